"""What to do about a finding: the causes say which and in which order."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ampatch.doctor.finding import Finding
from ampatch.doctor.fixes import (
    Bfloat16,
    Dynamic,
    Fix,
    Float32,
    Keep,
    OtherLevel,
    Paste,
    Rate,
    StartScale,
    Words,
)
from ampatch.doctor.instruments.evidence import lines_with
from ampatch.doctor.instruments.places import SHOWN
from ampatch.doctor.instruments.region import CAST_BACK
from ampatch.doctor.instruments.tape import DOMAINS, EXPONENTIALS, MULTIPLY, NORMALIZERS, QUOTIENTS, SUMS
from ampatch.doctor.instruments.values import HALF
from ampatch.doctor.text.mend import (
    Mend,
    cast_source,
    constructed,
    log_source,
    mended,
    normalized_source,
    retyped,
    summed_source,
    target_source,
    widened,
)
from ampatch.doctor.text.source import Change, lines_on_disk, place_of, statement_of

Remedy = str | Callable[[Finding], Fix | None]  # None where it does not fit
DIVERGES = 200.0  # times what weights or outputs were at first
LAYERS = ("linear", "conv1d", "conv2d", "conv3d")
CLAMP = ".clamp(min={eps})"
DEFAULTS = ("normalize", "cosine_similarity", "pairwise_distance")  # whose eps is 1e-12 or 1e-8
RANGE = ", whose range is that of float32"


def pasted(title: str, change: Change | None, otherwise: str | None = None) -> Fix:
    """Returns the fix that makes a change, or says it where there is no text to change."""
    return Paste(title, (change,)) if change else Words(otherwise or title)


def keep(finding: Finding) -> Fix | None:
    """Has modules run in float32; under torch.autocast by lines to paste after the model is made."""
    alike = finding.facts.get("alike") or [finding.module]
    kept = finding.keep if finding.phase == "forward" else ()
    if kept and not finding.facts.get("own"):
        alike = []
    names = [
        *kept,
        *(name for name in alike if name and not any(f"{name}.".startswith(f"{each}.") for each in kept)),
    ]
    if finding.op in EXPONENTIALS and finding.facts.get("own") and not finding.autocast:  # and its like
        names = list(dict.fromkeys(re.sub(r"([a-z_]\w*)\.\d+", r"\1.*", name) for name in names))
    model = finding.model or finding.facts.get("model")
    is_own = finding.facts.get("halved") and not finding.autocast  # which no level reaches
    if is_own or not (finding.float32_survives and names and model):
        return None
    return Keep(tuple(names), model, finding.autocast)


def keep_buffer(finding: Finding) -> Fix | None:
    """Has the module of a buffer run in float32, if it is not the model itself."""
    module = str(finding.facts["buffer"]).rpartition(".")[0]
    is_apt = module and finding.model and not finding.facts.get("halved")
    return Keep((module,), finding.model) if is_apt else None


def paste(finding: Finding) -> Fix | None:
    """Has the statement run in float32, or the function that it is in; an inf would be cast back to one."""
    is_void = finding.kind == "inf" and finding.region and finding.region.title == CAST_BACK
    return finding.region if finding.float32_survives and not is_void else None


def paste_or(text: str) -> Remedy:
    """Has the statement run in float32; says so where it cannot be seen how."""
    return lambda finding: paste(finding) or Words(text)


def is_of_gradient(finding: Finding) -> bool:
    """Asks for a gradient that was compared with that of float32."""
    return "init_scale" in finding.facts


def cast_functions(finding: Finding) -> Fix | None:
    """Takes the level that casts in functions alone, where a model is half throughout."""
    is_apt = finding.float32_survives and finding.facts.get("is_half") and finding.dtype in HALF
    is_own = finding.autocast or finding.facts.get("halved")
    return cast_in_functions(finding) if is_apt and not is_own else None


def start_scale(finding: Finding) -> Fix:
    """Has the loss scale start where no gradient overflows; a script that has none makes one."""
    power = math.frexp(float(finding.facts["init_scale"]))[1] - 1
    if finding.autocast and finding.facts["scale"] == 1.0:
        return Words(
            f"scale the loss, by a scaler = torch.amp.GradScaler({finding.autocast!r}, "
            f"init_scale=2.0**{power}): scaler.scale(loss).backward(), scaler.step(optimizer), "
            "scaler.update()"
        )
    return StartScale(power, finding.autocast)


def take_bfloat16(finding: Finding) -> Fix | None:
    """Takes the half type that has float32's range."""
    types = finding.dtype, finding.facts.get("half"), finding.facts.get("dtype")
    if not finding.float32_survives or "bfloat16" in types:
        return None
    if where := finding.facts.get("halved"):
        text = ", whose range is that of float32"
        return own_type(where, "bfloat16", text)
    return Bfloat16(finding.autocast) if finding.autocast else OtherLevel("O4", f" (bfloat16){RANGE}")


