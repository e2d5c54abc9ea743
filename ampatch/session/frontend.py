"""The public functions: what scripts call."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, overload

import torch
from torch import Tensor
from torch.nn import Module

from ampatch.casts.catalog import Catalog, Explanation, Name
from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.loss_scale import Alarms, DynamicLossScale, is_number, validate_scale
from ampatch.levels.overrides import Overrides, parse_flag, resolve
from ampatch.levels.patcher import qualify
from ampatch.levels.policy import Policy
from ampatch.levels.stack import warn
from ampatch.models.float8 import LayersExplained, explain_layers
from ampatch.models.float32_parts import Keep, normalize_keep
from ampatch.patching.torch_patch import Function, Registration, decorate, validate_place
from ampatch.session.request import (
    Models,
    Optimizers,
    Request,
    parse_process_group,
    returns_what_it_is_given,
    suited_level,
    validate_names,
)
from ampatch.session.session import SESSION
from ampatch.steps.block import PassedThrough, ScaledLoss
from ampatch.steps.scaler import BackwardOutcome, LossScaler
from ampatch.table import Cast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@returns_what_it_is_given
def initialize(
    models: Models,
    optimizers: Optimizers | None = None,
    enabled: bool = True,
    opt_level: str | None = None,
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | DynamicLossScale | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float | None = 2.0**24,
    *,
    dtype: torch.dtype | None = None,
    patch_torch_functions_type: torch.dtype | None = None,
    keep_fp32: object = (),
    float8_recipe: str | None = None,
    float8_layers: object = (),
    allow_banned: bool = False,
    allow_half_params: bool = False,
    alarms: Alarms | None = Alarms(),  # noqa: B008  # a frozen value
    post_mortem: bool | str | os.PathLike[str] | None = None,
    diagnose: bool = False,
    process_group: ProcessGroup | None = None,
) -> Models | tuple[Models, Optimizers]:
    """Gives models and optimizers the mixed precision of an opt level, in place.

    ```python
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    ```

    Returns models and optimizers in the shape they came in; only the models if `optimizers` is
    None, so that `a, b = amp.initialize(model)` takes a Sequential of two layers apart. May be called
    again for other models and optimizers. A call that raises an error leaves torch, models and
    optimizers as they were. `uninitialize` undoes it.

    - `opt_level`: "O0" float32; "O1" (float16) and "O4" (bfloat16) patch torch's functions with
      casts; "O2" and "O5" cast the model and keep float32 master params; "O3" casts everything;
      "O6" is O4 with the products of large linear layers in float8. Default: the level of the
      previous call; for a first call "O4" if the models are on a CPU, where float16 is slow, else "O1".
    - `dtype`: float16 or bfloat16 instead of the level's half type.
    - `loss_scale`: a number, "dynamic" or an `amp.DynamicLossScale`; `min_loss_scale` and
      `max_loss_scale` bound "dynamic". One scaler is made for each of `num_losses`.
    - `keep_fp32`: names of modules (exact, or else shell patterns), classes or modules that run in float32.
    - `float8_recipe`: at O6 "tensorwise" (the default), "rowwise" or "rowwise_with_gw_hp", as in torchao.
    - `float8_layers`: as `keep_fp32`, linear layers that run in float8 at O6 whatever their size and place.
    - `keep_batchnorm_fp32`, `master_weights`, `cast_model_type`, `cast_model_outputs` (a dtype),
      `patch_torch_functions`, `patch_torch_functions_type`: override the level's default.
    - `allow_banned`: runs banned functions in float32 instead of raising an error on half tensors.
    - `allow_half_params`: accepts models with half parameters, which stay half, instead of raising an error.
    - `alarms`: when to raise an alarm about a loss and its scale, in the log and to `on_alarm`; None: never.
    - `post_mortem`: where the first alarm leaves a file for `ampatch doctor --open`: a folder, or True for
      `ampatch-post-mortem`; by default where the environment variable AMPATCH_POST_MORTEM says, or nowhere.
    - `diagnose`: watches each step, and explains a step that breaks (see `amp.diagnose.watch`), until
      `uninitialize`; `amp.diagnose.patient()` has what was found.
    - `process_group`: ranks that skip steps together, where gradients are averaged by hand or each rank holds
      a stage of a model; one small collective a block. DistributedDataParallel, FSDP2 and DTensors need none.
    - `verbosity`: 0 silent, 1 a banner and a line for each skipped step, 2 also every cast.

    Raises AmpValueError and AmpTypeError (both AmpError) for arguments that cannot work.
    """
    arguments = {**locals(), **SESSION.overrides}
    return cast("Models | tuple[Models, Optimizers]", _initialize(**arguments))


def _initialize(
    models: object,
    optimizers: object,
    enabled: object,
    opt_level: object,
    num_losses: int,
    verbosity: int,
    keep_fp32: object,
    float8_layers: object,
    allow_half_params: object,
    process_group: object,
    **overrides: object,
) -> object:
    returned = models if optimizers is None else (models, optimizers)
    model_list = _as_tuple(models)
    optimizer_list = () if optimizers is None else _as_tuple(optimizers)
    if not parse_flag("enabled", enabled):
        SESSION.disable(optimizer_list)
        return returned
    options = {name: overrides.pop(name) for name in ("alarms", "post_mortem", "diagnose")}
    if opt_level is None:
        opt_level = SESSION.calls[-1].policy.opt_level if SESSION.calls else suited_level(model_list)
    policy = resolve(opt_level, Overrides(**overrides))  # type: ignore[arg-type]  # checked there
    _validate_num_losses(num_losses)
    if not isinstance(verbosity, int):  # True and False are 1 and 0, as scripts write
        raise AmpTypeError(f"verbosity is {verbosity!r}: expected 0 (silent), 1 or 2")
    request = Request(
        model_list,
        optimizer_list,
        policy,
        num_losses,
        verbosity,
        normalize_keep(keep_fp32),
        _parse_float8_layers(policy, float8_layers),
        bool(parse_flag("allow_half_params", allow_half_params)),
        parse_process_group(process_group),
        options,
    )
    SESSION.open(request)
    return returned


def _as_tuple(value: object) -> tuple:  # type: ignore[type-arg]  # Session.open checks what is in it
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _parse_float8_layers(policy: Policy, value: object) -> tuple[Keep, ...]:
    layers = normalize_keep(value, "float8_layers")
    if layers and policy.float8_recipe is None:
        raise AmpValueError(
            f"float8_layers contradicts {policy.opt_level}: use opt_level='O6', or leave it out"
        )
    return layers


def _validate_num_losses(num_losses: object) -> None:
    if isinstance(num_losses, bool) or not isinstance(num_losses, int):
        raise AmpTypeError(f"num_losses is {num_losses!r}: expected a whole number, 1 or more")
    if num_losses < 1:
        raise AmpValueError(f"num_losses is {num_losses!r}: expected 1 or more, one for each loss")


def scale_loss(
    loss: Tensor,
    optimizers: object,
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
    *,
    of_last_call: bool = False,
) -> AbstractContextManager[Tensor]:
    """Returns a context manager that yields `loss.float()` times the loss scale.

    ```python
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    ```

    When it ends, the gradients made inside are unscaled and added to earlier ones, and the scale is
    updated; after an overflow the next step of every optimizer named is skipped. No host sync.

    - `optimizers`: the optimizer, or all those whose parameters get gradients from this loss.
    - `loss_id`: which of the `num_losses` scalers to use, of the call that took the (first) optimizer.
    - `delay_unscale`: leaves the gradients scaled until a later block or the step.
    - `delay_overflow_check`: leaves the scale as it is until a later block.
    - `model`: accepted as apex did, and not used.
    - `of_last_call`: takes a scaler of the latest `initialize`, whichever call took the optimizer (as apex).
    """
    if not SESSION.calls:
        SESSION.require_open()
    named = optimizers if isinstance(optimizers, (list, tuple)) else (optimizers,)
    if SESSION.is_disabled and SESSION.is_passive(named):
        return PassedThrough(loss)
    if not isinstance(loss, Tensor):
        raise AmpTypeError(
            f"loss is a {type(loss).__name__}: expected a tensor, the output of the loss function"
        )
    amps = []
    for index, optimizer in enumerate(named):
        amps.append(SESSION.find(optimizer, index))
    scalers = SESSION.scalers(of_last_call=True) if of_last_call or not amps else amps[0].call.scalers
    return ScaledLoss(
        loss,
        amps if len(amps) == 1 else list(dict.fromkeys(amps)),
        pick_scaler(scalers, loss_id),
        SESSION,
        delay_unscale=delay_unscale,
        delay_overflow_check=delay_overflow_check,
    )


def master_params(optimizer: object) -> Iterator[Tensor]:
    """Iterates over the parameters that the optimizer steps: float32 masters at O2 and O5.

    ```python
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm=1.0)
    ```

    Works without `initialize` too.
    """
    if not hasattr(optimizer, "param_groups"):
        raise AmpTypeError(f"optimizer is a {type(optimizer).__name__}: expected one torch.optim.Optimizer")
    SESSION.settle(optimizer)
    for group in optimizer.param_groups:
        yield from group["params"]


def step_was_skipped(optimizer: object) -> bool:
    """Says whether the optimizer's last step was skipped because of an overflow.

    Costs one host sync with an optimizer that skips on the device (a fused one), none otherwise.
    """
    return not SESSION.is_passive((optimizer,)) and SESSION.find(optimizer).was_skipped()


def clear_cache() -> None:
    """Forgets the casts of weights; they are made again when needed.

    Frees their memory; the next step of an optimizer would do that, too. Needed only after writing to weights
    in a way that leaves no trace: through a `.data` that was kept from earlier, between two forwards that
    share one backward, or through a pointer.
    """
    SESSION.casts.clear_cache()


def disable_casts() -> AbstractContextManager[None]:
    """Returns a context manager in which patched functions do not cast, in this thread.

    May be nested, and ends with its block even after an exception.
    """
    return SESSION.casts.thread.disabled()


def uninitialize(*, functions_only: bool = False) -> None:
    """Undoes every `initialize`: torch, models and optimizers are what they would be without it.

    Models are float32 again, with the masters' values, and optimizers step them. `functions_only` undoes
    only the casts of torch's functions; the next `initialize` at O1 or O4 patches them again. Raises
    PatchConflictError, after everything else is undone, for functions that others patched over.
    """
    SESSION.unpatch() if functions_only else SESSION.close()


@contextmanager
def override(**arguments: object) -> Iterator[None]:
    """Gives `initialize` these arguments, whatever the script passes, while the context is open."""
    validate_names("override: ", arguments, inspect.signature(initialize))
    before = SESSION.overrides
    SESSION.overrides = {**before, **arguments}
    try:
        yield
    finally:
        SESSION.overrides = before


def loss_scalers(*, of_last_call: bool = False) -> tuple[LossScaler, ...]:
    """Returns the loss scalers of the session, numbered as `state_dict` numbers them."""
    SESSION.require_open()
    return tuple(SESSION.scalers(of_last_call=of_last_call))


def get_loss_scale(loss_id: int = 0) -> float:
    """Returns a loss scale; one host sync if it is dynamic. Losses are numbered across calls."""
    scalers = loss_scalers()
    return pick_scaler(scalers, loss_id).get_scale() if scalers else 1.0


def set_loss_scale(value: float, loss_id: int = 0) -> None:
    """Sets a loss scale to a number above 0; a dynamic one continues from there."""
    scalers = loss_scalers()
    if scalers:
        pick_scaler(scalers, loss_id).set_scale(value)


def pick_scaler(scalers: Sequence[LossScaler], loss_id: object) -> LossScaler:
    """Returns the scaler of a loss; raises AmpTypeError or AmpValueError for a number that none has."""
    if isinstance(loss_id, bool) or not isinstance(loss_id, int):
        raise AmpTypeError(f"loss_id is {loss_id!r}: expected a whole number from 0 to {len(scalers) - 1}")
    if not 0 <= loss_id < len(scalers):
        raise AmpValueError(
            f"loss_id {loss_id!r} is out of range: expected 0 to {len(scalers) - 1}; "
            f"initialize(num_losses=...) says how many there are"
        )
    return scalers[loss_id]


def state_dict(*, of_last_call: bool = False) -> dict[str, dict[str, float | int]]:
    """Returns the state of every loss scaler, in apex's format; one host sync for each that is dynamic.

    The scalers of several `initialize` calls are numbered in sequence, even if their models are gone.
    `of_last_call`: only those of the latest.
    """
    scalers = loss_scalers(of_last_call=of_last_call)
    return {f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(scalers)}


def load_state_dict(state_dict: dict[str, dict[str, float | int]], *, of_last_call: bool = False) -> None:
    """Restores the loss scalers from a `state_dict`, also one that apex wrote; all or nothing.

    A static scale stays what `initialize` was told. Raises AmpValueError for unknown keys, and warns
    if the number of scalers differs: those that both have are loaded.
    """
    scalers = loss_scalers(of_last_call=of_last_call)
    if not isinstance(state_dict, Mapping):
        raise AmpTypeError(
            f"state_dict is a {type(state_dict).__name__}: expected what amp.state_dict() returned"
        )
    for key, state in state_dict.items():
        _validate_state(key, state)
    for index, scaler in enumerate(scalers):
        if f"loss_scaler{index}" in state_dict:
            scaler.load_state_dict(state_dict[f"loss_scaler{index}"])
    if scalers and len(state_dict) != len(scalers):  # none: enabled=False
        warn(  # which may raise
            f"the checkpoint holds {len(state_dict)} loss scalers, this session has {len(scalers)}: those "
            f"that both have are loaded"
        )


def _validate_state(key: object, state: object) -> None:
    if not (isinstance(key, str) and re.fullmatch(r"loss_scaler\d+", key)):
        raise AmpValueError(
            f"state_dict has an unknown key {key!r}: expected 'loss_scaler0' and so on; nothing is loaded"
        )
    expected = {"loss_scale", "unskipped"}
    if not isinstance(state, Mapping) or set(state) != expected:
        held = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise AmpValueError(f"state_dict[{key!r}] has {held}: expected {sorted(expected)}; nothing is loaded")
    validate_scale(f"nothing is loaded, state_dict[{key!r}]['loss_scale']", state["loss_scale"])
    unskipped = state["unskipped"]
    if not is_number(unskipped) or not 0 <= unskipped < 2**31:
        raise AmpValueError(
            f"nothing is loaded, state_dict[{key!r}]['unskipped'] {unskipped!r}: expected 0 to 2**31"
        )


def master_pairs(optimizer: object) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterates over the half parameters of a model and their float32 masters, in pairs (O2 and O5).

    A write into either shows in the other after the next step or forward. There are no
    pairs at other levels. Raises AmpError for an optimizer that `initialize` did not return.
    """
    if not SESSION.is_passive((optimizer,)):
        for weight in SESSION.find(optimizer).masters:
            if weight.master is not None:
                yield weight.half, weight.master


