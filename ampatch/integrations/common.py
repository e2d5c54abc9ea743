"""What the plugins share: what starts training, what checkpoints hold, and which masters parameters have."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

import ampatch as amp

logger = logging.getLogger("ampatch")


@contextmanager
def needs(package: str, extra: str = "trainers") -> Iterator[None]:
    """Goes around the imports of a package: where it is missing, says what installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        text = f"{package} is not installed: pip install 'ampatch[{extra}]'"
        raise ModuleNotFoundError(text, name=package) from None


def validate(options: Mapping[str, object]) -> dict[str, object]:
    """Returns arguments for `initialize`; raises AmpTypeError for those that it has not."""
    with amp.override(**options):
        return dict(options)


def is_initialized(optimizer: object) -> bool:
    """Whether `initialize` has taken an optimizer, or its wrapper, and nothing has undone that."""
    try:
        next(amp.master_pairs(optimizer), None)
    except amp.AmpError:
        return False
    return True


def was_skipped(optimizer: object) -> bool:
    """Whether an overflow skipped the last step of an optimizer; without a session none did."""
    return is_initialized(optimizer) and amp.step_was_skipped(optimizer)


def start(models: Sequence[Module], optimizers: Sequence[Optimizer], options: Mapping[str, object]) -> None:
    """Gives them their mixed precision, and has checkpoints of the optimizers hold the loss scale."""
    amp.initialize(models, optimizers, **options)
    scales = SavedScales(amp.loss_scalers(of_last_call=True))
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper has no hooks
        inner.register_state_dict_post_hook(scales.save)
        inner.register_load_state_dict_pre_hook(scales.load)


class SavedScales:
    """The loss scalers of one `initialize`, which go into the state of its optimizers and come back."""

    def __init__(self, scalers: Sequence[amp.LossScaler]) -> None:
        self._scalers = {f"loss_scaler{index}": scaler for index, scaler in enumerate(scalers)}

    def save(self, _: Optimizer, state: dict[str, object]) -> None:
        """Adds them to what `optimizer.state_dict()` returns; one host sync for each that is dynamic."""
        state["amp"] = {name: scaler.state_dict() for name, scaler in self._scalers.items()}

    def load(self, _: Optimizer, state: dict[str, object]) -> None:
        """Restores them; those that the state lacks stay as they are, and the log says so."""
        saved = state.get("amp", {})
        for name, scaler in self._scalers.items():
            if name in saved:
                scaler.load_state_dict(saved[name])
            elif scaler.is_dynamic:
                logger.warning("the checkpoint holds no %s: its first steps may be skipped", name)


def find_masters(parameters: Tensor | Iterable[Tensor], optimizers: Iterable[object]) -> list[Tensor]:
    """Returns what optimizers step in the place of parameters, in their order: masters at O2 and O5."""
    clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    masters: dict[int, Tensor] = {}
    for optimizer in filter(is_initialized, optimizers):
        list(amp.master_params(optimizer))  # which has their gradients
        masters |= {id(half): master for half, master in amp.master_pairs(optimizer)}
    return [masters.get(id(parameter), parameter) for parameter in clipped]
