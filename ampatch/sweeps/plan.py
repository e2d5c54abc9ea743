"""What a sweep will run, checked before any time is spent."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ampatch import AmpValueError
from ampatch.apex.script import STDIN, Script
from ampatch.sweeps.processes.isolation import isolated
from ampatch.sweeps.rows import Settings, Training
from ampatch.sweeps.switches import find_file
from ampatch.sweeps.variant import Value, Variant

SEED, LEVEL = "{seed}", "{level}"  # in the script's arguments
LONGEST_SLUG = 100
MORE_THAN_0 = math.ulp(0.0)  # the least number that is
MOST_RUNS = 10_000  # a mistyped number of seeds is told at once, and not after a year
DEFAULTS = Settings(script="", arguments=(), rows=())
# What is expected of the numbers of a plan: the least of each, and in words.
LEAST = {
    "seeds": (1, "1 or more"),
    "repeat": (1, "1 or more"),
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
    None for a row without torch.autocast. `limits` are seconds, and seconds of the processors: a run that has
    needed more of both is far slower than O0, and cut short.
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
    isolate: bool = False
    earlier: tuple[Training, ...] = ()  # runs of the sweep, whose files it must not read
    limits: tuple[float, float] | None = None

    def file(self, kind: str) -> Path:
        """Returns the file of a kind.

        The "log" takes what the script prints, and the child leaves the others: "json" is what it measured,
        and "raised" a line about the exception that ended it.
        """
        return Path(self.directory, f"{slug(self.row)}-seed{self.seed}-repeat{self.repeat}.{kind}")

    def identity(self) -> dict[str, object]:
        """Returns what tells the run from others of its sweep: fields of a `Run`."""
        return {"row": self.row, "seed": self.seed, "repeat": self.repeat}

    def to_json(self) -> str:
        """Writes the run as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PlannedRun:
        """Reads what `to_json` wrote."""
        fields = json.loads(text)
        script = fields["script"]
        fields["earlier"] = tuple(Training(**each) for each in fields["earlier"])
        fields["limits"] = fields["limits"] and tuple(fields["limits"])
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

    Each row runs with each of so many seeds, and all of that as often as is asked for. Raises AmpValueError
    for what cannot work, all of the numbers at once.
    """

    script: Script
    rows: tuple[Variant, ...]
    settings: Settings

    def __post_init__(self) -> None:
        if not self.script.is_module and self.script.name == STDIN:
            raise AmpValueError(
                "the standard input can be read once, and a sweep reads its script often: save it to a file"
            )
        self.script.validate()
        if self.settings.isolate:
            isolated(self.script)
        values = asdict(self.settings)
        faults = [
            f"{name} {value!r}: expected {expected}"
            for name, (low, expected) in LEAST.items()
            if (value := values[name]) is not None and not value >= low
        ]
        if faults:
            raise AmpValueError("; ".join(faults))
        if self.settings.runs > MOST_RUNS:
            raise AmpValueError(f"{self.settings.runs} runs: expected at most {MOST_RUNS:,}")
        for row in self.rows:
            row.validate()

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

    def _script(self) -> Script:
        return isolated(self.script) if self.settings.isolate else self.script

    def _run(self, row: Variant, seed: int, repeat: int) -> PlannedRun:
        given = self.script.arguments
        words = {SEED: seed, LEVEL: row.overrides["opt_level"], "{row}": slug(row.name), "{repeat}": repeat}
        words["{run}"] = f"{slug(row.name)}-seed{seed}-repeat{repeat}"
        arguments = tuple(replace_words(argument, words) for argument in given)
        return PlannedRun(
            row=row.name,
            seed=seed,
            repeat=repeat,
            script=replace(self._script(), arguments=arguments),
            overrides=row.overrides,
            autocast_dtype=row.autocast_dtype,
            shift_seeds=not any(SEED in argument for argument in given),
            steps=self.settings.steps,
            warmup=self.settings.warmup,
            nproc_per_node=self.settings.nproc_per_node,
            isolate=self.settings.isolate,
        )


def replace_words(argument: str, words: Mapping[str, object]) -> str:
    """Puts values into the places of their names.

    >>> replace_words("--out={row}/{seed}.pt", {"{row}": "O4", "{seed}": 1})
    '--out=O4/1.pt'
    """
    for word, value in words.items():
        argument = argument.replace(word, str(value))
    return argument


def make_plan(script: Script, rows: tuple[Variant, ...], title: str = "", **asked: float | None) -> Plan:
    """Makes a plan; `title` is the name of what is run, if that is no script to its user."""
    name = title or (f"-m {script.name}" if script.is_module else script.name)
    arguments = () if title else script.arguments
    digest = "" if title else digest_of(script)
    settings = Settings(name, arguments, tuple(row.name for row in rows), digest=digest, **asked)
    return Plan(script, rows, settings)


def digest_of(script: Script) -> str:
    """Returns what tells the text of a script from others; empty where there is no file to read."""
    path = find_file(script)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""
