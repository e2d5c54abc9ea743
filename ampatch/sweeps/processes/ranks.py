"""A run on several ranks, which torch.distributed.run starts: their files, their times, who failed first."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ampatch import AmpError
from ampatch.sweeps.plan import PlannedRun
from ampatch.sweeps.rows import Run
from ampatch.tools.folder import HELD
from ampatch.tools.log_file import last_lines
from ampatch.tools.process import START

TIMES = ("step_ms", "step_ms_low", "step_ms_high", "timed", "busy", "waited", "throttled", "processor_ms")
SECONDS = 40.0  # in which torch.distributed.run, told to end, ends its ranks by force: it takes 30


def refuse_ranks() -> None:
    """Raises AmpError in a process that is one rank of several: each of them would run all of a sweep."""
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        count = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
        raise AmpError(
            "a sweep was started by torchrun, on each rank: start it once, as "
            f"`ampatch sweep --nproc-per-node {count} SCRIPT`; it starts the ranks of each run"
        )


def list_ranks(run: PlannedRun) -> list[PlannedRun]:
    """Returns the run as each rank sees it: the files of all but the first are in folders of their own."""
    others = range(1, run.nproc_per_node or 1)
    return [run, *(replace(run, directory=str(Path(run.directory, f"rank{rank}"))) for rank in others)]


def own_part(run: PlannedRun) -> PlannedRun:
    """Returns the run as the rank of this process sees it."""
    own = list_ranks(run)[int(os.environ["RANK"]) if run.nproc_per_node else 0]
    Path(own.directory).mkdir(exist_ok=True)
    return own


def launcher(run: PlannedRun) -> list[str]:
    """Returns what goes before the module of a child on the command line."""
    start = [START, str(Path(run.directory, HELD))]
    if run.nproc_per_node is None:
        return start
    options = ["--standalone", "--nproc-per-node", str(run.nproc_per_node), "--log-dir", run.directory]
    return [*start, "torch.distributed.run", *options, *start]


def slowest(ranks: Sequence[Run | None]) -> Run | None:
    """Returns what the first rank measured, with the times of the slowest and the memory of the largest.

    None if a rank has left nothing.
    """
    known = [rank for rank in ranks if rank is not None]
    if len(known) < len(ranks):
        return None
    slow = max(known, key=lambda rank: rank.step_ms or 0.0)
    peak = max((rank.peak_mib for rank in known if rank.peak_mib is not None), default=None)
    return replace(known[0], **{name: getattr(slow, name) for name in TIMES}, peak_mib=peak)


def first_raised(run: PlannedRun, log: Sequence[str]) -> tuple[str, ...]:
    """Returns a line about the exception of the rank that raised first, or was ended by the system.

    The others fail because of it: they wait for what it does not send any more.
    """
    paths = [one.file("raised") for one in list_ranks(run)]
    files = [(rank, path) for rank, path in enumerate(paths) if path.exists()]
    if not files:
        return () if run.nproc_per_node is None else find_ended(log)
    rank, path = min(files, key=lambda file: file[1].stat().st_mtime_ns)
    lines = last_lines(path)
    return lines if run.nproc_per_node is None else tuple(f"rank {rank}: {line}" for line in lines)


def find_ended(log: Sequence[str]) -> tuple[str, ...]:
    """Reads which rank ended first, and how, in the words that torch.distributed.run closes with.

    >>> find_ended(["Root Cause:", "  rank      : 1 (local_rank: 1)", "  exitcode  : -9"])
    ('rank 1: exitcode -9',)
    """
    text = "\n".join(log).rpartition("Root Cause")[2]
    rank = re.search(r"^\s*rank\s*: (\d+)", text, re.MULTILINE)
    code = re.search(r"^\s*exitcode\s*: (-?\d+)", text, re.MULTILINE)
    return (f"rank {rank[1]}: exitcode {code[1]}",) if rank and code else ()
