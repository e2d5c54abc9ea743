"""What is left on disk of the step at which training broke; `ampatch doctor --open` reads it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from ampatch.casts.cast_tree import cast_tree
from ampatch.errors import AmpTypeError
from ampatch.levels.policy import Policy
from ampatch.levels.private import unwrap
from ampatch.levels.ranks import has_ranks
from ampatch.patching.torch_features import BeforeGraph
from ampatch.watching.alarms.history import ScaleHistory

logger = logging.getLogger("ampatch")
FORMAT, VERSION = "ampatch post-mortem", 1
VARIABLE = "AMPATCH_POST_MORTEM"  # a folder, or 0 for none
FOLDER = "ampatch-post-mortem"  # in the current folder of the process, for who names none
MOST_FILES = 16  # in a folder: the oldest of ours go
OFF = ("0", "", "off", "no", "false")
MOST_BYTES = 16 * 2**20  # of the batch's values
MOST_TENSORS = 2000  # whose ranges are kept
MOST_LEAVES = 200  # of a batch
MOST_CHARACTERS = 200
Facts = dict[str, object]


def parse_post_mortem(value: object) -> Path | None:
    """Reads what a user may pass as `post_mortem`: the folder to write to, None for nowhere.

    None is the folder that the environment names; True as well, or else `ampatch-post-mortem`.
    """
    if value is False:
        return None
    if value is True or value is None:
        named = os.environ.get(VARIABLE, FOLDER if value else "")
        return None if named.lower() in OFF else Path(named)
    if isinstance(value, (str, os.PathLike)):
        return Path(value)
    raise AmpTypeError(f"post_mortem is {value!r}: expected True, False or a folder to write to")


# ---- What a model was given ----


class LastForward(BeforeGraph):
    """Keeps what a model's last forward was given, until the step; a forward pre-hook with kwargs.

    Tensors are referred to, not copied, and without their graph, so that no other model is kept alive; the
    state of the random numbers is that from before the forward. A forward without gradients leaves nothing
    here. A deep copy or a pickled model has a hook that keeps nothing.
    """

    def __init__(self, is_on: bool = True) -> None:
        self._is_on = is_on
        self.drop()

    def __reduce__(self) -> tuple:
        return LastForward, (False,)

    def drop(self) -> None:
        """Forgets it."""
        self.args: tuple = ()
        self.kwargs: dict = {}
        self.random: dict[str, Tensor] = {}

    def __call__(self, module: Module, args: tuple, kwargs: dict) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.refresh(args, kwargs)

    def refresh(self, args: tuple, kwargs: dict) -> None:
        """Takes what a forward is given."""
        if not self._is_on or not torch.is_grad_enabled():
            return
        self.random = _read_random(args or tuple(kwargs.values()))
        self.args, self.kwargs = cast_tree(args, _without_graph), cast_tree(kwargs, _without_graph)


def _without_graph(tensor: Tensor) -> Tensor:
    """Detaches a tensor; in `torch.func`, whose transforms end with the forward, what lies underneath."""
    tensor = unwrap(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def _read_random(values: tuple) -> dict[str, Tensor]:
    """The state of the generator that a forward draws from: that of the first tensor's device."""
    for one in values:
        if isinstance(one, Tensor) and one.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return {}
            return {str(one.device): torch.cuda.default_generators[one.device.index].get_state()}
    return {"cpu": torch.random.default_generator.get_state()}


# ---- What goes into a file: plain values and tensors, which `weights_only` reads ----


