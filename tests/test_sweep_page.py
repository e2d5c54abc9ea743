"""`write_page` makes one file of a sweep that says everything and needs nothing."""

import html
import importlib.util
import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest

from ampatch.sweeps.rows import Distance, Outcome, Recommendation, Verdict
from ampatch.sweeps.show.page import write_page
from chromium import look_at, needs_chromium
from sweep_extremes import HOSTILE, METRICS, extreme_sweeps
from sweep_samples import CRASHING, ENVIRONMENT, SETTINGS, TRACEBACK, VARIANT, sample_sweep

EXTREMES = extreme_sweeps()
VOID = {"meta", "link", "wbr"}
INLINE = {"span", "wbr", "b", "code"}
# What a browser would fetch something for.
LOADING = "script img iframe object embed video audio source image form base a"
LOADED_BY = {"src", "srcset", "href", "xlink:href", "action", "data", "poster", "background"}


class Page(HTMLParser):
    """A page as a browser's parser sees it: its elements with their attributes, and its text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.html, self.elements, self.open, self.texts = text, [], [], []
        self.feed(text)
        self.text = " ".join("".join(self.texts).split())

    def handle_starttag(self, tag, attributes):
        self.texts.append("" if tag in INLINE else " ")
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        self.texts.append("" if tag in INLINE else " ")
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append("" if "style" in self.open else data)

    def having(self, attribute):
        return [attributes[attribute] for _, attributes in self.elements if attribute in attributes]

    def row(self, name):
        """Returns the cells of a row of the table of results, by heading."""
        for line in re.findall(r"<tr\b.*?</tr>", self.html.partition("<tbody")[2], re.DOTALL):
            if f'class="name">{name}<' in line:
                cells = re.findall(r'<td[^>]*data-label="([^"]*)"[^>]*>(.*?)</td>', line)
                return {label: Page(cell).text for label, cell in cells}
        raise AssertionError(f"no row {name}")


def page_of(sweep, **changes):
    return Page(write_page(replace(sweep, **changes)))


@cache
def extreme(name):
    return page_of(EXTREMES[name])


SAMPLE = page_of(sample_sweep())


# ---- One file ----


@pytest.mark.parametrize("name", EXTREMES)
def test_a_page_is_whole_loads_nothing_and_runs_nothing(name):
    page = extreme(name)
    assert page.open == []
    assert {tag for tag, _ in page.elements} & set(LOADING.split()) == set()
    links = [value for attribute in LOADED_BY for value in page.having(attribute)]
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    assert re.findall(r"url\((?!#)|@import|javascript:", page.html.replace(" ", "")) == []
    assert [key for _, attributes in page.elements for key in attributes if key.startswith("on")] == []
    assert page.having("content")[0].startswith("default-src 'none';")
    assert len(page.having("id")) == len(set(page.having("id")))
    drawings = re.findall(r"<svg [^>]*>(<title>[^<]+</title><desc>[^<]+</desc>)?", page.html)
    assert all(drawings)
    assert not re.search(r"\b(nan|inf|None)\b", page.html.partition("</style>")[2])
    page.html.encode("utf-8")


@pytest.mark.parametrize("sweep", [sample_sweep(), EXTREMES["long"]], ids=["usual", "long"])
def test_a_page_is_small_and_the_same_each_time(sweep):
    page = write_page(sweep)
    assert len(page.encode()) < 200_000
    assert write_page(sweep) == page


def test_without_numpy_there_are_tables_and_words_on_what_is_missing(monkeypatch, caplog):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    page = page_of(sample_sweep())
    assert "<svg" not in page.html
    assert page.row("O2") == SAMPLE.row("O2")
    said = "There are no charts, since NumPy is not installed: pip install numpy"
    assert said in page.text
    assert [record.getMessage() for record in caplog.records] == [f"sweep.html: {said}"]


# ---- What it says ----


def test_the_recommendation_comes_first_then_the_table_then_the_charts():
    places = [SAMPLE.html.index(it) for it in ("Take O5", "O5 runs at 2.60x", "<table", "<svg")]
    assert places == sorted(places)
    unknown = Recommendation(Outcome.UNKNOWN, None, "All were slower, try --repeat 5.")
    page = page_of(sample_sweep(), recommendation=unknown)
    assert "It cannot be told which level to take All were slower, try --repeat 5." in page.text
    assert ("span", {"class": "option"}) in page.elements  # which no line breaks in after its hyphens
    assert ' best"' not in page.html
    stay = Recommendation(Outcome.STAY, "O0", "O0 is the fastest here.")
    assert "Stay with O0 O0 is the fastest here" in page_of(sample_sweep(), recommendation=stay).text


def test_a_row_says_all_that_was_measured():
    row = SAMPLE.row("O2")
    assert list(row.values()) == [
        *("same", "17.20 16.9\N{EN DASH}17.9", "2.43\N{MULTIPLICATION SIGN}"),
        "2,790 0.54\N{MULTIPLICATION SIGN} O0",
        *("0.2163 \N{MINUS SIGN}0.8 spreads", "5", "2¹³", "3"),
        *("0.9301 \N{MINUS SIGN}0.8 spreads", "0.9952 \N{MINUS SIGN}0.8 spreads"),
    ]
    assert SAMPLE.row("O3")["Verdict"] == "diverged loss is NaN from step 61 on (3 of 3 runs)"


def test_what_is_unknown_is_said_or_left_out():
    sweep = sample_sweep(("O0", "O1"))
    far = Distance(0.22, 0.2, -10.0, 0.002, "percent")
    row = replace(sweep.rows[1], verdict=Verdict.UNKNOWN, timed=1, loss=far)
    cells = page_of(sweep, rows=(sweep.rows[0], row)).row("O1")
    expected = ("not compared", "21.40", "0.2200 \N{MINUS SIGN}10.0 %")
    assert (cells["Verdict"], cells["ms a step"], cells["Final loss"]) == expected
    text = extreme("nothing").text
    assert [word for word in ("Results", "Curves", "Failed") if word in text] == []


def test_metrics_beyond_the_third_have_tables_of_their_own():
    page = extreme("hostile")
    assert [name in page.row("O0") for name in METRICS[:4]] == [True, True, False, False]
    assert set(METRICS) <= set(page.having("data-label"))


def test_runs_that_failed_alike_are_told_together():
    assert f"Failed: {CRASHING}" in SAMPLE.text
    assert f"{CRASHING}, seed 2: crashed after 4.40 s" in SAMPLE.text
    assert SAMPLE.html.count('<tr role="row" class="failed">') == 1
    for line in TRACEBACK[:-1]:
        assert SAMPLE.text.count(" ".join(line.split())) == 1


def test_settings_environment_and_method_are_there():
    for words in (ENVIRONMENT.command, ENVIRONMENT.cpu, ENVIRONMENT.created):
        assert words in SAMPLE.text
    page = page_of(sample_sweep(), settings=replace(SETTINGS, timeout=600.0))
    assert "timeout 600" in page.text
    assert "more than 2 spreads worse" in page.text
    assert "Times are medians without the first 5 steps." in page.text


# ---- What comes from outside ----


def test_hostile_names_are_shown_as_they_are():
    page = extreme("hostile")
    for words in (HOSTILE, METRICS[2], "</pre><script>alert(2)</script>", "</p><b>faster & <i>better"):
        assert words in page.text
    assert f"<title>{html.escape(METRICS[2])} of" in page.html
    assert re.findall(r"[\x00-\x08\x1b]|\[31m|z{401}", page.html) == []


def test_a_name_is_not_broken_into_two():
    # Where a line may end there is no space: who copies a name gets the name.
    assert "keep_<wbr>batchnorm_<wbr>fp32" in SAMPLE.html
    assert SAMPLE.text.count(VARIANT) > 5


# ---- In a real browser ----


@needs_chromium
@pytest.mark.process
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_and_can_be_read_at_every_width(scheme, tmp_path):
    browsed = ("one step", "no O0", "nothing", "all failed", "hostile", "huge")
    pages = {"sample": SAMPLE.html, **{name: extreme(name).html for name in browsed}}
    seen = look_at(pages, [320, 390, 768, 1020, 1280], tmp_path, dark=scheme == "dark")
    assert set(seen["sample at 390"]["heads"]) == {"block"}  # cards
    assert set(seen["sample at 1280"]["heads"]) == {"table"}
