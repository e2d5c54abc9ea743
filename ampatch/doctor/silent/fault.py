"""A silent fault: all numbers stay finite, no step is skipped, and the training is wrong nevertheless."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Site
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.suspects import is_flat
from ampatch.doctor.text.source import pasted

MOST_SHOWN = 5
STUCK = 0.97  # of what is updated stays as it was: a fault in any case
# Kinds, by what else tells of them.
EXPLAINED = {"scaled_not_backpropagated": "late_backward", "not_unscaled": "never_stepped"}
# Numbers break of these.
MISUSES = ("not_unscaled", "ignored_edits", "unscaled_twice", "never_stepped", "lost_state", "scaled_penalty")
MISUSES += ("not_zeroed", "stepped_twice")
COLON = re.compile(r": (?=(?:[^`]*`[^`]*`)*[^`]*$)")  # that is in no code

# By kind: why, with the numbers of the fault, and what to do. A gradient that underflows has words of its
# own, as has a block of `scale_loss`.
WORDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "zeros": (
        "{op} overflowed in {dtype} (its largest input is {input_largest:.4g}), and what takes the inf makes "
        "{zeros:.0%} zeros of it: float32 has numbers up to {float32_largest:.3g} there.",
        (
            "compute the line in float32, with `x = x.float()` before it, and let its result stay float32",
            "divide by the largest magnitude before the square, and take it out again after the root",
            "use torch.nn.functional.rms_norm or layer_norm, which compute in float32 inside",
        ),
    ),
    "underflow": (
        "{op} made zeros in {dtype} of numbers that are too small for it (its largest input is "
        "{input_largest:.4g}), and what follows has {share:.0%} of its numbers far from those of float32, "
        "which go up to {float32_largest:.3g}.",
        (
            "compute the line in float32, with `x = x.float()` before it, and let its result stay float32",
            "multiply before the product or square, and divide after it",
            "an eps that the type can hold: float16 makes 0 of what is below 3e-8",
        ),
    ),
    "gradient": (
        "at a loss scale of {scale:g} float16 makes zeros of {lost:.0%} of the gradient that are none in "
        "float32; {share:.0%} of it are lost or far off, {subnormals:.0%} subnormal.",
        (
            "start with init_scale={init_scale}, the largest at which nothing overflows here",
            "with another loss: take a mean over fewer elements, or multiply it",
            "opt_level O4 (bfloat16), whose range is that of float32",
        ),
    ),
    "clipped_while_scaled": (
        "gradients are clipped at {limit:g} while they are multiplied by the loss scale ({scale:g}): the "
        "limit that holds is {limit:g} / {scale:g}.",
        (
            "call scaler.unscale_(optimizer) before it; scaler.step then does not unscale again",
            "with ampatch: clip amp.master_params(optimizer) after the block of scale_loss",
        ),
    ),
    "unscaled_twice": (
        "gradients are divided by the loss scale that were divided by it before: they are too small by "
        "that factor.",
        (
            "call unscale_ once for each optimizer and step, after the last backward pass; one scaler for it",
            "when accumulating, unscale after the last micro-step alone, and update the scaler once a step",
        ),
    ),
    "not_unscaled": (
        "{op} uses gradients that are still multiplied by the loss scale ({scale:g}).",
        (
            "call scaler.unscale_(optimizer) before gradients are read or changed",
            "step with scaler.step(optimizer), which unscales; with ampatch after the block of scale_loss",
        ),
    ),
    "stepped_twice": (
        "gradients are stepped that a step has used already, and no backward pass was between.",
        ("take one of the two steps away: scaler.step(optimizer) steps by itself, where nothing overflowed",),
    ),
    "stale_weights": (
        "the step is made inside of torch.autocast, which goes on with the half weights that it cast before.",
        ("have the block of torch.autocast end before backward() and step(): forward and loss alone in it",),
    ),
    "no_gradients": (
        "no parameter of the optimizer has a gradient, and those of the model that have one are others.",
        ("make the optimizer of model.parameters() after the last of its layers is replaced",),
    ),
    "not_zeroed": (
        "gradients are added to those of the step before: nothing has made them 0 since.",
        ("call optimizer.zero_grad() in each step, before the backward pass",),
    ),
    "scaled_penalty": (
        "a penalty is made of gradients that are multiplied by the loss scale.",
        ("divide them by scaler.get_scale() before the penalty is made of them",),
    ),
    "lost_state": (
        "{lost} second moments (exp_avg_sq) are 0 where the first are not, as in a checkpoint in half: the "
        "optimizer divides by its eps there.",
        (
            "save the optimizer's state in float32: leave out what casts it before it is saved",
            "leave out this load_state_dict: the optimizer begins anew",
        ),
    ),
    "lost_steps": (
        "the step leaves {share:.0%} of the weights in {dtype} as they are that have a gradient: {dtype} is "
        "too coarse for it.",
        (
            "keep what is trained in float32: model.float() under torch.autocast, or opt_level O2 or O5, "
            "which step float32 masters",
        ),
    ),
    "collapsed": (
        "{op} makes {after} numbers of {before} in {dtype}, which holds whole numbers up to {limit} alone.",
        ("keep these in float32, and cast what is computed of them: positions, times, and counts",),
    ),
    "lost_updates": (
        "{op} adds to {dtype} what it is too coarse for: {share:.0%} of the numbers stay as they were.",
        (
            "keep in float32 what it adds to, and what it adds: copy.deepcopy(model).float() for an average "
            "of weights, and p.float() there",
        ),
    ),
    "never_stepped": (
        "{count} losses in a row are scaled, and no step follows: a scale that is too large never falls.",
        (
            "call scaler.step(optimizer) and scaler.update() after each backward pass, under no condition: "
            "step leaves out by itself what overflows",
        ),
    ),
    "scaled_not_backpropagated": (
        "a loss is scaled here, and no backward pass came of what {op} returned.",
        ("call backward() on the scaled loss: scaler.scale(loss).backward()", "or take the line away"),
    ),
    "scale_loss": (
        "a block of {op} ends without a backward pass of what it yields.",
        (
            "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
            "or take the block away",
        ),
    ),
    "unscaled_backward": (
        "a backward pass of a loss that is not scaled makes gradients that are divided by the loss scale: "
        "they are lost beside the others, and small ones become zero.",
        (
            "scale every loss of a step: scaler.scale(loss).backward()",
            "or add the losses first, and scale the sum",
        ),
    ),
    "float32_under_autocast": (
        "the cast to float32 has no effect: {runs} casts to half again, by itself.",
        (
            "turn casts off around the lines: with torch.autocast(device, enabled=False): on x.float(), or "
            "with amp.disable_casts():",
            "with ampatch: keep_fp32=[...] for a module",
        ),
    ),
    "float8_underflow": (
        "{share:.0%} of the numbers in the {what} of this layer are 0 in float8, beside the largest, "
        "{largest:.4g}.",
        (
            "keep the layer out of float8: keep_fp32=[...] with its name, or look for what is so large",
            'give each row a scale of its own: float8_recipe="rowwise"',
        ),
    ),
    "length_alone": (
        "a sum of {length} products in float16 reaches {largest:.4g} before it is divided by its length: "
        "float16 holds nothing above 65504.",
        ("divide before the sum: (k / n).transpose(-2, -1) @ v, not (k.transpose(-2, -1) @ v) / n",),
    ),
}


@dataclass(frozen=True, slots=True)
class SilentFault:
    """One silent fault, of a kind that `WORDS` explains.

    `numbers` are what was measured, by name; `steps` are those at which it was seen.
    """

    kind: str
    step: int | None
    phase: str
    model: str | None
    module: str
    parameter: str | None
    op: str
    where: str | None
    numbers: dict[str, object] = field(default_factory=dict)
    steps: tuple[int, ...] = ()
    why: str = ""
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is a fault if what follows makes it one."""

    kind: str
    site: Site
    numbers: dict[str, object] = field(default_factory=dict)


