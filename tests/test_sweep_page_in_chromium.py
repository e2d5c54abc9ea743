"""A sweep's page in a real browser: no width makes it scroll sideways, and all of it can be read."""

import pytest

from ampatch.sweeps.web.page import write_page
from chromium import look_at, needs_chromium
from colour_vision import contrast
from sweep_extremes import extreme_sweeps
from sweep_samples import sample_sweep

pytestmark = [pytest.mark.process, needs_chromium]

WIDTHS = [320, 390, 768, 1020, 1280]
BROWSED = ("one step", "no O0", "nothing", "all failed", "hostile", "huge")


@pytest.fixture(scope="module")
def pages():
    sweeps = extreme_sweeps()
    return {"sample": write_page(sample_sweep()), **{name: write_page(sweeps[name]) for name in BROWSED}}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_fits_and_can_be_read_at_every_width(pages, scheme, tmp_path):
    seen = look_at(pages, WIDTHS, tmp_path, dark=scheme == "dark")
    assert len(seen.measures) == len(WIDTHS) * len(pages)
    assert seen.console == []
    for place, it in seen.measures.items():
        assert it["dark"] == (scheme == "dark"), place
        assert (it["scroll"] <= it["width"], it["outside"]) == (True, []), place
        assert (it["loaded"], it["cut"], it["crossing"]) == ([], [], []), place
        assert [pair for pair in it["colours"] if contrast(*pair[:2]) < 4.5] == [], place
        assert len(it["colours"]) >= 2, place
    # A frame of 390 has a scroll bar, which a phone lays over the page.
    assert seen.measures["sample at 390"]["smallest"] > 10.5
    assert set(seen.measures["sample at 390"]["heads"]) == {"block"}  # cards
    assert set(seen.measures["sample at 1280"]["heads"]) == {"table"}
