"""A sweep's page in a real browser: no width makes it scroll sideways, and all of it can be read."""

import pytest

from ampatch.sweeps.web.page import write_page
from chromium import look_at, needs_chromium, print_to_pdf
from colour_vision import contrast
from sweep_extremes import extreme_sweeps
from sweep_samples import sample_sweep

pytestmark = [pytest.mark.process, needs_chromium]

WIDTHS = [320, 360, 768, 1280]
SCHEMES = ["light", "dark"]
BROWSED = ("one step", "no O0", "nothing", "all failed", "hostile", "huge")


@pytest.fixture(scope="module")
def pages():
    sweeps = extreme_sweeps()
    return {"sample": write_page(sample_sweep()), **{name: write_page(sweeps[name]) for name in BROWSED}}


@pytest.fixture(scope="module", params=SCHEMES)
def scheme(request):
    return request.param


@pytest.fixture(scope="module")
def seen(scheme, pages, tmp_path_factory):
    """What the browser measured, in one start for each of the schemes."""
    return look_at(pages, WIDTHS, tmp_path_factory.mktemp("chromium"), dark=scheme == "dark")


@pytest.fixture
def each(seen):
    """A function that collects a measure of each page at each width where there is something to tell."""
    return lambda tell: {key: told for key, it in seen.measures.items() if (told := tell(it))}


def test_the_browser_shows_the_scheme_that_was_asked_for(seen, scheme):
    assert len(seen.measures) == len(WIDTHS) * (1 + len(BROWSED))
    assert {it["dark"] for it in seen.measures.values()} == {scheme == "dark"}
    assert len({it["paper"] for it in seen.measures.values()}) == 1


def test_nothing_scrolls_sideways(each):
    assert each(lambda it: it["scroll"] > it["width"]) == {}
    assert each(lambda it: it["outside"]) == {}


def test_nothing_is_loaded_and_nothing_complained_about(seen, each):
    assert each(lambda it: it["loaded"]) == {}
    assert seen.console == []


def test_all_text_has_the_contrast_that_reading_needs(each):
    def faint(it):
        return [(name, a, b) for a, b, name in it["colours"] if contrast(a, b) < 4.5]

    assert each(lambda it: len(it["colours"]) < 2) == {}
    assert each(faint) == {}


def test_no_text_in_a_drawing_leaves_it_or_covers_another(each):
    assert each(lambda it: it["cut"]) == {}
    assert each(lambda it: it["crossing"]) == {}


def test_text_in_drawings_is_legible_on_a_phone(seen):
    # A frame of 360 has a scroll bar, which a phone lays over the page.
    assert seen.measures["sample at 360"]["smallest"] > 10.5
    assert seen.measures["sample at 320"]["smallest"] > 9


def test_tables_are_cards_where_there_is_no_room(seen):
    assert set(seen.measures["sample at 360"]["heads"]) == {"block"}
    assert set(seen.measures["sample at 1280"]["heads"]) == {"table"}


def test_a_page_can_be_printed(pages, tmp_path):
    printed, log = print_to_pdf(pages["sample"], tmp_path)
    assert printed.startswith(b"%PDF-")
    assert printed.rstrip().endswith(b"%%EOF")
    assert len(printed) > 20_000
    assert [line for line in log.splitlines() if "CONSOLE" in line] == []
