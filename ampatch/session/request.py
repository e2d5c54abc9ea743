"""One call of `initialize`: what it was asked for, the checks of it, and what it set up."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ampatch.errors import AmpError, AmpTypeError, AmpValueError
from ampatch.levels.loss_scale import DynamicLossScale, StaticLossScale
from ampatch.levels.policy import OPT_LEVELS, Policy
from ampatch.levels.private import steps_in_backward
from ampatch.models.float32_parts import Keep
from ampatch.models.rounding import Effect
from ampatch.steps.block import PlainBackward, ScaledLoss
from ampatch.steps.events import Listener
from ampatch.steps.foreign_step import find_hooked
from ampatch.steps.optimizer import AmpOptimizer, InitializeCall
from ampatch.steps.scaler import LossScaler

# One statement each: type checkers see none of them in an assignment of several.
Models = TypeVar("Models", bound=Module | Sequence[Module])
Optimizers = TypeVar("Optimizers")
Rest = ParamSpec("Rest")


class Initialize(Protocol[Rest]):
    """What type checkers make of `initialize`: it returns what it is given, models alone or both."""

    @overload
    def __call__(
        self, models: Models, optimizers: None = None, *args: Rest.args, **kwargs: Rest.kwargs
    ) -> Models: ...
    @overload
    def __call__(
        self, models: Models, optimizers: Optimizers, *args: Rest.args, **kwargs: Rest.kwargs
    ) -> tuple[Models, Optimizers]: ...


def returns_what_it_is_given(
    initialize: Callable[Concatenate[Module, object, Rest], object],
) -> Initialize[Rest]:
    """Tells type checkers so, without the other arguments being written three times; checks their names."""
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def checked(*args: object, **kwargs: object) -> object:
        validate_names("", kwargs, signature)
        return initialize(*args, **kwargs)  # type: ignore[arg-type]  # checked there

    # `inspect.getfullargspec`, by which trainers select the arguments, does not look behind a wrapper.
    checked.__signature__ = signature  # type: ignore[attr-defined]
    return cast(Initialize[Rest], checked)


def validate_names(caller: str, names: Iterable[str], signature: inspect.Signature) -> None:
    """Raises AmpTypeError for arguments that `initialize` has not, and names the nearest that it has."""
    unknown = sorted(name for name in names if name not in signature.parameters)
    nearest = [difflib.get_close_matches(name, signature.parameters, 1) for name in unknown]
    faults = [
        f"{name!r}" + "".join(f" (did you mean {one!r}?)" for one in close)
        for name, close in zip(unknown, nearest, strict=True)
    ]
    if faults:
        raise AmpTypeError(f"{caller}initialize has no argument {', '.join(faults)}")


@dataclass(frozen=True, slots=True)
class Request:
    """What one call of `initialize` was asked for, read and checked on its own."""

    models: tuple[Module, ...]
    optimizers: tuple[object, ...]  # as given: an Optimizer, or a wrapper around one
    policy: Policy
    num_losses: int
    verbosity: int
    keep_fp32: tuple[Keep, ...]
    float8_layers: tuple[Keep, ...]
    allow_half_params: bool
    process_group: torch.distributed.ProcessGroup | None
    options: Mapping[str, object]  # of listeners, by the name of the argument; they read and check them


@dataclass(slots=True, eq=False)
class Opening:
    """A call of `initialize` while it is set up, as listeners hear of it."""

    request: Request
    call: InitializeCall
    amps: Sequence[AmpOptimizer]
    undo: ExitStack  # of what a session changes once, as functions of torch
    rounded: Mapping[Effect, Sequence[str]] = field(default_factory=dict)  # what half changes for the worse
    buffered: Mapping[int, str] = field(default_factory=dict)  # names of modules without parameters, by id


SessionListener = Listener[Opening, ScaledLoss, AmpOptimizer, PlainBackward]


def parse_process_group(value: object) -> torch.distributed.ProcessGroup | None:
    """Reads what `initialize` was given; raises AmpTypeError for what is no group that this rank is in."""
    dist = torch.distributed
    if value is None or (dist.is_available() and isinstance(value, dist.ProcessGroup)):
        return value
    raise AmpTypeError(
        f"process_group is {value!r}: expected a torch.distributed.ProcessGroup that this rank is in, as "
        f"torch.distributed.group.WORLD, or None"
    )


def validate_optimizers(request: Request, known: set[int], others: Sequence[AmpOptimizer]) -> None:
    """Raises for optimizers that are taken already, step unknown parameters or cannot be skipped.

    `known` are the ids of the tensors of earlier calls, `others` their optimizers.
    """
    params = [param for model in request.models for param in model.parameters()]
    known = known | set(map(id, params))
    taken = {id(amp.optimizer) for amp in others}
    masters = {id(pair.master) for amp in others for pair in amp.masters}
    shapes = {param.shape for param in params if not is_lazy(param)}
    for index, outer in enumerate(request.optimizers):
        optimizer = unwrap_optimizer(outer, index)
        if id(optimizer) in taken:
            raise AmpError(
                f"optimizers[{index}] ({type(optimizer).__name__}) is given to initialize twice: "
                f"an optimizer belongs to the first call that takes it; call ampatch.uninitialize() to start "
                "over"
            )
        taken.add(id(optimizer))
        _validate_params(index, optimizer, known, shapes, masters)
        _validate_closure_use(index, optimizer, request.policy)
        _validate_zero(index, optimizer, request.policy)


def unwrap_optimizer(outer: object, index: int = 0) -> Optimizer:
    """Returns the optimizer, or the one inside a wrapper such as LARC, which has no hooks itself.

    Some wrappers derive from Optimizer and never call its `__init__`: these count as wrappers too. A
    scheduler, of torch or of another library, has an optimizer as well and is no wrapper.
    """
    if any(kind.__name__.endswith("Scheduler") for kind in type(outer).__mro__):
        raise AmpTypeError(
            f"optimizers[{index}] is a {type(outer).__name__}, a learning rate scheduler: pass the optimizer "
            f"that it was made for; schedulers are not given to initialize"
        )
    inner = find_hooked(outer)
    if inner is not None:
        return inner
    hint = f"; a level is given as opt_level={outer!r}" if outer in (*OPT_LEVELS,) else ""
    raise AmpTypeError(
        f"optimizers[{index}] is a {type(outer).__name__}: expected a torch.optim.Optimizer "
        f"or a list of them{hint}"
    )


def _validate_params(
    index: int, optimizer: Optimizer, known: set[int], shapes: set[torch.Size], masters: set[int]
) -> None:
    """Raises for masters, and for parameters of no model that have the models' shapes: most likely its own.

    Others are a script's own: a latent code that it fits, a temperature.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not masters.isdisjoint(map(id, params)):
        raise AmpValueError(
            f"optimizers[{index}] ({type(optimizer).__name__}) steps masters of an earlier optimizer, which "
            f"get no gradients from this one's blocks: make it from model.parameters()"
        )
    is_strange = not any(id(param) in known for param in params)
    if params and is_strange and {param.shape for param in params if not is_lazy(param)} <= shapes:
        shape = tuple(params[0].shape)
        raise AmpValueError(
            f"optimizers[{index}] ({type(optimizer).__name__}) steps parameters of no initialized model (the "
            f"first has shape {shape}): pass its model to initialize too, and make the optimizer from "
            f"model.parameters() after the model is on its device"
        )


