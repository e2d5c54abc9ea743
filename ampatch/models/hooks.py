"""The hooks that ampatch puts on modules: small objects that pickle, copy and print."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.loss import _Loss

from ampatch.casts.cast import CASTS, PendingGraph
from ampatch.casts.cast_tree import cast_batch, cast_call, cast_object, cast_to, cast_tree
from ampatch.casts.thread import OpenForward, Rounded
from ampatch.errors import AmpValueError
from ampatch.levels.precision import HALF_TYPES
from ampatch.models.cast_tensor import CastModule, Float32Values, own_tensors


def find_dtype(dtype: torch.dtype | None, weight: Tensor | None) -> torch.dtype | None:
    """What a half module computes in: None once somebody has cast its weight to float32."""
    return None if weight is not None and weight.dtype not in HALF_TYPES else dtype


@dataclass(frozen=True, slots=True)
class CastInputs:
    """Casts a module's floating inputs, in any container; a forward pre-hook with kwargs.

    On a deep copy or a pickled model it follows the weights, which their owner may cast to float32; on the
    model itself one of them, `weight`, for whoever calls `model.float()`. Who puts it onto the successor of a
    module, as torch.ao.quantization does, may leave kwargs out.
    """

    dtype: torch.dtype
    is_copy: bool = False
    weight: Tensor | None = field(default=None, compare=False)

    def __reduce__(self) -> tuple:
        return type(self), (self.dtype, True)

    def __call__(self, module: Module, args: tuple, kwargs: dict | None = None) -> tuple | None:
        dtype = self.find_dtype(module)
        if dtype is None:
            return None
        return cast_call(args, kwargs, dtype, cast_object(dtype))

    def find_dtype(self, module: Module) -> torch.dtype | None:
        """What the inputs are cast to; in a copy as its weights are, None if they are not half any more."""
        if not self.is_copy:
            return find_dtype(self.dtype, self.weight)
        tensors = itertools.chain(module.parameters(), module.buffers())
        half = (tensor.dtype for tensor in tensors if tensor.dtype in HALF_TYPES)
        return next(half, None if self.dtype in HALF_TYPES else self.dtype)


@dataclass(frozen=True, slots=True)
class CastEntry(CastInputs):
    """Casts what comes to a half module inside of a model, where another one is kept in float32.

    Objects of unknown classes stay: inside a model these are no batches.
    """

    def __call__(self, module: Module, args: tuple, kwargs: dict | None = None) -> tuple | None:
        dtype = self.find_dtype(module)
        is_usual = len(args) == 1 and not kwargs and getattr(args[0], "dtype", None) is dtype
        return None if is_usual or dtype is None else cast_call(args, kwargs, dtype)


@dataclass(frozen=True, slots=True)
class EnterForward:
    """Tells the session that a module's forward begins; a forward pre-hook.

    `off` says that nothing is cast inside, `dtype` what the module's weights have there.
    """

    off: bool
    dtype: torch.dtype | None
    weight: Tensor | None = field(default=None, compare=False)  # as that of `CastInputs`

    def __call__(self, module: Module, args: tuple) -> None:
        if torch.compiler.is_dynamo_compiling():
            CASTS.thread.push(OpenForward(id(module), self.off, self.find_dtype(args), None))
        else:
            frame = sys._getframe(1)
            CASTS.enter_forward(OpenForward(id(module), self.off, self.find_dtype(args), frame))
        if not self.off and CASTS.half is not None:
            for parameter in module.parameters():
                # Asked before: a part of a graph, such as a checkpoint, must not change what is outside it.
                if parameter.device.type not in CASTS.device_types:
                    CASTS.device_types.add(parameter.device.type)
                break

    def find_dtype(self, args: tuple) -> torch.dtype | None:
        """What the activations in the forward have."""
        return find_dtype(self.dtype, self.weight)


@dataclass(frozen=True, slots=True)
class EnterAsGiven(EnterForward):
    """Enters the forward of a module that, inside of another one, returns the type of what it is given."""

    def find_dtype(self, args: tuple) -> torch.dtype | None:
        outer = CASTS.thread.forwards
        if not outer:
            return None
        dtypes = (arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point())
        return next(dtypes, outer[-1].dtype)


@dataclass(frozen=True, slots=True)
class ExitForward:
    """Tells the session that a module's forward ended; a forward hook that always runs.

    What it returns as one of its parts did, it returns as it was before it was rounded for the other parts.
    """

    def __call__(self, module: Module, args: tuple, output: object) -> object:
        forwards = CASTS.thread.forwards
        if forwards and forwards[-1].rounded and forwards[-1].owner == id(module):
            output = cast_tree(output, functools.partial(_find_precise, forwards[-1].rounded))
        if torch.compiler.is_dynamo_compiling():
            CASTS.thread.pop(id(module))
        elif CASTS.exit_forward(id(module)) and CASTS.half is not None:
            _end_outermost(output)
        return output


def _end_outermost(output: object) -> None:
    """Has the session notice whether the graph of an output still waits for its backward.

    Without a graph, the iteration is over: grad mode may be off, or the weights are frozen.
    """
    tensors: list[Tensor] = [output] if type(output) is Tensor else []

    def find(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    if not tensors:
        cast_tree(output, find)
    has_graph, new = False, None
    for tensor in tensors:
        node = tensor.grad_fn
        if node is None:
            continue
        has_graph = True
        graph = node.metadata.get(PendingGraph)
        if graph is not None and not graph.was_used:  # a model that returns what it is given
            continue
        if new is None:
            new = PendingGraph()
            CASTS.watch(new)
        node.metadata[PendingGraph] = new
        node.register_prehook(new)
    if not has_graph:
        CASTS.recheck_casts()


def _find_precise(rounded: list[Rounded], tensor: Tensor) -> Tensor:
    """Returns what a tensor was before it was rounded, unless it was written since."""
    for one in rounded:
        if tensor is one.half:
            is_untouched = one.version is not None and one.version == _find_version(tensor)
            return one.precise if is_untouched else _refine(one.half, one.precise)
    return tensor


def _refine(half: Tensor, precise: Tensor) -> Tensor:
    """Returns `precise` where `half` still is its rounding; gradients go to whoever wrote into `half`."""
    wide = half.float()
    is_rounding = precise.to(half.dtype) == half
    refined = wide + torch.where(is_rounding, precise - wide, 0).detach()  # exactly `precise`
    return torch.where(is_rounding & wide.isinf(), precise, refined)


def _find_version(tensor: Tensor) -> int | None:
    return None if torch.compiler.is_dynamo_compiling() or tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class CastOutputs:
    """Casts a module's floating outputs, in any container; a forward hook.

    Inside the forward of another module that ampatch knows, it casts to the type of that one (not if `inside`
    is False: its modules cast what they are given); else to `alone` (None leaves the outputs). With
    `keeps_losses`, losses stay as they are, which are single numbers and what a loss of torch.nn returns:
    half would keep three digits of them, or nothing above 65504.
    """

    alone: torch.dtype | None
    keeps_losses: bool = False
    inside: bool = True

    def __call__(self, module: Module, args: tuple, output: object) -> object:
        is_number = isinstance(output, Tensor) and output.dim() == 0
        if self.keeps_losses and (is_number or isinstance(module, _Loss)):
            return output
        outer = CASTS.thread.forwards
        if outer and not self.inside:
            return output
        dtype = (outer[-1].dtype if outer else None) or self.alone
        around = outer[:-1] if outer and outer[-1].owner == id(module) else outer
        if dtype is None or not around:
            return output if dtype is None else cast_batch(output, dtype)
        return cast_tree(output, _round_in(around[-1], dtype, id(module)), cast_object(dtype))


def _round_in(around: OpenForward, dtype: torch.dtype, owner: int) -> Callable[[Tensor], Tensor]:
    """Casts to a type for the modules of a forward, which learns what it was before."""
    cast = cast_to(dtype)

    def cast_and_note(tensor: Tensor) -> Tensor:
        result = cast(tensor)
        if result is not tensor and dtype in HALF_TYPES:
            around.rounded.append(Rounded(result, _find_version(result), tensor, owner))
        return result

    return cast_and_note


class _StateDictHook:
    """Finds the half tensors of one module, and keeps alive what is known of them.

    `values` are its own, and those of modules that share a tensor with it; `part` is what this call cast.
    Registered on every module, so that a part of a model, or a wrapper such as
    DistributedDataParallel, saves and loads float32 too. A deep copy or a pickled model has values of its
    own: those of its half weights, and what is written into its state_dict.
    """

    def __init__(self, values: Sequence[Float32Values], part: CastModule | None = None) -> None:
        self._values = values
        self._part = part

    def find_values(self, tensor: Tensor) -> Float32Values:
        return next((values for values in self._values if tensor in values), self._values[0])

    def find_tensors(self, module: Module) -> dict[str, Tensor]:
        """The half tensors of the module, and of parts that came after `initialize`, by name."""
        if self._part is not None:
            self._part.find(module)
        return {name: item for name, item in list_tensors(module) if item.dtype in HALF_TYPES}

    def __reduce__(self) -> tuple:
        return type(self), (self._values,)


def list_tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yields a module's own parameters and buffers, and those of parts that came after `initialize`."""
    yield from own_tensors(module)
    for name, child in module._modules.items():
        if child is not None and not _is_served(child):
            yield from ((f"{name}.{key}", item) for key, item in list_tensors(child))


