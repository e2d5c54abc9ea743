"""What ampatch uses of torch that is private: each name once, and what is lost where a torch lacks it.

Dynamo's names are looked up when torch is patched, the others on import; who needs one takes it from here.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ampatch.errors import AmpError

Result = TypeVar("Result")

OLDEST, NEWEST = "2.6", "2.15"  # the releases of torch that the whole suite passed on


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def is_tested(version: str = torch.__version__) -> bool:
    """Whether a torch is one of the releases that ampatch was tested on.

    >>> is_tested("2.13.0+cpu"), is_tested("2.5.1"), is_tested("3.0.0a0")
    (True, False, False)
    """
    return _release(OLDEST) <= _release(version) <= _release(NEWEST)


@dataclass(frozen=True)
class Private:
    """A private name of torch: its path after `torch.`, and what does not work without it."""

    path: str
    lost: str

    def find(self, instead: object = None) -> Callable:
        """Returns what has the name, or `instead` where there is none."""
        value, place = torch, "torch"
        for name in self.path.split("."):
            place = f"{place}.{name}"
            try:  # a package does not have a module yet that is being imported
                value = getattr(value, name) if hasattr(value, name) else importlib.import_module(place)
            except ImportError:
                return instead
        return value

    def find_place(self) -> tuple[object, str]:
        """Returns what has the name as an attribute, and the attribute; for a name that is there."""
        parent, _, attribute = self.path.rpartition(".")
        return Private(parent, self.lost).find(), attribute

    def is_missing(self) -> bool:
        return self.find(self) is self


_LATE_WRITES = "weights written during a backward, or by NumPy, may be cast from their old values"
_TRACES = "torch.jit.trace and make_fx may record casts of weights as constants"
_SCALE = "loss scales other than a static 1 cannot be used"
_ENGINE = "disable_casts() does not reach backward passes on a GPU"
_SCRIPTS = "torch.jit.script refuses models with hooks, and patched functions"
_LOSSES = "amp.diagnose does not see the operations of a loss"
_LOSSES_THERE = f"{_LOSSES} after torch.set_default_device"
_BACKWARDS = "masters do not hear of backward passes that call the engine of torch by themselves"
_COMPILED = "functions of torch.compile run as plain Python while torch is patched"
_WRAPPED = "ampatch doctor fails on models that are called in torch.func, and no post-mortem has their batch"
_RECURRENT = "recurrent networks copy their half weights at each call on a GPU, and torch warns of it"
_OPS = "ops of torch.library are cast inside, and may return other types than they declare"
_ORDER = "from the second step on, gradients of cast weights come after the whole backward pass"
_OVERRIDES = "what overrides methods of Tensor is handed wrappers, and tables of libraries do not find them"
_LOADS = "ampatch run --legacy loads no checkpoints that torch.load refuses"
_MASKS = "ampatch run --legacy does not have attention take masks of bytes"
_CHECKPOINTS = "torch.distributed.checkpoint.state_dict raises KeyError for optimizers with masters"

MASK_CHECKS = (
    Private("nn.functional._canonical_mask", _MASKS),
    Private("nn.modules.transformer._detect_is_causal_mask", _MASKS),
)
OPS = Private("_ops.OpOverload", _OPS), Private("_ops.OpOverloadPacket", _OPS)
BACKWARDS = Private("_library.custom_ops.CustomOpDef", _OPS), Private("_library.autograd.Info", _OPS)
FUNCTIONS_IN_SCRIPTS = (  # by which TorchScript gets to know a function
    FIND_BUILTIN := Private("jit._builtins._find_builtin", _SCRIPTS),
    Private("jit._recursive.try_compile_fn", _SCRIPTS),
    Private("jit._script._get_overloads", _SCRIPTS),
    Private("_jit_internal._try_get_dispatched_fn", _SCRIPTS),
)
EAGER = (
    GRAPH_TASK := Private("_C._current_graph_task_id", _LATE_WRITES),
    USE_COUNT := Private("_C._storage_Use_Count", "casts of weights are made again in each iteration"),
    HOLDERS := Private("Tensor._use_count", "casts of weights take new memory after each step"),
    TRACING := Private("_C._get_tracing_state", _TRACES),
    MODE_COUNT := Private("_C._len_torch_dispatch_stack", _TRACES),
    MODE := Private("_C._get_dispatch_mode", _TRACES),
    PROXY := Private("_C._TorchDispatchModeKey.PROXY", _TRACES),
    TRANSFORMED := Private("_C._are_functorch_transforms_active", "casts made in torch.func may outlive it"),
    IS_WRAPPED := Private("_C._functorch.is_functorch_wrapped_tensor", _WRAPPED),
    UNWRAP := Private("_C._functorch.get_unwrapped", _WRAPPED),
    FORWARD_AD := Private("autograd.forward_ad._current_level", "half BatchNorm fails in forward-mode AD"),
    KEEP_IN_THREAD := Private("_C._stash_obj_in_tls", _ENGINE),
    FIND_IN_THREAD := Private("_C._get_obj_in_tls", _ENGINE),
    IS_IN_THREAD := Private("_C._is_key_in_tls", _ENGINE),
    CHECK_AND_UNSCALE := Private("_amp_foreach_non_finite_check_and_unscale_", _SCALE),
    UPDATE_SCALE := Private("_amp_update_scale_", _SCALE),
    GROUP := Private("utils._foreach_utils._group_tensors_by_device_and_dtype", _SCALE),
    QUALIFY := Private("fx.graph._get_qualified_name", "functions in generated code of torch.fx stay uncast"),
    *FUNCTIONS_IN_SCRIPTS,
    SCRIPT_MODULE := Private("jit._recursive.create_script_module", _SCRIPTS),
    ENTER_AUTOCAST := Private(
        "amp.autocast_mode._enter_autocast", "compiled functions may ignore torch.autocast(enabled=False)"
    ),
    FUNCTION_MODES := Private("_C._len_torch_function_stack", _LOSSES),
    FUNCTION_MODE := Private("_C._get_function_stack_at", _LOSSES),
    DEFAULT_DEVICE := Private("_GLOBAL_DEVICE_CONTEXT", _LOSSES_THERE),
    RUN_BACKWARD := Private("autograd._engine_run_backward", _BACKWARDS),
    FLATTEN := Private("_cudnn_rnn_flatten_weight", _RECURRENT),
    SEQUENCE := Private("_C._functions.AccumulateGrad._set_sequence_nr", _ORDER),
    POP_MODE := Private("overrides._pop_mode_temporarily", _OVERRIDES),
    REENTRANT := Private("utils.checkpoint.CheckpointFunction", "reentrant checkpoints may recompute uncast"),
    LOADABLE := Private("_weights_only_unpickler._get_allowed_globals", _LOADS),
    ADDED := Private("_weights_only_unpickler._get_user_allowed_globals", _LOADS),
    *OPS,
    *BACKWARDS,
    *MASK_CHECKS,
)

DYNAMO = (
    OBJECT_RULES := Private("_dynamo.trace_rules.get_torch_obj_rule_map", _COMPILED),
    TENSOR_METHODS := Private("_dynamo.trace_rules.get_tensor_method", _COMPILED),
    RESET_CODE := Private("_dynamo.reset_code_caches", _COMPILED),
    SKIP_CODE := Private("_dynamo.eval_frame.skip_code", _COMPILED),
    CALL_METHOD := Private("_dynamo.variables.tensor.TensorVariable.call_method", _COMPILED),
    INSERT := Private("_dynamo.variables.builtin.BuiltinVariable._handle_insert_op_in_graph", _COMPILED),
    HANDLERS := Private("_dynamo.variables.builtin.BuiltinVariable.call_function_handler_cache", _COMPILED),
    ATTRIBUTE := Private("_dynamo.source.AttrSource", _COMPILED),
    BUILD := Private("_dynamo.variables.base.VariableTracker.build", _COMPILED),
)

# A table of torch's functions that a mode of its own keeps; made before any patch, where there is one.
REFERENCES = Private(
    "_prims.context.torch_to_refs_map", "torch._prims.context.TorchRefsMode misses functions"
)

# Looked up once their module is imported, which takes a second.
CHECKPOINTS = (
    Private("distributed.checkpoint.state_dict._get_optim_state_dict", _CHECKPOINTS),
    Private("distributed.checkpoint.state_dict._load_optim_state_dict", _CHECKPOINTS),
)


def change_in_graph(function: Callable[..., Result], *args: object) -> Result:
    """Calls what changes Python's state while Dynamo traces a part of a graph, such as a checkpoint's.

    It refuses changes there that outlast the part, from torch 2.7 on.
    """
    allow = getattr(torch._dynamo.utils, "_disable_side_effect_safety_checks_for_current_subtracer", None)
    return function(*args) if allow is None else allow(function, *args)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements of a strided tensor are at one place in memory."""
    strides = tensor.stride()
    return 0 in strides and any(
        size > 1 and not stride for size, stride in zip(tensor.shape, strides, strict=True)
    )


