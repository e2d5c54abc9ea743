"""What to do about a finding: the causes say which and in which order."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from ampatch.doctor.finding import Finding, words_for
from ampatch.doctor.instruments.evidence import lines_with
from ampatch.doctor.instruments.operations import EXPONENTIALS, SUMS
from ampatch.doctor.instruments.places import SHOWN
from ampatch.doctor.text.logarithm import log_source
from ampatch.doctor.text.mend import Mend, cast_source, constructed, mended, normalized_source
from ampatch.doctor.text.source import PASTED, pasted

Remedy = str | Callable[[Finding], str | None]  # None where it does not fit
DIVERGES = 200.0  # times what weights or outputs were at first
LAYERS = ("linear", "conv1d", "conv2d", "conv3d")
CLAMP = ".clamp(min={eps})"
DEFAULTS = ("normalize", "cosine_similarity", "pairwise_distance")  # whose eps is 1e-12 or 1e-8


def keep(finding: Finding) -> str | None:
    """Has modules run in float32; under torch.autocast by lines to paste after the model is made."""
    alike = finding.facts.get("alike") or [finding.module]
    kept = finding.keep if finding.phase == "forward" else ()
    if kept and not finding.facts.get("own"):
        alike = []
    names = [*kept, *(it for it in alike if it and not any(f"{it}.".startswith(f"{each}.") for each in kept))]
    if finding.op in EXPONENTIALS and finding.facts.get("own") and not finding.autocast:  # and its like
        names = list(dict.fromkeys(re.sub(r"([a-z_]\w*)\.\d+", r"\1.*", it) for it in names))
    model = finding.model or finding.facts.get("model")
    if not (finding.float32_survives and names and model):
        return None
    if not finding.autocast:
        is_one = len(names) == 1 and "*" not in names[0]
        return f"keep_fp32={names}: {'this module runs' if is_one else 'these modules run'} in float32"
    lines = (
        f"in float32, by these lines after {model} is made:",
        f"for name in {names}:",
        f"    part = {model}.get_submodule(name)",
        f"    part.forward = torch.amp.custom_fwd(part.forward, device_type={finding.autocast!r}, "
        "cast_inputs=torch.float32)",
    )
    return PASTED.join(lines)


def paste(finding: Finding) -> str | None:
    """Has the statement run in float32, or the function that it is in."""
    if not (finding.float32_survives and finding.region):
        return None
    return pasted(finding.region)


def take_bfloat16(finding: Finding) -> str | None:
    """Takes the half type that has float32's range."""
    if not finding.float32_survives or "bfloat16" in (finding.dtype, finding.facts.get("half")):
        return None
    how = "opt_level O4 (bfloat16)"
    if finding.autocast:
        how = f"torch.autocast({finding.autocast!r}, dtype=torch.bfloat16)"
    return f"{how}, whose range is that of float32"


def leave_half(finding: Finding) -> str | None:
    """Computes in float32, where nothing else is enough."""
    if not finding.float32_survives:
        return None
    how = "opt_level O0"
    if finding.autocast:
        how = f"torch.autocast({finding.autocast!r}, enabled=False) and GradScaler(enabled=False)"
    return f"{how}: float32 throughout; nothing less that was tried was enough"


def lower_rate(finding: Finding) -> str | None:
    """Keeps weights from growing; before the first update they have not grown."""
    if finding.float32_survives or finding.step == 0:
        return None
    return "lower the learning rate, warm it up, or clip gradients: weights that grow break float32 as well"


def slow_down(finding: Finding) -> str | None:
    """Keeps weights from growing that have grown so much that float32 would break later."""
    if finding.facts.get("halved"):
        return "take .half() from the model: the script makes it half itself, whatever the level"
    grown = finding.facts.get("grown", 1.0)
    if grown < DIVERGES:
        return None
    return (
        "lower the learning rate and the weight decay, warm up, or clip gradients: numbers have "
        f"become {grown:.3g} times as large as at first{finding.facts.get('grew', '')}"
    )


def begin_smaller(finding: Finding) -> str | None:
    """Makes numbers smaller that are too large before the first update."""
    largest = finding.input_largest or 0.0
    if finding.float32_survives or finding.step != 0 or finding.kind != "inf" or largest < 1:
        return None
    said = (
        "no update has been made yet: make the input or the weights smaller (the largest number is "
        f"{largest:.3g}), as by a normalization before this line"
    )
    is_layer = finding.op in LAYERS and not finding.facts.get("own")
    dim = -1 if finding.op == "linear" else 1
    lines = normalized_source(finding.where, finding.module, dim) if is_layer else ()
    return PASTED.join((f"{said}:", *lines)) if lines else said


def bound_exponent(finding: Finding) -> str | None:
    """Bounds an exponent that float32 cannot hold either."""
    return None if finding.float32_survives else BOUND(finding)