def own_type(lines: Sequence[str], dtype: str, why: str) -> Fix | None:
    """Writes another type where a script itself makes a model half: in all of the file of the first line."""
    changes = retyped(lines[0], dtype)
    places: dict[str, list[str]] = {}  # by what is written there
    for change in changes:
        match = re.search(
            r"(torch)?\.(bfloat16|float16|half)\b(\(\))?", lines_on_disk(change.file)[change.first - 1]
        )
        is_method = bool(match and match[3] and not match[1])
        old = match[2] if match else "half"
        new = f".{dtype.removesuffix('32')}()" if is_method else f"torch.{dtype}"
        text = f"write {new} in the place of {'.' * is_method}{old}{'()' * is_method}"
        places.setdefault(text, []).append(shown(change.where))
    title = ", and ".join(f"{said}, at {' and '.join(at)}" for said, at in places.items()) + why
    return Paste(title, changes, False) if changes else None


def leave_own_half(finding: Finding) -> Fix | None:
    """Trains in float32 what the script itself makes half, whatever the level."""
    lines = finding.facts.get("halved")
    why = ": the script makes its model half itself, whatever the level"
    return lines and own_type(lines, "float32", why)


def keep_makers(finding: Finding) -> Fix | None:
    """Has the parts of a model run in float32 whose outputs an operation takes."""
    parts = dict.fromkeys(maker.partition(".")[0] for maker in finding.facts.get("makers", ()))
    return keep(replace(finding, module="", facts=finding.facts | {"alike": list(parts)}))


def take_finer(finding: Finding) -> Fix | None:
    """Takes float16 in the place of bfloat16, which is eight times as fine."""
    is_coarse = "bfloat16" in (finding.dtype, finding.facts.get("dtype"))
    is_apt = is_coarse and not (finding.autocast or finding.facts.get("halved"))
    return OtherLevel("O1", " (float16), which rounds eight times as finely") if is_apt else None


def leave_half(finding: Finding) -> Fix | None:
    """Computes in float32, where nothing else is enough."""
    is_apt = finding.float32_survives
    return Float32(finding.autocast, bool(finding.facts.get("has_scaler"))) if is_apt else None


def lower_rate(finding: Finding) -> Fix | None:
    """Keeps weights from growing; before the first update they have not grown."""
    if finding.float32_survives or finding.step == 0:
        return None
    return Rate(", warm it up, or clip gradients: weights that grow break float32 as well")


def slow_down(finding: Finding) -> Fix | None:
    """Keeps weights from growing that have grown so much that float32 would break later."""
    if finding.facts.get("halved"):
        return leave_own_half(finding)
    grown = finding.facts.get("grown", 1.0)
    if grown < DIVERGES:
        return None
    return Rate(
        " and the weight decay, warm up, or clip gradients: numbers have "
        f"become {grown:.3g} times as large as at first{finding.facts.get('grew', '')}"
    )


def begin_smaller(finding: Finding) -> Fix | None:
    """Makes numbers smaller that are too large before the first update."""
    largest = finding.input_largest or 0.0
    if finding.float32_survives or finding.step != 0 or finding.kind != "inf" or largest < 1:
        return None
    text = (
        "no update has been made yet: make the input or the weights smaller (the largest number is "
        f"{largest:.3g}), as by a normalization before this line"
    )
    is_layer = finding.op in LAYERS and not finding.facts.get("own")
    dim = -1 if finding.op == "linear" else 1
    return pasted(text, normalized_source(finding.where, finding.module, dim) if is_layer else None)


