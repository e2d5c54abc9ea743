"""What breaks a number: one table of causes, with the reason in words and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ampatch.doctor.finding import Finding
from ampatch.doctor.instruments.operations import (
    CASTING,
    CASTS,
    DOMAINS,
    EXPONENTIALS,
    LOGARITHMS,
    NORMALIZERS,
    NORMS,
    POWERS,
    QUOTIENTS,
    ROOTS,
    SPREADS,
    SUMS,
)
from ampatch.doctor.remedies import (
    PRECISION,
    SMALLER,
    Remedy,
    divide_first,
    keep,
    lower_rate,
    mend,
    paste,
    slow_down,
    take_bfloat16,
    words_for,
    write,
)

LOG = mend(
    "clamp before the log, or take a loss on logits (binary_cross_entropy_with_logits, cross_entropy)",
    "clamp before the log: x.clamp(min={eps}).log(), or take a loss on logits "
    "(binary_cross_entropy_with_logits, cross_entropy)",
    suffix=".clamp(min={eps})",
)
ROOT = mend("clamp what is under the root: x.clamp(min={eps})", suffix=".clamp(min={eps})")
LOOK = "no rule fits: look at what this line takes, at the step and the sample that are named"
DATA = "leave the sample out, or mend the data: torch.isfinite(batch).all() in the loader finds it"
ONE_ENTRY = "leave one entry in each row: mask[mask.all(-1), 0] = False, where True hides"


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


def becomes(finding: Finding) -> object:
    """Returns what a constant of the operation becomes in half, None where there is none that is lost."""
    return finding.facts.get("constant", (None, None))[1]


CAUSES = (  # the first that explains a finding is its cause
    Cause(
        "weight bad at first",
        "{made_weight} before the first step.",
        (
            "set it where the module is made (torch.empty leaves what was in memory), or mend the checkpoint "
            "that is loaded",
        ),
        of=lambda it: it.phase == "input" and it.parameter is not None,
    ),
    Cause(
        "data",
        "{sample_of}the batch holds {kind} before the model sees it.",
        (DATA,),
        of=lambda it: it.phase == "input" and not it.op,
    ),
    Cause(
        "weight lost in the step before",
        "the weight {parameter} held {kind} before the step began.",
        (*SMALLER, *PRECISION),
        of=lambda it: it.phase == "optimizer" and not it.op,
    ),
    Cause(
        "eps of an optimizer in half",
        "{made} The optimizer's eps, {constant}, is 0 in {dtype}: it divides by 0.",
        (
            "step float32 masters: opt_level O2, or O5 (bfloat16)",
            "give the optimizer eps=1e-4, which {dtype} holds",
        ),
        of=lambda it: it.phase == "optimizer" and becomes(it) == "0",
    ),
    Cause(
        "update too large",
        "{made}{limit} That is of the update of {parameter}.",
        (
            "lower the learning rate and the weight decay: the update is larger than the weight",
            "clip gradients before the step",
        ),
        of=lambda it: it.phase == "optimizer" and it.parameter is not None,
    ),
    Cause(
        "weight too large for half",
        "{made}{limit} It is the weight {parameter} that is cast: it has grown to {largest}.",
        ("lower the learning rate and the weight decay, or clip gradients: the weight grows", *PRECISION),
        ops=CASTING,
        of=lambda it: it.parameter is not None,
    ),
    Cause(
        "loss not seen",
        "the loss is {kind}; the operation that made it was not seen.",
        (*SMALLER, *PRECISION),
        of=lambda it: not it.op,
    ),
    Cause(
        "static loss scale",
        "{made}{limit} The loss scale stays at {scale}, which is too large.",
        ('loss_scale="dynamic" in the place of {scale}: it falls until gradients fit', *PRECISION),
        of=lambda it: "static" in it.facts,
    ),
    Cause(
        "constant that does not fit",
        "{op} raises an error: {constant} does not fit into {dtype}, which holds nothing above {limit_number:g}.",
        (write, "or torch.finfo(x.dtype).min, where nothing is added to it"),
        of=lambda it: "raised" in it.facts,
    ),
    Cause(
        "all targets ignored",
        "{made} All targets of this batch are ignored: it is a mean of nothing, 0 / 0.",
        (
            mend(
                "sum, and divide by the count",
                'sum, and divide by the count: reduction="sum", and then '
                "loss / (target != ignore_index).sum().clamp(min=1)",
                keyword=', reduction="sum"',
                tail=" / ({y} != -100).sum().clamp(min=1)",
            ),
            "or skip a batch whose targets are all ignored",
        ),
        of=lambda it: it.facts.get("nothing") == "ignored",
    ),
    Cause(
        "mean of nothing",
        "{made} It took an empty tensor: a mean of nothing is 0 / 0.",
        (
            mend(
                "sum, and divide by the count",
                "sum, and divide by the count: x.sum() / max(x.numel(), 1)",
                name="sum",
                tail=" / max({x}.numel(), 1)",
            ),
            "or skip a batch in which nothing is selected",
        ),
        ops=("mean",),
        of=lambda it: it.facts.get("nothing") == "empty",
    ),
    Cause(
        "mean of nothing",
        "{made} It took an empty tensor: a mean of nothing is 0 / 0.",
        (
            mend(
                "sum, and divide by the count",
                'sum, and divide by the count: reduction="sum", and then loss / max(x.numel(), 1)',
                keyword=', reduction="sum"',
                tail=" / max({x}.numel(), 1)",
            ),
            "or skip a batch in which nothing is selected",
        ),
        of=lambda it: it.facts.get("nothing") == "empty",
    ),
    Cause(
        "count of 0",
        "{made} It divides by a count of 0.",
        (
            mend("clamp the count", "divide by count.clamp(min=1)", suffix=".clamp(min=1)"),
            "or skip what there is nothing of",
        ),
        of=lambda it: it.facts.get("nothing") == "count",
    ),
    Cause(
        "mask in the backward",
        "{made} It took an infinity, that of a mask: its derivative there is 0 * inf.",
        ("mask after this line, not before it", "or mask with -1e4 in the place of -inf"),
        of=lambda it: "masked" in it.facts,
    ),
    Cause(
        "constant too large for half",
        "{made} {constant} is {becomes} in {dtype}{turns}.",
        (write, "or torch.finfo(x.dtype).min, where nothing is added to it", *PRECISION),
        of=lambda it: becomes(it) == "-inf" and it.kind == "inf",
    ),
    Cause(
        "cast by hand",
        "{made}{limit} The script itself casts to half, at {cast}.",
        ("cast to float32 there, by .float(): the script breaks in half whatever the level", *SMALLER),
        of=lambda it: it.facts.get("cast") is not None and it.float32_survives is not True,
    ),
    Cause(
        "constant too large for half",
        "{made} {constant} is {becomes} in {dtype}{turns}.",
        (*PRECISION, "write a number below {limit_number:g} in the place of {constant}"),
        of=lambda it: becomes(it) == "inf" and it.kind == "inf",
    ),
    Cause(
        "eps that half makes 0",
        "{made} {constant} is 0 in {dtype}, and so it keeps nothing from being 0.",
        (keep, paste, write, take_bfloat16),
        ops=QUOTIENTS,
        kind="inf",  # of which the backward makes inf * inf, and not of 0 / 0
        of=lambda it: becomes(it) == "0",
    ),
    Cause(
        "eps that half makes 0",
        "{made} {constant} is 0 in {dtype}, and so it keeps nothing from being 0.",
        (write, keep, paste, take_bfloat16),
        ops=(*QUOTIENTS, *LOGARITHMS, *ROOTS, *NORMS, *NORMALIZERS, "pow"),
        of=lambda it: becomes(it) == "0",
    ),
    Cause(
        "limit that half makes 1",
        "{made} {constant} is 1 in {dtype}, and so it keeps nothing from being 1.",
        (keep, paste, write),
        ops=(*QUOTIENTS, *LOGARITHMS, *ROOTS, *DOMAINS, "pow"),
        of=lambda it: becomes(it) == "1",
    ),
    Cause(
        "softmax of nothing",
        "{made} A row whose entries are all -inf has no softmax.",
        (ONE_ENTRY, "or mask with -1e4 in the place of -inf"),
        ops=("softmax", "log_softmax"),
        backward=False,
        of=lambda it: not it.facts.get("own"),
    ),
    Cause(
        "softmax of nothing",
        "{made} A row whose entries are all -inf has no softmax.",
        ("mask with -1e4 in the place of -inf, or leave one entry in each row", "or " + ONE_ENTRY),
        ops=("softmax", "log_softmax"),
        backward=False,
    ),
    Cause(
        "transcript longer than its audio",
        "{made} A target that is longer than its input has no alignment, and the probability 0.",
        (
            mend("give the loss zero_infinity=True", keyword=", zero_infinity=True"),
            "or leave out samples whose target, with a blank between equal neighbours, is longer than "
            "the input",
        ),
        ops=("ctc_loss",),
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
        (ROOT, *PRECISION),
        ops=ROOTS,
        backward=True,
    ),
    Cause(
        "root at 0",
        "{made} The derivative of a root is infinite at 0.",
        ("add an eps under the root: (x.var() + {eps}).sqrt(), which {dtype} holds", *PRECISION),
        ops=(*NORMS, *SPREADS),
        backward=True,
    ),
    Cause(
        "root below 0",
        "{made} A negative number has no root.",
        (ROOT, *PRECISION),
        ops=ROOTS,
        kind="nan",
        backward=False,
    ),
    Cause(
        "power at 0",
        "{made} The derivative of x ** p is infinite at 0 where p is below 1.",
        (mend("clamp the base: x.clamp(min={eps}) ** p", suffix=".clamp(min={eps})"), *PRECISION),
        ops=("pow", "pow_"),
        backward=True,
    ),
    Cause(
        "outside of its domain",
        "{made} It takes what lies outside of its domain, or whose derivative there is infinite: cosines "
        "round to more than 1.",
        (
            mend(
                "clamp what it takes, by a small margin inside of its domain",
                "clamp what it takes, by a small margin inside of its domain (x.clamp(-1 + {eps}, 1 - {eps}))",
                suffix=".clamp(-1 + {eps}, 1 - {eps})",
            ),
            *PRECISION,
        ),
        ops=DOMAINS,
    ),
    Cause(
        "logarithm below 0",
        "{made} A negative number has no logarithm.",
        (LOG, *PRECISION),
        ops=LOGARITHMS,
        kind="nan",
        backward=False,
    ),
    Cause(
        "logarithm of 0",
        "{made} The logarithm of 0 is -inf{tiny}.",
        (LOG, *PRECISION),
        ops=LOGARITHMS,
    ),
    Cause(
        "division by 0",
        "{made} It divides by 0, or by a number that is too small{tiny}.",
        (
            mend(
                "keep the divisor from being 0",
                "clamp the divisor: x / y.clamp(min={eps}), where it is not negative",
                suffix=".clamp(min={eps})",
            ),
            *PRECISION,
        ),
        ops=QUOTIENTS,
    ),
    Cause(
        "data",
        "{made} {sample_of}the batch holds it before the model sees it.",
        (DATA,),
        of=lambda it: it.phase == "input",
    ),
    Cause(
        "exponential",
        "{made}{limit}",
        (
            *PRECISION[:2],
            mend("clamp what it takes: exp(x.clamp(max={top}))", suffix=".clamp(max={top})"),
            "or subtract the maximum, as softmax and logsumexp do",
            *SMALLER,
            take_bfloat16,
        ),
        ops=EXPONENTIALS,
        backward=False,
    ),
    Cause("power", "{made}{limit}", (*PRECISION[:2], *SMALLER, take_bfloat16), ops=POWERS, backward=False),
    Cause(
        "cast",
        "{made}{limit}",
        (
            *SMALLER,
            "make the numbers smaller before they are cast: normalize the input, or divide it",
            *PRECISION,
        ),
        ops=CASTS,
    ),
    Cause(
        "accumulated gradients",
        "{made}{limit}",
        ("divide each loss by the number of micro-steps, before its backward", lower_rate, *PRECISION),
        ops=("accumulate_grad",),
    ),
    Cause("sum", "{made}{limit}", (*SMALLER, *PRECISION[:2], divide_first, take_bfloat16), ops=SUMS),
    Cause("magnitude", "{made}{limit}", (*SMALLER, *PRECISION)),
)


def explain(finding: Finding) -> Finding:
    """Returns the finding with its reason and remedies."""
    cause = next(row for row in CAUSES if row.explains(finding))
    words = words_for(finding)
    first = slow_down(finding) if "{limit}" in cause.why else None
    found = [first, *(it.format(**words) if isinstance(it, str) else it(finding) for it in cause.remedies)]
    remedies = tuple(it for it in found if it) or (LOOK,)
    return replace(finding, cause=cause.name, why=cause.why.format(**words), remedies=remedies)