def backward_outcomes(optimizer: object) -> tuple[BackwardOutcome, ...]:
    """Returns what the backward passes that led to the optimizer's last step did, for dynamic scales.

    A `BackwardOutcome` knows whether its pass overflowed and the scale before and after: `poll` returns
    them once the device has delivered them, without a host sync. Static scales have no outcomes.
    """
    return () if SESSION.is_passive((optimizer,)) else tuple(SESSION.find(optimizer).last_outcomes)


@dataclass(frozen=True, slots=True)
class CastCounts:
    """Casts of patched functions' arguments since the session opened: `made`, and `reused` ones of weights.

    `cached_bytes` are those of the casts of weights that are kept now.
    """

    made: int
    reused: int
    cached_bytes: int


def cast_counts() -> CastCounts:
    """Returns how many casts patched functions used since the session opened, and the bytes of kept ones.

    Counted only if an `Observer` with `counts_casts` watched when it opened, and outside compiled code;
    the bytes are always known.
    """
    counter = SESSION.torch_patch.counter
    made, reused = (counter.made, counter.reused) if counter else (0, 0)
    return CastCounts(made, reused, SESSION.casts.nbytes)


def half_function(function: Function) -> Function:
    """Decorates a function to run in the half type of the level, while O1 or O4 is on."""
    return decorate(function, Cast.LOWER)