def _is_served(module: Module) -> bool:
    return any(isinstance(hook, SaveFloat32) for hook in module._state_dict_hooks.values())


class SaveFloat32(_StateDictHook):
    """Puts a module's own float32 values into its state_dict; a state_dict post-hook."""

    def __call__(self, module: Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
        for name, tensor in self.find_tensors(module).items():
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor):
                state_dict[prefix + name] = self.find_values(tensor).export(tensor, saved)


class LoadFloat32(_StateDictHook):
    """Feeds loaded values to the masters before the model rounds them; a load pre-hook."""

    def __call__(
        self, module: Module, state_dict: dict, prefix: str, local_metadata: dict, *rest: object
    ) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise AmpValueError(
                "load_state_dict(assign=True) would replace the parameters that initialize cast and the "
                "optimizer steps: leave assign out, or load before initialize"
            )
        for name, tensor in self.find_tensors(module).items():
            loaded, weight = state_dict.get(prefix + name), self.find_values(tensor).find(tensor)
            if weight is not None and isinstance(loaded, Tensor) and loaded.shape == tensor.shape:
                weight.load(loaded)


_ENTER = EnterAsGiven(True, torch.float32)
_LEAVE = CastOutputs(None, keeps_losses=True)


class MethodInside:
    """A public method, as `normalize` or `rotate`, that acts as the forward does; what its module finds.

    Called by the module itself, or outside of any forward, it is the plain method.
    """

    def __init__(self, module: Module, name: str) -> None:
        self._module = module
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        module, forwards = self._module, CASTS.thread.forwards
        method = getattr(type(module), self._name)
        if not forwards or forwards[-1].owner == id(module):
            return method(module, *args, **kwargs)
        _ENTER(module, args)
        try:
            args, kwargs = cast_call(args, kwargs, torch.float32, cast_object(torch.float32))
            return _LEAVE(module, args, method(module, *args, **kwargs))
        finally:
            CASTS.thread.pop(id(module))


