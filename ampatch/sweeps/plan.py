"""What a sweep will run, checked before any time is spent."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
import os
import re
import shlex
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import ampatch as amp
from ampatch import AmpError, AmpValueError
from ampatch.apex.script import STDIN, Script, level_overrides
from ampatch.sweeps.rows import AUTOCAST, LEVELS, Settings, Training

# ---- Rows: levels, variants of them such as `O2 loss_scale=128`, and the yardstick ----

# Of `initialize`: what the script alone can give, and what changes nothing that is measured.
NO_OPTIONS = ("models", "optimizers", "enabled", "opt_level", "num_losses", "verbosity")
NO_OPTIONS += ("alarms", "post_mortem", "diagnose", "process_group")
OPTIONS = tuple(name for name in inspect.signature(amp.initialize).parameters if name not in NO_OPTIONS)
# Of torch.autocast and its scaler.
AUTOCAST_OPTIONS = ("loss_scale", "min_loss_scale", "max_loss_scale", "dtype")
HALF_TYPES = ("float16", "bfloat16")
MODULES = ("keep_fp32", "float8_layers")  # which name modules of the script's

Value = str | float | list[str] | None


@dataclass(frozen=True, slots=True)
class Variant:
    """One row: its name, the options given beside its level, and what `initialize` is made to use.

    `autocast_dtype` is the half type of `torch.autocast`, None for a row that does without it.
    """

    name: str
    level: str
    options: dict[str, Value]
    overrides: dict[str, Value]
    autocast_dtype: str | None = None

    @property
    def autocast(self) -> bool:
        return self.level == AUTOCAST

    def validate(self) -> None:
        """Raises AmpValueError for options that `initialize` would refuse, whatever the model.

        Asks `initialize` itself, with no models. Where it is in use in this process, the run will say.
        """
        if not self.options or in_use():
            return
        overrides = {name: value for name, value in self.overrides.items() if name not in MODULES}
        try:
            amp.initialize([], [], verbosity=0, **overrides)
        except AmpError as error:
            raise AmpValueError(f"variant {self.name!r}: {error}") from None
        amp.uninitialize()


def in_use() -> bool:
    """Says whether this process has called `initialize`."""
    try:
        amp.get_loss_scale()
    except amp.NotInitializedError:
        return False
    return True


def parse_rows(levels: Sequence[str], variants: Sequence[str] = ()) -> tuple[Variant, ...]:
    """Reads levels and variants, and puts the yardstick last; none of them starts `initialize`.

    >>> [row.name for row in parse_rows(["autocast", "O0"], ["O2  loss_scale=128"])]
    ['O0', 'O2 loss_scale=128', 'autocast']
    """
    rows = [parse_variant(text) for text in (*levels, *variants)]
    if not rows:
        raise AmpValueError(f"no levels: expected one or more of {', '.join(LEVELS)}")
    for place, row in enumerate(rows):
        if any((row.level, row.options) == (other.level, other.options) for other in rows[:place]):
            raise AmpValueError(f"{row.name!r} is given twice: name each level and each variant once")
    return tuple(sorted(rows, key=lambda row: row.autocast))


def parse_variant(text: str) -> Variant:
    """Reads a level and the arguments of `initialize` that follow it, as a shell splits them.

    >>> parse_variant("O2 keep_fp32=head,norm* loss_scale=128").options
    {'keep_fp32': ['head', 'norm*'], 'loss_scale': '128'}
    """
    try:
        level, *words = shlex.split(text) or [""]
    except ValueError as error:
        raise AmpValueError(f"variant {text!r}: {error}: expected a level and NAME=VALUE") from None
    if level not in LEVELS:
        meant = AUTOCAST if level.lower() == AUTOCAST else level.upper().replace("0", "O", 1)
        hint = f" (did you mean {meant!r}?)" if meant in LEVELS else ""
        raise AmpValueError(f"unknown opt_level {level!r}{hint}: expected one of {', '.join(LEVELS)}")
    name = " ".join([level, *words])
    options: dict[str, Value] = {}
    for word in words:
        option, value = parse_option(name, level, word)
        if option in options:
            raise AmpValueError(f"variant {name!r}: {option} is given twice")
        options[option] = value
    if level == AUTOCAST:
        return make_autocast(name, options)
    return Variant(name, level, options, level_overrides(level) | options)


def make_autocast(name: str, options: dict[str, Value]) -> Variant:
    """Makes the yardstick: float32 to us, torch.autocast's casts around it, scaled as they need it.

    At O1 and O4 without their casts, since O0 casts the model's outputs to float32.
    """
    half = str(options.get("dtype") or default_half()).removeprefix("torch.")
    if half not in HALF_TYPES:
        raise AmpValueError(f"variant {name!r}: dtype {half!r}: expected {' or '.join(HALF_TYPES)}")
    level = "O1" if half == "float16" else "O4"
    others = {option: value for option, value in options.items() if option != "dtype"}
    overrides = level_overrides(level) | {"patch_torch_functions": "False"} | others
    return Variant(name, AUTOCAST, options, overrides, half)


def default_half() -> str:
    """Returns the half type that torch.autocast itself takes, on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def parse_option(name: str, level: str, word: str) -> tuple[str, Value]:
    """Reads `option=value`."""
    option, sign, value = word.partition("=")
    good = AUTOCAST_OPTIONS if level == AUTOCAST else OPTIONS
    if option not in good:
        raise AmpValueError(f"variant {name!r}: {level} has no option {option!r}: expected {', '.join(good)}")
    if not sign or not value:
        raise AmpValueError(f"variant {name!r}: {word!r} has no value: expected {option}=VALUE")
    try:
        return option, read_value(option, value)
    except ValueError:
        raise AmpValueError(f"variant {name!r}: {word!r}: expected a number") from None


