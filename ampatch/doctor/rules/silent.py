"""Faults that skip no step, with the reason in words and what to do."""

from __future__ import annotations

from ampatch.doctor.rules import remedies as do
from ampatch.doctor.rules.rule import Rule, Test, has

IN_FLOAT32 = do.paste_or(
    "compute the line in float32, with `x = x.float()` before it, and let its result stay float32"
)
UNSCALE = "call scaler.unscale_(optimizer) before gradients are read or changed"
STEP = "step with scaler.step(optimizer), which unscales; with ampatch after the block of scale_loss"
COUNT_WHOLE = "keep it a buffer of integers (dtype=torch.long), which nothing casts with the model"
KEEP_BUFFER = (
    "keep it in float32: put it into a module of its own, and give initialize keep_fp32=[...] with the name "
    "of that, or make the buffer float32 again after the model is cast"
)
NOT_UNSCALED = "{op} uses gradients that are still multiplied by the loss scale ({scale:g})."


def is_of(*ops: str) -> Test:
    return lambda finding: finding.op in ops


def silent(kind: str, why: str, *remedies: do.Remedy, of: tuple[Test, ...] = ()) -> Rule:
    """Returns the rule of a kind of silent fault."""
    return Rule(kind.replace("_", " "), why, remedies, of, kinds=(kind,))


