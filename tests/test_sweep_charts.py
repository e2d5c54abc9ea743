"""The charts of a sweep's page: where things are drawn, and in which colours."""

import math
import re
from itertools import combinations, pairwise

import pytest

from ampatch.sweeps.records.record import Curve, Measured, Outcome, Record
from ampatch.sweeps.web.axes import Axis, Kind, axis_over
from ampatch.sweeps.web.bars import Band, Bar, Strip, bar_chart, strip_chart
from ampatch.sweeps.web.chart import History, Range, line_chart, panel, scale_chart
from ampatch.sweeps.web.colours import DARK, DARK_PARTS, LIGHT, LIGHT_PARTS, looks_of
from ampatch.sweeps.web.curve_figures import curve_note
from ampatch.sweeps.web.drawing import spread_out
from ampatch.sweeps.web.lines import POINTS, Line, is_wide, lines_of, make_line, value_range
from ampatch.sweeps.web.markup import element, escape
from ampatch.sweeps.web.style import DARK_SURFACES, LIGHT_SURFACES
from colour_vision import DEUTERANOPIA, NORMAL, PROTANOPIA, TRITANOPIA, contrast, distance

NAN, INF = math.nan, math.inf
VISIONS = {"normal": NORMAL, "protan": PROTANOPIA, "deutan": DEUTERANOPIA, "tritan": TRITANOPIA}
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5", "autocast")
LOOKS = looks_of([*LEVELS, "O2 loss_scale=128", "O2 loss_scale=64"])


def curve(*values):
    return Curve(tuple(range(1, len(values) + 1)), values)


def numbers(markup, pattern):
    """Reads the numbers of the only place that a pattern finds."""
    (found,) = re.findall(pattern, markup)
    return [float(number) for number in re.findall(r"-?[\d.]+", found)]


def paths(markup, style):
    """Returns the points of each path with a class, as pairs in pixels."""
    found = re.findall(rf'<path d="([^"]*)" class="{style}"', markup)
    return [
        [tuple(map(float, place.split())) for part in path.split("M")[1:] for place in part.split("L")]
        for path in found
    ]


def surfaces(text):
    return dict(re.findall(r"--(\w+):(#\w{6})", text))


SCHEMES = [
    pytest.param(LIGHT, LIGHT_PARTS, surfaces(LIGHT_SURFACES), id="light"),
    pytest.param(DARK, DARK_PARTS, surfaces(DARK_SURFACES), id="dark"),
]


# ---- Colours ----


@pytest.mark.parametrize("vision", VISIONS.values(), ids=VISIONS)
@pytest.mark.parametrize(("rows", "parts", "surface"), SCHEMES)
def test_no_two_rows_have_colours_that_look_alike(rows, parts, surface, vision):
    # Ten times what can just be told apart, since lines are thin; 2.3 is that limit.
    assert min(distance(a, b, vision) for a, b in combinations(rows, 2)) > 23


@pytest.mark.parametrize("vision", VISIONS.values(), ids=VISIONS)
@pytest.mark.parametrize(("rows", "parts", "surface"), SCHEMES)
def test_no_two_parts_of_a_bar_look_alike(rows, parts, surface, vision):
    assert min(distance(a, b, vision) for a, b in combinations(parts, 2)) > 23


@pytest.mark.parametrize(("rows", "parts", "surface"), SCHEMES)
def test_lines_and_bars_stand_out_from_the_page(rows, parts, surface):
    assert min(contrast(colour, surface["page"]) for colour in (*rows, *parts)) >= 3
    assert min(contrast(colour, surface["surface"]) for colour in rows) >= 3
    assert contrast(surface["axis"], surface["page"]) >= 3


@pytest.mark.parametrize(("rows", "parts", "surface"), SCHEMES)
def test_text_can_be_read_on_both_surfaces(rows, parts, surface):
    for name in ("ink", "muted", "good", "bad", "link"):
        assert min(contrast(surface[name], surface[below]) for below in ("page", "surface")) >= 4.5


@pytest.mark.parametrize(("rows", "parts", "surface"), SCHEMES)
def test_o0_has_the_colour_of_the_text(rows, parts, surface):
    assert rows[LOOKS["O0"].colour] == surface["ink"]


def test_a_level_looks_the_same_in_every_sweep():
    alone = looks_of(["O5", "O1"])
    assert {name: alone[name] for name in alone} == {name: LOOKS[name] for name in alone}


