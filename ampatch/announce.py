"""What ampatch prints: the lines that people look for in their logs, on rank 0 alone."""

from __future__ import annotations

import logging

import torch

from ampatch.policy import Policy, find_level

logger = logging.getLogger("ampatch")


def say(text: str) -> None:
    """Prints a line on rank 0."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0:
        return
    print(text, flush=True)


def format_banner(policy: Policy) -> str:
    """The options of a policy, with those that override the level's defaults marked."""
    defaults = find_level(policy.opt_level).options()
    lines = [f"Selected optimization level {policy.opt_level}: {policy.summary}"]
    for name, value in policy.options().items():
        mark = "" if value == defaults[name] else f"  (overrides {defaults[name]})"
        lines.append(f"  {name:<27}: {value}{mark}")
    return "\n".join(lines)


def format_overflow(loss_id: int, before: float, after: float) -> str:
    """The line for one skipped step."""
    scale = f"reducing loss scale to {after}" if after < before else f"keeping loss scale at {after}"
    return f"Gradient overflow.  Skipping step, loss scaler {loss_id} {scale}"
