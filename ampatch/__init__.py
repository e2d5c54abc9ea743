"""Mixed precision for PyTorch scripts by opt level, with an exact way back."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

if not os.path.isdir(os.path.join(__path__[0], "lists")):  # a source tree, where it lies beside the package
    __path__.append(os.path.dirname(__path__[0]))

from ampatch.errors import (
    AmpError,
    AmpTypeError,
    AmpValueError,
    BannedFunctionError,
    NotInitializedError,
    PatchConflictError,
    TableError,
)
from ampatch.levels.loss_scale import Alarms, DynamicLossScale
from ampatch.levels.policy import OPT_LEVELS, Policy
from ampatch.session.frontend import (
    CastCounts,
    backward_outcomes,
    bfloat16_function,
    cast_counts,
    clear_cache,
    disable_casts,
    explain,
    float_function,
    get_loss_scale,
    half_function,
    initialize,
    load_state_dict,
    loss_scalers,
    master_pairs,
    master_params,
    override,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    scale_loss,
    set_loss_scale,
    state_dict,
    step_was_skipped,
    uninitialize,
)
from ampatch.steps.scaler import BackwardOutcome, LossScaler
from ampatch.watching.alarms.history import Alarm, ScaleHistory, ScaleUpdate
from ampatch.watching.alarms.log import history, log_to, on_alarm
from ampatch.watching.listeners import listen
from ampatch.watching.observers import Observer, observe, observers, report

if TYPE_CHECKING:
    import ampatch as amp  # noqa: F401
    from ampatch.doctor.live import diagnose
    from ampatch.sweeps.function import sweep

__version__ = "1.0.0rc1"

listen()
del listen

__all__ = [
    "OPT_LEVELS",
    "Alarm",
    "Alarms",
    "AmpError",
    "AmpTypeError",
    "AmpValueError",
    "BackwardOutcome",
    "BannedFunctionError",
    "CastCounts",
    "DynamicLossScale",
    "LossScaler",
    "NotInitializedError",
    "Observer",
    "PatchConflictError",
    "Policy",
    "ScaleHistory",
    "ScaleUpdate",
    "TableError",
    "backward_outcomes",
    "bfloat16_function",
    "cast_counts",
    "clear_cache",
    "diagnose",
    "disable_casts",
    "explain",
    "float_function",
    "get_loss_scale",
    "half_function",
    "history",
    "initialize",
    "load_state_dict",
    "log_to",
    "loss_scalers",
    "master_pairs",
    "master_params",
    "observe",
    "observers",
    "on_alarm",
    "override",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "report",
    "scale_loss",
    "set_loss_scale",
    "state_dict",
    "step_was_skipped",
    "sweep",
    "uninitialize",
]

# Names of torch.amp that are looked for here, and what to write instead.
INSTEAD = {
    "autocast": "amp.initialize(model, optimizer, opt_level='O1') casts from then on, and "
    "`with amp.disable_casts():` does not",
    "GradScaler": "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()` scales, "
    "unscales, skips the step after an overflow and updates the scale",
    "unscale_": "gradients are unscaled when the block of amp.scale_loss ends: clip those of "
    "amp.master_params(optimizer) after it",
}


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # which takes any name for one that is there, where there is such a function

    def __getattr__(name: str) -> object:
        # Loaded when it is asked for: it stands on the other names, and most scripts need none of it.
        if name == "amp":  # `from ampatch import amp`, as apex is imported
            return sys.modules[__name__]
        if name == "sweep":
            return importlib.import_module("ampatch.sweeps.function").sweep
        if name == "diagnose":
            return importlib.import_module("ampatch.doctor.live.diagnose")
        hint = f": {INSTEAD[name]}" if name in INSTEAD else ""
        text = f"module {__name__!r} has no attribute {name!r}{hint}"
        if hint and sys._getframe(1).f_code.co_name == "_handle_fromlist":
            raise ImportError(text, name=__name__)  # for an AttributeError there, `from` has words of its own
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
