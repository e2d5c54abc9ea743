"""What the tensors of training take up, by kind, and how many casts a step makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from statistics import fmean

from ampatch.sweeps.records.numbers import TYPESET
from ampatch.sweeps.records.record import Bytes, Casts, Measured, Record
from ampatch.sweeps.records.sweep import Row, Sweep
from ampatch.sweeps.web.bars import Bar, bar_chart
from ampatch.sweeps.web.colours import Look
from ampatch.sweeps.web.figures import figure, part_legend
from ampatch.sweeps.web.markup import Markup
from ampatch.sweeps.web.style import NARROW_COLUMN
from ampatch.sweeps.web.tables import Column, cell, table_of

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
KINDS = ("Parameters", "Masters", "Gradients", "Optimizer state", "Kept casts")


def measured_of(row: str, records: Sequence[Record]) -> list[Measured]:
    """Returns what was measured in the runs of a row that finished, else in those that did not."""
    own = [record for record in records if record.row == row and record.measured]
    finished = [record.measured for record in own if record.measured and not record.failed]
    return finished or [record.measured for record in own if record.measured]


def bytes_of(row: str, records: Sequence[Record]) -> Bytes | None:
    """Returns the bytes of a row, which are the same in each of its runs."""
    return next((it.bytes for it in measured_of(row, records) if it.bytes), None)


def casts_of(row: str, records: Sequence[Record]) -> Casts | None:
    """Returns the casts of a step, on average over the runs."""
    found = [it.casts for it in measured_of(row, records) if it.casts]
    return Casts(fmean(it.made for it in found), fmean(it.reused for it in found)) if found else None


def bytes_table(sweep: Sweep, looks: Mapping[str, Look]) -> Markup | None:
    """Returns the table of bytes and casts, None where neither was measured."""
    by_row = {row.name: bytes_of(row.name, sweep.records) for row in sweep.rows}
    casts = {row.name: casts_of(row.name, sweep.records) for row in sweep.rows}
    columns, captions = [], []
    if any(by_row.values()):
        name, size = unit_of([sum(astuple(it)) for it in by_row.values() if it])
        columns += [size_column(kind, by_row, size, index) for index, kind in enumerate(KINDS)]
        columns.append(size_column("Together", by_row, size))
        captions.append(f"Tensors that training keeps, before an optimizer's step, in {name}.")
    if any(casts.values()):
        columns += cast_columns(casts)
        captions.append("Casts of arguments in a step; a cast of a weight is reused while the weight stays.")
    if not columns:
        return None
    rows = [row for row in sweep.rows if by_row[row.name] or casts[row.name]]
    return table_of(sweep, looks, columns, " ".join(captions), rows=rows, width=NARROW_COLUMN)


def unit_of(sizes: list[int]) -> tuple[str, int]:
    """Returns the unit in which the largest of these sizes has few digits, and its bytes.

    >>> unit_of([0, 46_758_048]), unit_of([])
    (('MiB', 1048576), ('B', 1))
    """
    power = max((size.bit_length() - 1 for size in sizes if size > 0), default=0) // 10
    power = min(power, len(BYTE_UNITS) - 1)
    return BYTE_UNITS[power], 1024**power


def size_column(
    heading: str, by_row: Mapping[str, Bytes | None], unit: int, index: int | None = None
) -> Column:
    """Returns a column for a kind of bytes, or without an index for their sum."""

    def read(row: Row) -> Markup:
        it = by_row[row.name]
        if it is None:
            return cell(TYPESET.nothing)
        count = sum(astuple(it)) if index is None else astuple(it)[index]
        return cell(TYPESET.number(count / unit) if count else "0")

    return Column(heading, read)


def cast_columns(casts: Mapping[str, Casts | None]) -> list[Column]:
    """Returns the columns of casts made, and of casts of weights used again."""

    def made(row: Row) -> Markup:
        it = casts[row.name]
        return cell(TYPESET.number(it.made) if it else TYPESET.nothing)

    def reused(row: Row) -> Markup:
        it = casts[row.name]
        return cell(TYPESET.number(it.reused) if it else TYPESET.nothing)

    return [Column("Casts made", made), Column("Casts reused", reused)]


def bytes_figure(sweep: Sweep, looks: Mapping[str, Look]) -> Markup | None:
    """Returns bars of the bytes, in parts by kind; None where none were counted."""
    by_row = {row.name: bytes_of(row.name, sweep.records) for row in sweep.rows}
    present = {name: astuple(it) for name, it in by_row.items() if it}
    if not present:
        return None
    name, size = unit_of([sum(parts) for parts in present.values()])
    best = sweep.recommendation.row
    bars = [
        Bar(
            looks[row],
            tuple(map(float, parts)),
            f"{TYPESET.number(sum(parts) / size)} {name}",
            strong=row == best,
        )
        for row, parts in present.items()
    ]
    legend = part_legend([kind.lower() for kind in KINDS])
    return figure(bar_chart("Bytes of tensors by kind", bars), "Bytes of tensors by kind", None, legend)


def casts_figure(sweep: Sweep, looks: Mapping[str, Look]) -> Markup | None:
    """Returns bars of the casts made and reused; None where none were counted."""
    found = {row.name: casts_of(row.name, sweep.records) for row in sweep.rows}
    best = sweep.recommendation.row
    bars = [
        Bar(
            looks[row],
            (it.made, it.reused),
            f"{TYPESET.number(it.made)} + {TYPESET.number(it.reused)}",
            strong=row == best,
        )
        for row, it in found.items()
        if it
    ]
    if not bars:
        return None
    legend = part_legend(["made", "reused"])
    return figure(bar_chart("Casts in a step", bars), "Casts in a step", None, legend)
