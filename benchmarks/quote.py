"""Writes a result's step times as a table of Markdown: what the README shows, and a test compares with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

COLUMNS = (
    ("O4 / autocast", "train", "O4", "autocast"),
    ("accumulate 4", "accumulate 4", "O4", "autocast"),
    ("eval", "eval", "O4", "autocast"),
    ("O5 / autocast", "train", "O5", "autocast"),
    ("O5 / limit", "train", "O5", "limit"),
)


def quote(result: dict) -> str:
    """Returns a row for each workload and number of threads: milliseconds of a step, and ratios."""
    rows = [row for row in result["rows"] if row["group"] == "steps"]
    found = {(row["subject"], row["threads"], row["variant"], row["contender"]): row for row in rows}
    headings = ("step of", "threads", "float32", "autocast", *(heading for heading, *_ in COLUMNS))
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    for subject, threads in dict.fromkeys((row["subject"], row["threads"]) for row in rows):
        times = (found[subject, threads, "train", name]["median"] for name in ("float32", "autocast"))
        ratios = (
            found[subject, threads, mode, contender]["ratios"][base]["median"]
            for _, mode, contender, base in COLUMNS
        )
        cells = [subject, str(threads), *(f"{time:.3g} ms" for time in times)]
        lines.append(f"| {' | '.join([*cells, *(f'{ratio:.2f}' for ratio in ratios)])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(quote(json.loads(Path(sys.argv[1]).read_text())))
