"""A sweep as one page that opens anywhere: no network, no script, no file beside it."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath

from ampatch.sweeps import numbers
from ampatch.sweeps.log_file import ESCAPES
from ampatch.sweeps.numbers import NOTHING, number, typeset
from ampatch.sweeps.rows import LAST_LOSSES, TOLERANCE, Level, Sweep, Verdict, keys_of, metric_names
from ampatch.sweeps.show.terminal import COLUMNS, distance_text, explain_warmup, part_of

NO_CHARTS = "There are no charts, since NumPy is not installed: pip install numpy"
# What XML and HTML do not allow, not even escaped; a tab and the ends of lines stay.
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]")
# Long names may break after these.
JOINTS = re.compile(r"(?<=\w[_/\\=.,:-])(?=\w)")
logger = logging.getLogger("ampatch")
METRICS_A_TABLE = 3  # the first ones stand in the table of results
BETTER = "how much better (+) or worse than that of O0 it is."
CAPTION = f"Under the time of a step stand its quartiles, under a loss or metric {BETTER}"


@dataclass(frozen=True, slots=True)
class PageCell:
    """A number, in small letters what belongs to it, and how long the bar below it is."""

    text: str
    small: str = ""
    bar: float | None = None  # a part of the longest one


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table: its headings, and the cells of each level."""

    caption: str
    headings: Sequence[str]
    lines: Sequence[tuple[Level, Sequence[PageCell]]]


def write_page(sweep: Sweep) -> str:
    """Returns the page of a sweep as one HTML file, to be written as UTF-8; charts need NumPy.

    The template takes nothing as markup that is not.
    """
    # torch depends on jinja2. Imported here, it makes nobody wait who wants no page.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=clean,
    )
    pages.filters.update(breakable=breakable)
    script = sweep.settings.script
    return pages.get_template("page.html.j2").render(
        n=TypesetNumbers(),
        script=PurePath(script).name or script,
        charts=draw_charts(sweep),
        no_charts=NO_CHARTS,
        sweep=sweep,
        version=sweep.environment.ampatch,
        keys=keys_of(row.name for row in sweep.rows),
        tables=[table for table in tables_of(sweep) if table.lines],
        warmup=explain_warmup(sweep),
        on_device={run.memory for run in sweep.records if run.peak_mib is not None} == {"device"},
        last_losses=LAST_LOSSES,
        tolerance=TOLERANCE,
        details=asdict(sweep.settings) | asdict(sweep.environment),
    )


def draw_charts(sweep: Sweep) -> list | None:
    """Returns the charts of a sweep; None without NumPy, which the log says."""
    if importlib.util.find_spec("numpy") is None:
        logger.warning("sweep.html: %s", NO_CHARTS)
        return None
    from ampatch.sweeps.show.charts import charts_of

    return charts_of(sweep)


def tables_of(sweep: Sweep) -> list[PageTable]:
    """Returns the table of results; where there are many metrics, further tables hold these."""
    columns = [column for column in COLUMNS if column.page]
    names = metric_names(sweep.rows, sweep.records)
    groups = [names[start : start + METRICS_A_TABLE] for start in range(0, len(names), METRICS_A_TABLE)]
    first, *others = groups or [[]]
    lines = []
    for row in sweep.rows:
        cells = [
            PageCell(
                "not compared" if row.verdict is Verdict.UNKNOWN else row.verdict, row.reason or row.note
            )
        ]
        for column in columns:
            value, text = column.of(row), typeset(column.write(column.of(row)))
            bar = part_of(value, list(map(column.of, sweep.rows))) if column.has_bar else None
            cells.append(PageCell(text, column.small(row) if value is not None else "", bar))
        cells.append(PageCell(str(row.runs), f"{row.failed} failed" if row.failed else ""))
        lines.append((row, [*cells, *metric_cells(row, first)]))
    tables = [PageTable(CAPTION, ["Verdict", *(column.page for column in columns), "Runs", *first], lines)]
    for group in others:
        lines = [(row, metric_cells(row, group)) for row in sweep.rows]
        tables.append(PageTable(f"Under a metric stands {BETTER}", group, lines))
    return tables


def metric_cells(row: Level, names: Sequence[str]) -> list[PageCell]:
    """Returns the last values of these metrics, and how far they are from those of O0."""
    distances = [row.metrics.get(name) for name in names]
    return [
        PageCell(typeset(NOTHING))
        if distance is None or distance.value is None
        else PageCell(typeset(number(distance.value, 4)), distance_text(distance))
        for distance in distances
    ]


class TypesetNumbers:
    """The functions of `numbers`, as pages print what they write."""

    nothing = numbers.typeset(numbers.NOTHING)

    def __getattr__(self, name: str) -> Callable[..., str]:
        return lambda *values: numbers.typeset(getattr(numbers, name)(*values))


def clean(value: object) -> object:
    r"""Returns text without what a page cannot hold.

    >>> clean("<b>\x1b[31m\x00\udcff")
    '<b>\ufffd?'
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):  # which is markup already
        return value
    # Names of files may hold lone surrogates, which cannot be written as UTF-8.
    return CONTROL.sub("\ufffd", ESCAPES.sub("", value).encode("utf-8", "replace").decode("utf-8"))


def breakable(name: str) -> str:
    """Returns a name as markup that may break after a joint.

    >>> print(breakable("top5_a<b>"))
    top5_<wbr>a&lt;b&gt;
    """
    from markupsafe import Markup

    return Markup("<wbr>").join(JOINTS.split(str(clean(name))))
