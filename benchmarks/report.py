"""Shows comparisons and goals as tables, and writes them as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.comparison import Comparison
from benchmarks.goals import Verdict, judge
from benchmarks.options import Options
from benchmarks.series import Series
from benchmarks.setting import Setting, describe_machine

SCHEMA = 1


def write(path: Path, options: Options, comparisons: Sequence[Comparison]) -> None:
    """Writes all that was measured, every round of it."""
    result = {
        "schema": SCHEMA,
        "machine": describe_machine(),
        "settings": options.describe(),
        "rows": [row for comparison in comparisons for row in comparison.rows()],
        "goals": [verdict.describe() for verdict in judge(comparisons)],
    }
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def show(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Prints a table for each group and setting, and one of goals."""
    for (group, setting, _), some in _split(comparisons).items():
        is_timed = group in ("steps", "micro")
        make = make_times if is_timed else make_totals
        console.print(make(_title(group, setting, is_timed), some))
    verdicts = judge(comparisons)
    if verdicts:
        console.print(make_verdicts(verdicts))


def _split(comparisons: Sequence[Comparison]) -> dict[tuple, list[Comparison]]:
    parts: dict[tuple, list[Comparison]] = {}
    for comparison in comparisons:
        # Times with the same bases have the same columns.
        bases = comparison.bases if comparison.group == "micro" else ()
        parts.setdefault((comparison.group, comparison.setting, bases), []).append(comparison)
    return parts


def _title(group: str, setting: Setting, is_timed: bool) -> str:
    threads = f", {_say_threads(setting)}" if is_timed else ""
    return f"{group}: {setting.device}, {setting.half_name}{threads}"


def _say_threads(setting: Setting) -> str:
    return f"{setting.threads} thread" + ("s" if setting.threads > 1 else "")


def _start_table(title: str, comparisons: Sequence[Comparison]) -> Table:
    """A table that says below which contenders could not run."""
    lines = {
        f"{comparison.subject}, {contender}: cannot run: {reason}": None
        for comparison in comparisons
        for contender, reason in comparison.failures.items()
    }
    caption = Text("\n".join(lines)) if lines else None
    return Table(
        "what", "contender", title=title, title_justify="left", caption=caption, caption_justify="left"
    )


def make_times(title: str, comparisons: Sequence[Comparison]) -> Table:
    """A row for each contender: the median, the quartiles, and the ratios to the bases with theirs."""
    bases = list(dict.fromkeys(base for comparison in comparisons for base in comparison.bases))
    table = _start_table(title, comparisons)
    for header in ("median", "unit", "quartiles", *(f"/ {base}" for base in bases)):
        table.add_column(header, justify="left" if header == "unit" else "right")
    for comparison in comparisons:
        for index, (contender, series) in enumerate(comparison.series.items()):
            ratios = comparison.ratios(contender)
            table.add_row(
                "" if index else comparison.name,
                contender,
                format_number(series.median),
                comparison.unit,
                format_quartiles(series),
                *(format_ratio(ratios[base]) if base in ratios else "" for base in bases),
            )
        table.add_section()
    return table


def make_totals(title: str, comparisons: Sequence[Comparison]) -> Table:
    """A row for each subject and contender, a column for each thing that was counted."""
    unit = comparisons[0].unit
    columns = list(dict.fromkeys(comparison.variant for comparison in comparisons))
    bases = list(dict.fromkeys(base for comparison in comparisons for base in comparison.bases))
    table = _start_table(f"{title}; {unit}", comparisons)
    for header in (*columns, *(f"/ {base}" for base in bases)):
        table.add_column(header, justify="right")
    for subject in dict.fromkeys(comparison.subject for comparison in comparisons):
        some = [comparison for comparison in comparisons if comparison.subject == subject]
        for index, contender in enumerate(some[0].series):
            table.add_row("" if index else subject, contender, *_count(some, contender, bases))
        table.add_section()
    return table


def _count(comparisons: Sequence[Comparison], contender: str, bases: Sequence[str]) -> Iterator[str]:
    yield from (format_number(comparison.series[contender].median) for comparison in comparisons)
    ratios = {base: one for comparison in comparisons for base, one in comparison.ratios(contender).items()}
    yield from (f"{ratios[base].median:.3f}" if base in ratios else "" for base in bases)


def make_verdicts(verdicts: Sequence[Verdict]) -> Table:
    """A row for each goal and setting."""
    table = Table("goal", "threads", title="goals", title_justify="left")
    for header in ("median", "quartiles", "at most"):
        table.add_column(header, justify="right")
    table.add_column("met")
    for verdict in verdicts:
        table.add_row(
            f"{verdict.goal.what} ({verdict.goal.half})",
            str(verdict.comparison.setting.threads),
            format_judged(verdict.series.median, verdict.goal.limit),
            format_quartiles(verdict.series, ".3f") if len(verdict.series.values) > 1 else "",
            f"{verdict.goal.limit:.2f}",
            "yes" if verdict.is_met else "no",
        )
    return table


def format_number(value: float) -> str:
    """Writes three digits or more.

    >>> format_number(0.01234), format_number(12.345), format_number(-3.0), format_number(0.0)
    ('0.0123', '12.3', '-3.00', '0')
    """
    if value == 0:
        return "0"
    size = abs(value)
    return f"{value:.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:#.3g}"


def format_judged(value: float, limit: float) -> str:
    """Writes three decimals, or as many as tell a value from a limit that it is just above.

    >>> format_judged(0.99996, 1.0), format_judged(1.00004, 1.0)
    ('1.000', '1.00004')
    """
    digits = 3
    while value > limit >= float(f"{value:.{digits}f}"):
        digits += 1
    return f"{value:.{digits}f}"


def format_quartiles(series: Series, form: str = "") -> str:
    """Writes between which the middle half lies."""
    low, high = series.quartiles
    write_one = (lambda value: format(value, form)) if form else format_number
    return f"{write_one(low)} to {write_one(high)}"


def format_ratio(series: Series) -> str:
    """Writes a ratio with its quartiles, if there is more than one."""
    if len(series.values) == 1:
        return f"{series.median:.3f}"
    return f"{series.median:.3f} ({format_quartiles(series, '.3f')})"
