"""Reads checkpoints of FP16_Optimizer: our own, and those that apex's several ones wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

import ampatch as amp
from ampatch.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler

Groups = Sequence[Sequence[Tensor]]


def read_loss_scaler(state: Mapping[str, object]) -> LossScaler:
    """Returns a loss scaler of its own, in the state that a checkpoint holds.

    Checkpoints hold an object of `apex.fp16_utils`, one of `apex.amp`, or the bare numbers.
    """
    values = state["loss_scaler"].__reduce_ex__(2)[2] if "loss_scaler" in state else state
    if "_loss_scale" in values:
        return _read_scaler_of_amp(values)
    if "cur_scale" not in values:
        raise amp.AmpValueError(
            f"load_state_dict: found {sorted(state)}, and no loss scale among them: expected what "
            f"FP16_Optimizer.state_dict() returns; the state of a plain optimizer goes into .optimizer"
        )
    is_dynamic = "scale_factor" in values
    scaler = DynamicLossScaler() if is_dynamic else LossScaler()
    vars(scaler).update({name: values[name] for name in vars(scaler) if name in values})
    return scaler


def _read_scaler_of_amp(values: Mapping[str, object]) -> LossScaler:
    if not values["dynamic"]:
        return LossScaler(values["_loss_scale"])
    scaler = DynamicLossScaler(
        values["_loss_scale"],
        scale_window=values["_scale_seq_len"],
        min_loss_scale=values["_min_loss_scale"],
        max_loss_scale=values["_max_loss_scale"],
    )
    scaler.cur_iter = values["_unskipped"]  # counted from the last change
    return scaler


def read_masters(state: Mapping[str, object], groups: Groups) -> list[Tensor]:
    """Returns the values of the masters, in the order of `groups`, the masters they are for.

    Raises AmpValueError if they are not of the same shapes.
    """
    saved = state.get("fp32_from_fp16", state.get("fp32_groups", []))
    found = [[tuple(master.shape) for master in group] for group in saved]
    expected = [[tuple(master.shape) for master in group] for group in groups]
    if found != expected:
        raise amp.AmpValueError(
            f"load_state_dict: the checkpoint has {_describe(found)}, this optimizer {_describe(expected)}: "
            f"make the optimizer of the same half parameters, in the same groups, before loading"
        )
    return [master for group in saved for master in group]


def _describe(shapes: list[list[tuple[int, ...]]]) -> str:
    count = sum(map(len, shapes))
    return f"{count} float32 masters in {len(shapes)} groups, of shapes {shapes!r}"