def subtract_maximum(finding: Finding) -> Fix | None:
    """Has an exponential be of what is at most 0, where a quotient takes it, as in a softmax by hand."""
    _, statement = statement_of(finding.where)
    nodes = (getattr(statement, "value", None), *map(dividend_of, ast.walk(statement) if statement else ()))
    is_apt = any(getattr(getattr(node, "func", None), "attr", "") == finding.op for node in nodes)
    return Words("subtract the maximum, as softmax and logsumexp do") if is_apt else None


def dividend_of(node: ast.AST) -> ast.expr | None:
    """Returns what a quotient by something that is no number divides."""
    match node:
        case ast.BinOp(left, ast.Div(), right) if not isinstance(right, ast.Constant):
            return left
    return None


def bound_exponent(finding: Finding) -> Fix | None:
    return None if finding.float32_survives else BOUND(finding)


def take_zeros(finding: Finding) -> Fix | None:
    """Takes 0 for what is missing, where a product with a mask would keep its NaN; not for one bad batch."""
    change = finding.facts.get("taken")
    if finding.step or not change:
        return None
    return Paste(f"take 0 for {finding.kind} where it is used, at {change.where}", (change,))


def step_masters(finding: Finding) -> Fix | None:
    """Has a level keep float32 weights; a script that makes its model half itself has no level."""
    level, why = finding.facts.get("level", "O3"), ", or O5 (bfloat16)"
    if finding.facts.get("halved") or (finding.is_silent and "level" not in finding.facts):
        return None
    if level != "O3":
        why = " without master_weights=False"
    elif finding.is_silent and finding.facts["dtype"] == "bfloat16":
        level, why = "O5", ""
    return OtherLevel("O2" if level == "O3" else level, why, "step float32 masters: ")


def make_dynamic(finding: Finding) -> Fix:
    return Dynamic(finding.facts["static"])


def divide_first(finding: Finding) -> Fix | None:
    """Has a sum that the script writes itself stay small; a layer has nothing to divide."""
    if finding.kind != "inf" or finding.op not in SUMS or not finding.facts.get("own"):
        return None
    return Words("divide before the sum (q / sqrt(d), x / n), not after it")


def write(finding: Finding) -> Fix | None:
    """Writes another number in the place of a constant, at the line that has it; or gives it to the call."""
    words = words_for(finding)
    constant, new, half = words["constant"], words["instead"], words["half"]
    if "constant" not in finding.facts:
        return None
    value = finding.facts["constant"][0]
    lines, text = lines_with(finding.where, value)
    if lines:
        others = [lines_with(place, value)[0] for place in finding.facts.get("places", ())]
        places = list(dict.fromkeys(sum(others, lines)))
        at = " and ".join(map(shown, places))
        title = f"write {new} in the place of {text or constant}, at {at}: {half} holds it"
        return Paste(title, tuple(written(place, str(text or constant), str(new)) for place in places), False)
    if finding.op in DEFAULTS and (change := mended(finding.where, finding.op, Mend(keyword=f", eps={new}"))):
        return Paste(f"give eps={new}, which {half} holds", (change,))
    how = "mask with" if math.isinf(value) else "write"
    return Words(f"{how} {new} in the place of {constant}: {half} holds it")


def written(where: str, old: str, new: str) -> Change:
    """Returns the line at "file:line" with one number for another, of the same sign."""
    path, line = place_of(where)
    text = lines_on_disk(path)[line - 1].strip()
    sign = "-" if old.startswith("-") and new.startswith("-") else ""
    return Change(path, line, line, (text.replace(old.removeprefix(sign), new.removeprefix(sign)),))