def replace_methods(module: Module) -> None:
    """Has the public methods of a module act as its forward does."""
    for name in {name for kind in type(module).__mro__ for name in _list_own(kind)} - vars(module).keys():
        vars(module)[name] = MethodInside(module, name)


def restore_methods(module: Module) -> None:
    for name in [name for name, value in vars(module).items() if isinstance(value, MethodInside)]:
        delattr(module, name)


def _list_own(kind: type) -> list[str]:
    """Names the public methods that a class defines, if torch's modules have none of that name."""
    methods = [name for name, value in vars(kind).items() if isinstance(value, FunctionType)]
    return [name for name in methods if not name.startswith("_") and not hasattr(Module, name)]


_NO_KERNEL = re.compile(r"(not implemented for|Unsupported dtype|support tensors of type:) '?(Half|BFloat16)")
_TYPES_DIFFER = re.compile(r"same dtype|scalar type|dtypes match|type .* should be the same")


@dataclass(frozen=True, slots=True)
class ExplainMismatch:
    """Adds to torch's error that two types met what is float32 in the model; a forward hook that always runs.

    To one that there is no half kernel it adds which module called what has none, and how to keep that one.
    The error stays what it is, and its text begins with torch's.
    """

    half: torch.dtype

    def __call__(self, module: Module, args: tuple, output: object) -> None:
        error = sys.exc_info()[1] if output is None else None
        if not isinstance(error, RuntimeError):
            return
        if _NO_KERNEL.search(str(error)):
            words = [self._say_where(module, error)]
        elif _TYPES_DIFFER.search(str(error)):
            words = list(self._find_words(module))
        else:
            return
        if words and words[0] not in str(error):  # as a model around this one has not said them
            error.args = (". ".join([str(error), *words]), *error.args[1:])

    def _say_where(self, model: Module, error: RuntimeError) -> str:
        names = {part: name for name, part in model.named_modules()}
        frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        inside = (part for part in reversed(frames) if isinstance(part, Module) and part in names)
        caller = next(inside, model)
        keep = "cast to float32 there"
        if names[caller]:
            keep = f"keep it in float32 by name or class, as in keep_fp32=[{names[caller]!r}]"
        level = "O1" if self.half is torch.float16 else "O4"
        return (
            f"ampatch: {names[caller]!r} ({type(caller).__name__}) calls what has no kernel of {self.half} "
            f"here: {keep}, or use {level}, which casts functions"
        )

    def _find_words(self, model: Module) -> Iterator[str]:
        kept = {inner: part for part in model.modules() if _is_kept(part) for inner in part.modules()}
        late, read = [], []
        for name, part in model.named_modules():
            label = f"{name!r} ({type(part).__name__})"
            if part in kept:
                read += [label] * (_has_float32(part.buffers()) and not any(True for _ in part.parameters()))
            elif not isinstance(part, _BatchNorm):
                late += [label] * _has_float32(part.parameters(recurse=False))
        if late:
            yield (
                f"ampatch: the parameters of {', '.join(late)} are float32 among {self.half}: put into the "
                f"model after initialize, or cast by .float(). Call ampatch.uninitialize(), then initialize "
                f"again, with an optimizer of the parameters that are there now"
            )
        if read:
            yield (
                f"ampatch: {', '.join(read)} computes in float32. Where others read its buffers, cast them, "
                f"as in buffer.to(x.dtype)"
            )


def _has_float32(tensors: Iterator[Tensor]) -> bool:
    return any(tensor.dtype is torch.float32 for tensor in tensors)


def _is_kept(module: Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, CastInputs) and hook.dtype is torch.float32 for hook in hooks)
