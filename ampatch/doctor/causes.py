"""What breaks a number: one table of causes, with the reason in words and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ampatch.doctor.finding import Finding
from ampatch.doctor.instruments.operations import CASTS
from ampatch.doctor.instruments.values import HALF

EXPONENTIALS = ("exp", "exp_", "expm1", "exp2", "sinh", "cosh")
POWERS = ("pow", "pow_", "square", "square_")
LOGARITHMS = ("log", "log2", "log10", "log1p", "log_", "logit", "binary_cross_entropy", "xlogy")
NORMS = ("norm", "cdist", "vector_norm", "linalg_vector_norm")
SPREADS = ("std", "var", "std_mean", "var_mean")
QUOTIENTS = ("div", "div_", "reciprocal", "rsqrt", "true_divide", "atan2")
SUMS = ("sum", "mean", "cumsum", "matmul", "linear", "bmm", "mm", "addmm", "einsum", "conv1d", "conv2d")
SUMS += ("conv3d", "baddbmm", "norm", "var", "std", "prod", "dot", "mv")

Remedy = str | Callable[[Finding], str | None]  # None where it does not fit


# ---- Remedies that depend on the finding ----


def keep(finding: Finding) -> str | None:
    """Has the module run in float32."""
    if not (finding.float32_survives and finding.module):
        return None
    if finding.autocast:
        return (
            f"call {finding.module!r} under torch.autocast(..., enabled=False), on .float() inputs "
            f"(with amp.initialize: keep_fp32=[{finding.module!r}])"
        )
    return f"keep_fp32=[{finding.module!r}]: this module runs in float32"


def paste(finding: Finding) -> str | None:
    """Has the statement run in float32."""
    if not (finding.float32_survives and finding.region):
        return None
    return "\n     ".join(("that statement alone in float32:", *finding.region))


def take_bfloat16(finding: Finding) -> str | None:
    """Takes the half type that has float32's range."""
    if not finding.float32_survives or finding.dtype == "bfloat16":
        return None
    return "opt_level O4 (bfloat16), whose range is that of float32"


def lower_rate(finding: Finding) -> str | None:
    """Keeps weights from growing."""
    if finding.float32_survives:
        return None
    return "lower the learning rate, warm it up, or clip gradients: weights that grow break float32 as well"


def only_if(condition: Callable[[Finding], bool], remedy: str) -> Remedy:
    """Returns a remedy that fits some findings."""
    return lambda finding: remedy if condition(finding) else None


PRECISION: tuple[Remedy, ...] = (keep, paste, take_bfloat16)
LOGITS = "take a loss on logits (binary_cross_entropy_with_logits, cross_entropy), or clamp before the log"
DIVIDE_FIRST = "divide before the sum (q / sqrt(d), x / n), not after it"


# ---- The table ----


@dataclass(frozen=True, slots=True)
class Cause:
    """A row: the findings it explains, why their numbers broke, and what to do, the likeliest first.

    A finding must be `of` it, and of its operations, kind and direction where these are given. `why` is
    formatted with what `words_for` returns.
    """

    name: str
    why: str
    remedies: tuple[Remedy, ...]
    ops: tuple[str, ...] | None = None
    kind: str | None = None
    backward: bool | None = None
    of: Callable[[Finding], bool] = lambda finding: True

    def explains(self, finding: Finding) -> bool:
        """Says whether it is the cause of a finding, if no earlier row is."""
        is_kind = self.kind in (None, finding.kind)
        is_direction = self.backward in (None, finding.phase == "backward")
        return (self.ops is None or finding.op in self.ops) and is_kind and is_direction and self.of(finding)


