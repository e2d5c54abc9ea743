"""What the reasons of rules are formatted with: numbers and names of a finding."""

from __future__ import annotations

import torch

from ampatch.doctor.finding import Finding
from ampatch.doctor.instruments.tape import DOMAINS, MULTIPLY, NORMALIZERS, QUOTIENTS

STEEP = (*QUOTIENTS, *NORMALIZERS, *DOMAINS)  # their gradients grow as 1 / eps, or 1 - 1e-4 is 1 in half
NEAR_1 = (*DOMAINS, "log1p")
EPS = {"float16": ("1e-4", "1e-3", "1e-3"), "bfloat16": ("1e-6", "1e-6", "1e-2")}  # STEEP, NEAR_1 last
INSTEAD = {"-inf": "-1e4", "inf": "1e4", "1": "0.99"}  # of what a constant becomes


def words_for(finding: Finding) -> dict[str, object]:
    """Returns what a reason is formatted with, of a silent fault what was measured."""
    if finding.is_silent:
        own = {name: getattr(finding, name) for name in ("op", "dtype", "input_largest")}
        return own | finding.facts
    constant, largest = (
        finding.facts.get("constant", (0.0, "", finding.dtype)),
        limit_of(finding.dtype or "float32"),
    )
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
    if finding.is_gradient:
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