def take_zeros(finding: Finding) -> str | None:
    """Takes 0 for what is missing, where a product with a mask would keep its NaN; not for one bad batch."""
    where, lines = finding.facts.get("taken", (None, ()))
    if finding.step or not lines:
        return None
    return PASTED.join((f"take 0 for {finding.kind} where it is used, at {where}:", *lines))


def step_masters(finding: Finding) -> str | None:
    """Has a level keep float32 weights; a script that makes its model half itself has no level."""
    return None if finding.facts.get("halved") else "step float32 masters: opt_level O2, or O5 (bfloat16)"


def divide_first(finding: Finding) -> str | None:
    """Has a sum that the script writes itself stay small; a layer has nothing to divide."""
    if finding.kind != "inf" or finding.op not in SUMS or not finding.facts.get("own"):
        return None
    return "divide before the sum (q / sqrt(d), x / n), not after it"


def write(finding: Finding) -> str | None:
    """Writes another number in the place of a constant, at the line that has it; or gives it to the call."""
    words = words_for(finding)
    constant, new, half = words["constant"], words["instead"], words["half"]
    if "constant" not in finding.facts:
        return None
    lines, text = lines_with(finding.where, finding.facts["constant"][0])
    if lines:
        others = [lines_with(it, finding.facts["constant"][0])[0] for it in finding.facts.get("places", ())]
        at = " and ".join(dict.fromkeys(map(shown, sum(others, lines))))
        return f"write {new} in the place of {text or constant}, at {at}: {half} holds it"
    if finding.op in DEFAULTS and (lines := mended(finding.where, finding.op, Mend(keyword=f", eps={new}"))):
        return PASTED.join((f"give eps={new}, which {half} holds:", *lines))
    how = "mask with" if math.isinf(finding.facts["constant"][0]) else "write"
    return f"{how} {new} in the place of {constant}: {half} holds it"


def mend(title: str, otherwise: str | None = None, **how: str) -> Remedy:
    """Writes the statement with what a `Mend` of these fields changes; says so where that is not seen."""

    def remedy(finding: Finding) -> str:
        """Writes it for a finding."""
        words = words_for(finding)
        op = "div" if finding.op in ("true_divide", "div_") else finding.op
        filled = {
            name: text.replace("{eps}", str(words["eps"])).replace("{top}", str(words["top"]))
            for name, text in how.items()
        }
        if finding.facts.get("signed") and how.get("suffix") == CLAMP:
            filled["suffix"] = f".where({{x}} != 0, {words['eps']})"
        if op == "log1p" and how.get("suffix") == CLAMP:
            filled["suffix"] = f".clamp(min={words['eps']} - 1)"
        if op == "acosh":
            filled["suffix"] = f".clamp(min=1 + {words['eps']})"
        if finding.facts.get("zero") == "number":
            filled = {"around": f"max({{x}}, {1 if finding.facts.get('nothing') else words['eps']})"}
        lines = mended(finding.where, op, Mend(**filled))
        said = title.format(**words)
        return PASTED.join((f"{said}:", *lines)) if lines else (otherwise or said).format(**words)

    return remedy


def cast_alike(finding: Finding) -> str | None:
    """Casts what is put into a tensor of another type."""
    lines = cast_source(finding.where)
    return PASTED.join(("cast what is put there to the type of what takes it:", *lines)) if lines else None


def look_within(finding: Finding) -> str:
    """Names the backward that the script writes itself."""
    return (
        f"look at {finding.op}.backward: where it divides, or takes a root or a logarithm, clamp what it "
        f"takes, as x.clamp(min=1e-3)"
    )


def take_logarithm(finding: Finding) -> str | None:
    """Takes the logarithm of a sigmoid or a softmax in one function, which has one where they are 0."""
    lines = log_source(finding.where)
    return PASTED.join(("take the logarithm and what it is of as one:", *lines)) if lines else None


def leave_nothing_out(finding: Finding) -> str | None:
    """Makes a quotient, or a negative power, of nothing 0, as that of a node without edges."""
    is_apt = finding.facts.get("inverse") and not (finding.facts.get("signed") or finding.float32_survives)
    return TAKE_0(finding) if is_apt else None


def leave_endless_out(finding: Finding) -> str | None:
    """Leaves targets out that no alignment fits, where the loss is called or made."""
    said, keyword = "give the loss zero_infinity=True", "zero_infinity=True"
    if lines := mended(finding.where, "ctc_loss", Mend(keyword=f", {keyword}")):
        return PASTED.join((f"{said}:", *lines))
    where, lines = constructed(finding.where, "CTCLoss", keyword)
    return PASTED.join((f"{said} where it is made, at {where}:", *lines)) if lines else said


def count_elements(finding: Finding) -> str | None:
    """Divides a sum by how many there are, where a mean is one of nothing."""
    changed = {"name": "sum"} if finding.op == "mean" else {"keyword": ', reduction="sum"'}
    said = "sum, and divide by the count: x.sum() / max(x.numel(), 1)"
    return mend("sum, and divide by the count", said, tail=" / max({x}.numel(), 1)", **changed)(finding)


