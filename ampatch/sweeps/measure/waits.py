"""What a run had to wait for while it trained: processors that others had, and the limit of its container."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ampatch.sweeps.environment import Load
from ampatch.sweeps.records.record import Waits

# Threads that did less than this part of what the busiest one did keep nobody waiting.
IDLE_THREAD = 0.1
# Of cgroups, version 2 and 1: what counts, and the part of a second that it counts.
THROTTLED = {"throttled_usec": 1e-6, "throttled_time": 1e-9}


class Waiting:
    """Reads the clocks of this process and of its processors, from now on until `result`."""

    def __init__(self) -> None:
        # To a rank the others would be programs of others.
        self._load = None if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 else Load()
        self._throttled = read_throttled() or 0.0
        self._threads, self._switches = read_threads(), read_switches()
        self._wall, self._ran = time.perf_counter(), time.process_time()

    def result(self, steps: int) -> Waits:
        """Returns what it waited, in so many steps."""
        ran, wall = time.process_time() - self._ran, time.perf_counter() - self._wall
        voluntary, forced = (now - old for now, old in zip(read_switches(), self._switches, strict=True))
        threads = [
            [(now - old) / 1e9 for now, old in zip(times, self._threads.get(thread, (0, 0)), strict=True)]
            for thread, times in read_threads().items()
        ]
        if not any(own for own, _ in threads) and forced:
            # Where nobody counts waits: the time without a processor, as far as it was not given up.
            threads = [[ran, max(0.0, wall - ran) * forced / (voluntary + forced)]]
        # Its own threads and processes keep it waiting as well, at every level: what others took is the most.
        most, busy = (self._load and self._load.taken()) or (float("inf"), None)
        busiest = max(map(sum, threads), default=0.0)
        parts = [part(min(it[1], most), it[0]) for it in threads if sum(it) >= IDLE_THREAD * busiest]
        throttled = read_throttled()
        return Waits(
            busy=busy,
            waited=max(parts, default=None),
            throttled=None if throttled is None else part(throttled - self._throttled, ran),
            forced=forced / wall,
            processor_ms=1000 * ran / steps if steps else None,
        )


def part(lost: float, had: float) -> float:
    """Returns the part that was lost of what was wanted."""
    return lost / (lost + had) if lost > 0 else 0.0


def read_threads() -> dict[str, tuple[int, int]]:
    """Returns of each thread how long it ran, and waited for a processor, in nanoseconds; Linux counts."""
    found = {}
    with suppress(OSError, ValueError):
        for file in Path("/proc/self/task").glob("*/schedstat"):
            with suppress(OSError):  # the thread may have ended
                ran, waited, _ = map(int, file.read_text().split())
                found[file.parent.name] = ran, waited
    return found


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
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own = Path(path.strip("/"))
            # A container may see its own cgroup as the root, whatever the path says.
            for base in (root, root / "unified", root / "cpu", root / controllers):
                for folder in (own, *own.parents):
                    with suppress(OSError, ValueError):
                        rows = (base / folder / "cpu.stat").read_text().splitlines()
                        words = dict(row.split() for row in rows)
                        yield from (int(words[it]) * unit for it, unit in THROTTLED.items() if it in words)
