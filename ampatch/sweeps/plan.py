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
from ampatch.sweeps.faults import check_arguments
from ampatch.sweeps.records.sweep import Settings
from ampatch.sweeps.variant import Value, Variant

SEED, LEVEL = "{seed}", "{level}"  # in the script's arguments
LONGEST_SLUG = 100
MOST_RUNS = 10_000  # a mistyped number of seeds is told at once, and not after a year
DEFAULTS = Settings(script="", arguments=(), rows=())


@dataclass(frozen=True, slots=True)
class Run:
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
    directory: str
    autocast_dtype: str | None = None
    shift_seeds: bool = True
    steps: int | None = None
    warmup: int = DEFAULTS.warmup
    nproc_per_node: int | None = None  # ranks, which torch.distributed.run starts

    @property
    def log(self) -> Path:
        """Returns the file that takes what the script prints."""
        return self._file("log")

    @property
    def progress(self) -> Path:
        """Returns the file in which the child counts its steps."""
        return self._file("steps")

    @property
    def measured(self) -> Path:
        """Returns the file in which the child leaves what it measured."""
        return self._file("json")

    @property
    def raised(self) -> Path:
        """Returns the file in which the child leaves a line about the exception that ended it."""
        return self._file("raised")

    def _file(self, ending: str) -> Path:
        return Path(self.directory, f"{slug(self.row)}-seed{self.seed}-repeat{self.repeat}.{ending}")

    def to_json(self) -> str:
        """Writes the run as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Run:
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
    """A script with its arguments, the rows to train it at, how often, how long, and how to compare.

    Each of `rows` runs with each of so many `seeds`, and all of that `repeat` times, each time for so many
    `steps` at the most and `timeout` seconds; `warmup` steps are not timed. Each run has
    `nproc_per_node` ranks, which torch.distributed.run starts; None is a process without it.
    `tolerance` is in spreads of O0. Raises AmpValueError for what cannot work, all of the numbers at once.
    """

    script: Script
    rows: tuple[Variant, ...]
    seeds: int = DEFAULTS.seeds
    repeat: int = DEFAULTS.repeat
    steps: int | None = None
    warmup: int = DEFAULTS.warmup
    timeout: float | None = None
    tolerance: float = DEFAULTS.tolerance
    title: str = ""  # of what is run, if it is no script to its user
    nproc_per_node: int | None = None
    budget: float | None = None  # minutes, in which it may be repeated more often until times tell

    def __post_init__(self) -> None:
        if not self.script.is_module and self.script.name == STDIN:
            raise AmpValueError(
                "the standard input can be read once, and a sweep reads its script often: save it to a file"
            )
        self.script.validate()
        steps, timeout = self.steps, self.timeout
        check_arguments(
            ("seeds", self.seeds, self.seeds >= 1, "expected 1 or more"),
            ("repeat", self.repeat, self.repeat >= 1, "expected 1 or more"),
            ("budget", self.budget, self.budget is None or self.budget > 0, "expected minutes, more than 0"),
            ("steps", steps, steps is None or steps >= 2, "expected 2 or more: times are from step to step"),
            ("warmup", self.warmup, self.warmup >= 0, "expected a number of steps, 0 or more"),
            ("timeout", timeout, timeout is None or timeout > 0, "expected seconds, more than 0"),
            (
                "nproc_per_node",
                nproc := self.nproc_per_node,
                nproc is None or nproc >= 1,
                "expected 1 or more",
            ),
            ("tolerance", self.tolerance, self.tolerance >= 0, "expected spreads of O0, 0 or more"),
        )
        if self.count > MOST_RUNS:
            raise AmpValueError(f"{self.count} runs: expected at most {MOST_RUNS:,}")
        for row in self.rows:
            row.validate()

    @property
    def count(self) -> int:
        """Returns how many runs there are."""
        return len(self.rows) * self.seeds * self.repeat

    @property
    def may_repeat(self) -> bool:
        """Says whether more repeats than were asked for are allowed."""
        return self.budget is not None and self.count + self.count // self.repeat <= MOST_RUNS

    def runs(self, directory: Path) -> Iterator[Run]:
        """Yields the runs in the order in which they start; their files go to `directory`.

        Round after round through the rows, every other one backwards: a machine that slows down over the
        hours slows down all rows alike.
        """
        rounds = itertools.product(range(self.repeat), range(self.seeds))
        for number, (repeat, seed) in enumerate(rounds):
            rows = self.rows if number % 2 == 0 else reversed(self.rows)
            for row in rows:
                yield self._run(row, seed, repeat, directory)

    def _run(self, row: Variant, seed: int, repeat: int, directory: Path) -> Run:
        given = self.script.arguments
        level = str(row.overrides["opt_level"])
        arguments = tuple(it.replace(SEED, str(seed)).replace(LEVEL, level) for it in given)
        return Run(
            row=row.name,
            seed=seed,
            repeat=repeat,
            script=replace(self.script, arguments=arguments),
            overrides=row.overrides,
            # A script may change the working directory.
            directory=str(directory.absolute()),
            autocast_dtype=row.autocast_dtype,
            shift_seeds=not any(SEED in argument for argument in given),
            steps=self.steps,
            warmup=self.warmup,
            nproc_per_node=self.nproc_per_node,
        )

    def settings(self) -> Settings:
        """Returns what the sweep was asked for, as it is written down."""
        return Settings(
            script=self.title or (f"-m {self.script.name}" if self.script.is_module else self.script.name),
            arguments=() if self.title else self.script.arguments,
            rows=tuple(row.name for row in self.rows),
            seeds=self.seeds,
            repeat=self.repeat,
            budget=self.budget,
            steps=self.steps,
            warmup=self.warmup,
            timeout=self.timeout,
            tolerance=self.tolerance,
            nproc_per_node=self.nproc_per_node,
        )