class Notes:
    """What was found in one run: each fault once, with the attempts at which it was seen."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._found: dict[tuple[object, ...], tuple[SilentFault, list[int]]] = {}

    def add(self, kind: str, site: Site, attempt: int | None = None, **numbers: object) -> None:
        """Notes a fault, at the present attempt unless another is given."""
        attempt = self._clock.attempt if attempt is None else attempt
        phase, where, op, place = site
        model, module = (None, "") if place is None else (place.model, place.module)
        fault = SilentFault(kind, attempt, phase, model, module, None, op, where, numbers)
        attempts = self._found.setdefault((kind, where, op, module), (fault, []))[1]
        if attempt not in attempts:
            attempts.append(attempt)

    def confirm(self, suspicion: Suspicion, **numbers: object) -> None:
        """Notes what is a fault by now."""
        self.add(suspicion.kind, suspicion.site, **suspicion.numbers, **numbers)

    def found(self) -> tuple[SilentFault, ...]:
        """Returns the faults; their steps are attempts as yet."""
        return tuple(replace(fault, steps=tuple(attempts)) for fault, attempts in self._found.values())


# ---- In words ----


def explain(fault: SilentFault) -> SilentFault:
    """Returns the fault with its reason, and what to change, the likeliest first."""
    if "said" in fault.numbers:  # by the library: what is wrong, and after the colon what to do
        *why, advice = COLON.split(str(fault.numbers["said"]))
        return replace(fault, why=": ".join(why) + ".", remedies=(advice,))
    of_gradient = "gradient" if "init_scale" in fault.numbers else fault.kind
    of_step = "lost_steps" if (fault.kind, fault.op) == ("lost_updates", "step") else of_gradient
    why, remedies = WORDS["scale_loss" if fault.op == "scale_loss" else of_step]
    if fault.kind == "not_unscaled" and fault.op == "step":
        remedies = remedies[::-1]
    if region := fault.numbers.get("region"):
        remedies = (pasted(region), *remedies[1:])
    exponent = math.frexp(fault.numbers.get("init_scale", 1.0))[1] - 1
    remedies = tuple(text.replace("{init_scale}", f"2.0**{exponent}") for text in remedies)
    return replace(fault, why=why.format(op=fault.op, **fault.numbers), remedies=remedies)


def describe_silent(
    faults: Sequence[SilentFault], title: str = "Silent faults, which skip no step"
) -> Iterator[str]:
    """Yields the lines of a terminal; parameters of one kind and line stand together."""
    groups: dict[tuple[str, str, str | None], list[SilentFault]] = {}
    for fault in faults:
        groups.setdefault((fault.phase, fault.kind, fault.where), []).append(fault)
    if groups:
        yield f"{title}: {len(groups)}"
    for first, *others in list(groups.values())[:MOST_SHOWN]:
        module = f" in {first.model}.{first.module}".rstrip(".") if first.model else ""
        subject = first.parameter or first.op
        yield f"Step {first.step}, {first.kind}: {subject}{module}, {first.where or 'line unknown'}"
        yield f"  {first.why}"
        if others:
            names = [str(it.parameter or it.op) for it in others]
            more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
            yield f"  the same of {', '.join(names[:MOST_SHOWN])}{more}"
        yield from (f"  -> {remedy}" for remedy in first.remedies)
    if len(groups) > MOST_SHOWN:
        yield f"... and {len(groups) - MOST_SHOWN} more (--json OUT has them all)"


def examine_silent(
    found: Sequence[SilentFault], attempts: Sequence[Attempt], findings: Sequence[object]
) -> tuple[SilentFault, ...]:
    """Returns the silent faults with their words, but for those whose line has a finding."""
    loud = {getattr(finding, "where", None) for finding in findings}
    faults = merge_faults(found, attempts)
    kinds = {fault.kind for fault in faults}
    return tuple(
        explain(fault)
        for fault in faults
        if (fault.phase != "forward" or fault.where not in loud) and EXPLAINED.get(fault.kind) not in kinds
        if fault.kind != "lost_updates" or fault.numbers["share"] > STUCK or is_flat(attempts)
    )


def merge_faults(found: Sequence[SilentFault], attempts: Sequence[Attempt]) -> list[SilentFault]:
    """Returns what several runs found, the same once, at the steps of their attempts."""
    merged: dict[tuple[object, ...], SilentFault] = {}
    for one in found:
        key = (one.kind, one.where, one.op, one.module, one.parameter)
        before = merged[key].steps if key in merged else ()
        steps = (attempts[it].step if it < len(attempts) else it for it in one.steps)
        all_steps = tuple(sorted({*before, *steps}))
        merged[key] = replace(one, step=min(all_steps, default=None), steps=all_steps)
    return sorted(merged.values(), key=lambda it: -1 if it.step is None else it.step)
