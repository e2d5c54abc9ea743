"""Parametrizes a test over the rows of cast tables."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import torch

from ampatch.lists import TABLES
from ampatch.table import Cast, CastTable

if TYPE_CHECKING:
    import pytest


def parametrize_rows(
    *tables: CastTable, cast: Cast | Container[Cast] | None = None, names: tuple[str, str] = ("path", "row")
) -> pytest.MarkDecorator:
    """Runs a test once for each row that holds in this torch, with its path and the row.

    ```python
    @parametrize_rows(MY_TABLE, cast=FP32)
    def test_a_row_gives_float32(path, row): ...
    ```

    The path, such as "torch.nn.functional.linear", is the test's id as well. Without tables it takes
    ampatch's own. `cast` narrows to one cast, or several; `names` are those of the test's arguments.
    """
    import pytest

    casts = (cast,) if isinstance(cast, Cast) else cast
    rows = [
        (f"{table.target}.{row.name}", row)
        for table in tables or TABLES
        for row in table.select(torch.__version__).rows
        if casts is None or row.cast in casts
    ]
    return pytest.mark.parametrize(names, rows, ids=[path for path, _ in rows])
