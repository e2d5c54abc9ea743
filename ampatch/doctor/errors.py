"""Errors that a script raises by itself: which line raised one, and what to do about those of loss scales."""

from __future__ import annotations

import re

from ampatch.doctor.instruments.places import OURS, SHOWN

FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
ADVICE = {
    "No inf checks were recorded": "step an optimizer only where a backward pass made its gradients: put "
    "scaler.step(optimizer) into the branch that has the backward pass of its loss",
    "called on this optimizer since": "unscale each optimizer once a step, and call scaler.update() in each "
    "step, after the last scaler.step and under no condition",
    "called after step": "unscale before scaler.step, and call scaler.update() once, after the last step",
    "unscale FP16 gradients": "leave out .half() and dtype=torch.float16 for what is trained: its parameters "
    "in float32 (model.float()), which torch.autocast casts by itself",
    "constraint Simplex()": "give logits=: half rounds probabilities, whose sum is not 1 then; or take the "
    "softmax in float32, F.softmax(x.float(), dim=-1)",
    "but found Half": "compute that line on .float() tensors, under torch.autocast(device, enabled=False); "
    "of a torch.autograd.Function decorate forward with "
    "torch.amp.custom_fwd(device_type=...), and backward with torch.amp.custom_bwd(device_type=...)",
    "is non-finite, so it cannot": "leave out error_if_nonfinite=True: gradients overflow while a loss scale "
    "looks for its size, and scaler.step leaves that step out",
    "Expected more than 1 value per channel": "leave out a batch of one: DataLoader(..., drop_last=True)",
    "called since the last update": "call scaler.update() once a step, after scaler.step",
}


def describe_error(said: str) -> str:
    """Returns the error at the end of what a process said, with the user's line, and what to do about it."""
    lines = (said.strip() or "it said nothing").splitlines()
    error = next((it for it in reversed(lines) if re.match(r"[\w.]+Error\b", it)), lines[-1])
    _, _, forward = said.partition("Traceback of forward call")  # by torch, of an error in a backward pass
    frames = [
        it
        for it in FRAME.findall(forward.partition("Traceback (most")[0] or said)
        if not it[0].startswith(OURS)
    ]
    where = f" (at {frames[-1][0].removeprefix(SHOWN)}:{frames[-1][1]})" if frames else ""
    advice = next((text for part, text in ADVICE.items() if part in error), "")
    return f"{error}{where}" + (f"\n  -> {advice}" if advice else "")