def mend(title: str, otherwise: str | None = None, is_exact: bool = True, **how: str) -> Remedy:
    """Writes the statement with what a `Mend` of these fields changes; says so where that is not seen."""

    def remedy(finding: Finding) -> Fix:
        """Writes it with the names and numbers of the finding."""
        words = words_for(finding)
        op = "div" if finding.op in ("true_divide", "div_") else finding.op
        filled = {
            name: text.replace("{eps}", str(words.get("eps"))).replace("{top}", str(words.get("top")))
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
        change = mended(finding.where, op, Mend(**filled))
        fix = pasted(title.format(**words), change, otherwise and otherwise.format(**words))
        return replace(fix, is_exact=is_exact) if isinstance(fix, Paste) else fix

    return remedy


def cast_back(finding: Finding) -> Fix:
    """Takes float32 where the script itself casts to half."""
    title = "cast to float32 there, by .float(): the script breaks in half whatever the level"
    return pasted(title, widened(finding.facts["cast"]))


def cast_alike(finding: Finding) -> Fix | None:
    """Casts what is put into a tensor of another type."""
    change = cast_source(finding.where)
    return Paste("cast what is put there to the type of what takes it", (change,)) if change else None


def widen_target(finding: Finding) -> Fix | None:
    """Makes what the script writes into float32, as a buffer that has the type of what a model gives."""
    change = target_source(finding.where) if finding.float32_survives and finding.kind == "inf" else None
    return Paste("make what it writes into float32", (change,)) if change else None


def pair_casts(finding: Finding) -> Fix | None:
    """Gives a backward of the script's own the types of its forward."""
    device = repr(finding.autocast or "cuda")
    text = (
        f"decorate forward with torch.amp.custom_fwd(device_type={device}), and backward with "
        f"torch.amp.custom_bwd(device_type={device}): both then run as the forward does"
    )
    return Words(text) if finding.phase == "backward" and not finding.is_gradient else None


def advised(finding: Finding) -> Fix | None:
    return Words(str(finding.facts["advice"])) if finding.facts.get("advice") else None


def look_within(finding: Finding) -> Fix:
    return Words(
        f"look at {finding.op}.backward: where it divides, or takes a root or a logarithm, clamp what it "
        f"takes, as x.clamp(min=1e-3)"
    )


def take_logarithm(finding: Finding) -> Fix | None:
    """Takes the logarithm of a sigmoid or a softmax in one function, which has one where they are 0."""
    change = log_source(finding.where)
    return Paste("take the logarithm and what it is of as one", (change,)) if change else None


def leave_nothing_out(finding: Finding) -> Fix | None:
    """Makes a quotient, or a negative power, of nothing 0, as that of a node without edges."""
    is_apt = finding.facts.get("inverse") and not (finding.facts.get("signed") or finding.float32_survives)
    return TAKE_0(finding) if is_apt else None


def leave_endless_out(finding: Finding) -> Fix:
    """Leaves targets out that no alignment fits, where the loss is called or made."""
    text, keyword = "give the loss zero_infinity=True", "zero_infinity=True"
    if change := mended(finding.where, "ctc_loss", Mend(keyword=f", {keyword}")):
        return Paste(text, (change,))
    change = constructed(finding.where, "CTCLoss", keyword)
    return pasted(f"{text} where it is made, at {change.where}" if change else text, change)


def count_elements(finding: Finding) -> Fix:
    """Divides a sum by how many there are, where a mean is one of nothing."""
    changed = {"name": "sum"} if finding.op == "mean" else {"keyword": ', reduction="sum"'}
    text = "sum, and divide by the count: x.sum() / max(x.numel(), 1)"
    return mend("sum, and divide by the count", text, tail=" / max({x}.numel(), 1)", **changed)(finding)


def sum_in_float32(finding: Finding) -> Fix | None:
    """Adds in float32, and casts the sum back."""
    change = summed_source(finding.where, finding.op)
    return Paste("sum in float32, and cast the sum", (change,)) if change else None


def cast_in_functions(finding: Finding) -> Fix:
    """Leaves the model in float32, and casts in functions to the half type of a fault."""
    half = finding.facts.get("dtype", finding.dtype)
    return OtherLevel("O4" if half == "bfloat16" else "O1", ", which casts only in functions")


def cut_rate(text: str) -> Remedy:
    """Lowers the learning rate, and says what else may be done, and why."""

    def remedy(_: object) -> Rate:
        return Rate(text)

    return remedy


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
TAKE_0 = mend("take 0 for it where there is nothing to divide by", suffix=".where({x} > 0, float('inf'))")
CLAMP_LOG = mend(
    "clamp before the log, or take a loss on logits (binary_cross_entropy_with_logits, cross_entropy)",
    "clamp before the log: x.clamp(min={eps}).log(), or take a loss on logits "
    "(binary_cross_entropy_with_logits, cross_entropy)",
    is_exact=False,
    suffix=CLAMP,
)
CLAMP_DIVISOR = mend(
    "keep the divisor from being 0",
    "clamp the divisor: x / y.clamp(min={eps}), where it is not negative",
    suffix=CLAMP,
)
WIDEN = mend("take correction=0: one number has a spread of 0", keyword=", correction=0")
TAKE_SLOGDET = mend("torch.slogdet(w)[1]: the logarithm of its magnitude", name="slogdet", tail="[1]")
IN_FLOAT32_TOO = mend("compute it in float32: {op}(x.float())", suffix=".float()")
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
    "bound what it takes, smoothly, as flows do: exp(2 * tanh(x / 2))",
    is_exact=False,
    around="(2 * torch.tanh(({x}) / 2))",
)
CLAMP_EXPONENT = mend(
    "clamp what it takes: exp(x.clamp(max={top}))", is_exact=False, suffix=".clamp(max={top})"
)
ON_LOGITS = "leave out the sigmoid before it, and take nn.BCEWithLogitsLoss: it takes logits"
ADD_EPS = "add an eps under the root: (x.var() + {eps}).sqrt(), which {dtype} holds"
MEND_SCHEDULE = "keep the schedule from dividing by 0: step / max(1, warmup_steps)"
GIVE_EPS = "give the optimizer an eps above 0: eps=1e-8"
RENEW_SCALE = "leave out the scaler's load_state_dict: a new scaler finds its scale by itself"
SET_WEIGHT = (
    "set it where the module is made (torch.empty leaves what was in memory), or mend the checkpoint "
    "that is loaded"
)
SLOWER = cut_rate(" and the weight decay: the update is larger than the weight")
GROWN = cut_rate(" and the weight decay, or clip gradients: the weight grows")
BEGIN_ABOVE_0 = (
    "initialize that weight with small numbers, not with zeros (nn.init.normal_(weight, std=1e-3)), or leave "
    "weight_norm off that layer"
)
MEND_DATA = "leave the sample out, or mend the data: torch.isfinite(batch).all() in the loader finds it"
CAST_SMALLER = "make the numbers smaller before they are cast: normalize the input, or divide it"
DIVIDE_LOSS = "divide each loss by the number of micro-steps, before its backward"
FINFO = "torch.finfo(x.dtype).min, if nothing is added to the scores after it: the sum would be -inf"
MASK = "mask with -1e4 in the place of -inf"
FILL = "fill in the place of the product: x.masked_fill(mask, -1e4), or torch.where"
ONE = "leave one entry in each row: mask[mask.all(-1), 0] = False, where True hides"
SHORTER = "leave out samples whose target, with a blank between equal neighbours, is longer than the input"
LOOK = "no rule fits: look at what this line takes, at the step and the sample that are named"
PRECISION: tuple[Remedy, ...] = (keep, paste, take_bfloat16)
SMALLER: tuple[Remedy, ...] = (begin_smaller, lower_rate)