def read_value(option: str, text: str) -> Value:
    """Reads what `initialize` does not read from a string, as scripts get them from argparse."""
    if option in MODULES:
        return [pattern.strip() for pattern in text.split(",") if pattern.strip()]
    if option in ("min_loss_scale", "max_loss_scale"):
        return None if text == "None" else float(text)
    return text


# ---- Runs ----

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
    "timeout": (MORE_THAN_0, "seconds, more than 0"),
    "nproc_per_node": (1, "1 or more"),
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

    >>> slug("O2"), slug("O2 keep_fp32=head,norm*")
    ('O2', 'O2-keep_fp32-head-norm-05e0a8e0')
    """
    if row in LEVELS:
        return row
    readable = re.sub(r"[^\w.]+", "-", row, flags=re.ASCII).strip("-")[:LONGEST_SLUG]
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
                "a sweep reads its script several times, and the standard input only once: save it to a file"
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
        templates = self.script.arguments
        words = {SEED: seed, LEVEL: row.overrides["opt_level"], "{row}": slug(row.name), "{repeat}": repeat}
        words["{run}"] = f"{slug(row.name)}-seed{seed}-repeat{repeat}"
        arguments = tuple(replace_words(argument, words) for argument in templates)
        return PlannedRun(
            row=row.name,
            seed=seed,
            repeat=repeat,
            script=replace(self._script(), arguments=arguments),
            overrides=row.overrides,
            autocast_dtype=row.autocast_dtype,
            shift_seeds=not any(SEED in argument for argument in templates),
            steps=self.settings.steps,
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


def make_plan(script: Script, rows: tuple[Variant, ...], **asked: float | None) -> Plan:
    """Makes a plan of what was asked for: numbers of `Settings`."""
    name = f"-m {script.name}" if script.is_module else script.name
    names = tuple(row.name for row in rows)
    return Plan(script, rows, Settings(name, script.arguments, names, digest=digest_of(script), **asked))


def find_file(script: Script) -> Path:
    """Returns the file that is run; of a module, the one that is to be found from the working directory."""
    path = Path(*script.name.split(".")) if script.is_module else Path(script.name)
    if path.is_dir():
        return path / "__main__.py"
    return path.with_suffix(".py") if script.is_module else path


def digest_of(script: Script) -> str:
    """Returns what tells the text of a script from others; empty where there is no file to read."""
    path = find_file(script)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


# ---- A copy of the working directory for each run, so that all find what the first one found ----

MOST_BYTES = 2**30  # of a copy, for each run in turn
LEFT_OUT = ("__pycache__", ".git", "ampatch-sweep", "ampatch-sweep-*", "ampatch-run-*")
ignore = shutil.ignore_patterns(*LEFT_OUT)


def isolated(script: Script) -> Script:
    """Returns the script as a run finds it in its copy of the working directory.

    Raises AmpValueError if it is not in that folder, or if the folder is too large to be copied.
    """
    here = Path.cwd()
    path = Path(script.name).absolute()
    if not script.is_module and not path.is_relative_to(here):
        raise AmpValueError(
            f"--isolate copies the working directory for each run, and {script.name!r} is not in it: start "
            "the sweep in the folder of the script"
        )
    size = sum(sizes_below(here))
    if size > MOST_BYTES:
        raise AmpValueError(
            f"--isolate copies the working directory for each run, which holds {size / 2**30:.1f} GiB: "
            f"expected {MOST_BYTES / 2**30:.0f} GiB at most; replace large data with "
            "a symbolic link, or give each run files of its own by {run} in the arguments of the script"
        )
    return script if script.is_module else replace(script, name=str(path.relative_to(here)))


def sizes_below(folder: Path) -> Iterator[int]:
    """Yields the sizes of the files that would be copied."""
    for place, below, names in os.walk(folder):
        skipped = ignore(place, [*below, *names])
        below[:] = [name for name in below if name not in skipped]
        for name in set(names) - skipped:
            with suppress(OSError):
                yield os.lstat(os.path.join(place, name)).st_size


def copy_working_directory(target: Path) -> Path:
    """Copies the files with their times, which tell what is from before the sweep."""
    return Path(shutil.copytree(Path.cwd(), target, symlinks=True, ignore=ignore))
