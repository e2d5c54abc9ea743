"""For timm: the loss scaler of a training loop, in the place of its `NativeScaler`."""

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

import ampatch as amp
from ampatch.integrations.common import find_masters, needs

with needs("timm", extra="timm"):
    from timm.utils import dispatch_clip_grad

__all__ = ["AmpScaler"]


class AmpScaler:
    """Runs a backward pass, clips and steps, as timm's scalers do; its state is that of the loss scale.

    ```python
    model, optimizer = amp.initialize(model, optimizer, opt_level="O4")
    loss_scaler = AmpScaler()
    loss_scaler(loss, optimizer, clip_grad=1.0)
    ```
    """

    state_dict_key = "amp"  # in the checkpoints of timm's CheckpointSaver
    state_dict = staticmethod(amp.state_dict)
    load_state_dict = staticmethod(amp.load_state_dict)

    def __call__(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Clips `parameters`, by default all of the optimizer, and steps, unless `need_update` is False."""
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(create_graph=create_graph)
        if need_update and clip_grad is not None:
            stepped = amp.master_params(optimizer)
            clipped = stepped if parameters is None else find_masters(parameters, [optimizer])
            dispatch_clip_grad(clipped, clip_grad, mode=clip_mode)
        if need_update:
            optimizer.step()
