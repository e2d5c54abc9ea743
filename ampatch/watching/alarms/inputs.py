"""What is noted while a step runs: the batch that a model was given, and losses that stay on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import Module

from ampatch.levels.private import unwrap
from ampatch.patching.torch_features import BeforeGraph

SLOTS = 8  # losses that go to the host together: one copy for all of them
MOST_ITEMS, MOST_DEPTH = 64, 3  # of a batch that is looked through in each forward


class LastForward(BeforeGraph):
    """Keeps what a model's last forward was given, until the step; a forward pre-hook with kwargs.

    Tensors are referred to, not copied, and without their graph, so that no other model is kept alive; the
    state of the random numbers is that from before the forward. A forward without gradients leaves nothing
    here. A deep copy or a pickled model has a hook that keeps nothing.
    """

    def __init__(self, is_on: bool = True) -> None:
        self._is_on = is_on
        self.drop()

    def __reduce__(self) -> tuple:
        return LastForward, (False,)

    def drop(self) -> None:
        """Forgets it."""
        self.args: tuple = ()
        self.kwargs: dict = {}
        self.random: dict[str, Tensor] = {}

    def __call__(self, module: Module, args: tuple, kwargs: dict) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self.refresh(args, kwargs)

    def refresh(self, args: tuple, kwargs: dict) -> None:
        """Takes what a forward is given."""
        if not self._is_on or not torch.is_grad_enabled():
            return
        self.random = _read_random(args or tuple(kwargs.values()))
        self.args, self.kwargs = _without_graph(args), _without_graph(kwargs)


def _without_graph(value: object, depth: int = 0) -> object:
    """Returns a value with its tensors detached, in tuples, lists and dicts; what else there is, as it is.

    Of those in `torch.func`, whose transforms end with the forward, what lies underneath.
    """
    if type(value) is Tensor or isinstance(value, Tensor):
        value = unwrap(value)
        return value.detach() if value.requires_grad else value
    if type(value) not in (tuple, list, dict) or len(value) > MOST_ITEMS or depth > MOST_DEPTH:
        return value
    if type(value) is dict:
        return {key: _without_graph(item, depth + 1) for key, item in value.items()}
    return type(value)([_without_graph(item, depth + 1) for item in value])


def _read_random(given: tuple) -> dict[str, Tensor]:
    """The state of the generator that a forward draws from: that of the first tensor's device."""
    for one in given:
        if isinstance(one, Tensor) and one.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return {}
            return {str(one.device): torch.cuda.default_generators[one.device.index].get_state()}
    return {"cpu": torch.random.default_generator.get_state()}


class LossRing:
    """Brings losses from a device to the host, some at a time, and never waits for them.

    A loss is copied into a slot on the device. Once all are taken, one copy brings them to the host; they
    are known when it has arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.zeros(SLOTS, dtype=torch.float32, device=device)
        self._slots = self._numbers.unbind()
        self._keys: list[object] = []
        self.sent: list[tuple[list[object], Tensor, torch.cuda.Event | None]] = []  # on their way

    def put(self, key: object, loss: Tensor) -> None:
        """Takes the loss of a step, under a key; no host sync."""
        self._slots[len(self._keys)].copy_(loss)
        self._keys.append(key)
        if len(self._keys) == SLOTS:
            self._send()

    def _send(self) -> None:
        keys, self._keys = self._keys, []
        if not self._numbers.is_cuda:
            self.sent.append((keys, self._numbers.clone(), None))
            return
        host = torch.empty(SLOTS, dtype=torch.float32, device="cpu", pin_memory=True)
        host.copy_(self._numbers, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record(torch.cuda.current_stream(self._numbers.device))
        self.sent.append((keys, host, arrival))

    def take(self, *, all_of_them: bool = False) -> Iterator[tuple[object, float]]:
        """Yields the keys and losses that have arrived, oldest first; `all_of_them` waits for the rest."""
        if all_of_them and self._keys:
            self._send()
        while self.sent:
            keys, numbers, arrival = self.sent[0]
            if arrival is not None and all_of_them:
                arrival.synchronize()
            if arrival is not None and not arrival.query():
                return
            del self.sent[0]
            yield from zip(keys, numbers.tolist(), strict=False)