COUNT_TARGETS = mend(
    "sum, and divide by the count",
    'sum, and divide by the count: reduction="sum", and then '
    "loss / (target != ignore_index).sum().clamp(min=1)",
    keyword=', reduction="sum"',
    tail=" / ({y} != -100).sum().clamp(min=1)",
)
CLAMP_COUNT = mend("clamp the count", "divide by count.clamp(min=1)", suffix=".clamp(min=1)")
CLAMP_ROOT = mend("clamp what is under the root: x.clamp(min={eps})", suffix=CLAMP)
CLAMP_BASE = mend("clamp the base: x.clamp(min={eps}) ** p", suffix=CLAMP)
TAKE_0 = mend("or take 0 for it where there is nothing to divide by", suffix=".where({x} > 0, float('inf'))")
CLAMP_LOG = mend(
    "clamp before the log, or take a loss on logits (binary_cross_entropy_with_logits, cross_entropy)",
    "clamp before the log: x.clamp(min={eps}).log(), or take a loss on logits "
    "(binary_cross_entropy_with_logits, cross_entropy)",
    suffix=CLAMP,
)
CLAMP_DIVISOR = mend(
    "keep the divisor from being 0",
    "clamp the divisor: x / y.clamp(min={eps}), where it is not negative",
    suffix=CLAMP,
)
WIDEN = mend("take correction=0: one number has a spread of 0", keyword=", correction=0")
TAKE_SLOGDET = mend("torch.slogdet(w)[1]: the logarithm of its magnitude", name="slogdet", tail="[1]")
IN_FLOAT32 = mend("compute it in float32: torch.atan2(y.float(), x)", suffix=".float()")
OPEN_CLASSES = (
    "leave the masked classes out of the logits and the targets, logits[:, open_classes], or take "
    "label_smoothing away: it gives each class a part"
)
LEAVE_OUT = mend("leave infinities out", suffix=".where({x}.isfinite(), 0)")
CLAMP_INSIDE = mend(
    "clamp what it takes, by a small margin inside of its domain",
    "clamp what it takes, by a small margin inside of its domain (x.clamp(-1 + {eps}, 1 - {eps}))",
    suffix=".clamp(-1 + {eps}, 1 - {eps})",
)
BOUND = mend(
    "bound what it takes, smoothly, as flows do: exp(2 * tanh(x / 2))", around="(2 * torch.tanh(({x}) / 2))"
)
CLAMP_EXPONENT = mend("clamp what it takes: exp(x.clamp(max={top}))", suffix=".clamp(max={top})")
ON_LOGITS = "leave out the sigmoid before it, and take nn.BCEWithLogitsLoss: it takes logits"
ADD_EPS = "add an eps under the root: (x.var() + {eps}).sqrt(), which {dtype} holds"
MEND_SCHEDULE = "keep the schedule from dividing by 0: step / max(1, warmup_steps)"
GIVE_EPS = "give the optimizer an eps above 0: eps=1e-8"
RENEW_SCALE = "leave out the scaler's load_state_dict: a new scaler finds its scale by itself"
SET_WEIGHT = (
    "set it where the module is made (torch.empty leaves what was in memory), or mend the checkpoint "
    "that is loaded"
)
SLOWER = "lower the learning rate and the weight decay: the update is larger than the weight"
BEGIN_ABOVE_0 = (
    "initialize that weight with small numbers, not with zeros (nn.init.normal_(weight, std=1e-3)), or leave "
    "weight_norm off that layer"
)
MEND_DATA = "leave the sample out, or mend the data: torch.isfinite(batch).all() in the loader finds it"
CAST_SMALLER = "make the numbers smaller before they are cast: normalize the input, or divide it"
DIVIDE_LOSS = "divide each loss by the number of micro-steps, before its backward"
OR_FINFO = "or torch.finfo(x.dtype).min, where nothing is added to it"
OR_MASK = "or mask with -1e4 in the place of -inf"
FILL = "fill in the place of the product: x.masked_fill(mask, -1e4), or torch.where"
OR_ONE = "or leave one entry in each row: mask[mask.all(-1), 0] = False, where True hides"
OR_MAXIMUM = "or subtract the maximum, as softmax and logsumexp do"
OR_SHORTER = (
    "or leave out samples whose target, with a blank between equal neighbours, is longer than the input"
)
LOOK = "no rule fits: look at what this line takes, at the step and the sample that are named"
PRECISION: tuple[Remedy, ...] = (keep, paste, take_bfloat16)
SMALLER: tuple[Remedy, ...] = (begin_smaller, lower_rate)


def shown(line: str) -> str:
    """Returns "file:line" from the working directory on."""
    return line.removeprefix(SHOWN)