def bfloat16_function(function: Function) -> Function:
    """Decorates a function to run in bfloat16, while O1 or O4 is on."""
    return decorate(function, Cast.LOWER, torch.bfloat16)


def float_function(function: Function) -> Function:
    """Decorates a function to run in float32, while O1 or O4 is on."""
    return decorate(function, Cast.FP32)


def promote_function(function: Function) -> Function:
    """Decorates a function to run in the widest type of its arguments, while O1 or O4 is on."""
    return decorate(function, Cast.PROMOTE)


def register_half_function(module: object, name: str) -> None:
    """Makes `module.name` run in the half type of the level at O1 and O4; before or after `initialize`.

    Raises AmpValueError, a ValueError, if the module has no such function.
    """
    _register(module, name, Cast.LOWER)


def register_bfloat16_function(module: object, name: str) -> None:
    """Makes `module.name` run in bfloat16 at O1 and O4; as `register_half_function` otherwise."""
    _register(module, name, Cast.LOWER, torch.bfloat16)


def register_float_function(module: object, name: str) -> None:
    """Makes `module.name` run in float32 at O1 and O4; as `register_half_function` otherwise."""
    _register(module, name, Cast.FP32)


def register_promote_function(module: object, name: str) -> None:
    """Makes `module.name` run in the widest type of its arguments; as `register_half_function` otherwise."""
    _register(module, name, Cast.PROMOTE)


