"""The loss scalers in a checkpoint, in the format that apex wrote."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.loss_scale import is_number, validate_scale
from ampatch.steps.scaler import LossScaler

logger = logging.getLogger("ampatch")


def save_scalers(scalers: Sequence[LossScaler]) -> dict[str, dict[str, float | int]]:
    """Returns the state of every scaler by its number; one host sync for each that is dynamic."""
    return {f"loss_scaler{index}": scaler.state_dict() for index, scaler in enumerate(scalers)}


def load_scalers(scalers: Sequence[LossScaler], states: object) -> None:
    """Loads the scalers' states by key, all or nothing."""
    if not isinstance(states, Mapping):
        raise AmpTypeError(
            f"state_dict is a {type(states).__name__}: expected what amp.state_dict() returned"
        )
    by_key = {f"loss_scaler{index}": scaler for index, scaler in enumerate(scalers)}
    for key, state in states.items():
        _validate_state(key, state)
    if len(states) != len(scalers):
        logger.warning(
            "the checkpoint holds %d loss scalers, this session has %d: those that both have are loaded",
            len(states),
            len(scalers),
        )
    for key in states.keys() & by_key.keys():
        by_key[key].load_state_dict(states[key])


def _validate_state(key: object, state: object) -> None:
    if not (isinstance(key, str) and re.fullmatch(r"loss_scaler\d+", key)):
        raise AmpValueError(
            f"state_dict has an unknown key {key!r}: expected 'loss_scaler0' and so on; nothing is loaded"
        )
    expected = {"loss_scale", "unskipped"}
    if not isinstance(state, Mapping) or set(state) != expected:
        found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise AmpValueError(
            f"state_dict[{key!r}] has {found}: expected {sorted(expected)}; nothing is loaded"
        )
    validate_scale(f"nothing is loaded, state_dict[{key!r}]['loss_scale']", state["loss_scale"])
    unskipped = state["unskipped"]
    if not is_number(unskipped) or not 0 <= unskipped < 2**31:
        raise AmpValueError(
            f"nothing is loaded, state_dict[{key!r}]['unskipped'] {unskipped!r}: expected 0 to 2**31"
        )
