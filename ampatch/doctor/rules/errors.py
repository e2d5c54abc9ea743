"""Errors that end a script: which line raised one, and what to do about those of loss scales."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ampatch.doctor.instruments.places import OURS, SHOWN

FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
ADVICE = {
    "No inf checks were recorded": "step an optimizer only where a backward pass made its gradients: put "
    "scaler.step(optimizer) into the branch that has the backward pass of its loss",
    "called on this optimizer since": "call scaler.unscale_(optimizer) in a pass that steps it and in no "
    "other, and scaler.update() once after each scaler.step: where gradients of several passes are added up, "
    "unscale_, clipping, step and update belong into the same `if`",
    "called after step": "unscale before scaler.step, and call scaler.update() once, after the last step",
    "unscale FP16 gradients": "leave out .half() and dtype=torch.float16 for what is trained: its parameters "
    "in float32 (model.float()), which torch.autocast casts by itself",
    "constraint Simplex()": "give logits=: half rounds probabilities, whose sum is not 1 then; or take the "
    "softmax in float32, F.softmax(x.float(), dim=-1)",
    "BannedFunctionError": "leave out the sigmoid before it, and take nn.BCEWithLogitsLoss: it takes "
    "logits; or give the loss x.float()",
    "but found Half": "compute that line on .float() tensors, under torch.autocast(device, enabled=False); "
    "of a torch.autograd.Function decorate forward with "
    "torch.amp.custom_fwd(device_type=...), and backward with torch.amp.custom_bwd(device_type=...)",
    "is non-finite, so it cannot": "leave out error_if_nonfinite=True: gradients overflow while a loss scale "
    "looks for its size, and scaler.step leaves that step out",
    "Expected more than 1 value per channel": "leave out a batch of one: DataLoader(..., drop_last=True)",
    "called since the last update": "call scaler.update() once a step, after scaler.step",
}


@dataclass(frozen=True, slots=True)
class ScriptError:
    """What ended a run: the error at the end of what it said, the user's line, and what to do about it.

    `is_raised` says that it is an error, and not just an exit status.
    """

    status: int
    text: str
    where: str | None = None
    advice: str = ""
    is_raised: bool = False

    def __str__(self) -> str:
        at = f" (at {self.where})" if self.where else ""
        return f"run ended with status {self.status}: {self.text}{at}"


def read_error(status: int, stderr: str) -> ScriptError:
    """Reads what a process said before it ended."""
    lines = (stderr.strip() or "it said nothing").splitlines()
    error = next((line for line in reversed(lines) if re.match(r"[\w.]+Error\b", line)), "")
    _, _, forward = stderr.partition("Traceback of forward call")  # by torch, of an error in a backward pass
    frames = [
        frame
        for frame in FRAME.findall(forward.partition("Traceback (most")[0] or stderr)
        if not frame[0].startswith(OURS)
    ]
    where = f"{frames[-1][0].removeprefix(SHOWN)}:{frames[-1][1]}" if frames else None
    advice = next((text for part, text in ADVICE.items() if part in error), "")
    return ScriptError(status, error or lines[-1], where, advice, bool(error))
