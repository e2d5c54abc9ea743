"""Writes the curves of layers for other programs: a table (CSV), or scalars for TensorBoard."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from ampatch.doctor.growth.curves import QUANTITIES

COLUMNS = ("attempt", "step", "model", "module", "dtype", *QUANTITIES, "headroom")


def rows_of(growth: dict) -> Iterator[tuple[object, ...]]:
    """Yields a row of `COLUMNS` for each attempt and layer; None for what did not run or is not finite."""
    for index, (attempt, step) in enumerate(zip(growth["attempts"], growth["steps"], strict=True)):
        for layer in growth["layers"]:
            numbers = [layer[name][index] for name in (*QUANTITIES, "headroom")]
            if any(it is not None for it in numbers):
                yield (attempt, step, layer["model"], layer["module"], layer["dtype"], *numbers)


def write_csv(growth: dict, path: str) -> None:
    """Writes a table with a line of headings."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows_of(growth))


def write_scalars(growth: dict, folder: str) -> None:
    """Writes a scalar for each quantity, layer and attempt, tagged `quantity/model.module`."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        for attempt, _, model, module, _, *numbers in rows_of(growth):
            for name, number in zip((*QUANTITIES, "headroom"), numbers, strict=True):
                if number is not None:
                    writer.add_scalar(
                        f"{name}/{model}.{module}" if module else f"{name}/{model}", number, attempt
                    )