def test_rows_that_share_a_colour_have_other_dashes():
    variants = [f"O2 loss_scale={number}" for number in range(30)]
    looks = looks_of([*LEVELS, *variants]).values()
    assert len({(look.colour, look.dashes) for look in looks}) == len(looks)
    assert len({look.key for look in looks}) == len(looks)


# ---- Axes ----


@pytest.mark.parametrize("kind", [Kind.LINEAR, Kind.LOG, Kind.LOG2])
@pytest.mark.parametrize(("low", "high"), [(1, 2), (0.001, 1e6), (3, 3), (1e-300, 1e300), (1, 1 + 1e-9)])
def test_ticks_lie_on_the_axis_in_order(kind, low, high):
    axis = axis_over(low, high, 200, 10, kind)
    ticks = axis.ticks()
    assert ticks == sorted(set(ticks))
    assert len(ticks) <= 8
    assert all(axis.low <= tick <= axis.high for tick in ticks)
    assert all(10 - 1e-6 <= axis.place(tick) <= 200 + 1e-6 for tick in ticks)
    assert all(axis.write(tick) for tick in ticks)


def test_a_logarithmic_axis_gives_each_factor_the_same_length():
    axis = Axis(1, 1000, 0, 300, Kind.LOG)
    assert [round(axis.place(value), 6) for value in (1, 10, 100, 1000)] == [0, 100, 200, 300]


def test_a_range_becomes_logarithmic_where_it_is_positive_and_wide():
    assert [is_wide(0.1, 2.3), is_wide(0.3, 2.3), is_wide(-1, 100), is_wide(0.0, 100)] == [
        True,
        False,
        False,
        False,
    ]


def test_labels_are_spread_out_and_keep_their_order():
    places = spread_out([50.0, 50.0, 51.0, 9.0], 13, 10, 60)
    assert places[3] < places[0] < places[1] < places[2]
    assert min(b - a for a, b in combinations(sorted(places), 2)) >= 13
    assert min(places) >= 10
    assert max(places) <= 60


# ---- Curves made thin ----


def test_short_curves_are_drawn_as_they_are():
    line = make_line("O1", [curve(3.0, 2.0, 1.0), curve(5.0, 4.0, 3.0)])
    assert line.mean == ((1, 4.0), (2, 3.0), (3, 2.0))
    assert line.runs[0] == ((1, 3.0), (2, 2.0), (3, 1.0))


def test_long_curves_become_means_over_buckets_that_cover_all_steps():
    line = make_line("O1", [curve(*(float(step) for step in range(1, 10_001)))])
    assert len(line.mean) == POINTS
    assert all(step == pytest.approx(value) for step, value in line.mean)
    assert line.mean[0][0] < 100
    assert line.mean[-1][0] > 9900


def test_runs_with_other_steps_share_buckets():
    # One run was cut off in the middle: from there on the mean is that of the others.
    line = make_line("O1", [curve(*[1.0] * 1000), curve(*[3.0] * 500)])
    assert [value for _, value in line.mean][:50] == [2.0] * 50
    assert [value for _, value in line.mean][-50:] == [1.0] * 50


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_a_gap(bad):
    line = make_line("O1", [curve(3.0, bad, 1.0)])
    assert line.mean == ((1, 3.0), (2, None), (3, 1.0))


def test_runs_that_failed_count_only_where_none_finished():
    def record(seed, outcome, value):
        return Record("O1", seed, 0, outcome, 1.0, measured=Measured(losses={"0": curve(value, value)}))

    records = [record(0, Outcome.FINISHED, 1.0), record(1, Outcome.CRASHED, 9.0)]
    (line,) = lines_of(["O1"], records, lambda it: it.losses.get("0"))
    assert line.mean == ((1, 1.0), (2, 1.0))
    (line,) = lines_of(["O1"], records[1:], lambda it: it.losses.get("0"))
    assert line.mean == ((1, 9.0), (2, 9.0))


def test_what_diverged_does_not_squeeze_the_others():
    lines = [Line("O0", ((1, 2.0), (2, 0.5))), Line("O3", ((1, 2.0), (2, 1e30)))]
    assert value_range(lines, lambda row: row != "O3") == (0.5, 2.0)
    assert value_range(lines[1:], lambda row: row != "O3") == (2.0, 1e30)
    assert value_range([Line("O3", ((1, None),))], lambda row: True) is None


def test_one_spike_does_not_squeeze_the_rest():
    values = tuple((step, 1.0 + step / 1000) for step in range(1000))
    low, high = value_range([Line("O0", (*values, (1000, 1e9)))], lambda row: True)
    assert low == 1.0
    assert 2 < high < 20


