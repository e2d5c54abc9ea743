"""The report in words: why an operation broke, what can be done, and the lines of a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ampatch.doctor.beside import said_beside
from ampatch.doctor.finding import Finding, Report
from ampatch.doctor.instruments.values import HALF
from ampatch.doctor.silent.words import describe_silent

EXPONENTIALS = (
    "exp",
    "exp_",
    "expm1",
    "sinh",
    "cosh",
    "pow",
    "pow_",
    "square",
    "exp2",
    "logsumexp",
    "softplus",
)
LOGARITHMS = ("log", "log2", "log10", "log1p", "log_", "logit", "binary_cross_entropy", "xlogy")
ROOTS = ("sqrt", "rsqrt", "sqrt_", "norm", "cdist", "std", "var", "vector_norm", "linalg_vector_norm")
QUOTIENTS = ("div", "div_", "reciprocal", "rsqrt", "true_divide", "atan2")
SUMS = (
    "sum",
    "mean",
    "cumsum",
    "matmul",
    "linear",
    "bmm",
    "mm",
    "addmm",
    "einsum",
    "conv1d",
    "conv2d",
    "conv3d",
)
SUMS += ("baddbmm", "norm", "var", "std", "prod", "dot", "mv")
CASTS = ("half", "to", "type", "bfloat16", "_to_copy")

MOST_SHOWN = 3


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
        return f"the gradient{target} that {finding.op} makes is {finding.kind}; {took}. {reason(finding)}"
    return f"{finding.op} made {finding.count} {finding.kind} in {finding.dtype}; {took}. {reason(finding)}"


def reason(finding: Finding) -> str:
    """Says what about the operation does that."""
    half = finding.dtype in HALF
    if finding.float32_survives is False:
        return "Float32 breaks as well: this is not a matter of precision."
    if finding.phase == "backward" and finding.op in ROOTS:
        return "The derivative of a root is infinite at 0."
    if finding.op in LOGARITHMS:
        return (
            "The logarithm of 0 is -inf; half makes 0 of what is below 6e-8."
            if half
            else "The logarithm of 0 is -inf."
        )
    if finding.op in QUOTIENTS and finding.op != "rsqrt":
        return "It divides by 0, or by what half rounds to 0."
    if half:
        return f"{finding.dtype} holds nothing above {limit_of(finding.dtype):.5g}."
    return f"{finding.dtype} ends at {limit_of(finding.dtype):.4g}."


def remedies(finding: Finding) -> tuple[str, ...]:
    """Says what to change, the likeliest first."""
    found: list[str] = []
    if finding.phase == "input" and finding.parameter:
        return ("mend what sets the weight: its initialization, or the checkpoint that is loaded",)
    if finding.phase == "input":
        return ("leave the sample out, or mend the data: torch.isfinite(batch).all() in the loader finds it",)
    if finding.op in LOGARITHMS:
        found.append(
            "take a loss on logits (binary_cross_entropy_with_logits, cross_entropy), or clamp before the log"
        )
    if finding.op in ("softmax", "log_softmax"):
        found.append("a row whose entries are all -inf has no softmax: leave one entry, or skip the row")
    if finding.op in ROOTS:
        found.append("add an eps under the root that the type can hold: 1e-6 in float32, 1e-4 in float16")
    if finding.op in QUOTIENTS:
        found.append("clamp the divisor, with an eps that the type can hold: float16 makes 0 of 1e-8")
    if finding.phase == "optimizer" and finding.dtype in HALF:
        found.append(
            "step float32 masters (O2, O5): float16 makes 0 of the eps of Adam (1e-8); or take eps=1e-4"
        )
    if finding.op in EXPONENTIALS and finding.phase == "forward":
        found.append("subtract the maximum before the exponential, or use softmax or logsumexp, which do so")
    if finding.op in CASTS and finding.float32_survives:
        found.append("make the numbers smaller before they are cast: normalize the input, or divide it")
    if finding.op in SUMS:
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
    if finding.float32_survives:
        found.append("opt_level O4 (bfloat16), whose range is that of float32")
    else:
        found.append(
            "lower the learning rate, warm it up, or clip gradients: weights that grow break float32 as well"
        )
    return tuple(found)


# ---- The terminal ----


def describe(report: Report) -> Iterator[str]:
    """Yields the lines of a report."""
    if not report.findings:
        yield "Nothing broke: losses, gradients and weights stayed finite."
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
    if report.harmless:
        yield f"{len(report.harmless)} other operations made inf or NaN that reached nothing."
    yield from said_beside(report)
    for line in report.unknown:
        yield f"Not known: {line}"


def describe_finding(finding: Finding) -> Iterator[str]:
    """Yields the lines of one finding."""
    module = ".".join(filter(None, (finding.model, finding.module))) or "the script"
    where = finding.where or "line unknown"
    yield f"Step {finding.step}, {finding.phase}: {finding.op or 'the data'} in {module}, {where}"
    yield f"  {finding.why}"
    element = f" at {list(finding.element)}" if finding.element else ""
    sample = f", sample {finding.sample} of the batch" if finding.sample is not None else ""
    yield f"  first {finding.kind}{element}{sample}; {finding.count} in all"
    if len(finding.steps) > 1:
        yield f"  again at steps {', '.join(map(str, finding.steps[1:]))}"
    survives = {True: "stays finite to its end", False: "breaks as well", None: "is not known"}
    yield f"  the same run in float32 {survives[finding.float32_survives]}"
    for remedy in finding.remedies:
        yield f"  -> {remedy}"
