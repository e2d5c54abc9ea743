"""What the doctor says: a finding for each operation that made bad numbers, and the report of a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from ampatch.doctor.instruments.operations import DOMAINS, MULTIPLY, NORMALIZERS, QUOTIENTS, Origin
from ampatch.doctor.instruments.places import Place
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.silent.fault import SilentFault

VERSION = 1
STEEP = (*QUOTIENTS, *NORMALIZERS, *DOMAINS)  # their gradients grow as 1 / eps, or 1 - 1e-4 is 1 in half
NEAR_1 = (*DOMAINS, "log1p")
EPS = {"float16": ("1e-4", "1e-3", "1e-3"), "bfloat16": ("1e-6", "1e-6", "1e-2")}  # STEEP, NEAR_1 last
OF_ORIGIN = ("micro_step", "phase", "parameter", "input_largest", "node", "region", "turns")
INSTEAD = {"-inf": "-1e4", "inf": "1e4", "1": "0.99"}  # of what a constant becomes


@dataclass(frozen=True, slots=True)
class Finding:
    """An operation that made inf or NaN out of finite numbers, or NaN out of an infinity that was no fault.

    `step` counts the attempts of the optimizer that followed, from 0; `micro_step` the backward passes in it
    (the update belongs to the last of them); `call` the calls of the module in that forward. `element` is the
    index of the first bad number, `sample` its index in the batch, `count` says how many there are;
    `largest_finite` is the largest magnitude among the others, `input_largest` that of what the operation
    took. `region` are the lines that compute the statement in float32; `autocast` is the device for which
    torch.autocast was on. `facts` are what arguments showed (see `instruments.evidence`), `turns` is what
    made NaN of an infinity: operation, line, sample. `keep` are the modules to keep in float32.
    """

    step: int | None
    micro_step: int
    phase: str
    model: str | None
    module: str
    call: int
    op: str
    parameter: str | None
    kind: str
    where: str | None
    element: tuple[int, ...]
    sample: int | None
    count: int
    largest_finite: float | None
    dtype: str
    input_largest: float | None
    node: str | None
    steps: tuple[int, ...] = ()
    region: tuple[str, ...] = ()
    autocast: str | None = None
    facts: dict[str, object] = field(default_factory=dict)
    turns: tuple[str, str | None, int | None] | None = None
    keep: tuple[str, ...] = ()
    float32_survives: bool | None = None
    cause: str = ""
    why: str = ""
    remedies: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()  # what came of each, "" where it was not tried

    @property
    def identity(self) -> tuple[object, ...]:
        """What findings share that are one: in an optimizer an operation is one, for all parameters.

        Calls of a module are not told apart: a script that leaves batches out makes ever more of them.
        """
        of_module = (self.module, self.parameter) if self.phase != "optimizer" else ()
        return (self.phase, self.op, self.model, self.where, *of_module)


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a script: findings in the order of appearance, and what could not be known."""

    findings: tuple[Finding, ...] = ()
    harmless: tuple[Finding, ...] = ()
    scale: dict[str, object] = field(default_factory=dict)
    keep_fp32: tuple[str, ...] = ()
    runs: int = 0
    unknown: tuple[str, ...] = ()
    growth: dict | None = None
    speed: dict | None = None
    against: dict | None = None
    silent: tuple[SilentFault, ...] = ()
    keep_fp32_cost: float | None = None  # how many times as long a step takes with it
    untraced: str = ""  # what broke and has no finding, and why

    def to_json(self) -> dict[str, object]:
        """Returns the report as plain values."""
        return {"version": VERSION, **asdict(self)}


def read_finding(origin: Origin, attempt: Attempt) -> Finding:
    """Reads what a trace left of one origin in an attempt."""
    is_static = origin.is_of_scale and not attempt.is_dynamic and (attempt.scale or 1.0) > 1.0
    call, damage = origin.call, origin.damage
    place = call.place or Place(None, "", 0)
    if origin.parameter is not None and (call.place is None or origin.phase == "forward"):
        place = replace(place, module=origin.parameter.rpartition(".")[0])
    in_batch = bool(damage.element) and damage.shape[0] in origin.batch_sizes and origin.parameter is None
    return Finding(
        step=attempt.step,
        **{name: getattr(origin, name) for name in OF_ORIGIN},
        **{name: getattr(place, name) for name in ("model", "module", "call")},
        **{name: getattr(call, name) for name in ("op", "where", "autocast")},
        **{name: getattr(damage, name) for name in ("kind", "element", "count", "largest_finite", "dtype")},
        facts=call.facts | ({"static": attempt.scale} if is_static else {}),
        sample=damage.element[0] if in_batch else None,
        float32_survives=origin.float32_survives,
    )


