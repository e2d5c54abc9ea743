"""What breaks a number, with the reason in words and what to do."""

from __future__ import annotations

import re

from ampatch.doctor.instruments import tape as ops
from ampatch.doctor.rules import remedies as do
from ampatch.doctor.rules.rule import (
    BACKWARD,
    FORWARD,
    Rule,
    becomes,
    breaks_float32,
    has,
    is_of_weight,
    is_steep,
)

PRECISION, SMALLER = do.PRECISION, do.SMALLER
TOO_LARGE = "constant too large for half"
LOST = "eps that half makes 0"
NOTHING = "softmax of nothing"
IS_LOST = "{made} {constant} is {becomes} in {half}, and so it keeps nothing from being {becomes}."
HAS_NO_ROW = "{made} A row whose entries are all -inf has no softmax."
BAD_DATA = "{sample_of}the batch holds {kind} before the model sees it."
STEEP = "{made} A negative number has no root, and at 0 its derivative is infinite."
UNFIT = "{op} raises an error: {constant} does not fit into {dtype}; {limit_number:g} does."
GIVEN = "{made} It was passed {given}, for example a learning rate computed by a schedule."
NO_EPS = "{made} The optimizer's eps is 0: it divides 0 by 0, where a weight has had no gradient."
NO_SCALE = "{made} The loss scale is 0, and no gradient can be divided by it."
NOT_HIDDEN = "{made} It takes an infinity, as that of a mask: nothing hides it here."
MASKED_CLASS = (
    "{made} A class whose logit is -inf has an infinite loss, where it is the target or is smoothed."
)
ANGLE = "{made} At (0, 0) an angle has no derivative{tiny}, squared."
OWN = "{made} It is computed by a backward of the script's own, and float32 breaks as well."
INF, NAN = ("inf",), ("nan",)
UNSEEN = ("",)  # numbers that no operation was seen to make
FRACTIONS = (*ops.QUOTIENTS, *ops.LOGARITHMS, *ops.ROOTS, *ops.NORMS, *ops.NORMALIZERS, "pow")

