"""What `torch.distributed` has to know of masters: under which names a checkpoint holds their state."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Concatenate, ParamSpec, TypeVar

import torch
import wrapt
from torch import Tensor
from torch.nn import Module, Parameter

from ampatch.levels.private import CHECKPOINTS, explain_missing
from ampatch.patching.patcher import Patcher, SessionPatch

logger = logging.getLogger("ampatch")

# Of an optimizer: its masters, by the half parameter that each stands for.
FindMasters = Callable[[object], Mapping[Tensor, Parameter]]
Rest, Result = ParamSpec("Rest"), TypeVar("Result")
StateDictFunction = Callable[Concatenate[Module, Sequence[object], Rest], Result]

STATE_DICT = "torch.distributed.checkpoint.state_dict"


class CheckpointNames(SessionPatch):
    """Has `get_optimizer_state_dict` and the functions beside it find masters by the model's names."""

    def __init__(self, find_masters: FindMasters) -> None:
        super().__init__()
        self._find_masters = find_masters
        self._is_waiting = False  # for the module to be imported, which takes a second

    def patch(self, patcher: Patcher) -> None:
        """Patches the module now, or once somebody imports it."""
        if STATE_DICT in sys.modules:
            self._patch_module(patcher)
        elif not self._is_waiting and torch.distributed.is_available():
            self._is_waiting = True
            wrapt.register_post_import_hook(self._take_module, STATE_DICT)

    def _take_module(self, module: ModuleType) -> None:
        if self._patcher is not None:
            self._patch_module(self._patcher)

    def _patch_module(self, patcher: Patcher) -> None:
        for line in explain_missing(CHECKPOINTS):
            logger.warning("torch %s has %s", torch.__version__, line)
        for name in CHECKPOINTS:
            if not name.is_missing():
                patcher.replace(*name.find_place(), with_names(name.find(), self._find_masters))


def with_names(
    original: StateDictFunction[Rest, Result], find_masters: FindMasters
) -> StateDictFunction[Rest, Result]:
    """Returns a function of torch's that looks the parameters of optimizers up among those of a model.

    While it runs, the model names the masters in the place of its half parameters.
    """

    @functools.wraps(original)
    def call(model: Module, optimizers: Sequence[object], *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        masters = {half: master for one in optimizers for half, master in find_masters(one).items()}
        own = vars(model)  # past `__setattr__`, by which compiled models set attributes of what they wrap
        if not masters or "named_parameters" in own:  # the one function calls the other
            return original(model, optimizers, *args, **kwargs)
        names = kwargs.get("info", args[-1] if args else None).fqn_param_mapping  # type: ignore[union-attr]
        names.update({master: names[half] for half, master in masters.items() if half in names})
        named_parameters = model.named_parameters

        def name_masters(*how: object, **options: object) -> Iterator[tuple[str, Tensor]]:
            for name, param in named_parameters(*how, **options):  # type: ignore[arg-type]
                yield name, masters.get(param, param)

        own["named_parameters"] = name_masters
        try:
            return original(model, optimizers, *args, **kwargs)
        finally:
            del own["named_parameters"]

    return call
