"""What is said of silent faults: one table of kinds, with the reason in words and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping

# By kind: first why, with the numbers of the fault, then what to do. A gradient that underflows has words
# of its own, as has a block of `scale_loss`.
WORDS: dict[str, tuple[str, ...]] = {
    "zeros": (
        "{op} overflowed in {dtype} (its largest input is {input_largest:.4g}), and what takes the inf makes "
        "{zeros:.0%} zeros of it: float32 has numbers up to {float32_largest:.3g} there.",
        "compute the line in float32, with `x = x.float()` before it, and let its result stay float32",
        "divide by the largest magnitude before the square, and take it out again after the root",
        "use torch.nn.functional.rms_norm or layer_norm, which compute in float32 inside",
    ),
    "underflow": (
        "{op} made zeros in {dtype} of numbers that are too small for it (its largest input is "
        "{input_largest:.4g}), and what follows has {share:.0%} of its numbers far from those of float32, "
        "which go up to {float32_largest:.3g}.",
        "compute the line in float32, with `x = x.float()` before it, and let its result stay float32",
        "multiply before the product or square, and divide after it",
        "an eps that the type can hold: float16 makes 0 of what is below 3e-8",
    ),
    "gradient": (
        "at a loss scale of {scale:g} float16 makes zeros of {lost:.0%} of the gradient that are none in "
        "float32; {share:.0%} of it are lost or far off, {subnormals:.0%} subnormal.",
        "{start}: the largest scale at which nothing overflows here",
        "with another loss: take a mean over fewer elements, or multiply it",
        "{bfloat16}, whose range is that of float32",
    ),
    "clipped_while_scaled": (
        "gradients are clipped at {limit:g} while they are multiplied by the loss scale ({scale:g}): the "
        "limit that holds is {limit:g} / {scale:g}.",
        "call scaler.unscale_(optimizer) before it; scaler.step then does not unscale again",
        "with ampatch: clip amp.master_params(optimizer) after the block of scale_loss",
    ),
    "unscaled_twice": (
        "gradients are divided by the loss scale that were divided by it before: they are too small by "
        "that factor.",
        "call unscale_ once for each optimizer and step, after the last backward pass; one scaler for it",
        "when accumulating, unscale after the last micro-step alone, and update the scaler once a step",
    ),
    "not_unscaled": (
        "{op} uses gradients that are still multiplied by the loss scale ({scale:g}).",
        "call scaler.unscale_(optimizer) before gradients are read or changed",
        "step with scaler.step(optimizer), which unscales; with ampatch after the block of scale_loss",
    ),
    "stepped_twice": (
        "gradients are stepped that a step has used already, and no backward pass was between.",
        "take one of the two steps away: scaler.step(optimizer) steps by itself, where nothing overflowed",
    ),
    "stale_weights": (
        "the step is made inside of torch.autocast, which goes on with the half weights that it cast before.",
        "have the block of torch.autocast end before backward() and step(): forward and loss alone in it",
    ),
    "no_gradients": (
        "no parameter of the optimizer has a gradient, and those of the model that have one are others.",
        "make the optimizer of model.parameters() after the last of its layers is replaced",
    ),
    "not_zeroed": (
        "gradients are added to those of the step before: nothing has made them 0 since.",
        "call optimizer.zero_grad() in each step, before the backward pass",
    ),
    "scaled_penalty": (
        "a penalty is made of gradients that are multiplied by the loss scale.",
        "divide them by scaler.get_scale() before the penalty is made of them",
    ),
    "lost_state": (
        "{lost} second moments (exp_avg_sq) are 0 where the first are not, as in a checkpoint in half: the "
        "optimizer divides by its eps there.",
        "save the optimizer's state in float32: leave out what casts it before it is saved",
        "leave out this load_state_dict: the optimizer begins anew",
    ),
    "lost_steps": (
        "the step leaves {share:.0%} of the weights in {dtype} as they are that have a gradient: {dtype} is "
        "too coarse for it.",
        "keep what is trained in float32: model.float() under torch.autocast, or opt_level O2 or O5, "
        "which step float32 masters",
    ),
    "collapsed": (
        "{op} makes {after} numbers of {before} in {dtype}, which holds whole numbers up to {limit} alone.",
        "keep these in float32, and cast what is computed of them: positions, times, and counts",
    ),
    "coarse_angles": (
        "{op} is in {dtype}, and the sine of what comes of it takes angles up to {largest:.3g}, which "
        "{dtype} rounds by {error:.2g}: they are noise.",
        "keep in float32 what this line has in half, up to the sine, and cast what the sine gives",
    ),
    "lost_updates": (
        "{op} adds to {dtype} what it is too coarse for: {share:.0%} of the numbers stay as they were.",
        "keep in float32 what it adds to, and what it adds: copy.deepcopy(model).float() for an average "
        "of weights, p.float() there, and inputs of float32 where that average is used",
    ),
    "never_stepped": (
        "{count} losses in a row are scaled, and no step follows: a scale that is too large never falls.",
        "call scaler.step(optimizer) and scaler.update() after each backward pass, under no condition: "
        "step leaves out by itself what overflows",
    ),
    "scaled_not_backpropagated": (
        "a loss is scaled here, and no backward pass came of what {op} returned.",
        "call backward() on the scaled loss: scaler.scale(loss).backward()",
        "or take the line away",
    ),
    "scale_loss": (
        "a block of {op} ends without a backward pass of what it yields.",
        "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
        "or take the block away",
    ),
    "unscaled_backward": (
        "a backward pass of a loss that is not scaled makes gradients that are divided by the loss scale: "
        "they are lost beside the others, and small ones become zero.",
        "scale every loss of a step: scaler.scale(loss).backward()",
        "or add the losses first, and scale the sum",
    ),
    "float32_under_autocast": (
        "the cast to float32 has no effect: {runs} casts to half again, by itself.",
        "turn casts off around the lines: with torch.autocast(device, enabled=False): on x.float(), or "
        "with amp.disable_casts():",
        "with ampatch: keep_fp32=[...] for a module",
    ),
    "float8_underflow": (
        "{share:.0%} of the numbers in the {what} of this layer are 0 in float8, beside the largest, "
        "{largest:.4g}.",
        "keep the layer out of float8: keep_fp32=[...] with its name, or look for what is so large",
        'give each row a scale of its own: float8_recipe="rowwise"',
    ),
    "length_alone": (
        "a sum of {length} products in float16 reaches {largest:.4g} before it is divided by its length: "
        "float16 holds nothing above 65504.",
        "divide before the sum: (k / n).transpose(-2, -1) @ v, not (k.transpose(-2, -1) @ v) / n",
    ),
}


def words_of(numbers: Mapping[str, object]) -> dict[str, str]:
    """Returns what is said of a gradient that underflows, by what the script scales and casts with."""
    exponent, device = math.frexp(float(str(numbers.get("init_scale", 1.0))))[1] - 1, numbers.get("autocast")
    start = f"init_scale=2.0**{exponent}"
    if device is None:
        start = f"give initialize loss_scale=amp.DynamicLossScale({start})"
    elif numbers.get("scale") == 1.0:
        start = f"scale the loss, by a scaler = torch.amp.GradScaler({device!r}, {start}): "
        start += "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()"
    else:
        start = f"start with torch.amp.GradScaler({device!r}, {start})"
    how = f"torch.autocast({device!r}, dtype=torch.bfloat16)" if device else "opt_level O4 (bfloat16)"
    return {"{start}": start, "{bfloat16}": how}