@overload
def explain(op: str) -> Explanation: ...
@overload
def explain(op: Module, float8_recipe: str = ...) -> LayersExplained: ...
def explain(op: str | Module, float8_recipe: str = "tensorwise") -> Explanation | LayersExplained:
    """Says what happens to an op at each level, under each of its names, and why.

    Of a model it says which linear layers compute in float8, or would at O6, and why others do not.

    `print(amp.explain("softmax"))` prints what `ampatch lists softmax` prints, and also
    what happens to functions that the script registered. `op` may include its module, as in
    "torch.nn.functional.softmax", "F.softmax" or "my_ops.fused_gelu", and may be an operator, such as "@".

    Raises AmpValueError for what is not an op, and suggests close names.
    """
    if isinstance(op, Module):
        return explain_layers(op, float8_recipe, SESSION.members.float8)
    with SESSION.casts.thread.disabled():
        return Catalog(registered=map(_name, SESSION.torch_patch.registrations)).explain(op)


def _name(registration: Registration) -> Name:
    path = ".".join(filter(None, qualify(registration.parent, registration.attribute)))
    reason = "registered by the script"
    return Name(path, registration.cast, reason, dtype=registration.dtype)


def _register(module: object, name: str, cast: Cast, dtype: torch.dtype | None = None) -> None:
    validate_place(module, name)
    SESSION.torch_patch.register(Registration(module, name, cast, dtype))
