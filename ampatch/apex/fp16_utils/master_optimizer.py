"""An optimizer with float32 masters in its param groups, in the place of half params."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ampatch.apex.fp16_utils.fp16util import master_params_to_model_params
from ampatch.apex.fp16_utils.optimizer_wrapper import OptimizerWrapper
from ampatch.levels.precision import HALF_TYPES
from ampatch.steps.masters import refine


class MasterOptimizer(OptimizerWrapper):
    """Puts float32 masters in the place of an optimizer's half parameters, with their state."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._stamps: dict[int, tuple[int, int]] = {}  # of half parameters that hold their master's rounding
        # One list for each param group; frozen parameters are in none of them.
        self.fp16_groups: list[list[Parameter]] = []
        self.fp32_from_fp16_groups: list[list[Parameter]] = []
        self.fp32_from_fp32_groups: list[list[Parameter]] = []
        self._make_masters()

    def _make_masters(self) -> None:
        """Makes masters for the half parameters that have none yet: new ones, and those unfrozen."""
        for _ in range(len(self.fp16_groups), len(self.param_groups)):
            for groups in (self.fp16_groups, self.fp32_from_fp16_groups, self.fp32_from_fp32_groups):
                groups.append([])
        for index, group in enumerate(self.param_groups):
            known = {id(p) for p in self.fp32_from_fp16_groups[index] + self.fp32_from_fp32_groups[index]}
            for position, param in enumerate(group["params"]):
                if not param.requires_grad or id(param) in known:
                    continue
                if param.dtype in HALF_TYPES:
                    group["params"][position] = self._make_master(index, param)
                else:
                    self.fp32_from_fp32_groups[index].append(param)
        self.all_fp16_params = _join(self.fp16_groups)
        self.all_fp32_from_fp16_params = _join(self.fp32_from_fp16_groups)
        self.all_fp32_from_fp32_params = _join(self.fp32_from_fp32_groups)

    def _make_master(self, index: int, half: Parameter) -> Parameter:
        master = Parameter(half.detach().float())
        master.__dict__.update(half.__dict__)  # attributes that optimizers look for
        self.fp16_groups[index].append(half)
        self.fp32_from_fp16_groups[index].append(master)
        self._stamps[id(half)] = _stamp(half)
        if half in self.state:
            self.state[master] = {
                name: value.float() if isinstance(value, Tensor) and value.dtype in HALF_TYPES else value
                for name, value in self.state.pop(half).items()
            }
        return master

    @torch.no_grad()
    def _take_edits(self) -> None:
        """Feeds masters with what was written into the half parameters since the last step."""
        for half, master in zip(self.all_fp16_params, self.all_fp32_from_fp16_params, strict=True):
            if self._stamps.get(id(half)) != _stamp(half):
                master.copy_(refine(master, half))

    def _master_params_to_model_params(self) -> None:
        master_params_to_model_params(self.all_fp16_params, self.all_fp32_from_fp16_params)
        self._stamps = {id(half): _stamp(half) for half in self.all_fp16_params}

    def add_param_group(self, param_group: dict) -> None:
        """Adds a param group to the inner optimizer, and makes masters for its half parameters."""
        self.optimizer.add_param_group(param_group)
        self._make_masters()


def _join(groups: list[list[Parameter]]) -> list[Parameter]:
    return [param for group in groups for param in group]


def _stamp(half: Tensor) -> tuple[int, int]:
    """What changes when a parameter is written or swapped; writes through `.data` leave no trace."""
    return half._version, half.data_ptr()