def shown(line: str) -> str:
    """Returns "file:line" from the working directory on."""
    return line.removeprefix(SHOWN)


STEEP = (*QUOTIENTS, *NORMALIZERS, *DOMAINS)  # their gradients grow as 1 / eps, or 1 - 1e-4 is 1 in half
NEAR_1 = (*DOMAINS, "log1p")
EPS = {"float16": ("1e-4", "1e-3", "1e-3"), "bfloat16": ("1e-6", "1e-6", "1e-2")}  # STEEP, NEAR_1 last
TINY = {
    "float16": "; float16 makes 0 of what is below 3e-8, and 1 of 0.9998",
    "bfloat16": "; bfloat16 makes 1 of 0.999",
}
INSTEAD = {"-inf": "-1e4", "inf": "1e4", "1": "0.99"}  # of what a constant becomes


def words_for(finding: Finding) -> dict[str, object]:
    """Returns what a reason is formatted with, of a silent fault what was measured."""
    if finding.is_silent:
        own = {name: getattr(finding, name) for name in ("op", "dtype", "input_largest")}
        return own | finding.facts
    constant = finding.facts.get("constant", (0.0, "", finding.dtype))
    largest = limit_of(finding.dtype or "float32")
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
        "tiny": TINY.get(finding.dtype, ""),
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

    >>> number(-1e9), number(-1e5), number(1e-8), number(0.9999999)
    ('-1e9', '-1e5', '1e-8', '0.9999999')
    """
    if value != 1 and abs(value - 1) < 1e-4:
        return f"{value:.9g}"
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
