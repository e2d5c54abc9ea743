"""For transformers: a Trainer that trains in the mixed precision of ampatch."""

from collections.abc import Mapping

from torch.optim import Optimizer

from ampatch.integrations.common import is_initialized, needs, start

with needs("transformers"):
    from transformers import Trainer

    from ampatch.integrations.accelerate import take_over

__all__ = ["AmpMixin", "AmpTrainer"]


class AmpMixin:
    """Gives any Trainer the mixed precision of ampatch; it stands first among the bases.

    ```python
    class AmpSeq2SeqTrainer(AmpMixin, Seq2SeqTrainer): ...
    ```

    `amp_options` are arguments of `amp.initialize`, which takes the model once there is an optimizer. Raises
    AmpValueError where `fp16` or `bf16` is on.
    """

    def __init__(self, *args: object, amp_options: Mapping[str, object] = {}, **kwargs: object) -> None:
        self.amp_options = amp_options
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Has the Accelerator scale losses, and clip the gradients that are stepped."""
        super().create_accelerator_and_postprocess()
        take_over(self.accelerator, self.amp_options, "neither fp16=True nor bf16=True")

    def create_optimizer(self, *args: object, **kwargs: object) -> Optimizer:
        """Makes the optimizer, unless there is one, and initializes it with the model."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if not is_initialized(optimizer):
            start([self.model], [optimizer], self.amp_options)
        return optimizer


class AmpTrainer(AmpMixin, Trainer):
    """transformers' Trainer, with the mixed precision of ampatch; `AmpMixin` makes one of another Trainer.

    ```python
    trainer = AmpTrainer(model, arguments, train_dataset=examples, amp_options={"opt_level": "O4"})
    ```
    """