def forget_partition(optimizer: object) -> None:
    """Has a ZeroRedundancyOptimizer share its present parameters out among the ranks, as it did the first."""
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        optimizer._clear_cache()  # type: ignore[attr-defined]


def steps_in_backward(optimizer: object) -> bool:
    """Whether a ZeroRedundancyOptimizer steps as gradients arrive, and its `step` does nothing."""
    return getattr(optimizer, "_overlap_with_ddp", False)


def explain_missing(names: Sequence[Private]) -> list[str]:
    """A line for each loss: the names that this torch lacks, and what is lost with them."""
    by_loss: dict[str, list[str]] = {}
    for name in [name for name in names if name.is_missing()]:
        by_loss.setdefault(name.lost, []).append(f"torch.{name.path}")
    return [f"no {' and no '.join(paths)}: {lost}" for lost, paths in by_loss.items()]


def _fail(*_: object) -> None:
    raise AmpError(f"torch {torch.__version__} lacks a function that is needed here: {_SCALE}")


def _nothing(*_: object) -> None:
    """Stands for a function that is missing."""


# The number of the backward pass that this thread is in, -1 outside of one.
graph_task = GRAPH_TASK.find(lambda: -1)
count_users = USE_COUNT.find(_nothing)  # how many hold a memory, by its `_cdata`; None if nobody can say
count_holders = HOLDERS.find(_nothing)  # how many hold a tensor in C++; None if nobody can say
tracing_state, count_modes, dispatch_mode = TRACING.find(_nothing), MODE_COUNT.find(int), MODE.find(_nothing)
count_function_modes, function_mode = FUNCTION_MODES.find(lambda: 1), FUNCTION_MODE.find(_nothing)
_default_device = DEFAULT_DEVICE.find()
is_transformed = TRANSFORMED.find(bool)
_is_wrapped, _unwrap = IS_WRAPPED.find(bool), UNWRAP.find(_nothing)


