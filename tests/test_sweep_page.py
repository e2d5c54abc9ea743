"""`write_page` makes one file of a sweep that says everything and needs nothing."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ampatch.sweeps.records.record import Outcome
from ampatch.sweeps.records.sweep import Distance, Recommendation, Verdict
from ampatch.sweeps.web.page import write_page
from sweep_extremes import HOSTILE, METRICS, extreme_sweeps
from sweep_samples import CRASHING, ENVIRONMENT, SETTINGS, TRACEBACK, VARIANT, sample_sweep

EXTREMES = extreme_sweeps()
VOID = {"meta", "link", "br", "wbr"}
INLINE = {"span", "wbr", "b", "code", "a"}
# What a browser would fetch something for.
LOADING = {
    "script",
    "img",
    "iframe",
    "object",
    "embed",
    "video",
    "audio",
    "source",
    "image",
    "use",
    "form",
    "base",
}
LOADED_BY = {"src", "srcset", "href", "xlink:href", "action", "data", "poster", "background"}


class Page(HTMLParser):
    """A page as a browser's parser sees it: its elements with their attributes, and its text."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.texts, self.unbalanced = [], [], [], []
        self.html = html
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.separate(tag)
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def separate(self, tag):
        """Notes a space where a reader sees one: between blocks, and not where a name may break."""
        if tag not in INLINE:
            self.texts.append(" ")

    def handle_endtag(self, tag):
        self.separate(tag)
        if self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join("".join(self.texts).split())

    def having(self, attribute):
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]

    def section(self, anchor):
        """Returns the text from a section's start to the next."""
        part = self.html.partition(f'<section id="{anchor}">')[2].partition("</section>")[0]
        return Page(part).text if part else None

    def row(self, name):
        """Returns the cells of a row of the table of results, by heading."""
        for line in re.findall(r"<tr\b.*?</tr>", self.html.partition('id="results"')[2], re.DOTALL):
            if f'class="name">{name}<' in line:
                cells = re.findall(r'<td[^>]*data-label="([^"]*)"[^>]*>(.*?)</td>', line)
                return {label: Page(cell).text for label, cell in cells}
        raise AssertionError(f"no row {name}")


SAMPLE = Page(write_page(sample_sweep()))


@pytest.fixture(params=EXTREMES, scope="module")
def page(request):
    return Page(write_page(EXTREMES[request.param]))


# ---- One file ----


def test_every_element_is_closed(page):
    assert page.open == []
    assert page.unbalanced == []


def test_a_page_loads_nothing(page):
    assert {tag for tag, _ in page.elements} & LOADING == set()
    links = [
        (tag, *pair)
        for tag, attributes in page.elements
        for pair in attributes.items()
        if pair[0] in LOADED_BY
    ]
    assert [link for link in links if not (link[0] == "a" and link[2].startswith("#"))] == [
        ("link", "href", "data:,")
    ]
    assert "url(" not in page.html
    assert "@import" not in page.html


def test_a_page_runs_nothing(page):
    names = {name for _, attributes in page.elements for name in attributes}
    assert [name for name in names if name.startswith("on")] == []
    assert "javascript:" not in page.html


