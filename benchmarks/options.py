"""What a run measures, as the command line says it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import fresh
from benchmarks.contender import COMPILED, CONTENDERS, FLOAT8, MODES, Kind, Mode, list_contenders
from benchmarks.fresh import Measured
from benchmarks.series import Clock, Open, Series, run_rounds
from benchmarks.setting import Setting, count_usable_cores
from benchmarks.workload import WORKLOADS, Workload

GROUPS = ("steps", "micro", "memory", "syncs", "measuring")
HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = tuple(dict.fromkeys(name for kinds in (*CONTENDERS.values(), FLOAT8) for name in kinds))


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure, on what, and how long."""

    device: str = "cpu"
    halves: tuple[str, ...] = ("bfloat16",)
    threads: tuple[int, ...] = (1,)
    rounds: int = 11
    seconds: float = 0.1
    groups: tuple[str, ...] = GROUPS
    workload_names: tuple[str, ...] = ()  # empty: all that the device is enough for
    mode_names: tuple[str, ...] = ()
    contender_names: tuple[str, ...] = ()
    keeps_memory: bool = False

    @property
    def workloads(self) -> list[Workload]:
        """The workloads to run."""
        on_gpu = self.device == "cuda"
        chosen = self.workload_names or [one.name for one in WORKLOADS if on_gpu or not one.needs_gpu]
        return [one for one in WORKLOADS if one.name in chosen]

    @property
    def modes(self) -> list[Mode]:
        """The modes to run them in."""
        chosen = self.mode_names or [mode.name for mode in MODES]
        return [mode for mode in (*MODES, COMPILED) if mode.name in chosen]

    @property
    def settings(self) -> Iterator[Setting]:
        """Each half type with each number of threads."""
        for half in self.halves:
            for threads in self.threads:
                yield Setting(self.device, HALVES[half], threads)

    @property
    def untimed_settings(self) -> Iterator[Setting]:
        """Each half type once, for what does not depend on the number of threads."""
        for half in self.halves:
            yield Setting(self.device, HALVES[half], self.threads[0])

    def choose(self, setting: Setting) -> dict[str, Kind]:
        """The contenders of a half type that were asked for."""
        kinds = list_contenders(setting)
        names = self.contender_names or kinds
        return {name: kind for name, kind in kinds.items() if name in names}

    def time(
        self, contenders: Mapping[str, Open], setting: Setting, clock: Clock | None = None
    ) -> dict[str, Series]:
        """Times contenders in rounds; in milliseconds a call."""
        return run_rounds(
            contenders,
            threads=setting.threads,
            device=setting.device,
            rounds=self.rounds,
            seconds=self.seconds,
            clock=clock,
        )

    def time_fresh(self, contenders: Mapping[str, Open], setting: Setting) -> Measured:
        """Times contenders in rounds, each in a process of its own."""
        return fresh.run_rounds(
            contenders,
            threads=setting.threads,
            device=setting.device,
            rounds=self.rounds,
            seconds=self.seconds,
        )

    def describe(self) -> dict[str, object]:
        """The options as a result holds them."""
        contenders = dict.fromkeys(name for it in self.untimed_settings for name in self.choose(it))
        return {
            "device": self.device,
            "halves": list(self.halves),
            "threads": list(self.threads),
            "rounds": self.rounds,
            "seconds": self.seconds,
            "keeps_memory": self.keeps_memory,
            "groups": list(self.groups),
            "workloads": [one.name for one in self.workloads],
            "modes": [mode.name for mode in self.modes],
            "contenders": list(contenders),
        }

    def find_faults(self) -> list[str]:
        """What cannot be measured, a sentence each."""
        faults = []
        if self.device == "cuda" and not torch.cuda.is_available():
            faults.append("--device cuda: torch finds no GPU (torch.cuda.is_available() is False)")
        if self.device == "cpu":
            large = [one.name for one in self.workloads if one.needs_gpu]
            faults += [f"--workload {name!r}: too large for a CPU, add --device cuda" for name in large]
        usable = count_usable_cores()
        many = [threads for threads in self.threads if threads > usable]
        faults += [
            f"--threads {it}: more than the {usable} that this process may use at a time" for it in many
        ]
        return faults + self._find_names_without_use()

    def _find_names_without_use(self) -> list[str]:
        names = {"--workload": self.workload_names, "--contender": self.contender_names}
        if set(self.groups) == {"micro"}:
            faults = [f"{flag}: micro has no choice of them" for flag, chosen in names.items() if chosen]
        else:
            faults = [
                f"--contender: none of those in {setting.half_name}, which has "
                + ", ".join(repr(name) for name in list_contenders(setting))
                for setting in self.untimed_settings
                if not self.choose(setting)
            ]
        if self.mode_names and "steps" not in self.groups:
            faults.append(f"--mode: {' and '.join(self.groups)} has no choice of them, only steps has")
        return faults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `python -m benchmarks` accepts."""
    default = Options()
    workloads, modes = [one.name for one in WORKLOADS], [mode.name for mode in (*MODES, COMPILED)]
    add = parser.add_argument
    several = {"nargs": "+", "metavar": "NAME"}
    add("--device", choices=("cpu", "cuda"), default=default.device, help="default: %(default)s")
    halves = _list(HALVES, "bfloat16")
    add("--half", dest="halves", **several, choices=HALVES, default=default.halves, help=halves)
    add("--threads", nargs="+", metavar="N", type=parse_count, default=default.threads, help="default: 1")
    add("--rounds", type=parse_count, default=default.rounds, metavar="N", help="default: %(default)s")
    seconds = "how long a timing takes, about; default: %(default)s"
    add("--seconds", type=parse_seconds, default=default.seconds, metavar="S", help=seconds)
    add("--only", dest="groups", type=parse_groups, default=GROUPS, metavar="GROUP,...", help=_list(GROUPS))
    add("--workload", dest="workload_names", **several, choices=workloads, default=(), help=_list(workloads))
    mode = _list(modes, "all but the last")
    add("--mode", dest="mode_names", **several, choices=modes, default=(), help=mode)
    keep = "have glibc keep freed memory in steps and measuring, by its environment variables"
    add("--keep-memory", dest="keeps_memory", action="store_true", help=keep)
    contenders = f"in steps, memory and syncs; {_list(NAMES)}"
    add("--contender", dest="contender_names", **several, choices=NAMES, default=(), help=contenders)
    out = "takes the result as JSON; default: %(default)s"
    add("--out", type=Path, default=Path("benchmark.json"), metavar="FILE", help=out)


def _list(names: Iterable[str], default: str = "all") -> str:
    return f"of {', '.join(map(repr, names))}; default: {default}"


def parse_options(arguments: argparse.Namespace) -> Options:
    """Returns the options that the arguments say, each name once."""
    given = {name: getattr(arguments, name) for name in Options.__slots__}
    several = {name: tuple(dict.fromkeys(it)) for name, it in given.items() if isinstance(it, list)}
    return Options(**given | several)


def parse_count(text: str) -> int:
    """Reads a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def parse_seconds(text: str) -> float:
    """Reads a number above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, more than 0")
    return seconds


def parse_groups(text: str) -> tuple[str, ...]:
    """Reads names of groups, separated by commas."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in GROUPS:
            known = ", ".join(repr(group) for group in GROUPS)
            raise argparse.ArgumentTypeError(f"unknown group {name!r}: expected one or more of {known}")
    return names


def find_file_faults(path: Path) -> list[str]:
    """Says why a file cannot be written, if it cannot; where it is not there, it is afterwards, empty."""
    try:
        path.open("a").close()
    except OSError as error:
        return [f"--out {str(path)!r}: cannot be written: {error.strerror}"]
    return []