# Bound before anything is patched.
set_data, set_grad = Tensor.data.__set__, Tensor.grad.__set__  # type: ignore[attr-defined]
TAKES_ANY_GRAD = hasattr(Tensor, "grad_dtype")  # from torch 2.10 on


def allow_any_grad(param: Tensor) -> None:
    """Lets a parameter hold gradients of other dtypes than its own, where a torch can; there is no way back.

    To delete the attribute crashes (torch 2.13), and any dtype that is set stays if the parameter is cast.
    """
    if TAKES_ANY_GRAD:
        param.grad_dtype = None


def give_float32_grad(half: Tensor, grad: Tensor) -> None:
    """Has a half parameter hold a float32 gradient, in a torch that refuses it.

    A gradient must have its parameter's type when it is assigned, and may have another one later.
    """
    held = torch.zeros_like(grad, dtype=half.dtype) if grad.is_sparse else torch.empty_like(half)
    set_grad(half, held)
    set_data(held, grad)


# The largest number that Python may give a node; AccumulateGrad's own is larger.
LAST_IN_SEQUENCE = 2**63 - 1


def run_when_ready(node: torch.autograd.graph.Node) -> None:
    """Has a backward run a node as soon as it can, whatever was recorded after it.

    The engine takes of all nodes that are ready the one that was recorded last, by its sequence number.
    """
    if _CAN_ORDER:
        node._set_sequence_nr(LAST_IN_SEQUENCE)  # type: ignore[attr-defined]


