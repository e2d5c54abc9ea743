"""What ampatch prints: the lines that people look for in their logs, on rank 0 alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from ampatch.levels.loss_scale import DynamicLossScale
from ampatch.levels.policy import Policy
from ampatch.levels.private import EAGER, NEWEST, OLDEST, explain_missing, is_tested
from ampatch.levels.ranks import find_rank, say
from ampatch.models.float8 import describe
from ampatch.session.request import Opening, SessionListener, device_types
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.steps.outcome import BackwardOutcome

logger = logging.getLogger("ampatch")


class LogFilter(logging.Filter):
    """Lets errors, and what was asked for, pass at verbosity 0; begins lines with the rank, of several."""

    is_silent = False

    def open(self, is_silent: bool, undo: ExitStack) -> None:
        """Filters the log from now on; `undo` receives the way back."""
        if self.is_silent is not is_silent:
            undo.callback(setattr, self, "is_silent", self.is_silent)
            self.is_silent = is_silent
        if self not in logger.filters:
            logger.addFilter(self)
            undo.callback(logger.removeFilter, self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Says whether a record passes, and changes it."""
        if self.is_silent and record.levelno < logging.ERROR and not hasattr(record, "is_asked"):
            return False
        rank = find_rank()
        if rank is not None:
            record.msg = f"rank {rank}: {record.msg}"
        return True


def warn_of_torch() -> None:
    """Logs what a torch that ampatch was not tested on, or that lacks a private name, may change."""
    if not is_tested():
        logger.warning(
            "torch %s: ampatch was tested on torch %s to %s; what it casts may differ: compare with O0, and "
            "check the functions that matter to you with ampatch.testing",
            *(torch.__version__, OLDEST, NEWEST),
        )
    for line in explain_missing(EAGER):
        logger.warning("torch %s has %s", torch.__version__, line)


def format_banner(policy: Policy) -> str:
    """What a call does, in a line, with the options that override the level's defaults."""
    overridden, options = policy.overridden(), policy.options()
    words = [f"Selected optimization level {policy.opt_level}: {policy.summary}"]
    if isinstance(policy.loss_scale, DynamicLossScale) and "loss_scale" not in overridden:
        words.append("dynamic loss scale")
    words += [f"{name}={options[name]} (not {default})" for name, default in overridden.items()]
    return f"{', '.join(words)}; amp.explain(model) says more"


def format_overflow(loss_id: int, before: float, after: float) -> str:
    """The line for one skipped step."""
    scale = f"reducing loss scale to {after}" if after < before else f"keeping loss scale at {after}"
    return f"Gradient overflow.  Skipping step, loss scaler {loss_id} {scale}"


class Announcer(SessionListener):
    """Announces the calls and the overflows of a session; `first_loss` finds the first of a loss's call."""

    def __init__(self, first_loss: Callable[[int], int]) -> None:
        self._first_loss = first_loss
        self.session_closed(None)

    def session_closed(self, _: None) -> None:
        """Lets everything be said again."""
        self._unannounced: list[Sequence[BackwardOutcome]] = []  # of each step what led to it
        self._said_slow = False

    def call_is_set_up(self, opening: Opening) -> None:
        """Says what a call does, and once that float16 is slow on a CPU."""
        policy, verbosity = opening.request.policy, opening.request.verbosity
        if verbosity >= 1:
            say(format_banner(policy))
            if policy.float8_recipe is not None:
                say(describe(opening.request.models))
        is_slow = policy.half is torch.float16 and verbosity and "cpu" in device_types(opening.request)
        if is_slow and not self._said_slow:
            self._said_slow = True
            logger.warning(
                "%s computes in float16, which is slow on a CPU: O4 and O5 (bfloat16) are the fast levels",
                policy.opt_level,
            )

    def step_ended(self, amp: AmpOptimizer) -> None:
        """Says a line if a step was skipped, this one or an earlier one, once the device has told of it.

        As in apex one line for each step of an optimizer, by the first of its blocks that overflowed. A
        loss has the number that scripts know it by: that within its call.
        """
        if amp.call.verbosity < 1:
            return
        if amp.last_outcomes:
            self._unannounced.append(amp.last_outcomes)
        waiting = []
        for outcomes in self._unannounced:
            if None in [outcome.poll() for outcome in outcomes]:
                waiting.append(outcomes)
                continue
            first = next((outcome.loss_id for outcome in outcomes if outcome.read()[0]), None)
            if first is not None:
                of_it = [outcome.read() for outcome in outcomes if outcome.loss_id == first]
                say(format_overflow(first - self._first_loss(first), of_it[0][1], of_it[-1][2]))
        self._unannounced = waiting
