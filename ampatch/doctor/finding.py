"""What the doctor says: findings, of numbers that broke and of silent faults, and the report of a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace

from ampatch.doctor.fixes import Fix, Paste, Rank, Tried
from ampatch.doctor.instruments.places import Place
from ampatch.doctor.instruments.tape import Origin
from ampatch.doctor.instruments.watch import Attempt

VERSION = 2
LOUD = ("inf", "nan", "")  # kinds of numbers that broke
OF_ORIGIN = ("micro_step", "phase", "parameter", "input_largest", "node", "region", "turns")


@dataclass(frozen=True, slots=True)
class Finding:
    """What breaks a run: an operation that made inf or NaN, or a fault that skips no step.

    `kind` is "inf" or "nan" of an operation that made these out of finite numbers, or NaN out of an infinity
    that was no fault; of a silent fault it is the name of its rule. `step` counts the attempts of the
    optimizer that followed, from 0; `micro_step` the backward passes in it (the update belongs to the last of
    them); `call` the calls of the module in that forward. `element` is the index of the first bad number,
    `sample` its index in the batch, `count` says how many there are; `largest_finite` is the largest
    magnitude among the others, `input_largest` that of what the operation took. `region` puts the statement
    into float32; `autocast` is the device for which torch.autocast was on. `facts` are what was measured, and
    what arguments showed (see `instruments.evidence`), `turns` is what made NaN of an infinity: operation,
    line, sample. `keep` are the modules to keep in float32.
    """

    kind: str
    step: int | None
    phase: str
    model: str | None
    module: str
    op: str
    where: str | None
    parameter: str | None = None
    micro_step: int = 0
    call: int = 0
    element: tuple[int, ...] = ()
    sample: int | None = None
    count: int = 0
    largest_finite: float | None = None
    dtype: str = ""
    input_largest: float | None = None
    node: str | None = None
    steps: tuple[int, ...] = ()
    region: Paste | None = None
    autocast: str | None = None
    facts: dict[str, object] = field(default_factory=dict)
    turns: tuple[str, str | None, int | None] | None = None
    keep: tuple[str, ...] = ()
    float32_survives: bool | None = None
    cause: str = ""
    why: str = ""
    remedies: tuple[Fix, ...] = ()
    tried: tuple[Tried, ...] = ()  # what came of each; none where nothing was tried

    @property
    def is_silent(self) -> bool:
        """Whether all numbers stay finite, and no step is skipped because of it."""
        return self.kind not in LOUD

    @property
    def is_gradient(self) -> bool:
        """Whether autograd made it, and not a line of a backward that the script itself has written."""
        return self.phase == "backward" and not self.facts.get("within")

    @property
    def is_mended(self) -> bool:
        """Whether a fix was tried, and the script trains with it."""
        return any(tried.rank is Rank.TRAINS for tried in self.tried)

    @property
    def is_harmful(self) -> bool:
        """Whether it breaks a run, or a run in float32 or with a fix showed that the script trains better."""
        return not self.is_silent or self.is_mended or "less" in self.facts

    @property
    def identity(self) -> tuple[object, ...]:
        """What findings share that are one: in an optimizer an operation is one, for all parameters.

        Calls of a module are not told apart: a script that leaves batches out makes ever more of them.
        """
        if self.is_silent:
            return (self.kind, self.where, self.op, self.module, self.parameter)
        of_module = (self.module, self.parameter) if self.phase != "optimizer" else ()
        return (self.phase, self.op, self.model, self.where, *of_module)


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a script: findings in the order of appearance, and what could not be known."""

    findings: tuple[Finding, ...] = ()
    harmless: tuple[Finding, ...] = ()
    scale: dict[str, object] = field(default_factory=dict)
    runs: int = 0
    unknown: tuple[str, ...] = ()
    silent: tuple[Finding, ...] = ()
    untraced: str = ""  # what broke and has no finding, and why

    def to_json(self) -> dict[str, object]:
        """Returns the report as plain values; fixes are what they say."""
        names = [field.name for field in fields(self)]
        return {"version": VERSION, **{name: plain_value(getattr(self, name)) for name in names}}


def plain_value(value: object) -> object:
    """Returns a value as JSON holds it."""
    if isinstance(value, (Fix, Tried)):
        return str(value)
    if is_dataclass(value):
        return {field.name: plain_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {name: plain_value(each) for name, each in value.items()}
    return type(value)(map(plain_value, value)) if isinstance(value, (tuple, list)) else value


def read_finding(origin: Origin, attempt: Attempt) -> Finding:
    """Reads what a trace left of one origin in an attempt."""
    is_static = origin.is_of_scale and not attempt.is_dynamic and (attempt.scale or 1.0) > 1.0
    call, damage = origin.call, origin.damage
    place = call.place or Place(None, "", 0)
    if origin.parameter is not None and (call.place is None or origin.phase == "forward"):
        place = replace(place, module=origin.parameter.rpartition(".")[0])
    in_batch = bool(damage.element) and damage.shape[0] in origin.batch_sizes and origin.parameter is None
    lost = {"lost_buffer": attempt.buffer} if attempt.buffer else {}
    return Finding(
        step=attempt.step,
        **{name: getattr(origin, name) for name in OF_ORIGIN},
        **{name: getattr(place, name) for name in ("model", "module", "call")},
        **{name: getattr(call, name) for name in ("op", "where", "autocast")},
        **{name: getattr(damage, name) for name in ("kind", "element", "count", "largest_finite", "dtype")},
        facts=call.facts | ({"static": attempt.scale} if is_static else {}) | lost,
        sample=damage.element[0] if in_batch else None,
        float32_survives=origin.float32_survives,
    )


def merge(attempts: Sequence[Attempt], origins: Sequence[Origin]) -> list[Finding]:
    """Reads origins, and keeps the first of those that are the same at several steps, with their steps."""
    after = Attempt(attempts[-1].step + 1 if attempts else 0)  # which never came
    there = [*attempts, after]
    return merge_steps(
        [read_finding(origin, there[min(origin.attempt, len(attempts))]) for origin in origins]
    )


def merge_steps(findings: Sequence[Finding]) -> list[Finding]:
    """Keeps the first of findings that are the same at several steps, with their steps."""
    merged: dict[object, Finding] = {}
    for finding in findings:
        same = finding.identity
        if not finding.op and finding.phase in ("input", "optimizer"):  # what is bad goes on to be bad
            alike = (key for key, other in merged.items() if other.phase == "input")
            same = next((key for key in alike if merged[key].parameter == finding.parameter), same)
        first = merged.setdefault(same, finding)
        if finding.step is not None and finding.step not in first.steps:
            merged[same] = replace(first, steps=(*first.steps, finding.step))
    return list(merged.values())