_CAN_ORDER = not SEQUENCE.is_missing()


def has_function_modes() -> bool:
    """Whether a script's function modes are on torch's stack; `set_default_device`'s is below all others."""
    count = count_function_modes()
    if count == 1 and function_mode(0) is getattr(_default_device, "device_context", None):
        return False
    return count > 0


def unwrap(tensor: Tensor) -> Tensor:
    """Returns what lies under the transforms of `torch.func`: of `vmap`, all samples at once."""
    while _is_wrapped(tensor):
        tensor = _unwrap(tensor)
    return tensor


def forward_ad_level() -> int:
    """How deep forward-mode AD is nested here, -1 outside of it; looked up each time, because it changes."""
    return getattr(torch.autograd.forward_ad, "_current_level", -1)


# Torch 2.6 has another flag, which only `torch.export(strict=False)` sets.
_EXPORTS = "_is_exporting_flag" if hasattr(torch.compiler, "_is_exporting_flag") else "_is_compiling_flag"


def is_exporting() -> bool:
    """Whether `torch.export` traces; Dynamo of torch 2.11 takes torch's function of this name for True."""
    return getattr(torch.compiler, _EXPORTS, False)


_stash, find_in_thread = KEEP_IN_THREAD.find(_nothing), FIND_IN_THREAD.find(_nothing)
is_in_thread = IS_IN_THREAD.find(_nothing)
_check_and_unscale_, update_scale_ = CHECK_AND_UNSCALE.find(_fail), UPDATE_SCALE.find(_fail)
group_by_kind = GROUP.find(_fail)


def check_and_unscale_(tensors: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Multiplies tensors of one kind by `inverse`, and sets `found_inf` to 1 where one is inf or NaN.

    CUDA's kernel takes no bfloat16: it gets float32, which is rounded once.
    """
    if not (tensors and tensors[0].is_cuda and tensors[0].dtype is torch.bfloat16):
        return _check_and_unscale_(tensors, found_inf, inverse)
    wide = [tensor.float() for tensor in tensors]
    _check_and_unscale_(wide, found_inf, inverse)
    torch._foreach_copy_(tensors, wide)


# The stream that is current on a CUDA device, given the device's index: a tenth of the time that
# `torch.cuda.current_stream` takes. Torch without CUDA has no such function, and nobody to ask it.
find_stream = Private("_C._cuda_getCurrentRawStream", "").find(int)


def withholds_grads(module: torch.nn.Module) -> bool:
    """Whether a module that FSDP2 has sharded keeps gradients to itself, to average them later."""
    return any(not (group.reduce_grads and group.all_reduce_grads) for group in _list_fsdp_groups(module))


def gather_anew(module: torch.nn.Module) -> None:
    """Has FSDP2 gather a module that it has sharded by the weights, and in the type, that they have now."""
    module.reshard()
    for group in _list_fsdp_groups(module):
        for param in group.fsdp_params:
            param.reset_sharded_param()
            param.all_gather_outputs = []
            vars(param).pop("_unsharded_param", None)
        if all(hasattr(param, "orig_dtype") for param in group.fsdp_params):  # a forward has run
            group._init_mp_dtypes()


def _list_fsdp_groups(module: torch.nn.Module) -> list:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # older
    return [group for group in groups if group is not None]


def keep_in_thread(key: str, value: object) -> None:
    """Keeps an object where the threads of a backward that this one starts find it, until this one ends.

    Torch before 2.13 gives a reference back then that it never took.
    """
    before = sys.getrefcount(value)
    _stash(key, value)
    if sys.getrefcount(value) == before and not KEEP_IN_THREAD.is_missing():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def loadable_globals() -> dict[str, object]:
    """What `torch.load(weights_only=True)` lets checkpoints name, with what was added to that."""
    return {**LOADABLE.find(dict)(), **ADDED.find(dict)()}
