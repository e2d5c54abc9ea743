"""Calls of `initialize`, trainers and ranks that work, and train wrongly."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from ampatch.casts.cast import CASTS
from ampatch.watching.misuse.warner import Warner

if TYPE_CHECKING:
    from ampatch.session.request import Request
    from ampatch.steps.optimizer import AmpOptimizer


def check_ranks(warner: Warner, amp: AmpOptimizer) -> None:
    """Warns of ranks that may not skip a step together, whose gradients nobody averages; no host sync."""
    if amp.list_groups():
        return
    if hasattr(amp.find_given(), "averager"):  # PostLocalSGDOptimizer, whose ranks are to step alone
        return
    if torch.distributed.get_world_size() > 1:
        warner.warn(
            "ranks",
            f"{type(amp.optimizer).__name__}: nothing makes the ranks skip a step together, as the model is "
            f"in no DistributedDataParallel and its parameters are on no device mesh: if ranks average "
            f"gradients by hand, or hold stages of a model, pass initialize(process_group=...), the group of "
            f"these ranks; if each trains a model of its own, ignore this",
        )


# Where the wrapper that a trainer puts around an optimizer says the trainer's own precision, and its remedy.
_TRAINERS = {
    "accelerator_state.mixed_precision": "Accelerator(mixed_precision='no'), or TrainingArguments without "
    "fp16 and bf16",
    "_strategy.precision_plugin.precision": "Trainer(precision='32-true')",
    "_strategy.precision.precision": "Fabric(precision='32-true')",
}


def check_trainer(warner: Warner, wrapper: object) -> None:
    """Warns of a trainer that casts and scales as well, by the wrapper of its optimizer."""
    for path, remedy in _TRAINERS.items():
        try:
            precision = attrgetter(path)(wrapper)
        except AttributeError:
            continue
        if precision not in ("no", "32-true", "64-true"):
            warner.warn(
                "trainer",
                f"two mixed precisions meet: the trainer of this {type(wrapper).__name__} has its own, "
                f"{precision!r}, beside that of ampatch: each casts what the other one has cast, and "
                f"gradients may be scaled twice: write {remedy}, or pass initialize(enabled=False)",
            )


def check_request(warner: Warner, request: Request, amps: Sequence[AmpOptimizer]) -> None:
    """Warns of a call of `initialize` that works, and trains wrongly."""
    policy = request.policy
    if CASTS.half is not None and not policy.patch_torch_functions and hasattr(sys, "ps1"):  # of a prompt
        warner.warn(
            "levels",
            f"{policy.opt_level} patches no functions, but outside of its models those that an earlier "
            f"initialize patched go on casting to {CASTS.half}: call ampatch.uninitialize() first, unless "
            f"both train side by side",
        )
    params = [param for model in request.models for param in model.parameters() if param.is_floating_point()]
    if policy.half is not None and params and all(param.dtype is torch.float64 for param in params):
        warner.warn(
            "float64",
            f"the model is float64, which {policy.opt_level} does not cast: call model.float() before "
            f"initialize",
        )
    optimizers = [amp.optimizer for amp in amps if policy.is_pure_half and policy.half is torch.float16]
    for optimizer, group in [(one, group) for one in optimizers for group in one.param_groups]:
        if _loses_eps(optimizer, group):
            warner.warn(
                "eps",
                f"eps={group['eps']} of {type(optimizer).__name__} is 0 in float16, the type of its "
                f"steps, and small gradients make it divide by 0: pass eps=1e-4, or use opt_level='O2'",
            )


def _loses_eps(optimizer: Optimizer, group: dict) -> bool:
    """Whether the eps of a group is 0 in float16; fused kernels add it in float32, others may do so."""
    eps = group.get("eps")
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    if not is_torchs or group.get("fused") or not isinstance(eps, float) or eps == 0:
        return False
    has_half = any(param.dtype is torch.float16 for param in group["params"])
    return has_half and abs(eps) <= 2.0**-25  # which is rounded to 0