RULES = (  # the first that explains a finding is its cause
    Rule(
        "weight bad at first",
        "{made_weight} before the first step.",
        (do.SET_WEIGHT,),
        (("input",), is_of_weight, lambda finding: "constant" not in finding.facts),
    ),
    Rule(
        "cast of the input",
        "{made}{limit} The script itself casts its input to half there.",
        (do.take_bfloat16, do.CAST_SMALLER, do.leave_own_half),
        (("input",),),
        ops.CASTS,
        INF,
    ),
    Rule("data", BAD_DATA, (do.take_zeros, do.MEND_DATA), (("input",),), UNSEEN),
    Rule(
        "eps of an optimizer in half",
        "{made} The optimizer's eps, {constant}, is 0 in {dtype}: it divides by 0.",
        (do.step_masters, "give the optimizer eps=1e-4, which {dtype} holds"),
        (("optimizer",), becomes("0")),
    ),
    Rule(
        "weight lost in the step before",
        "the weight {parameter} held {kind} before the step began.",
        (*SMALLER, do.SLOWER, *PRECISION),
        (("optimizer",),),
        UNSEEN,
    ),
    Rule("number that is none", GIVEN, (do.MEND_SCHEDULE,), (has("given"),)),
    Rule("eps of an optimizer that is 0", NO_EPS, (do.GIVE_EPS,), (), ops.ADDCDIV, NAN),
    Rule("loss scale of 0", NO_SCALE, (do.RENEW_SCALE,), (("optimizer",),), ("reciprocal",)),
    Rule(
        "update too large",
        "{made}{limit} That is of the update of {parameter}.",
        (do.SLOWER, "clip gradients before the step"),
        (("optimizer",), is_of_weight, lambda finding: not finding.facts.get("zero")),
    ),
    Rule(
        "weight too large for half",
        "{made}{limit} It is the weight {parameter} that is cast: it has grown to {largest}.",
        (do.GROWN, *PRECISION),
        (is_of_weight, has("casts", True)),
    ),
    Rule(
        "loss not seen",
        "the loss is {kind}; the operation that made it was not seen.",
        (*SMALLER, *PRECISION),
        (),
        UNSEEN,
    ),
    Rule(
        "static loss scale",
        "{made}{limit} The loss scale stays at {scale}, which is too large.",
        (do.make_dynamic, *PRECISION),
        (has("static"),),
    ),
    Rule(
        "error of the script in half",
        "the script raises an error only in half: {error}",
        (do.leave_own_half, do.advised, "give that line float32: x.float() of what is half there"),
        (("error",),),
    ),
    Rule(
        "types that differ",
        "{op} raises an error only in half: {error}",
        (do.cast_alike, do.pair_casts, *PRECISION),
        (lambda finding: bool(re.search("dtype|scalar type", str(finding.facts.get("error")))),),
    ),
    Rule("error in half", "{op} raises an error only in half: {error}", PRECISION, (has("error"),)),
    Rule(
        "limit that does not fit",
        UNFIT,
        (*PRECISION, do.write),
        (has("raised"), lambda finding: finding.op.startswith("clamp")),
    ),
    Rule("constant that does not fit", UNFIT, (do.write, do.FINFO), (has("raised"),)),
    Rule(
        "all targets ignored",
        "{made} All targets of this batch are ignored, or weigh 0: it is a mean of nothing, 0 / 0.",
        (do.COUNT_TARGETS, "skip a batch whose targets are all ignored"),
        (has("nothing", "ignored"),),
    ),
    Rule(
        "mean of nothing",
        "{made} It took an empty tensor: a mean of nothing is 0 / 0.",
        (do.count_elements, "skip a batch in which nothing is selected"),
        (has("nothing", "empty"),),
    ),
    Rule(
        "count of 0",
        "{made} It divides by a count of 0.",
        (do.CLAMP_COUNT, "skip what there is nothing of"),
        (has("nothing", "count"), lambda finding: finding.phase != "optimizer"),
    ),
    Rule(
        "mask in the backward",
        "{made} It took an infinity, as of a mask: its derivative there is 0 * inf.",
        (do.write, "mask after this line, not before it", do.MASK),
        (has("masked"),),
    ),
    Rule("masked class in a loss", MASKED_CLASS, (do.OPEN_CLASSES,), (FORWARD, has("mask")), ops.LOSSES),
    Rule("mask in a sum", NOT_HIDDEN, (do.LEAVE_OUT, do.write), (FORWARD, has("mask")), ("mean", "sum")),
    Rule(
        "mask by a product",
        "{made} It multiplies an infinity by 0, as where a mask hides nothing.",
        (do.write, do.FILL),
        (FORWARD,),
        ("mul", "mul_"),
        NAN,
    ),
    Rule(
        "two masks added",
        "{made} It adds to {constant}, the lowest number of {dtype}{turns}.",
        (do.write, do.ONE),
        (has("mask"),),
    ),
    Rule(
        TOO_LARGE,
        "{made} {constant} is {becomes} in {dtype}{turns}.",
        (do.write, do.FINFO, *PRECISION),
        (becomes("-inf"),),
        kinds=INF,
    ),
    Rule(
        "cast by hand",
        "{made}{limit} The script itself casts to half, at {cast}.",
        (do.cast_back, *SMALLER, do.take_bfloat16),
        (has("cast"), lambda finding: finding.facts.get("constant", (0, "inf"))[1] not in ("0", "1")),
    ),
    Rule(
        TOO_LARGE,
        "{made} {constant} is {becomes} in {dtype}{turns}.",
        (*PRECISION, do.write),
        (becomes("inf"),),
        kinds=INF,
    ),
    # An infinity makes inf * inf in the backward with a larger eps as well; 0 / 0 does not.
    Rule(LOST, IS_LOST, (do.keep, do.paste, do.write, do.take_bfloat16), (becomes("0"),), ops.QUOTIENTS, INF),
    Rule(LOST, IS_LOST, (do.take_logarithm, do.write, *PRECISION), (becomes("0"),), FRACTIONS),
    Rule(
        "limit that half makes 1",
        IS_LOST,
        (do.keep, do.write, do.paste),
        (becomes("1"),),
        (*FRACTIONS, *ops.DOMAINS),
    ),
    Rule(NOTHING, HAS_NO_ROW, (do.ONE, do.MASK), (FORWARD, has("own", False)), ops.SOFTMAXES),
    Rule(
        NOTHING,
        HAS_NO_ROW,
        (do.write, do.ONE),
        (FORWARD,),
        ops.SOFTMAXES,
    ),
    Rule(
        "transcript longer than its audio",
        "{made} A target that is longer than its input has no alignment, and the probability 0.",
        (do.leave_endless_out, do.SHORTER),
        (),
        ("ctc_loss",),
    ),
    Rule(
        "spread of one number",
        "{made} A single number has no spread: it is 0 / 0.",
        (do.WIDEN, "leave out a batch of one (drop_last=True)", *PRECISION),
        (FORWARD,),
        ops.SPREADS,
        NAN,
    ),
    Rule("root at 0 or below", STEEP, (do.CLAMP_ROOT, *PRECISION), (is_steep,), ops.ROOTS),
    Rule("root at 0 or below", STEEP, (do.ADD_EPS, *PRECISION), (BACKWARD,), (*ops.NORMS, *ops.SPREADS)),
    Rule(
        "power at 0 or below",
        "{made} x ** p is no number below 0, and at 0 it is infinite for p < 0, its derivative for p < 1.",
        (do.CLAMP_BASE, do.leave_nothing_out, *PRECISION),
        (is_steep,),
        ("pow", "pow_"),
    ),
    Rule(
        "outside of its domain",
        "{made} It takes what lies outside of its domain, or whose derivative there is infinite: cosines "
        "round to 1 and more.",
        (do.CLAMP_INSIDE, *PRECISION),
        (),
        ops.DOMAINS,
    ),
    Rule("angle of 0", ANGLE, (do.IN_FLOAT32, *PRECISION), (BACKWARD,), ("atan2",)),
    Rule("backward of one's own", OWN, (do.look_within,), (BACKWARD, has("function", True), breaks_float32)),
    Rule(
        "determinant that is not above 0",
        "{made} A determinant below 0 has no logarithm.",
        (do.TAKE_SLOGDET,),
        (),
        ("logdet",),
    ),
    Rule(
        "loss on a sigmoid of half",
        "{made}{limit} It is 1 / (p - p * p): half rounds a sigmoid to 0 or 1.",
        (do.ON_LOGITS, *PRECISION),
        (BACKWARD,),
        ("binary_cross_entropy",),
    ),
    Rule(
        "logarithm of 0 or below",
        "{made} Only what is above 0 has a logarithm{tiny}.",
        (do.take_logarithm, do.CLAMP_LOG, *PRECISION),
        (),
        ops.LOGARITHMS,
    ),
    Rule(
        "direction of zeros",
        "{made} A weight of zeros has no direction, which it is divided into.",
        (do.BEGIN_ABOVE_0,),
        ops=("_weight_norm",),
    ),
    Rule(
        "division by 0",
        "{made} It divides by 0, or by a number that is too small{tiny}.",
        (do.keep, do.paste, do.CLAMP_DIVISOR, do.leave_nothing_out, do.take_bfloat16),
        (lambda finding: finding.facts.get("zero", True),),
        ops.QUOTIENTS,
    ),
    Rule("data", "{made} " + BAD_DATA, (do.take_zeros, do.MEND_DATA), (("input",),)),
    Rule(
        "exponential",
        "{made}{limit}",
        (
            do.take_logarithm,
            do.keep,
            do.paste,
            do.CLAMP_EXPONENT,
            do.bound_exponent,
            do.subtract_maximum,
            *SMALLER,
            do.take_bfloat16,
        ),
        (FORWARD,),
        ops.EXPONENTIALS,
    ),
    Rule("cast", "{made}{limit}", (*SMALLER, do.CAST_SMALLER, *PRECISION), (), ops.CASTS),
    Rule(
        "accumulated gradients",
        "{made}{limit}",
        (do.DIVIDE_LOSS, do.lower_rate, *PRECISION),
        (),
        ("accumulate_grad",),
    ),
    Rule(
        "magnitude",
        "{made}{limit}",
        (
            *(do.widen_target, do.take_logarithm, *SMALLER, do.keep, do.paste),
            *(do.divide_first, do.take_bfloat16),
        ),
    ),
)
