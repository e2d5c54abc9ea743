"""The LossScaler that scripts know: apex's names of attributes and methods, on a scaler of ampatch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict

import torch
from torch import Tensor

import ampatch as amp
from ampatch.apex.amp_C import multi_tensor_scale


class _Option:
    """An option of a dynamic scale, as an attribute; to a constant it means nothing."""

    def __init__(self, name: str, default: float | None) -> None:
        self._name, self._default = name, default

    def __get__(self, view: LossScaler | None, owner: type) -> object:
        if view is None:
            return self
        return getattr(view.scaler.config, self._name) if view.dynamic else self._default

    def __set__(self, view: LossScaler, value: float | None) -> None:
        if not view.dynamic:
            return
        config = {**asdict(view.scaler.config), self._name: value}
        low, high = config["min_scale"] or 0.0, config["max_scale"] or math.inf
        config["init_scale"] = min(max(config["init_scale"], low), high)  # which is over and done with
        view.scaler.config = amp.DynamicLossScale(**config)


class LossScaler:
    """Shows one loss scaler under apex's names; what is assigned takes effect.

    `LossScaler("dynamic")` or `LossScaler(128.0)` makes one of its own. Reading the scale of a
    dynamic scaler costs a host sync.
    """

    has_fused_kernel = True  # so that scripts read `_overflow_buf`

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        config: object = loss_scale
        if loss_scale == "dynamic":
            config = amp.DynamicLossScale(
                init_scale=min(init_scale, max_loss_scale),
                growth_factor=scale_factor,
                backoff_factor=1 / scale_factor,
                growth_interval=scale_window,
                min_scale=min_loss_scale,
                max_scale=max_loss_scale,
            )
        self._show_scaler(amp.LossScaler(0, config, torch.device("cpu")))

    @classmethod
    def show(cls, scaler: amp.LossScaler, loss_id: int) -> LossScaler:
        """Returns apex's view of a scaler; `loss_id` is its number within its call of `initialize`."""
        view = cls.__new__(cls)
        view._show_scaler(scaler, loss_id)
        return view

    def _show_scaler(self, scaler: amp.LossScaler, loss_id: int = 0) -> None:
        self.scaler = scaler
        self.loss_id = loss_id
        self._own_buffer = self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    def replace(self, other: LossScaler) -> None:
        """Takes the place of another view, whose scaler gets the options and the scale of this one."""
        scale, unskipped, config = self._loss_scale, self._unskipped, self.scaler.config
        self._show_scaler(other.scaler, other.loss_id)
        self.scaler.config = config
        self._loss_scale, self._unskipped = scale, unskipped

    def __getstate__(self) -> dict[str, object]:
        # The layout that apex pickled, as in the checkpoints of its FP16_Optimizer.
        bounds = ("_max_loss_scale", "_min_loss_scale")
        names = ("dynamic", "_loss_scale", *bounds, "_unskipped", "_scale_seq_len")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, object]) -> None:
        LossScaler.__init__(
            self,
            "dynamic" if state["dynamic"] else state["_loss_scale"],
            scale_window=state.get("_scale_seq_len", 2000),
            min_loss_scale=state.get("_min_loss_scale"),
            max_loss_scale=state.get("_max_loss_scale", 2.0**24),
        )
        self._loss_scale, self._unskipped = state["_loss_scale"], state.get("_unskipped", 0)

    dynamic = property(lambda self: self.scaler.is_dynamic, doc="Whether the scale follows overflows.")

    def loss_scale(self) -> float:
        """Returns the scale, as a plain number."""
        return self.scaler.get_scale()

    _loss_scale = property(loss_scale, lambda self, value: self.scaler.set_scale(float(value)))
    _unskipped = property(
        lambda self: self.scaler.state_dict()["unskipped"],
        lambda self, value: self.scaler.load_state_dict(
            {"loss_scale": self._loss_scale, "unskipped": int(value)}
        ),
    )
    _has_overflow = property(
        lambda self: self.scaler.did_overflow(),
        lambda self, value: self._overflow_buf.fill_(bool(value)),  # for `update_scale`
    )
    _scale_seq_len = _Option("growth_interval", 2000)
    _min_loss_scale = _Option("min_scale", None)
    _max_loss_scale = _Option("max_scale", 2.0**24)

    # Overflows

    def clear_overflow_state(self) -> None:
        self._overflow_buf.zero_()

    def update_scale(self) -> bool:
        """Updates the scale by hand, by `_overflow_buf` and what blocks left; says whether to skip.

        `_overflow_buf` may be one that the script assigned, which it clears itself.
        """
        should_skip = self.scaler.update(self._overflow_buf)
        self._own_buffer.zero_()
        return should_skip

    def unscale(
        self,
        model_grads: Iterable[Tensor],
        master_grads: Iterable[Tensor],
        unused_scale: float | None = None,
        models_are_masters: bool = False,
        scale_override: float | tuple | None = None,
    ) -> None:
        """Writes `model_grads` divided by the scale into `master_grads`, and notes an overflow."""
        scale = self._loss_scale if scale_override is None else scale_override
        scale = scale[0] if isinstance(scale, tuple) else scale
        multi_tensor_scale(0, self._overflow_buf, [[*model_grads], [*master_grads]], 1 / scale)


# It is in checkpoints of apex, and `torch.load` takes only classes that it knows.
torch.serialization.add_safe_globals([(LossScaler, "apex.amp.scaler.LossScaler")])