def test_single_runs_are_in_what_a_chart_shows():
    line = make_line("O0", [curve(2.0, 1.0, 0.5), curve(2.2, 1.4, 0.9)])
    assert value_range([line], lambda row: True) == (0.5, 2.2)


# ---- Charts ----


def test_a_line_goes_through_its_points():
    chart = line_chart("Loss", [Line("O0", ((1, 4.0), (51, 2.0), (101, 0.0)))], LOOKS, Range(101, 0.0, 4.0))
    (points,) = paths(chart, "k0 mean")
    assert points[1][0] == pytest.approx((points[0][0] + points[2][0]) / 2, abs=0.1)
    assert points[1][1] == pytest.approx((points[0][1] + points[2][1]) / 2, abs=0.1)
    assert points[0][1] < points[2][1]  # in SVG up is less


def test_a_gap_breaks_a_line_and_a_lonely_point_is_a_dot():
    line = Line("O0", ((1, 1.0), (2, 2.0), (3, None), (4, 1.0), (5, None), (6, 2.0), (7, 1.0)))
    chart = line_chart("Loss", [line], LOOKS, Range(7, 1.0, 2.0))
    assert re.search(r'd="M[^M]*M[^M]*" class="k0 mean"', chart)
    assert chart.count("<circle") == 1


@pytest.mark.parametrize(
    ("values", "cross", "gap"),
    [
        ((2.0, None, 1.0), False, True),
        ((2.0, 1.0, None), True, False),
        ((2.0, None, 1.0, None), True, True),
        ((None, 2.0, 1.0), False, False),
    ],
    ids=["in the middle", "at the end", "both", "at the start"],
)
def test_the_note_of_a_chart_tells_crosses_only_where_there_are_some(values, cross, gap):
    line = Line("O3", tuple(enumerate(values, start=1)))
    note = curve_note([line], Range(4, 1.0, 2.0))
    assert ("where no finite value follows" in note) == cross
    assert ("a gap is where values are not finite" in note) == gap
    assert (line_chart("Loss", [line], LOOKS, Range(4, 1.0, 2.0)).count(' mark"') == 1) == cross


def test_a_line_that_breaks_off_ends_with_a_cross_and_says_so():
    lines = [Line("O0", ((1, 2.0), (2, 1.0))), Line("O3", ((1, 2.0), (2, None)))]
    chart = line_chart("Loss", lines, LOOKS, Range(2, 1.0, 2.0))
    assert chart.count(' mark"') == 1
    assert "O3: from 2.00 to 2.00, and breaks off at step 1." in chart
    assert "O0: from 2.00 to 1.00;" in chart


def test_a_diverging_line_is_cut_off_at_the_frame():
    line = Line("O3", ((1, 1.0), (2, 1e300), (3, 1.0)))
    chart = line_chart("Loss", [line], LOOKS, Range(3, 1.0, 2.0))
    assert max(abs(y) for _, y in paths(chart, "k3 mean")[0]) < 1000  # and not 1e300 pixels away
    x, y, width, height = numbers(chart, r'<svg x=[^>]*viewBox="([^"]*)"')
    assert (width > 100, height > 100, x + width < 344, y + height < 220) == (True, True, True, True)


def test_every_row_has_its_key_beside_its_line():
    lines = [Line(name, ((1, 1.0), (2, 1.0))) for name in LOOKS]
    chart = line_chart("Loss", lines, LOOKS, Range(2, 1.0, 2.0))
    labels = re.findall(r'<text x="[\d.]+" y="([\d.]+)" class="k\d key">([^<]+)<', chart)
    assert {key for _, key in labels} == {look.key for look in LOOKS.values()}
    heights = sorted(float(y) for y, _ in labels)
    assert min(b - a for a, b in pairwise(heights)) >= 12


@pytest.mark.parametrize("count", [1, 9, 40])
def test_a_chart_has_room_for_all_keys(count):
    looks = looks_of([f"O2 loss_scale={number}" for number in range(count)])
    chart = line_chart(
        "Loss", [Line(name, ((1, 1.0), (9, 1.0))) for name in looks], looks, Range(9, 1.0, 2.0)
    )
    _, _, _, height = numbers(chart, r'^<svg viewBox="([^"]*)"')
    heights = [float(y) for y in re.findall(r'<text x="[\d.]+" y="([\d.]+)" class="k\d key">', chart)]
    assert min(heights) > 0
    assert max(heights) < height


