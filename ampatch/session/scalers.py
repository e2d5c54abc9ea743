"""The public functions of the loss scalers: their scales, and their state as apex wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.loss_scale import is_number, validate_scale
from ampatch.levels.stack import warn
from ampatch.session.session import SESSION
from ampatch.steps.scaler import LossScaler


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