def merge(attempts: Sequence[Attempt], origins: Sequence[Origin]) -> list[Finding]:
    """Reads origins, and keeps the first of those that are the same at several steps, with their steps."""
    after = Attempt(attempts[-1].step + 1 if attempts else 0)  # which never came
    there = [*attempts, after]
    return merge_steps([read_finding(it, there[min(it.attempt, len(attempts))]) for it in origins])


def merge_steps(findings: Sequence[Finding]) -> list[Finding]:
    """Keeps the first of findings that are the same at several steps, with their steps."""
    merged: dict[object, Finding] = {}
    for it in findings:
        same = it.identity
        if not it.op and it.phase in ("input", "optimizer"):  # what is bad goes on to be bad
            alike = (key for key, other in merged.items() if other.phase == "input")
            same = next((key for key in alike if merged[key].parameter == it.parameter), same)
        first = merged.setdefault(same, it)
        if it.step is not None and it.step not in first.steps:
            merged[same] = replace(first, steps=(*first.steps, it.step))
    return list(merged.values())


# ---- In words ----


def words_for(finding: Finding) -> dict[str, object]:
    """Returns what the reasons in the table are formatted with."""
    constant, largest = finding.facts.get("constant", (0.0, "", finding.dtype)), limit_of(finding.dtype)
    half = constant[2] or finding.dtype
    turned = ""
    if finding.turns is not None:
        op, where, sample = finding.turns
        turned = f"; {op} makes nan of it at {where}" + ("" if sample is None else f", in sample {sample}")
    limit = f" {finding.dtype} holds nothing above {largest:.5g}{turned}."
    return {
        **{name: getattr(finding, name) for name in ("op", "kind", "parameter", "dtype")},
        "sample_of": "" if finding.sample is None else f"sample {finding.sample} of ",
        "limit": limit if is_of_size(finding) else "",
        "tiny": "; float16 makes 0 of what is below 3e-8" if finding.dtype == "float16" else "",
        "made": made_by(finding),
        "constant": number(constant[0]),
        "becomes": constant[1],
        "turns": turned,
        "largest": f"{finding.input_largest or 0:.3g}",
        **{name: finding.facts.get(name) for name in ("cast", "error", "given")},
        "eps": "1e-30" if finding.facts.get("sums") else eps_of(finding.op, finding.dtype),
        "half": half,
        "instead": INSTEAD.get(constant[1]) or eps_of(finding.op, half),
        "limit_number": largest,
        "top": "10" if finding.dtype == "float16" else "40",
        "scale": f"{finding.facts.get('static', 1):g}",
        "made_weight": f"{finding.op} made {finding.kind} of {finding.parameter}"
        if finding.op
        else f"{finding.parameter} holds {finding.kind}",
    }


def is_of_size(finding: Finding) -> bool:
    """Says whether inf came of large numbers: the derivative of many an operation may be infinite itself."""
    is_forward = finding.phase != "backward" or finding.node is None
    return finding.kind == "inf" and (is_forward or finding.node in MULTIPLY)


def eps_of(op: str, dtype: str) -> str:
    """Returns an eps that a type holds, beside what an operation takes."""
    plain, steep, near_1 = EPS.get(dtype, ("1e-6",) * 3)
    return near_1 if op in NEAR_1 else steep if op in STEEP else plain


def number(value: float) -> str:
    """Writes a number as people do.

    >>> number(-1e9), number(-1e5), number(1e-8), number(0.9999)
    ('-1e9', '-1e5', '1e-8', '0.9999')
    """
    text = f"{value:e}" if abs(value) >= 1e5 else f"{value:g}"
    mantissa, _, exponent = text.partition("e")
    return f"{float(mantissa):g}" + (f"e{int(exponent)}" if exponent else "")


def made_by(finding: Finding) -> str:
    """Says what an operation made of what."""
    largest = finding.input_largest
    took = f"its largest input is {largest:.4g}" if largest is not None else "what it took is finite"
    if finding.phase == "backward":
        target = f" of {finding.parameter}" if finding.parameter else ""
        return f"the gradient{target} that {finding.op} makes is {finding.kind}; {took}."
    if not finding.op:
        return f"a step made {finding.count} {finding.kind} in {finding.parameter}."
    return f"{finding.op} made {finding.count} {finding.kind} in {finding.dtype}; {took}."


def limit_of(dtype: str) -> float:
    """Returns the largest number of a type.

    >>> limit_of("float16")
    65504.0
    """
    return torch.finfo(getattr(torch, dtype)).max
