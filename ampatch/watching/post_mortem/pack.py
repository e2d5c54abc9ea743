"""What goes into a post-mortem: plain values and tensors alone, which `weights_only` reads."""

from __future__ import annotations

import platform
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Module

from ampatch.levels.policy import Policy
from ampatch.levels.ranks import has_ranks
from ampatch.watching.alarms.history import ScaleHistory
from ampatch.watching.alarms.inputs import LastForward
from ampatch.watching.post_mortem.measure import Facts, find_values, measure, measure_all

FORMAT, VERSION = "ampatch post-mortem", 1
MOST_BYTES = 16 * 2**20  # of the batch's values
MOST_TENSORS = 2000  # whose ranges are kept
MOST_LEAVES = 200  # of a batch
MOST_CHARACTERS = 200


def pack(
    alarm: dict[str, object],
    history: ScaleHistory,
    policy: Policy,
    models: Sequence[tuple[Module, LastForward]],
) -> dict[str, object]:
    """Returns what is known at a step about a loss and its models; many host syncs."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "alarm": alarm,
        "history": pack_history(history),
        "opt_level": policy.opt_level,
        "options": {name: str(value) for name, value in policy.options().items()},
        "models": [pack_model(model, forward) for model, forward in models],
        "random": pack_random(),
        "where": describe_place(),
    }


def pack_history(history: ScaleHistory) -> dict[str, object]:
    """Returns a history; its updates as rows of step, scale, next scale, skipped, loss is finite."""
    rows = [[it.step, it.scale, it.next_scale, it.skipped, it.loss_is_finite] for it in history]
    counts = {"steps": history.steps, "skipped": history.skipped, "forgotten": history.forgotten}
    return {"loss_id": history.loss_id, **counts, "updates": rows}


def pack_model(model: Module, forward: LastForward) -> dict[str, object]:
    """Returns the ranges of a model's weights and gradients, and what its last forward was given."""
    named = list(model.named_parameters())
    grads = [(name, param.grad) for name, param in named if param.grad is not None]
    return {
        "name": type(model).__name__,
        "weights": measure_all(named, MOST_TENSORS),
        "gradients": measure_all(grads, MOST_TENSORS),
        "batch": pack_batch(forward),
        "random": {name: state.clone() for name, state in forward.random.items()},
    }


def pack_batch(forward: LastForward) -> list[Facts]:
    """Returns what a forward was given, each tensor with its facts; the first samples where it is large."""
    leaves = [*_name_leaves("args", forward.args), *_name_leaves("kwargs", forward.kwargs)][:MOST_LEAVES]
    left, found = MOST_BYTES, []
    for name, leaf in leaves:
        if isinstance(leaf, Tensor):
            facts = measure(name, leaf)
            values = cut(leaf, left)
            if values is not None:
                facts["values"] = values
                left -= values.nbytes
            found.append(facts)
        else:
            found.append({"name": name, "value": _plain(leaf)})
    return found


def cut(tensor: Tensor, most: int) -> Tensor | None:
    """Returns the values of a tensor on the host, as many samples as fit into so many bytes, or None."""
    values = find_values(tensor) if not tensor.is_complex() else tensor.detach()
    if values is None or tensor.is_sparse:
        return None
    if values.nbytes > most:
        count = most // (values[0].nbytes or 1) if values.dim() and len(values) else 0
        if not count:
            return None
        values = values[:count]
    return values.cpu().clone(memory_format=torch.contiguous_format)  # or all of a view's memory is saved


def _name_leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    """What is in tuples, lists and dicts, such as `args[0]` and `kwargs['mask']`."""
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value[:MOST_LEAVES]):
            yield from _name_leaves(f"{name}[{index}]", item)
    elif isinstance(value, Mapping):
        for key, item in list(value.items())[:MOST_LEAVES]:
            yield from _name_leaves(f"{name}[{_plain(key)!r}]", item)
    else:
        yield name, value


def _plain(value: object) -> object:
    """Returns a value that any reader knows, or else the name of its type."""
    if value is None or type(value) in (bool, int, float):
        return value
    return value[:MOST_CHARACTERS] if type(value) is str else f"<{type(value).__name__}>"


def pack_random() -> dict[str, object]:
    """Returns the states of Python's and NumPy's random numbers, as they are now."""
    found: dict[str, object] = {"python": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        name, keys, *rest = numpy.get_state()
        found["numpy"] = (name, keys.tolist(), *rest)
    return found


def describe_place() -> dict[str, object]:
    """Returns what ran, when, and where."""
    devices = [torch.cuda.get_device_name()] if torch.cuda.is_initialized() else []
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "script": str(sys.argv[0])[:MOST_CHARACTERS] if sys.argv else "",
        "ampatch": sys.modules["ampatch"].__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": devices[0] if devices else platform.machine(),
        "rank": torch.distributed.get_rank() if has_ranks() else 0,
        "ranks": torch.distributed.get_world_size() if has_ranks() else 1,
    }
