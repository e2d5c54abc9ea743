"""For Accelerate: an Accelerator that trains in the mixed precision of ampatch."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

import ampatch as amp
from ampatch.integrations.common import find_masters, is_initialized, needs, start, validate, was_skipped

with needs("accelerate"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import convert_to_fp32

__all__ = ["AmpAccelerator"]

SHARDING = ("DEEPSPEED", "FSDP", "MEGATRON_LM")


class AmpAcceleratedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper of an optimizer, which knows of skipped steps: schedulers ask it."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether an overflow skipped the last step."""
        return was_skipped(self)


class AcceleratorMethods:
    """What an Accelerator does otherwise where the precision is that of ampatch."""

    def prepare(self, *args: object, **kwargs: object) -> object:
        """Initializes models and optimizers as the attribute `amp_options` says, then prepares them."""
        models = [arg for arg in args if isinstance(arg, Module)]
        optimizers = [arg for arg in args if isinstance(arg, Optimizer) and not is_initialized(arg)]
        if optimizers and not models:
            raise amp.AmpValueError(
                f"prepare got {type(optimizers[0]).__name__} without its model: ampatch initializes both "
                f"together, so pass both in one call, accelerator.prepare(model, optimizer, ...)"
            )
        for model in models if optimizers and self.device_placement else ():
            if not self.verify_device_map(model):
                model.to(self.device)
        if optimizers:
            start(models, optimizers, self.amp_options)
        return super().prepare(*args, **kwargs)

    def prepare_model(self, model: Module, *args: object, **kwargs: object) -> Module:
        """Prepares a model, whose outputs are float32: so they are in any mixed precision of Accelerate."""
        is_cast = cast_outputs in model._forward_hooks.values()
        if not is_cast and self.amp_options.get("cast_model_outputs") in (None, torch.float32):
            model.register_forward_hook(cast_outputs)
        return super().prepare_model(model, *args, **kwargs)

    def prepare_optimizer(self, *args: object, **kwargs: object) -> AmpAcceleratedOptimizer:
        """Wraps an optimizer such that no scheduler steps where it has not."""
        prepared = super().prepare_optimizer(*args, **kwargs)
        prepared.__class__ = AmpAcceleratedOptimizer
        return prepared

    def backward(self, loss: Tensor, *, optimizers: object = None, loss_id: int = 0, **rest: object) -> None:
        """Scales the loss, runs its backward pass and unscales the gradients.

        `optimizers` are those whose parameters get gradients from it, by default all that were prepared: an
        overflow skips the next step of each. `loss_id` is that of `amp.scale_loss`.
        """
        optimizers = self._optimizers if optimizers is None else optimizers
        if not optimizers:
            raise amp.AmpValueError("no optimizer is prepared: pass it to accelerator.prepare with its model")
        with amp.scale_loss(loss, optimizers, loss_id) as scaled_loss:
            super().backward(scaled_loss, **rest)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], *args: object, **kwargs: object) -> Tensor:
        """Clips the gradients that are stepped: those of the parameters' masters at O2 and O5."""
        return super().clip_grad_norm_(find_masters(parameters, self._optimizers), *args, **kwargs)

    def clip_grad_value_(self, parameters: Iterable[Tensor], *args: object, **kwargs: object) -> None:
        super().clip_grad_value_(find_masters(parameters, self._optimizers), *args, **kwargs)


def cast_outputs(model: Module, args: tuple, output: object) -> object:
    return convert_to_fp32(output)


class AmpAccelerator(AcceleratorMethods, Accelerator):
    """Accelerate's Accelerator, with the mixed precision of ampatch.

    ```python
    accelerator = AmpAccelerator(amp_options={"opt_level": "O4"})
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ```

    `amp_options` are arguments of `amp.initialize`, the others are those of Accelerator. Raises AmpValueError
    where Accelerate's own mixed precision is on, and for DeepSpeed, FSDP and Megatron.
    """

    def __init__(self, *args: object, amp_options: Mapping[str, object] = {}, **kwargs: object) -> None:
        kwargs["mixed_precision"] = kwargs.get("mixed_precision") or "no"
        refuse_precision(kwargs["mixed_precision"], "mixed_precision='no'")
        super().__init__(*args, **kwargs)
        take_over(self, amp_options, "mixed_precision='no'")


def take_over(accelerator: Accelerator, options: Mapping[str, object], remedy: str) -> None:
    """Has an Accelerator train in the mixed precision of ampatch, with these arguments of `initialize`."""
    refuse_precision(accelerator.mixed_precision, remedy)
    if accelerator.distributed_type.name in SHARDING:
        raise amp.AmpValueError(
            f"Accelerate's {accelerator.distributed_type.name} shards or scales by itself: ampatch goes with "
            f"one process, DistributedDataParallel, or torch's fully_shard in a loop of your own"
        )
    if not isinstance(accelerator, AcceleratorMethods):
        accelerator.__class__ = type("AmpAccelerator", (AcceleratorMethods, type(accelerator)), {})
    accelerator.amp_options = validate(options)


def refuse_precision(precision: str, remedy: str) -> None:
    if precision != "no":
        raise amp.AmpValueError(
            f"two mixed precisions meet: Accelerate has its own, {precision!r}, beside that of ampatch: "
            f"write {remedy}"
        )