def test_a_panel_says_where_nothing_is_left_to_draw():
    baseline = Line("O0", ((1, 1.0), (9, 0.5)))
    assert "no finite value" in panel(Line("O3", ((1, None),)), baseline, LOOKS, Range(9, 0.5, 1.0))
    assert "no finite value" not in panel(Line("O1", baseline.mean), baseline, LOOKS, Range(9, 0.5, 1.0))


def test_a_loss_scale_is_drawn_in_steps_and_skips_are_marked_at_the_scale_before():
    history = History(Curve((1, 51), (8.0, 2.0)), 101, (50,))
    chart = scale_chart("Loss scale", LOOKS["O2"], [history])
    path = re.search(r'd="M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H([\d.]+)" class="k2 scale"', chart)
    left, high, middle, low, right = map(float, path.groups())
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert high < low
    x, y = paths(chart, "skip")[0][0]
    assert (x + 3, y + 3) == pytest.approx((middle - (right - left) / 100, high), abs=0.11)


def test_ten_thousand_skipped_steps_do_not_make_a_large_file():
    steps = tuple(range(1, 10_001))
    history = History(Curve(steps, tuple(2.0 ** (step % 7) for step in steps)), 10_000, steps)
    assert len(scale_chart("Loss scale", LOOKS["O1"], [history])) < 250_000


def test_bars_are_as_long_as_their_values():
    bars = [Bar(LOOKS["O0"], (1.0,), "1.00"), Bar(LOOKS["O1"], (2.0,), "2.00"), Bar(LOOKS["O2"], (0.0,), "0")]
    chart = bar_chart("Speed", bars, mark=1.0)
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]
    assert widths == [171.0, 342.0]
    assert {float(x) for x in re.findall(r'<line x1="([\d.]+)"', chart)} == {172.0}
    assert "O0: 1.00; O1: 2.00; O2: 0." in chart


def test_a_whisker_goes_from_quartile_to_quartile_within_the_drawing():
    chart = bar_chart("Speed", [Bar(LOOKS["O1"], (2.0,), "2.00", (1.5, 4.0))])
    (path,) = re.findall(r'd="([^"]*)" class="whisker"', chart)
    low, _, _, high, *_ = (float(number) for number in re.findall(r"[MH]([\d.]+)|V[\d.]+", path) if number)
    assert (low, high) == pytest.approx((1 + 342 * 1.5 / 4, 343), abs=0.1)


def test_the_parts_of_a_bar_lie_side_by_side():
    chart = bar_chart("Time", [Bar(LOOKS["O1"], (1.0, 0.0, 3.0), "4 ms")])
    rects = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" [^>]*class="(\w+)"', chart)
    assert [name for *_, name in rects] == ["part0", "part2"]
    (first, width, _), (second, _, _) = rects
    assert 0 < float(second) - float(first) - float(width) < 2


def test_a_strip_shows_each_seed_and_what_counts_as_the_same():
    strips = [Strip(LOOKS["O0"], (1.0, 3.0)), Strip(LOOKS["O1"], (2.0,))]
    chart = strip_chart("accuracy", strips, Band(2.0, 1.0), "")
    dots = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', chart)]
    left, width = numbers(chart, r'<rect (x="[\d.]+" y="0" width="[\d.]+")')[0::2]
    assert dots[2] == pytest.approx((dots[0] + dots[1]) / 2, abs=0.1)
    assert (left, left + width) == pytest.approx((dots[0], dots[1]), abs=0.2)


def test_a_row_that_is_far_off_gets_an_arrow_and_does_not_squeeze_the_others():
    strips = [Strip(LOOKS["O0"], (0.93, 0.94)), Strip(LOOKS["O3"], (0.1, 0.1), counts=False)]
    chart = strip_chart("accuracy", strips, None, "")
    assert "\N{LEFTWARDS ARROW} 0.100" in chart
    first, second = (float(x) for x in re.findall(r'<circle cx="([\d.]+)"', chart))
    assert second - first > 200


# ---- Markup ----


def test_what_comes_from_outside_is_escaped_once():
    inner = element("b", '1 < 2 & "3"')
    assert element("p", inner, title="'<&>\"") == (
        '<p title="&#x27;&lt;&amp;&gt;&quot;"><b>1 &lt; 2 &amp; &quot;3&quot;</b></p>'
    )


def test_what_a_page_cannot_hold_is_replaced():
    assert escape("a\x00b\x1b[2Kc\udcffd\x9be\tf\n") == "a\ufffdbc?d\ufffde\tf\n"
