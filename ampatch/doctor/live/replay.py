"""Does a recorded step again under the instruments, and says what broke."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.doctor.instruments.dispatch import Operations
from ampatch.doctor.instruments.operations import Origin
from ampatch.doctor.instruments.places import unwrap, user_line
from ampatch.doctor.instruments.precision import Oversized
from ampatch.doctor.instruments.tape import Op, Tape
from ampatch.doctor.instruments.trace import Trace
from ampatch.doctor.instruments.values import examine, is_finite, quiet
from ampatch.doctor.live.outcome import Step
from ampatch.doctor.live.record import Backward, Forward, Record, call_at
from ampatch.doctor.live.rerun import Impossible, InFloat32, Rerun
from ampatch.doctor.suspects import find_hidden
from ampatch.levels.ranks import has_ranks

Outcome = tuple[list[Origin], bool | None, list[str], tuple[str, ...]]


def replay(step: Step, models: Sequence[Module], optimizers: Sequence[Optimizer], scale: float) -> Outcome:
    """Returns the origins of a step, whether float32 survives, what is not known, and oversized layers."""
    record = step.record
    unknown: list[str] = []
    origins: list[Origin] = []
    survives, oversized = None, None
    try:
        refuse(record, models)
        with as_it_was(record, models):
            run = Rerun(record, {id(model): unwrap(model) for model in models})
            run.clock.scale, trace = scale, Trace(Tape(run.clock), None)
            try:
                run_again(run, trace)
            finally:
                origins = found_by(trace, step)
        with as_it_was(record, models):
            again = InFloat32(record, models, optimizers)
            trace = Trace(Tape(again.clock), None) if find_hidden(origins) else None
            oversized = Oversized(again.clock)
            run_again(again, trace)
            survives = again.is_finite()
            behind = found_by(trace, step) if trace is not None else []
            origins = [it for it in behind if it.has_reached] + origins
    except Exception as error:  # of the script's own code, or of torch: training goes on
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = "whether float32 survives is not known" if origins else "it could not be replayed"
        unknown.append(f"{what}: {said}")
    if not unknown and not any(it.has_reached for it in origins):
        why = "another rank may have broken it" if has_ranks() else "it drew from elsewhere than torch"
        unknown.append(f"it did not break again when it was replayed: {why}")
    return origins, survives, unknown, tuple(oversized.names if oversized else ())


def refuse(record: Record, models: Sequence[Module]) -> None:
    """Raises Impossible for what a replay would get wrong, or other ranks would have to join."""
    if not record.of(Forward):
        raise Impossible("no forward of a watched model came before it: watch what is called as model(...)")
    if any(tensor._version != version for tensor, version in record.slots.given):
        raise Impossible("what the step took was written to before its end")
    modules = [each for model in models for each in model.modules()]
    are_sharded = any("FullyShardedDataParallel" in type(each).__name__ for each in modules)
    if are_sharded or any(hasattr(p, "to_local") for model in models for p in model.parameters()):
        raise Impossible("weights are distributed over ranks, and a replay would need all of them")
    if any(isinstance(each, torch.nn.SyncBatchNorm) and each.training for each in modules):
        raise Impossible("SyncBatchNorm computes over all ranks, and a replay is of one")


@contextmanager
def as_it_was(record: Record, models: Sequence[Module]) -> Iterator[None]:
    """Has models and generators be what they were before a step; afterwards all is as it is now."""
    devices = {p.device for model in models for p in model.parameters() if p.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        for state in record.state.values():
            stack.enter_context(state.restored())
        parameters = [parameter for model in models for parameter in model.parameters()]
        for parameter in parameters:
            stack.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        stack.enter_context(record.weights.restored())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        yield


def run_again(run: Rerun, trace: Trace | None) -> None:
    """Does a step again, which a trace follows."""
    with run.clock.undo:
        run.clock.follow_modules()
        if trace is not None:
            Operations(trace.tape, [trace]).follow()
        run.run()


def found_by(trace: Trace, step: Step) -> list[Origin]:
    """Returns the origins that a trace found."""
    if (optimizer := step.optimizer()) is not None:
        with quiet():
            trace.end_attempt(optimizer)
    origins = trace.found()
    if not step.record.slots.is_whole and not any(it.has_reached for it in origins):
        origins += of_unseen_loss(step.record)
    return origins


def of_unseen_loss(record: Record) -> list[Origin]:
    """Says that the loss broke, where its operations were not seen: what came back of it is bad."""
    for event in record.of(Backward):
        if not is_finite(event.value):
            call = Op("", "loss", None, call_at(event.frames, user_line), str(event.value.dtype)[6:])
            return [Origin(call, "loss", examine(event.value), 0, has_reached=True)]
    return []
