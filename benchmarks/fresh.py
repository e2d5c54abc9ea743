"""Times each contender in a process of its own, as scripts run: no memory or cache is another's."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

import ampatch as amp
from benchmarks.series import (
    WARMUP_STEPS,
    Open,
    Series,
    Turn,
    choose_calls,
    interleave,
    make_clock,
    time_calls,
)

# Bytes; above what any workload allocates. glibc reads them when a process starts.
KEPT = {"MALLOC_TRIM_THRESHOLD_": "8000000000", "MALLOC_MMAP_THRESHOLD_": "8000000000"}


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of contenders, round by round, and why the others cannot run."""

    milliseconds: dict[str, Series]
    faults: dict[str, Series]  # minor page faults of one call
    failures: dict[str, str]


class CannotRunError(Exception):
    """Torch cannot do what a contender asks for on this machine."""


class FreshProcess:
    """A contender's step in a process of its own, which waits between its turns."""

    def __init__(self, open_step: Open, threads: int, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, open_step, threads, device), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def time(self, calls: int) -> Turn:
        """Lets the process make so many calls, after a warm-up."""
        self._pipe.send(calls)
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the process of a contender ended: its error stands above") from None
        if isinstance(answer, str):
            raise CannotRunError(answer)
        return answer


def serve(pipe: Connection, open_step: Open, threads: int, device: str) -> None:
    """Answers each number of calls with how long they took; sends the reason where torch cannot run them."""
    torch.set_num_threads(threads)
    clock = make_clock(device)
    try:
        with open_step() as step:
            while True:
                calls = pipe.recv()
                for _ in range(WARMUP_STEPS):
                    step()
                pipe.send(time_calls(step, calls, clock))
    except amp.AmpError:
        raise
    except RuntimeError as error:
        pipe.send(say_reason(error))


def say_reason(error: Exception) -> str:
    """Returns the first line of an error."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def run_rounds(
    contenders: Mapping[str, Open], *, threads: int, device: str, rounds: int, seconds: float
) -> Measured:
    """Times contenders in turn, as `series.run_rounds` does, each in a process that lives for all rounds.

    What they are opened by is sent to the processes: functions at the top of modules, and `partial` of them.
    """
    failures: dict[str, str] = {}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(FreshProcess(it, threads, device)) for name, it in contenders.items()
        }
        calls = {}
        for name, process in processes.items():
            try:
                calls[name] = choose_calls(process.time, seconds)
            except CannotRunError as error:
                failures[name] = str(error)
        turns = interleave({name: partial(processes[name].time, calls[name]) for name in calls}, rounds)
    return Measured(
        {name: Series(tuple(turn.milliseconds for turn in it)) for name, it in turns.items()},
        {name: Series(tuple(turn.faults for turn in it)) for name, it in turns.items()},
        failures,
    )


def keep_memory() -> None:
    """Has the C library of processes that start from now on keep what they free."""
    os.environ.update(KEPT)
