"""The report in words: why an operation broke, what can be done, and the lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ampatch.doctor.beside import said_beside
from ampatch.doctor.finding import Finding, Report
from ampatch.doctor.instruments.operations import CASTS
from ampatch.doctor.instruments.values import HALF
from ampatch.doctor.silent.words import describe_silent

EXPONENTIALS = ("exp", "exp_", "expm1", "exp2", "sinh", "cosh")
POWERS = ("pow", "pow_", "square", "square_")
LOGARITHMS = ("log", "log2", "log10", "log1p", "log_", "logit", "binary_cross_entropy", "xlogy")
NORMS = ("norm", "cdist", "vector_norm", "linalg_vector_norm")
SPREADS = ("std", "var", "std_mean", "var_mean")
QUOTIENTS = ("div", "div_", "reciprocal", "rsqrt", "true_divide", "atan2")
SUMS = ("sum", "mean", "cumsum", "matmul", "linear", "bmm", "mm", "addmm", "einsum", "conv1d", "conv2d")
SUMS += ("conv3d", "baddbmm", "norm", "var", "std", "prod", "dot", "mv")


@dataclass(frozen=True, slots=True)
class Cause:
    """What some operations do that no type mends: of `kind` and `backward` those that are given must hold."""

    ops: tuple[str, ...]
    why: str
    remedy: str
    kind: str | None = None
    backward: bool | None = None

    def is_of(self, finding: Finding) -> bool:
        """Says whether it explains a finding."""
        is_kind = self.kind in (None, finding.kind)
        return finding.op in self.ops and is_kind and self.backward in (None, finding.phase == "backward")


LOGITS = "take a loss on logits (binary_cross_entropy_with_logits, cross_entropy), or clamp before the log"
CAUSES = (  # the first that fits is the reason
    Cause(
        ("softmax", "log_softmax"),
        "A row whose entries are all -inf has no softmax.",
        "a row whose entries are all -inf has no softmax: leave one entry, or skip the row",
        backward=False,
    ),
    Cause(
        SPREADS,
        "A single number has no spread: it is 0 / 0.",
        "leave out a batch of one (drop_last=True), or take correction=0",
        kind="nan",
        backward=False,
    ),
    Cause(
        ("sqrt", "sqrt_", "rsqrt", *NORMS, *SPREADS),
        "The derivative of a root is infinite at 0.",
        "add an eps under the root that the type can hold: 1e-6 in float32, 1e-4 in float16",
        backward=True,
    ),
    Cause(
        ("sqrt", "sqrt_", "rsqrt"),
        "A negative number has no root.",
        "clamp what is under the root: x.clamp(min=0), with an eps where it is differentiated",
        kind="nan",
        backward=False,
    ),
    Cause(
        ("pow", "pow_"),
        "The derivative of x ** p is infinite at 0 where p is below 1.",
        "clamp the base: x.clamp(min=eps) ** p, with an eps that the type can hold",
        backward=True,
    ),
    Cause(
        ("acos", "asin", "arccos", "arcsin", "atanh", "acosh"),
        "It takes what lies outside of its domain, or whose derivative there is infinite.",
        "clamp what it takes, by a small margin inside of its domain: cosines round to more than 1",
    ),
    Cause(LOGARITHMS, "A negative number has no logarithm.", LOGITS, kind="nan", backward=False),
    Cause(LOGARITHMS, "The logarithm of 0 is -inf{tiny}.", LOGITS),
    Cause(
        QUOTIENTS,
        "It divides by 0, or by a number that is too small{tiny}.",
        "clamp the divisor, with an eps that the type can hold: float16 makes 0 of 1e-8",
    ),
)

MOST_SHOWN = 3
SURVIVES = {
    True: "the same run in float32 stays finite to its end",
    False: "the same run in float32 breaks as well: this is not a matter of precision",
    None: "whether float32 survives is not known",
}


def explain(finding: Finding) -> Finding:
    """Returns the finding with its reason and remedies."""
    return replace(finding, why=why(finding), remedies=remedies(finding))


def limit_of(dtype: str) -> float:
    """Returns the largest number of a type.

    >>> limit_of("float16")
    65504.0
    """
    return torch.finfo(getattr(torch, dtype)).max


def why(finding: Finding) -> str:
    """Says in a sentence or two what happened."""
    largest = finding.input_largest
    took = f"its largest input is {largest:.4g}" if largest is not None else "what it took is finite"
    if finding.phase == "input" and finding.parameter:
        return f"{finding.op} made {finding.kind} of the weight {finding.parameter} before the model ran."
    if finding.phase == "input":
        where = f"sample {finding.sample} of " if finding.sample is not None else ""
        return f"{where}the batch holds {finding.kind} before the model sees it."
    if finding.phase == "optimizer" and not finding.op:
        return f"the weight {finding.parameter} held {finding.kind} before the step began."
    if finding.phase == "backward":
        target = f" of {finding.parameter}" if finding.parameter else ""
        made = f"the gradient{target} that {finding.op} makes is {finding.kind}; {took}."
        return f"{made} {reason(finding)}".strip()
    if not finding.op:
        return f"the loss is {finding.kind}; the operation that made it was not seen."
    made = f"{finding.op} made {finding.count} {finding.kind} in {finding.dtype}; {took}."
    return f"{made} {reason(finding)}".strip()


def reason(finding: Finding) -> str:
    """Says what about the operation does that."""
    limit = f"{finding.dtype} holds nothing above {limit_of(finding.dtype):.5g}."
    default = limit if finding.kind == "inf" or finding.dtype in HALF else ""
    tiny = "; float16 makes 0 of what is below 3e-8" if finding.dtype == "float16" else ""
    return next((it.why for it in CAUSES if it.is_of(finding)), default).format(tiny=tiny)


def remedies(finding: Finding) -> tuple[str, ...]:
    """Says what to change, the likeliest first."""
    if finding.phase == "input" and finding.parameter:
        return ("mend what sets the weight: its initialization, or the checkpoint that is loaded",)
    if finding.phase == "input":
        return ("leave the sample out, or mend the data: torch.isfinite(batch).all() in the loader finds it",)
    found = [it.remedy for it in CAUSES if it.is_of(finding)]
    if not (finding.float32_survives or found):
        found.append(
            "lower the learning rate, warm it up, or clip gradients: weights that grow break float32 as well"
        )
    if finding.phase == "optimizer" and finding.dtype in HALF:
        found.append(
            "step float32 masters (O2, O5): float16 makes 0 of the eps of Adam (1e-8); or take eps=1e-4"
        )
    if finding.op in EXPONENTIALS and finding.phase != "backward":
        found.append("clamp what it takes, or subtract the maximum, as softmax and logsumexp do")
    if finding.op in POWERS and finding.phase != "backward":
        found.append("divide before the power, and multiply after it")
    if finding.op in CASTS and finding.float32_survives:
        found.append("make the numbers smaller before they are cast: normalize the input, or divide it")
    if finding.op == "accumulate_grad":
        found.append("divide each loss by the number of micro-steps, before its backward")
    if finding.op in SUMS and finding.kind == "inf":
        found.append("divide before the sum (q / sqrt(d), x / n), not after it")
    if finding.float32_survives and finding.module and finding.autocast:
        found.append(
            f"call {finding.module!r} under torch.autocast(..., enabled=False), on .float() inputs "
            f"(with amp.initialize: keep_fp32=[{finding.module!r}])"
        )
    elif finding.float32_survives and finding.module:
        found.append(f"keep_fp32=[{finding.module!r}]: this module runs in float32")
    if finding.float32_survives and finding.region:
        found.append("\n     ".join(("that statement alone in float32:", *finding.region)))
    if finding.float32_survives and finding.dtype != "bfloat16":
        found.append("opt_level O4 (bfloat16), whose range is that of float32")
    return tuple(dict.fromkeys(found))


# ---- The terminal ----


def describe(report: Report) -> Iterator[str]:
    """Yields the lines of a report."""
    if not report.findings:
        sound = "Nothing broke: losses, gradients and weights stayed finite."
        yield "Nothing was found, but not everything is known." if report.unknown else sound
    for finding in report.findings[:MOST_SHOWN]:
        yield from describe_finding(finding)
    if len(report.findings) > MOST_SHOWN:
        yield f"... and {len(report.findings) - MOST_SHOWN} more (--json OUT has them all)"
    yield from describe_silent(report.silent)
    if report.keep_fp32:
        cost = report.keep_fp32_cost
        said = "too few steps to time it" if cost is None else f"a step takes about {cost:.2f} times as long"
        yield f"Proposed: keep_fp32={list(report.keep_fp32)} ({said})"
    if report.scale.get("search"):
        yield f"The loss scale looked for its size in {len(report.scale['skipped'])} steps: no fault."
    named = {it.where for it in (*report.findings, *report.silent)}
    harmless = [str(it.where) for it in report.harmless if it.where not in named]
    if harmless:
        yield f"Harmless, since it reached nothing: inf or NaN made at {', '.join(dict.fromkeys(harmless))}"
    for line in report.unknown:
        yield f"Not known: {line}"
    yield from said_beside(report)


def describe_finding(finding: Finding) -> Iterator[str]:
    """Yields the lines of one finding."""
    module = ".".join(filter(None, (finding.model, finding.module))) or "the script"
    where = finding.where or "line unknown"
    micro = f" (micro-step {finding.micro_step})" if finding.micro_step else ""
    yield f"Step {finding.step}{micro}, {finding.phase}: {finding.op or 'the data'} in {module}, {where}"
    yield f"  {finding.why}"
    element = f" at {list(finding.element)}" if finding.element else ""
    sample = f", sample {finding.sample} of the batch" if finding.sample is not None else ""
    yield f"  first {finding.kind}{element}{sample}; {finding.count} in all"
    if len(finding.steps) > 1:
        steps = "step" if len(finding.steps) == 2 else "steps"
        yield f"  again at {steps} {', '.join(map(str, finding.steps[1:]))}"
    yield f"  {SURVIVES[finding.float32_survives]}"
    for remedy in finding.remedies:
        yield f"  -> {remedy}"