CAUSES = (  # the first that explains a finding is its cause
    Cause(
        "weight bad at first",
        "{op} made {kind} of the weight {parameter} before the model ran.",
        ("mend what sets the weight: its initialization, or the checkpoint that is loaded",),
        of=lambda it: it.phase == "input" and it.parameter is not None,
    ),
    Cause(
        "data",
        "{sample_of}the batch holds {kind} before the model sees it.",
        ("leave the sample out, or mend the data: torch.isfinite(batch).all() in the loader finds it",),
        of=lambda it: it.phase == "input",
    ),
    Cause(
        "weight lost in the step before",
        "the weight {parameter} held {kind} before the step began.",
        (lower_rate, *PRECISION),
        of=lambda it: it.phase == "optimizer" and not it.op,
    ),
    Cause(
        "eps of the optimizer",
        "{made}{limit}",
        (
            "step float32 masters (O2, O5): float16 makes 0 of the eps of Adam (1e-8); or take eps=1e-4",
            lower_rate,
            *PRECISION,
        ),
        of=lambda it: it.phase == "optimizer" and it.dtype in HALF,
    ),
    Cause(
        "loss not seen",
        "the loss is {kind}; the operation that made it was not seen.",
        (lower_rate, *PRECISION),
        of=lambda it: not it.op,
    ),
    Cause(
        "softmax of nothing",
        "{made} A row whose entries are all -inf has no softmax.",
        ("a row whose entries are all -inf has no softmax: leave one entry, or skip the row", *PRECISION),
        ops=("softmax", "log_softmax"),
        backward=False,
    ),
    Cause(
        "spread of one number",
        "{made} A single number has no spread: it is 0 / 0.",
        ("leave out a batch of one (drop_last=True), or take correction=0", *PRECISION),
        ops=SPREADS,
        kind="nan",
        backward=False,
    ),
    Cause(
        "root at 0",
        "{made} The derivative of a root is infinite at 0.",
        ("add an eps under the root that the type can hold: 1e-6 in float32, 1e-4 in float16", *PRECISION),
        ops=("sqrt", "sqrt_", "rsqrt", *NORMS, *SPREADS),
        backward=True,
    ),
    Cause(
        "root below 0",
        "{made} A negative number has no root.",
        ("clamp what is under the root: x.clamp(min=0), with an eps where it is differentiated", *PRECISION),
        ops=("sqrt", "sqrt_", "rsqrt"),
        kind="nan",
        backward=False,
    ),
    Cause(
        "power at 0",
        "{made} The derivative of x ** p is infinite at 0 where p is below 1.",
        ("clamp the base: x.clamp(min=eps) ** p, with an eps that the type can hold", *PRECISION),
        ops=("pow", "pow_"),
        backward=True,
    ),
    Cause(
        "outside of its domain",
        "{made} It takes what lies outside of its domain, or whose derivative there is infinite.",
        (
            "clamp what it takes, by a small margin inside of its domain: cosines round to more than 1",
            *PRECISION,
        ),
        ops=("acos", "asin", "arccos", "arcsin", "atanh", "acosh"),
    ),
    Cause(
        "logarithm below 0",
        "{made} A negative number has no logarithm.",
        (LOGITS, *PRECISION),
        ops=LOGARITHMS,
        kind="nan",
        backward=False,
    ),
    Cause(
        "logarithm of 0",
        "{made} The logarithm of 0 is -inf{tiny}.",
        (LOGITS, *PRECISION),
        ops=LOGARITHMS,
    ),
    Cause(
        "division by 0",
        "{made} It divides by 0, or by a number that is too small{tiny}.",
        ("clamp the divisor, with an eps that the type can hold: float16 makes 0 of 1e-8", *PRECISION),
        ops=QUOTIENTS,
    ),
    Cause(
        "exponential",
        "{made}{limit}",
        (lower_rate, "clamp what it takes, or subtract the maximum, as softmax and logsumexp do", *PRECISION),
        ops=EXPONENTIALS,
        backward=False,
    ),
    Cause(
        "power",
        "{made}{limit}",
        (lower_rate, "divide before the power, and multiply after it", *PRECISION),
        ops=POWERS,
        backward=False,
    ),
    Cause(
        "cast",
        "{made}{limit}",
        (
            lower_rate,
            "make the numbers smaller before they are cast: normalize the input, or divide it",
            *PRECISION,
        ),
        ops=CASTS,
    ),
    Cause(
        "accumulated gradients",
        "{made}{limit}",
        (lower_rate, "divide each loss by the number of micro-steps, before its backward", *PRECISION),
        ops=("accumulate_grad",),
    ),
    Cause(
        "sum",
        "{made}{limit}",
        (lower_rate, only_if(lambda it: it.kind == "inf", DIVIDE_FIRST), *PRECISION),
        ops=SUMS,
    ),
    Cause("magnitude", "{made}{limit}", (lower_rate, *PRECISION)),
)


def explain(finding: Finding) -> Finding:
    """Returns the finding with its reason and remedies."""
    cause = next(row for row in CAUSES if row.explains(finding))
    found = [it if isinstance(it, str) else it(finding) for it in cause.remedies]
    why = cause.why.format(**words_for(finding)).strip()
    return replace(finding, why=why, remedies=tuple(it for it in found if it))


def words_for(finding: Finding) -> dict[str, object]:
    """Returns what the reasons in the table are formatted with."""
    sample = "" if finding.sample is None else f"sample {finding.sample} of "
    is_limit = finding.kind == "inf" or finding.dtype in HALF
    limit = f" {finding.dtype} holds nothing above {limit_of(finding.dtype):.5g}." if is_limit else ""
    tiny = "; float16 makes 0 of what is below 3e-8" if finding.dtype == "float16" else ""
    values = {name: getattr(finding, name) for name in ("op", "kind", "parameter", "dtype")}
    return values | {"sample_of": sample, "limit": limit, "tiny": tiny, "made": made_by(finding)}


def made_by(finding: Finding) -> str:
    """Says what an operation made of what."""
    largest = finding.input_largest
    took = f"its largest input is {largest:.4g}" if largest is not None else "what it took is finite"
    if finding.phase == "backward":
        target = f" of {finding.parameter}" if finding.parameter else ""
        return f"the gradient{target} that {finding.op} makes is {finding.kind}; {took}."
    return f"{finding.op} made {finding.count} {finding.kind} in {finding.dtype}; {took}."


def limit_of(dtype: str) -> float:
    """Returns the largest number of a type.

    >>> limit_of("float16")
    65504.0
    """
    return torch.finfo(getattr(torch, dtype)).max
