"""The public functions: what scripts call."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.alarms import Alarms
from ampatch.levels.loss_scale import DynamicLossScale
from ampatch.levels.overrides import Overrides, parse_flag, resolve
from ampatch.levels.policy import Policy
from ampatch.models.kept import Keep, normalize_keep
from ampatch.session.request import (
    Models,
    Optimizers,
    Request,
    parse_process_group,
    returns_what_it_is_given,
    suited_level,
    validate_names,
)
from ampatch.session.scalers import pick_scaler
from ampatch.session.session import SESSION
from ampatch.steps.block import PassedThrough, ScaledLoss

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

    Returns models and optimizers in the shape they came in; the models alone if `optimizers` is
    None, so that `a, b = amp.initialize(model)` takes a Sequential of two layers apart. May be called
    again for other models and optimizers. All or nothing: a call that raises leaves torch, models and
    optimizers as they were. `uninitialize` undoes it.

    - `opt_level`: "O0" float32; "O1" (float16) and "O4" (bfloat16) patch torch's functions with
      casts; "O2" and "O5" cast the model and keep float32 master params; "O3" casts everything;
      "O6" is O4 with the products of large linear layers in float8. By default that of an
      earlier call; of the first call "O4" for models on a CPU, where float16 is slow, and "O1" elsewhere.
    - `dtype`: float16 or bfloat16 instead of the level's half type.
    - `loss_scale`: a number, "dynamic" or an `amp.DynamicLossScale`; `min_loss_scale` and
      `max_loss_scale` bound "dynamic". One scaler is made for each of `num_losses`.
    - `keep_fp32`: names of modules (exact, or else shell patterns), classes or modules that run in float32.
    - `float8_recipe`: at O6 "tensorwise" (the default), "rowwise" or "rowwise_with_gw_hp", as in torchao.
    - `float8_layers`: as `keep_fp32`, linear layers that run in float8 at O6 whatever their size and place.
    - `keep_batchnorm_fp32`, `master_weights`, `cast_model_type`, `cast_model_outputs` (a dtype),
      `patch_torch_functions`, `patch_torch_functions_type`: override the level's default.
    - `allow_banned`: runs banned functions in float32 instead of raising on half tensors.
    - `allow_half_params`: takes models with half parameters, which stay half, instead of raising.
    - `alarms`: when to raise an alarm about a loss and its scale, in the log and to `on_alarm`; None: never.
    - `post_mortem`: where the first alarm leaves a file for `ampatch doctor --open`: a folder, or True for
      `ampatch-post-mortem`; by default where the environment variable AMPATCH_POST_MORTEM says, or nowhere.
    - `diagnose`: watches each step and explains one that breaks (see `amp.diagnose.watch`), until
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

    Nests, and survives exceptions.
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
