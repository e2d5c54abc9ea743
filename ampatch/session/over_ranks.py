"""What `torch.distributed` asks of a session: masters by name, wrapped optimizers, one rank's values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from ampatch.patching.distributed import Broadcast
from ampatch.session.members import Members
from ampatch.steps.foreign_step import WholeStep
from ampatch.steps.scaler import LossScaler


class OverRanks:
    """Answers for the members of a session."""

    def __init__(self, members: Members) -> None:
        self._members = members

    def map_masters(self, optimizer: object) -> dict[Tensor, Parameter]:
        """Returns the masters of an optimizer, by the half parameter that each stands for."""
        found = self._members.find(optimizer)
        return {} if found is None else {pair.half: pair.master for pair in found[0].masters}

    def join_wrapper(self, wrapper: object, optimizer: Optimizer) -> None:
        """Makes the steps of a wrapper whole, as if it had been given to `initialize`."""
        found = self._members.find(optimizer)
        if found is not None:
            WholeStep(wrapper, found[0]).open(found[0].undo)

    @torch.no_grad()
    def broadcast_(self, model: Module, broadcast: Broadcast) -> None:
        """Gives masters and loss scales of a model the values of one rank; two host syncs a dynamic scale."""
        params = set(model.parameters())
        scalers: dict[LossScaler, None] = {}
        for amp in self._members.optimizers():
            if params.isdisjoint(amp.model_params()):
                continue
            scalers |= dict.fromkeys(self._members.find(amp.optimizer)[1].scalers)  # type: ignore[index]
            for pair in amp.masters:
                broadcast(pair.master.detach())
                pair.mark_synced()
        device = next(iter(params)).device
        for scaler in scalers:
            if scaler.is_dynamic:
                state = scaler.state_dict()
                values = torch.tensor(list(state.values()), dtype=torch.float64, device=device)
                broadcast(values)
                scaler.load_state_dict(dict(zip(state, values.tolist(), strict=True)))
