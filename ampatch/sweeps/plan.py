"""What a sweep will run, checked before any time is spent."""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ampatch import AmpValueError
from ampatch.apex.script import STDIN, Script
from ampatch.sweeps.faults import MORE_THAN_0, validate_numbers
from ampatch.sweeps.processes.devices import Device
from ampatch.sweeps.records.sweep import Settings
from ampatch.sweeps.variant import Value, Variant

SEED, LEVEL = "{seed}", "{level}"  # in the script's arguments
LONGEST_SLUG = 100
MOST_RUNS = 10_000  # a mistyped number of seeds is told at once, and not after a year
DEFAULTS = Settings(script="", arguments=(), rows=())
# What is expected of the numbers of a plan: the least of each, and in words.
LEAST = {
    "seeds": (1, "1 or more"),
    "repeat": (1, "1 or more"),
    "budget": (MORE_THAN_0, "minutes, more than 0"),
    "steps": (2, "2 or more: times are from step to step"),
    "warmup": (0, "a number of steps, 0 or more"),
    "timeout": (MORE_THAN_0, "seconds, more than 0"),
    "nproc_per_node": (1, "1 or more"),
    "tolerance": (0, "spreads of O0, 0 or more"),
}


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One process to come: a script with its arguments, and what `initialize` is made to use.

    `directory` takes its files, of which the child writes all but the log. `shift_seeds` says that the seeds
    which the script sets itself are to be moved by `seed`: it has not been told the seed. `autocast_dtype` is
    None for a row without torch.autocast.
    """

    row: str
    seed: int
    repeat: int
    script: Script
    overrides: dict[str, Value]
    directory: str = ""
    autocast_dtype: str | None = None
    shift_seeds: bool = True
    steps: int | None = None
    warmup: int = DEFAULTS.warmup
    nproc_per_node: int | None = None  # ranks, which torch.distributed.run starts
    visible: str | None = None  # the GPU that it sees alone

    def file(self, kind: str) -> Path:
        """Returns the file of a kind.

        The "log" takes what the script prints, and the child leaves the others: "steps" counts these, "json"
        is what it measured, and "raised" a line about the exception that ended it.
        """
        return Path(self.directory, f"{slug(self.row)}-seed{self.seed}-repeat{self.repeat}.{kind}")

    def to_json(self) -> str:
        """Writes the run as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PlannedRun:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        script = fields["script"]
        return cls(**fields | {"script": Script(**script | {"arguments": tuple(script["arguments"])})})


def slug(row: str) -> str:
    """Returns a row's name as it can stand in a file's name; no two rows share one.

    >>> slug("O2 keep_batchnorm_fp32=False loss_scale=128")
    'O2-keep_batchnorm_fp32-False-loss_scale-128'
    >>> slug("O2 keep_fp32=head,norm*")
    'O2-keep_fp32-head-norm-05e0a8e0'
    """
    plain = re.sub(r"[ =]", "-", row)
    if re.fullmatch(r"[\w.-]*", plain, re.ASCII) and "-" not in row and len(plain) <= LONGEST_SLUG:
        return plain
    readable = re.sub(r"[^\w.]+", "-", plain, flags=re.ASCII).strip("-")[:LONGEST_SLUG]
    return f"{readable}-{zlib.crc32(row.encode()):08x}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A script with its arguments, the rows to train it at, and what was asked for beside.

    Each row runs with each of so many seeds, and all of that as often as is asked for, one run on each device
    at a time. Raises AmpValueError for what cannot work, all of the numbers at once.
    """

    script: Script
    rows: tuple[Variant, ...]
    settings: Settings
    devices: tuple[Device, ...] = ()

    def __post_init__(self) -> None:
        if not self.script.is_module and self.script.name == STDIN:
            raise AmpValueError(
                "the standard input can be read once, and a sweep reads its script often: save it to a file"
            )
        self.script.validate()
        validate_numbers(asdict(self.settings), LEAST)
        if self.count > MOST_RUNS:
            raise AmpValueError(f"{self.count} runs: expected at most {MOST_RUNS:,}")
        for row in self.rows:
            row.validate()

    @property
    def count(self) -> int:
        """Returns how many runs there are."""
        return len(self.rows) * self.settings.seeds * self.settings.repeat

    @property
    def may_repeat(self) -> bool:
        """Says whether more repeats than were asked for are allowed."""
        again = self.count + self.count // self.settings.repeat
        return self.settings.budget is not None and again <= MOST_RUNS

    def runs(self) -> Iterator[PlannedRun]:
        """Yields the runs in the order in which they start, as yet without a directory.

        Round after round through the rows, every other one backwards: a machine that slows down over the
        hours slows down all rows alike.
        """
        rounds = itertools.product(range(self.settings.repeat), range(self.settings.seeds))
        for number, (repeat, seed) in enumerate(rounds):
            rows = self.rows if number % 2 == 0 else reversed(self.rows)
            for row in rows:
                yield self._run(row, seed, repeat)

    def _run(self, row: Variant, seed: int, repeat: int) -> PlannedRun:
        given = self.script.arguments
        level = str(row.overrides["opt_level"])
        arguments = tuple(it.replace(SEED, str(seed)).replace(LEVEL, level) for it in given)
        return PlannedRun(
            row=row.name,
            seed=seed,
            repeat=repeat,
            script=replace(self.script, arguments=arguments),
            overrides=row.overrides,
            autocast_dtype=row.autocast_dtype,
            shift_seeds=not any(SEED in argument for argument in given),
            steps=self.settings.steps,
            warmup=self.settings.warmup,
            nproc_per_node=self.settings.nproc_per_node,
        )


def make_plan(script: Script, rows: tuple[Variant, ...], title: str = "", **asked: float | None) -> Plan:
    """Makes a plan; `title` is the name of what is run, if that is no script to its user."""
    name = title or (f"-m {script.name}" if script.is_module else script.name)
    arguments = () if title else script.arguments
    return Plan(script, rows, Settings(name, arguments, tuple(row.name for row in rows), **asked))