RULES = (
    silent(
        "zeros",
        "{op} overflowed in {dtype} (its largest input is {input_largest:.4g}), and what takes the inf makes "
        "{zeros:.0%} zeros of it: float32 has numbers up to {float32_largest:.3g} there.",
        *(IN_FLOAT32, do.keep, do.take_bfloat16),
        "divide by the largest magnitude before the square, and take it out again after the root",
        "use torch.nn.functional.rms_norm or layer_norm, which compute in float32 inside",
    ),
    silent(
        "underflow",
        "at a loss scale of {scale:g} float16 makes zeros of {lost:.0%} of the gradient that are none in "
        "float32; {share:.0%} of it are lost or far off, {subnormals:.0%} subnormal.",
        do.start_scale,
        "with another loss: take a mean over fewer elements, or multiply it",
        do.take_bfloat16,
        of=(do.is_of_gradient,),
    ),
    silent(
        "underflow",
        "{op} made zeros in {dtype} of numbers that are too small for it (its largest input is "
        "{input_largest:.4g}), and what follows has {share:.0%} of its numbers far from those of float32, "
        "which go up to {float32_largest:.3g}.",
        *(IN_FLOAT32, do.keep, do.take_bfloat16),
        "multiply before the product or square, and divide after it",
        "an eps that the type can hold: float16 makes 0 of what is below 3e-8",
    ),
    silent(
        "clipped_while_scaled",
        "gradients are clipped inside of a block of scale_loss, where they are still multiplied by the loss "
        "scale.",
        "clip those of amp.master_params(optimizer) after the block",
        of=(is_of("clip_grad"),),
    ),
    silent(
        "clipped_while_scaled",
        "gradients are clipped at {limit:g} while they are multiplied by the loss scale ({scale:g}): the "
        "limit that holds is {limit:g} / {scale:g}.",
        "call scaler.unscale_(optimizer) before it; scaler.step then does not unscale again",
        "with ampatch: clip amp.master_params(optimizer) after the block of scale_loss",
    ),
    silent(
        "unscaled_twice",
        "gradients are divided by the loss scale that were divided by it before: they are too small by "
        "that factor.",
        "call unscale_ once for each optimizer and step, after the last backward pass; one scaler for it",
        "when accumulating, unscale only after the last micro-step, and update the scaler once a step",
    ),
    silent("not_unscaled", NOT_UNSCALED, STEP, UNSCALE, of=(is_of("step"),)),
    silent("not_unscaled", NOT_UNSCALED, UNSCALE, STEP),
    silent(
        "stepped_twice",
        "gradients are stepped that a step has used already, and no backward pass was between.",
        "remove one of the two steps: scaler.step(optimizer) steps by itself, where nothing overflowed",
    ),
    silent(
        "renewed_scaler",
        "each step makes a GradScaler of its own, which begins at {scale:g} again: it never learns at which "
        "scale gradients overflow, and none of them grows.",
        "make the scaler once, before the loop, and pass it to what steps",
    ),
    silent(
        "stale_weights",
        "the step is made inside of torch.autocast, which goes on with the half weights that it cast before.",
        "end the block of torch.autocast before backward() and step(), with only forward and loss in it",
    ),
    silent(
        "no_gradients",
        "no parameter of the optimizer has a gradient, and those of the model that have one are others.",
        "make the optimizer of model.parameters() after the last of its layers is replaced",
    ),
    silent(
        "not_zeroed",
        "gradients are added to those of the step before: nothing has made them 0 since.",
        "call optimizer.zero_grad() in each step, before the backward pass",
    ),
    silent(
        "scaled_penalty",
        "a penalty is made of gradients that are multiplied by the loss scale.",
        "divide them by scaler.get_scale() before the penalty is made of them",
    ),
    silent(
        "lost_state",
        "{lost} second moments (exp_avg_sq) are 0 where the first are not, as in a checkpoint in half: the "
        "optimizer divides by its eps there.",
        "save the optimizer's state in float32: leave out what casts it before it is saved",
        "leave out this load_state_dict: the optimizer begins from nothing",
    ),
    silent(
        "lost_updates",
        "{share:.0%} of the {dtype} weights that have a gradient did not change in the step: {dtype} is too "
        "coarse for it.",
        *(do.leave_own_half, do.step_masters),
        "keep what is trained in float32: model.float() under torch.autocast, or opt_level O2 or O5, "
        "which step float32 masters",
        of=(is_of("step"),),
    ),
    silent(
        "lost_updates",
        "gradients of many backward passes are added up in {dtype}, which is too coarse for it: their sum is "
        "off by {share:.0%}.",
        do.leave_own_half,
        "add them up in float32: after each backward pass master.grad += p.grad.float() and p.grad = None; "
        "opt_level O2 and O5 add them up so",
        of=(is_of("accumulate_grad"),),
    ),
    silent(
        "lost_updates",
        "{op} adds to the buffer {buffer} what {dtype} is too coarse for: {share:.0%} of the numbers stay as "
        "they were. It was cast with the model.",
        *(do.keep_buffer, KEEP_BUFFER),
        of=(has("buffer"),),
    ),
    silent(
        "lost_updates",
        "{op} adds to {dtype} what it is too coarse for: {share:.0%} of the numbers stay as they were.",
        "keep in float32 what it adds to, and what it adds: copy.deepcopy(model).float() for an average "
        "of weights, p.float() there, and inputs of float32 where that average is used",
    ),
    silent(
        "lost_counts",
        "{op} counts in the buffer {buffer}, which was cast with the model: {dtype} holds whole numbers up "
        "to {limit} only, and more is rounded away.",
        *(COUNT_WHOLE, do.keep_buffer),
        of=(has("buffer"),),
    ),
    silent(
        "lost_counts",
        "{op} counts in {dtype}, which holds whole numbers up to {limit} only: more is rounded away.",
        *(do.sum_in_float32, do.keep),
        "count in float32 or in integers (x.long().cumsum(0)), or in a number of Python: "
        "correct += hits.sum().item()",
    ),
    silent(
        "lost_sums",
        "{op} adds to the buffer {buffer}, which was cast with the model: in {dtype} it stays at {have:.5g}, "
        "as {added:.2g} is too small beside that.",
        *(do.keep_buffer, KEEP_BUFFER),
        of=(has("running", True), has("buffer")),
    ),
    silent(
        "lost_sums",
        "{op} adds to a running sum in {dtype}, which stays at {have:.5g}: {added:.2g} is too small beside "
        "that.",
        "sum in float32, or in a number of Python: total += loss.item()",
        of=(has("running", True),),
    ),
    silent(
        "lost_sums",
        "{op} adds one after the other in {dtype}, until each is too small for the sum: it gives {have:.5g} "
        "where float32 has {wanted:.5g}.",
        do.sum_in_float32,
        do.keep,
        "sum in float32: what it adds to, and what it adds",
    ),
    silent(
        "rounding",
        "{op} is off by {error:.2g} times what its numbers differ by: that is lost in what {dtype} rounds, "
        "as where large terms nearly cancel.",
        *(IN_FLOAT32, do.keep, do.keep_makers, do.take_finer),
    ),
    silent(
        "saturated",
        "{op} rounds {share:.0%} of its numbers to 1 in {dtype}, which they are not in float32: their "
        "derivative is 0 then, and nothing learns behind them.",
        *(do.IN_FLOAT32_TOO, do.keep),
        "take a loss on logits, such as binary_cross_entropy_with_logits",
    ),
    silent(
        "collapsed",
        "{op} makes {after} numbers of {before} in {dtype}, which holds whole numbers up to {limit} only: "
        "the buffer {buffer} was cast with the model.",
        *(COUNT_WHOLE, do.cast_in_functions),
        of=(has("buffer"),),
    ),
    silent(
        "collapsed",
        "{op} makes {after} numbers of {before} in {dtype}, which holds whole numbers up to {limit} only: "
        "the opt level casts what the model is given.",
        do.cast_in_functions,
        "give these to the model as integers, in a tensor of their own, which no level casts",
        of=(has("given", True),),
    ),
    silent(
        "collapsed",
        "{op} makes {after} numbers of {before} in {dtype}, which holds whole numbers up to {limit} only.",
        do.keep,
        "keep these in float32, and cast what is computed of them: positions, times, and counts",
    ),
    silent(
        "coarse_angles",
        "{op} is in {dtype}, and the sine of what comes of it takes angles up to {largest:.3g}, which "
        "{dtype} rounds by {error:.2g}: they are noise.",
        do.keep,
        "keep in float32 what this line has in half, up to the sine, and cast what the sine gives",
    ),
    silent(
        "never_stepped",
        "{count} losses in a row are scaled, and no step follows: a scale that is too large never falls.",
        "call scaler.step(optimizer) and scaler.update() after each backward pass, under no condition: "
        "step leaves out by itself what overflows",
    ),
    silent(
        "scaled_not_backpropagated",
        "a block of scale_loss ends without a backward pass of what it yields.",
        "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
        "remove the block",
        of=(is_of("scale_loss"),),
    ),
    silent(
        "scaled_not_backpropagated",
        "a loss is scaled here, and no backward pass came of what {op} returned.",
        "call backward() on the scaled loss: scaler.scale(loss).backward()",
        "remove the line",
    ),
    silent(
        "unscaled_backward",
        "a backward pass of a loss that is not scaled makes gradients that are divided by the loss scale: "
        "they are lost beside the others, and small ones become zero.",
        "scale every loss of a step: scaler.scale(loss).backward(), or with ampatch scaled_loss.backward() "
        "in the block of scale_loss",
        "add the losses first, and scale the sum",
    ),
    silent(
        "late_backward",
        "backward() began at a scaled loss after its block of scale_loss had ended, and nothing of it counts "
        "for the growth of the scale.",
        "move backward() into the block: with amp.scale_loss(loss, optimizer) as scaled_loss: "
        "scaled_loss.backward()",
    ),
    silent(
        "two_scalers",
        "a GradScaler steps an optimizer whose gradients scale_loss scales and unscales.",
        "use one of the two: without the GradScaler, call optimizer.step()",
    ),
    silent(
        "half_after_initialize",
        "float32 weights became half after initialize and have no masters: small updates are lost.",
        "remove this line, as casts need no half weights, or use opt_level O2 or O5, which keep float32 "
        "masters",
    ),
    silent(
        "unknown_optimizer",
        "an optimizer that initialize never saw steps what it made half or scaled.",
        "make the optimizer first, and pass it: amp.initialize(model, optimizer); name it in scale_loss",
    ),
    silent(
        "float32_under_autocast",
        "the cast to float32 has no effect: {runs} casts to half again, by itself.",
        "turn casts off around the lines: with torch.autocast(device, enabled=False): on x.float(), or "
        "with amp.disable_casts():",
        "with ampatch: keep_fp32=[...] for a module",
    ),
    silent(
        "float8_underflow",
        "{share:.0%} of the numbers in the {what} of this layer are 0 in float8, beside the largest, "
        "{largest:.4g}.",
        "keep the layer out of float8: keep_fp32=[...] with its name, or look for what is so large",
        'give each row a scale of its own: float8_recipe="rowwise"',
    ),
    silent(
        "length_alone",
        "a sum of {length} products in float16 reaches {largest:.4g} before it is divided by its length: "
        "float16 holds nothing above 65504.",
        "divide before the sum: (k / n).transpose(-2, -1) @ v, not (k.transpose(-2, -1) @ v) / n",
    ),
)