def test_the_browser_is_told_to_refuse_what_comes_from_elsewhere(page):
    (policy,) = [
        it["content"] for _, it in page.elements if it.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none';")


def test_every_link_leads_somewhere(page):
    anchors = [href[1:] for href in page.having("href") if href.startswith("#")]
    assert set(anchors) <= set(page.having("id"))
    assert len(page.having("id")) == len(set(page.having("id")))


def test_every_drawing_has_a_title_and_a_description(page):
    drawings = [it for tag, it in page.elements if tag == "svg" and it.get("role") == "img"]
    described = re.findall(r'<svg [^>]*role="img"><title>[^<]+</title><desc>[^<]+</desc>', page.html)
    assert len(described) == len(drawings)


def test_no_number_is_written_as_python_does(page):
    assert not re.search(
        r"\b(nan|inf|None)\b", re.sub(r"\bno finite\b", "", page.html.partition("</style>")[2])
    )


def test_a_page_can_be_written_as_utf8(page):
    page.html.encode("utf-8")


def test_a_page_of_a_usual_sweep_is_small():
    assert len(SAMPLE.html.encode()) < 300_000


def test_a_page_of_ten_thousand_steps_is_small_too():
    assert len(write_page(EXTREMES["long"]).encode()) < 300_000


def test_the_same_sweep_gives_the_same_page():
    assert write_page(sample_sweep()) == SAMPLE.html


# ---- What it says ----


def test_the_recommendation_and_its_reason_come_first():
    assert SAMPLE.text.index("Take O5") < SAMPLE.text.index("ms a step")
    assert "The fastest level whose accuracy is the same as that of O0" in SAMPLE.text


def test_no_recommendation_is_one_that_has_a_reason():
    page = Page(write_page(replace(sample_sweep(), recommendation=Recommendation(None, "all were slower"))))
    assert "No level can be recommended All were slower." in page.text
    assert 'class="best"' not in page.html


def test_the_command_is_there_to_be_copied():
    (command,) = re.findall(r'<p class="command"><code>(.*?)</code>', SAMPLE.html)
    assert "".join(Page(command).texts) == ENVIRONMENT.command


def test_a_row_says_all_that_was_measured():
    row = SAMPLE.row("O2")
    assert row["Verdict"] == "same"
    assert row["ms a step"] == "17.2 16.9\N{EN DASH}17.9"
    assert row["Speed"] == "2.43\N{MULTIPLICATION SIGN}"
    assert row["Peak memory"] == "2,790 MiB 0.54\N{MULTIPLICATION SIGN} O0"
    assert row["Final loss"] == "0.2163 \N{MINUS SIGN}0.8 spreads"
    assert row["accuracy"] == "0.9301 \N{MINUS SIGN}0.8 spreads"
    assert row["Loss scale"] == "2¹⁴ 5.3 skipped"
    assert row["Runs"] == "3"


def test_a_single_time_has_no_quartiles():
    sweep = sample_sweep(("O0", "O1"))
    rows = tuple(replace(row, step_ms=replace(row.step_ms, count=1)) for row in sweep.rows)
    page = Page(write_page(replace(sweep, rows=rows)))
    assert page.row("O1")["ms a step"] == "21.4"
    assert 'class="whisker"' not in page.html


@pytest.mark.parametrize(
    ("warmup", "steps", "expected"),
    [
        (5, 60, "Times are medians without the first 5 steps."),
        (5, 6, "Times are medians without the first half of so short a run."),
        (0, 60, "Times are medians of all steps."),
    ],
)
def test_what_was_left_out_of_the_times_is_said_as_it_was(warmup, steps, expected):
    sweep = sample_sweep(("O0", "O1"), steps=steps)
    page = Page(write_page(replace(sweep, settings=replace(sweep.settings, warmup=warmup))))
    assert expected in page.section("method")


def test_the_last_values_of_a_metric_stand_below_its_curves():
    titles = re.findall(r"<title>(.*?)</title>", SAMPLE.html.partition('<section id="metrics">')[2])
    assert titles[:1] == ["accuracy over the steps"]
    strips = [title for title in titles if "last value" in title]
    drawn = [title for title in titles if "over the steps" in title or "last value" in title]
    assert drawn == ["accuracy over the steps", *strips[:2]]
    curves = extreme_sweeps()["hostile"]
    html = write_page(curves).partition('<section id="metrics">')[2].partition("</section>")[0]
    drawn = [it for it in re.findall(r"<title>(.*?)</title>", html) if it.endswith(("steps", "run"))]
    assert [it.partition(",")[0].removesuffix(" over the steps") for it in drawn[::2]] == [
        it.partition(",")[0] for it in drawn[1::2]
    ]


def test_an_option_is_not_parted_from_its_value():
    why = "With one seed, nothing is known: --seeds 3. Without O0: add it to --levels."
    html = write_page(replace(sample_sweep(("O0",)), recommendation=Recommendation("O0", why)))
    assert '<span class="flag">--seeds 3.</span>' in html
    assert '<span class="flag">--levels.</span>' in html
    assert why in Page(html).text


def test_a_heading_has_room_for_its_longest_word():
    sweep = sample_sweep(("O0", "O1"))
    rows = tuple(replace(row, metrics={"nanmetric": row.metrics["accuracy"]}) for row in sweep.rows)
    html = write_page(replace(sweep, rows=rows))
    assert '<span class="long" style="min-width:9ch">nanmetric</span>' in html


def test_times_and_rates_have_a_table():
    speed = SAMPLE.section("speed")
    assert "O2 58.1 7,442 5.33 9.46 1.55 0.92" in speed
    assert CRASHING not in speed


def test_bytes_and_casts_have_a_table():
    # 11,689,512 weights of 2 bytes, masters of 4, gradients of both, and a momentum of 4.
    assert "O2 22.3 44.6 66.9 44.6 0 178" in SAMPLE.section("bytes")
    assert "O1 44.6 0 44.6 44.6 22.3 156 41.5 62.0" in SAMPLE.section("bytes")


def test_a_verdict_has_its_reason():
    assert SAMPLE.row("O3")["Verdict"] == "diverged loss is NaN from step 61 on"


def test_a_distance_in_percent_is_one_of_o0s_value():
    sweep = sample_sweep(("O0", "O1"))
    rows = [replace(row, loss=Distance(0.22, 0.2, -10.0, 0.002, "percent")) for row in sweep.rows]
    page = Page(write_page(replace(sweep, rows=tuple(rows))))
    assert page.row("O1")["Final loss"] == "0.2200 \N{MINUS SIGN}10.0 %"


def test_more_than_three_metrics_have_tables_of_their_own():
    page = Page(write_page(EXTREMES["hostile"]))
    assert METRICS[0] not in page.row("O0")
    labels = [label for label in page.having("data-label") if label in METRICS]
    assert set(labels) == set(METRICS)


def test_the_loss_has_a_chart_for_each_loss_id():
    assert SAMPLE.html.count("<title>Loss over the steps</title>") == 1
    hostile = write_page(EXTREMES["hostile"])
    assert hostile.count("<title>Loss 0 over the steps</title>") == 1
    assert hostile.count("<title>Loss &lt;1&gt; over the steps</title>") == 1


def test_single_seeds_are_drawn_where_there_are_several():
    assert SAMPLE.html.count(' run"') > 30
    assert write_page(EXTREMES["one seed"]).count(' run"') == 0


def test_only_metrics_with_a_curve_have_one():
    assert "<title>accuracy over the steps</title>" in SAMPLE.html
    assert "<title>top5_accuracy over the steps</title>" not in SAMPLE.html
    assert "<title>top5_accuracy, last value of each run</title>" in SAMPLE.html


def test_loss_scales_that_change_are_drawn_and_the_others_told():
    drawn = re.findall(r"<title>Loss scale of ([^<]+)</title>", SAMPLE.html)
    assert drawn == ["O1", "O2", "autocast"]
    text = SAMPLE.section("loss-scale")
    assert "O0, O3, O4, O5: 1 from the first step to the last" in text
    assert "loss_scale=128: 128 from the first step to the last, and no step was skipped." in text


def test_every_skipped_step_has_a_mark():
    sweep = sample_sweep(("O0", "O1"), seeds=1)
    skipped = sweep.records[1].measured.skipped
    assert write_page(sweep).count('class="skip"') == len(skipped) > 3


def test_failed_runs_that_failed_alike_are_told_once():
    text = SAMPLE.section("failed")
    assert text.count(f"{CRASHING}: crashed") == 1
    assert "Seeds 0, 1, 2, after" in text
    for line in TRACEBACK:
        assert " ".join(line.split()) in text


def test_runs_that_failed_otherwise_are_told_apart():
    sweep = sample_sweep((CRASHING,))
    first, *rest = sweep.records
    records = (replace(first, outcome=Outcome.TIMED_OUT, cause="no end after 9 s"), *rest)
    text = Page(write_page(replace(sweep, records=records))).section("failed")
    assert f"{CRASHING}: timed out Seed 0, after 4.20 s. no end after 9 s" in text
    assert f"{CRASHING}: crashed Seeds 1, 2, after" in text


def test_parts_without_content_are_left_out():
    page = Page(write_page(EXTREMES["nothing"]))
    assert [page.section(name) for name in ("results", "speed", "loss", "metrics", "bytes", "failed")] == [
        None
    ] * 6
    assert "Nothing was measured." in page.text


def test_settings_and_environment_are_complete():
    text = SAMPLE.section("environment")
    for words in (
        ENVIRONMENT.device,
        ENVIRONMENT.cpu,
        ENVIRONMENT.commit,
        ENVIRONMENT.torch,
        ENVIRONMENT.created,
    ):
        assert words in text
    assert "Time limit none" in text
    limited = replace(sample_sweep(), settings=replace(SETTINGS, timeout=600.0, steps=1000))
    assert "Time limit 600 s a run" in Page(write_page(limited)).section("environment")


def test_the_tolerance_is_explained():
    sweep = replace(sample_sweep(), settings=replace(SETTINGS, tolerance=1.5))
    assert "more than 1.5 spreads worse" in Page(write_page(sweep)).section("method")


def test_without_a_commit_there_is_no_line_for_it():
    sweep = replace(sample_sweep(), environment=replace(ENVIRONMENT, commit=None))
    assert "Commit" not in Page(write_page(sweep)).section("environment")


def test_a_row_that_could_not_be_compared_says_so():
    sweep = sample_sweep(("O1",))
    rows = (replace(sweep.rows[0], verdict=Verdict.UNKNOWN),)
    assert Page(write_page(replace(sweep, rows=rows))).row("O1")["Verdict"] == "not compared"


def test_speed_without_o0_is_in_steps_a_second():
    page = Page(write_page(EXTREMES["no O0"]))
    assert "steps a second; whiskers: quartiles" in page.text
    assert "46.7 a second" in page.text


# ---- What comes from outside ----


def test_hostile_names_are_shown_as_they_are():
    page = Page(write_page(EXTREMES["hostile"]))
    assert HOSTILE in page.text
    assert "</pre><script>alert(2)</script>" in page.text
    assert "</p><b>faster & <i>better." in page.text
    assert "<img src=x onerror=alert(1)>" in page.text


def test_colours_of_a_terminal_are_left_out_of_logs():
    text = Page(write_page(EXTREMES["hostile"])).section("failed")
    assert "\x1b" not in text
    assert "[31m" not in text


def test_long_logs_are_cut():
    assert len(Page(write_page(EXTREMES["hostile"])).section("failed")) < 10_000


def test_a_name_is_not_broken_into_two():
    # Where a line may end there is no space: who copies a name gets the name.
    assert "keep_<wbr>batchnorm_<wbr>fp32" in SAMPLE.html
    assert SAMPLE.text.count(VARIANT) > 5