def _validate_closure_use(index: int, optimizer: Optimizer, policy: Policy) -> None:
    if isinstance(optimizer, torch.optim.LBFGS) and isinstance(policy.loss_scale, DynamicLossScale):
        raise AmpValueError(
            f"optimizers[{index}] is LBFGS, which evaluates its closure several times a step and cannot skip "
            f"one: use a static scale (loss_scale=1.0), or a level that has one (O0, O4, O5)"
        )


def _validate_zero(index: int, optimizer: Optimizer, policy: Policy) -> None:
    """Raises for options of ZeroRedundancyOptimizer that would go past what a level does."""
    if policy.is_pure_half and getattr(optimizer, "parameters_as_bucket_view", False):
        raise AmpValueError(
            f"optimizers[{index}] sends its buckets of float32 weights to the other ranks, and "
            f"{policy.opt_level} casts the weights: pass parameters_as_bucket_view=False"
        )
    if steps_in_backward(optimizer) and (policy.master_weights or policy.loss_scale != StaticLossScale(1.0)):
        raise AmpValueError(
            f"optimizers[{index}] steps inside of backward (overlap_with_ddp=True), where gradients are half "
            f"or still scaled: pass overlap_with_ddp=False, or use opt_level='O4'"
        )


def make_scalers(request: Request, first_id: int) -> list[LossScaler]:
    """Makes a scaler for each loss, numbered from `first_id` on, as `state_dict` numbers them."""
    device = next((tensor.device for tensor in _tensors(request)), torch.device("cpu"))
    return [LossScaler(first_id + i, request.policy.loss_scale, device) for i in range(request.num_losses)]


def _tensors(request: Request) -> list[Tensor]:
    params = [param for model in request.models for param in model.parameters()]
    optimizers = [unwrap_optimizer(outer) for outer in request.optimizers]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return params + [param for group in groups for param in group["params"]]


def suited_level(models: Iterable[object]) -> str:
    """The level of a first call that names none: O4 where each tensor of the models is on a CPU, else O1."""
    modules = [model for model in models if isinstance(model, Module)]
    tensors = itertools.chain.from_iterable((*model.parameters(), *model.buffers()) for model in modules)
    return "O4" if _types_of(tensors) == {"cpu"} else "O1"


def device_types(request: Request) -> set[str]:
    return _types_of(_tensors(request))


def _types_of(tensors: Iterable[Tensor]) -> set[str]:
    return {tensor.device.type for tensor in tensors} or {torch.empty(0).device.type}
