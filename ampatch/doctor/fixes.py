"""What to do about a finding: each fix says itself, and applies itself to a run of the script."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

from ampatch import DynamicLossScale
from ampatch.doctor.run import ScriptRun
from ampatch.doctor.text.source import PASTED, Change, meets

LARGEST_SCALE = 24  # as a power of two: more are not looked at
PARTS = {10: "tenth", 100: "hundredth"}


class Rank(IntEnum):
    """What came of a fix, in the order in which fixes are said; what learns less is as if untried."""

    TRAINS = 0
    UNTRIED = 1
    BREAKS = 2


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a fix: its rank, and in words what the run showed, "" where none was made."""

    rank: Rank = Rank.UNTRIED
    said: str = ""

    def __str__(self) -> str:
        return self.said


NOT_TRIED = Tried()


class Fix:
    """What to do, in words by `str`; what a program can do, it does to a run by `change`."""

    def change(self, run: ScriptRun) -> ScriptRun | None:
        """Returns the run of the script with the fix, None where that takes a reader."""
        return None

    def next(self) -> Fix | None:
        """Returns what to try where this is not enough, of the same kind."""
        return None

    @property
    def how(self) -> str:
        """What is done of what is said, before what came of it."""
        return ""

    is_exact = True  # whether what broke nothing is computed as before


@dataclass(frozen=True, slots=True)
class Words(Fix):
    """What a reader has to do."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Keep(Fix):
    """Modules that run in float32: by `initialize`, or under `torch.autocast` for a device by lines."""

    modules: tuple[str, ...]
    model: str
    autocast: str | None = None

    def change(self, run: ScriptRun) -> ScriptRun:
        return replace(run, keep_fp32=tuple(dict.fromkeys((*run.keep_fp32, *self.modules))))

    def __str__(self) -> str:
        names = list(self.modules)
        if self.autocast is None:
            is_one = len(names) == 1 and "*" not in names[0]
            what = "this module runs" if is_one else "these modules run"
            return f"amp.initialize(..., keep_fp32={names}): {what} in float32"
        lines = (
            f"in float32, by these lines after {self.model} is made:",
            f"for name in {names}:",
            f"    part = {self.model}.get_submodule(name)",
            f"    part.forward = torch.amp.custom_fwd(part.forward, device_type={self.autocast!r}, "
            "cast_inputs=torch.float32)",
        )
        return PASTED.join(lines)


@dataclass(frozen=True, slots=True)
class OtherLevel(Fix):
    """Another opt level; `why` says what it is good for, `before` what is done by it."""

    level: str
    why: str = ""
    before: str = ""

    def change(self, run: ScriptRun) -> ScriptRun:
        return replace(run, level=self.level)

    def __str__(self) -> str:
        return f"{self.before}opt_level {self.level}{self.why}"


@dataclass(frozen=True, slots=True)
class Bfloat16(Fix):
    """bfloat16 where `torch.autocast` for a device takes float16."""

    device: str

    def change(self, run: ScriptRun) -> ScriptRun:
        return replace(run, bfloat16=True)

    def __str__(self) -> str:
        return f"torch.autocast({self.device!r}, dtype=torch.bfloat16), whose range is that of float32"


@dataclass(frozen=True, slots=True)
class Float32(Fix):
    """float32 throughout: without `torch.autocast` for a device, or at O0; `is_last` if others were tried."""

    device: str | None
    has_scaler: bool = False
    is_last: bool = field(default=False, compare=False)

    def change(self, run: ScriptRun) -> ScriptRun:
        return replace(run, level="O0", float32=True)

    def __str__(self) -> str:
        how = "opt_level O0"
        if self.device is not None:
            how = f"torch.autocast({self.device!r}, enabled=False)"
            how += " and GradScaler(enabled=False)" if self.has_scaler else ""
        return f"{how}: float32 throughout" + "; nothing less that was tried was enough" * self.is_last


@dataclass(frozen=True, slots=True)
class Rate(Fix):
    """A part of the learning rate; `text` says what else may be done, and why."""

    text: str
    divisor: int = 10

    def change(self, run: ScriptRun) -> ScriptRun:
        return replace(run, rate=run.rate / self.divisor)

    def next(self) -> Fix | None:
        return replace(self, divisor=10 * self.divisor) if 10 * self.divisor in PARTS else None

    @property
    def how(self) -> str:
        return f"at a {PARTS[self.divisor]} of the rate "

    def __str__(self) -> str:
        return f"lower the learning rate{self.text}"


@dataclass(frozen=True, slots=True)
class StartScale(Fix):
    """The power of two that a dynamic scale starts with, of ampatch, or of a `GradScaler` for a device."""

    power: int
    device: str | None = None

    def change(self, run: ScriptRun) -> ScriptRun:
        return replace(run, init_scale=2.0**self.power)

    def __str__(self) -> str:
        start = f"init_scale=2.0**{self.power}"
        how = f"start with torch.amp.GradScaler({self.device!r}, {start})"
        if self.device is None:
            how = f"give initialize loss_scale=amp.DynamicLossScale({start})"
        largest = "the largest scale" if self.power < LARGEST_SCALE else "a scale"
        return f"{how}: {largest} at which nothing overflows here"


@dataclass(frozen=True, slots=True)
class Dynamic(Fix):
    """A dynamic loss scale in the place of a static one."""

    scale: float

    def change(self, run: ScriptRun) -> ScriptRun:
        return replace(run, init_scale=DynamicLossScale().init_scale)

    def __str__(self) -> str:
        return f'loss_scale="dynamic" in the place of {self.scale:g}: it falls until gradients fit'


@dataclass(frozen=True, slots=True)
class Paste(Fix):
    """Other lines in a file of the user's, which are shown if they `are_shown`; `title` says what they do.

    They are exact if they compute the same of numbers that broke nothing.
    """

    title: str
    changes: tuple[Change, ...]
    are_shown: bool = True
    is_exact: bool = True

    def change(self, run: ScriptRun) -> ScriptRun | None:
        """Changes the files that the run reads; None where the run changes the same lines by now."""
        if any(meets(one, other) for one in self.changes for other in run.changes):
            return None
        return replace(run, changes=(*run.changes, *self.changes))

    def __str__(self) -> str:
        return PASTED.join((f"{self.title}:", *self._shown())) if self.are_shown else self.title

    def _shown(self) -> tuple[str, ...]:
        (change,) = self.changes
        is_one = change.first == change.last
        header = () if is_one else (f"# in the place of lines {change.first} to {change.last}",)
        return (*header, *change.lines)


@dataclass(frozen=True, slots=True)
class Both(Fix):
    """Fixes that are made together; each stands at a line, "file:line"."""

    parts: tuple[tuple[str | None, Fix], ...]

    def change(self, run: ScriptRun) -> ScriptRun | None:
        """Makes all of them."""
        changed: ScriptRun | None = run
        for _, fix in self.parts:
            changed = changed and fix.change(changed)
        return changed

    def __str__(self) -> str:
        (_, first), *rest = self.parts
        return "\n  and ".join([str(first), *(f"at {where}: {fix}" for where, fix in rest)])


def join(parts: tuple[tuple[str | None, Fix], ...]) -> Fix:
    """Returns fixes as one; of modules to keep one list."""
    fixes = [fix for _, fix in parts]
    if all(isinstance(fix, Keep) for fix in fixes):
        modules = dict.fromkeys(name for fix in fixes for name in fix.modules)
        return replace(fixes[0], modules=tuple(modules))
    return Both(parts)
