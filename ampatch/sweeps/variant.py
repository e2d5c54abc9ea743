"""The rows of a sweep: opt levels, variants of them such as `O2 loss_scale=128`, and the yardstick."""

from __future__ import annotations

import inspect
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import ampatch as amp
from ampatch import AmpError, AmpValueError
from ampatch.apex.script import level_overrides
from ampatch.sweeps.rows import AUTOCAST, LEVELS
from ampatch.tools.process import START

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
        """Says whether `torch.autocast` casts, in the place of a level of ours."""
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


def list_possible() -> tuple[str, ...]:
    """The levels that this machine can run: in float8 it needs torchao, and a GPU that has such products."""
    return tuple(name for name in LEVELS if name == AUTOCAST or _can_run(name))


def _can_run(level: str) -> bool:
    policy = amp.OPT_LEVELS[level]
    if policy.float8_recipe is None or not torch.cuda.is_available():
        return not policy.find_lack()
    # A GPU that is asked here loses memory to this process.
    command = [sys.executable, START, "", "ampatch.sweeps.variant", level]
    return subprocess.run(command, capture_output=True).returncode == 0


def main(arguments: Sequence[str]) -> None:
    """Exits with a status that says whether a level can run."""
    sys.exit(amp.OPT_LEVELS[arguments[0]].find_lack() or 0)


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