def pack(
    alarm: dict[str, object],
    history: ScaleHistory,
    policy: Policy,
    forwards: Mapping[Module, LastForward],
) -> dict[str, object]:
    """Returns what is known at a step about a loss and its models; many host syncs."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "alarm": alarm,
        "history": pack_history(history),
        "opt_level": policy.opt_level,
        "options": {name: str(value) for name, value in policy.options().items()},
        "models": [pack_model(model, forward) for model, forward in forwards.items()],
        "random": pack_random(),
        "where": describe_place(),
    }


def pack_history(history: ScaleHistory) -> dict[str, object]:
    """Returns a history; its updates as rows of step, scale, next scale, skipped, loss is finite."""
    rows = [
        [outcome.step, outcome.scale, outcome.next_scale, outcome.skipped, outcome.loss_is_finite]
        for outcome in history
    ]
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
    left, packed = MOST_BYTES, []
    for name, leaf in leaves:
        if isinstance(leaf, Tensor):
            facts = measure(name, leaf)
            values = cut(leaf, left)
            if values is not None:
                facts["values"] = values
                left -= values.nbytes
            packed.append(facts)
        else:
            packed.append({"name": name, "value": _plain(leaf)})
    return packed


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
    packed: dict[str, object] = {"python": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        name, keys, *rest = numpy.get_state()
        packed["numpy"] = (name, keys.tolist(), *rest)
    return packed


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


# ---- What there is to say about tensors in few numbers ----


def find_values(tensor: Tensor) -> Tensor | None:
    """Returns the values that this process holds: local ones of a DTensor, those of a sparse tensor.

    None for tensors of which nobody knows that looking at them asks no other rank.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor._values()
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not is_plain or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@torch.no_grad()
def measure(name: str, tensor: Tensor) -> Facts:
    """Returns the facts of a tensor; some host syncs.

    `least` and `largest` are those of the finite values; `sample` is the first index along the first
    dimension that holds inf or NaN.
    """
    facts: Facts = {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    values = find_values(tensor)
    if values is None or not values.numel():
        return facts
    values = values.float() if values.element_size() == 1 else values  # of bool and float8 torch lacks these
    least, largest = torch.aminmax(values)  # NaN if there is one
    if not torch.isfinite(least) & torch.isfinite(largest):
        broken, nans = ~torch.isfinite(values), int(torch.isnan(values).sum())
        facts |= {"nan": nans, "inf": int(broken.sum()) - nans}
        if values.dim():
            facts["sample"] = int(broken.reshape(len(broken), -1).any(1).nonzero()[0])
        values = values[~broken]
        if not values.numel():
            return facts
        least, largest = torch.aminmax(values)
    return facts | {"least": least.item(), "largest": largest.item()}


def measure_all(named: Iterable[tuple[str, Tensor]], most: int) -> list[Facts]:
    """Returns the facts of tensors, of `most` at the most: those that are not finite come first."""
    ranges = [measure(name, tensor) for name, tensor in named]
    return sorted(ranges, key=lambda facts: not (facts.get("nan") or facts.get("inf")))[:most]


# ---- Files: whole or not at all, in a folder that stays small ----


def write(folder: Path, rank: int, gather: Callable[[], object]) -> Path | None:
    """Writes what `gather` returns into a new file; returns its path, or None and logs why there is none."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)  # one reading: two may stand a second apart
    moment = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(seconds))}-{nanoseconds:09d}"
    path = folder / f"post-mortem-{moment}-rank{rank}-{os.getpid()}.pt"
    part = path.with_suffix(".part")
    try:
        torch.save(gather(), buffer := io.BytesIO())
        folder.mkdir(0o700, parents=True, exist_ok=True)
        with open(part, "xb", opener=open_private) as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except Exception as error:  # a full disk, or a device that has no memory left
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        kind = type(error).__name__
        logger.error("no post-mortem was written to %s: %s: %s; training goes on", folder, kind, error)
        return None
    remove_oldest(folder, path)
    return path.absolute()


def open_private(path: str, flags: int) -> int:
    """Opens a file that others cannot read: it holds data of a batch."""
    return os.open(path, flags, 0o600)


def remove_oldest(folder: Path, newest: Path) -> None:
    """Leaves so many of our files, and of what processes that were killed left unfinished.

    Those stay whose times are nearest to that of the newest: a clock that went back makes it the oldest.
    """
    with contextlib.suppress(OSError):
        paths = [path for end in ("pt", "part") for path in folder.glob(f"post-mortem-*-rank*.{end}")]
        now = newest.stat().st_mtime_ns
        for path in sorted(paths, key=lambda path: abs(path.stat().st_mtime_ns - now))[MOST_FILES:]:
            path.unlink(missing_ok=True)
