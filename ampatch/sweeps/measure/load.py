"""What others took while a run trained: processors that it waited for, and the limit of its container."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

MOST_IDLE = 0.25  # part of the processors' time; where more is left, others take nothing from a run
LEAST_TICKS = 10
IDLE = slice(3, 5)  # idle and iowait, of the times in /proc/stat
# Threads that did less than this part of what the busiest one did keep nobody waiting.
IDLE_THREAD = 0.1
# Of cgroups, version 2 and 1: what counts, and the part of a second that it counts.
THROTTLED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}


class Load:
    """Reads the clocks of this process and of its processors, from now on; Linux tells all of it."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        # To a rank the others would be programs of others.
        self._stat = None if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 else stat
        self._cpus = {f"cpu{number}" for number in find_cpus()}
        self._times, self._own = self._read_times(), own_ticks()
        self._throttled = read_throttled() or 0.0
        self._threads, self._switches = read_threads(), read_switches()
        self._wall, self._ran = time.perf_counter(), time.process_time()

    def _read_times(self) -> list[int]:
        return read_times(self._stat, self._cpus) if self._stat else []

    def passed(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, time.process_time() - self._ran

    def fields(self, steps: int) -> dict[str, float | None]:
        """Returns what it waited, in so many steps: fields of a `Run`."""
        wall, ran = self.passed()
        voluntary, forced = (now - old for now, old in zip(read_switches(), self._switches, strict=True))
        threads = [
            [(now - old) / 1e9 for now, old in zip(times, self._threads.get(thread, (0, 0)), strict=True)]
            for thread, times in read_threads().items()
        ]
        if not any(own for own, _ in threads) and forced:
            # Where nobody counts waits: the time without a processor, as far as it was not given up.
            threads = [[ran, max(0.0, wall - ran) * forced / (voluntary + forced)]]
        # Its own threads and processes keep it waiting as well, at every level: what others took is the most.
        most, busy = self.taken() or (float("inf"), None)
        busiest = max(map(sum, threads), default=0.0)
        parts = [
            part(min(waited, most), ran) for ran, waited in threads if ran + waited >= IDLE_THREAD * busiest
        ]
        throttled = read_throttled()
        return {
            "busy": busy,
            "waited": max(parts, default=None),
            "throttled": None if throttled is None else part(throttled - self._throttled, ran),
            "processor_ms": 1000 * ran / steps if steps else None,
        }

    def taken(self) -> tuple[float, float] | None:
        """Returns the seconds that others took, and the part of all time, 0 where enough was left for us.

        Ours are this process, its children that have ended, and those that `multiprocessing` started. None
        where that is not known, or too little time has passed to tell.
        """
        passed = [new - old for new, old in zip(self._read_times(), self._times, strict=True)]
        if sum(passed) < LEAST_TICKS:
            return None
        idle = sum(passed[IDLE])
        others = max(0.0, sum(passed) - idle - (own_ticks() - self._own))
        is_free = idle >= MOST_IDLE * sum(passed)
        return others / os.sysconf("SC_CLK_TCK"), 0.0 if is_free else others / sum(passed)


def part(lost: float, had: float) -> float:
    return lost / (lost + had) if lost > 0 else 0.0


def find_cpus() -> set[int]:
    """Returns the processors that the threads of this process may use: OMP_PROC_BIND gives each its own."""
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    cpus = set(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it may have ended
            cpus |= os.sched_getaffinity(int(thread.name))
    return cpus


def read_times(path: Path, cpus: Collection[str]) -> list[int]:
    """Returns what these processors have spent their time on, in ticks: the eight kinds that Linux counts.

    Of all processors where none has one of the names, as in containers that number theirs themselves.
    """
    lines = [line.split() for line in read_text(path).splitlines() if line.startswith("cpu")]
    lines = [words for words in lines if words[0] in cpus] or lines[:1]
    return [sum(map(int, kind)) for kind in zip(*(words[1:9] for words in lines), strict=True)]


def own_ticks() -> float:
    """Returns the processors' time of this process and of its children, in ticks."""
    if not hasattr(os, "sysconf"):
        return 0.0
    ticks = sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")
    for child in multiprocessing.active_children():
        words = read_text(Path(f"/proc/{child.pid}/stat")).rpartition(")")[2].split()
        ticks += sum(map(int, words[11:15]))
    return ticks


def read_threads() -> dict[str, tuple[int, int]]:
    """Returns of each thread how long it ran, and waited for a processor, in nanoseconds; Linux counts."""
    times = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        if words := read_text(file).split():
            times[file.parent.name] = int(words[0]), int(words[1])
    return times


def read_switches() -> tuple[int, int]:
    """Returns how often this process has given up a processor, and was made to; Windows does not tell."""
    with suppress(ImportError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_nvcsw, usage.ru_nivcsw
    return 0, 0


def read_throttled(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float | None:
    """Returns for how many seconds limits of processors have stopped its cgroup, None if there are none."""
    return max(throttled_times(Path(groups), Path(root)), default=None)


def throttled_times(groups: Path, root: Path) -> Iterator[float]:
    """Yields the seconds that the cgroup was stopped, and those above it: any of them may have the limit."""
    for line in read_text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        own = Path(path.strip("/"))
        # A container may see its own cgroup as the root, whatever the path says.
        for base in (root, root / "unified", root / "cpu", root / controllers):
            for folder in (own, *own.parents):
                rows = read_text(base / folder / "cpu.stat").splitlines()
                words = dict(row.split() for row in rows)
                yield from (int(words[name]) * unit for name, unit in THROTTLED.items() if name in words)


def read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
