"""The ways to train that are compared: float32, torch's own, ampatch's levels, and a limit by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

import ampatch as amp
from ampatch import testing
from ampatch.casts.kernels import flatten_parameters
from ampatch.levels.float8 import find_lack
from benchmarks.fresh import say_reason
from benchmarks.series import Step
from benchmarks.setting import Setting
from benchmarks.workload import Workload


@dataclass(frozen=True, slots=True)
class Mode:
    """What one step is: forward, or `accumulation` times forward and backward, and the optimizer's step."""

    name: str
    accumulation: int  # 0: evaluation
    is_compiled: bool = False  # the forward and the loss, in one graph


TRAIN, ACCUMULATE, EVALUATE = Mode("train", 1), Mode("accumulate 4", 4), Mode("eval", 0)
COMPILED = Mode("train compiled", 1, is_compiled=True)  # only where it is asked for: compiling takes minutes
MODES = (TRAIN, ACCUMULATE, EVALUATE)


def make_optimizer(params: Iterable[Tensor], fused: bool) -> Optimizer:
    """AdamW; fused it is the fastest of torch, and hides as little as it can of what surrounds it."""
    return torch.optim.AdamW(params, lr=1e-4, fused=fused)


class Trainer:
    """Trains in float32; the others override what they do otherwise."""

    def __init__(self, workload: Workload, mode: Mode, setting: Setting, fused: bool = True) -> None:
        self.model, self.inputs, self.targets = workload.make(setting.device)
        self.optimizer = make_optimizer(self.model.parameters(), fused)
        self.mode = mode
        self.setting = setting
        if mode.is_compiled:
            self.compute_loss = torch.compile(self.compute_loss, fullgraph=True)

    def open(self) -> AbstractContextManager[object]:
        """Sets up what must be undone."""
        return nullcontext()

    def keep_casts(self) -> AbstractContextManager[object]:
        """A block in which casts of weights outlive the forward that made them."""
        return nullcontext()

    def list_masters(self) -> list[Tensor]:
        """The float32 copies of half weights."""
        return []

    def compute_loss(self) -> Tensor:
        """One forward."""
        return cross_entropy(self.model(self.inputs), self.targets)

    def backward(self, loss: Tensor) -> None:
        """One backward."""
        loss.backward()

    def update(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self) -> None:
        """One step: as many forwards and backwards as the mode says, and an update."""
        for _ in range(self.mode.accumulation):
            self.backward(self.compute_loss())
        self.update()

    @torch.no_grad()
    def evaluate(self) -> None:
        """One forward without a graph."""
        self.compute_loss()

    def choose_step(self) -> Step:
        """What is timed."""
        if self.mode.accumulation:
            return self.train
        self.model.eval()
        return self.evaluate


class Autocast(Trainer):
    """Trains with `torch.autocast`, and with `GradScaler` in float16."""

    def __init__(self, workload: Workload, mode: Mode, setting: Setting, fused: bool = True) -> None:
        super().__init__(workload, mode, setting, fused)
        self.scaler = torch.amp.GradScaler(setting.device, enabled=setting.needs_scaler)

    def keep_casts(self) -> AbstractContextManager[object]:
        # Around the one of the forward: the cache is cleared where the outermost ends.
        return torch.autocast(self.setting.device, self.setting.half)

    def compute_loss(self) -> Tensor:
        with torch.autocast(self.setting.device, self.setting.half):
            return super().compute_loss()

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class AtLevel(Trainer):
    """Trains at an opt level of ampatch."""

    def __init__(
        self, opt_level: str, workload: Workload, mode: Mode, setting: Setting, fused: bool = True
    ) -> None:
        super().__init__(workload, mode, setting, fused)
        self.opt_level = opt_level

    def open(self) -> AbstractContextManager[object]:
        return testing.session(self.opt_level, self.model, self.optimizer)

    def list_masters(self) -> list[Tensor]:
        return [master for _, master in amp.master_pairs(self.optimizer)]

    def backward(self, loss: Tensor) -> None:
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()


class Limit(Trainer):
    """Trains half weights that are cast once, with float32 masters: what O2 and O5 do, without a check.

    BatchNorm stays float32. Nothing is scaled, no gradient is looked at, and gradients of several
    batches add up in half. The masters' gradients have memory of their own: that is fastest.
    """

    def __init__(self, workload: Workload, mode: Mode, setting: Setting, fused: bool = True) -> None:
        super().__init__(workload, mode, setting, fused)
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        self.kept = [param for norm in norms for param in norm.parameters()]
        kept = {id(param) for param in self.kept}
        self.half = [param for param in self.model.parameters() if id(param) not in kept]
        self.masters = [param.detach().clone().requires_grad_() for param in self.half]
        for param, master in zip(self.half, self.masters, strict=True):
            param.data = param.data.to(setting.half)
            master.grad = torch.zeros_like(master)
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):
                flatten_parameters(module)  # on a GPU: else each call copies the weights into one block
        self.optimizer = make_optimizer([*self.masters, *self.kept], fused)

    def list_masters(self) -> list[Tensor]:
        return self.masters

    def compute_loss(self) -> Tensor:
        outputs = self.model(self.inputs.to(self.setting.half))
        return cross_entropy(outputs.float(), self.targets)

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_copy_([master.grad for master in self.masters], [param.grad for param in self.half])
        self.optimizer.step()
        torch._foreach_copy_(self.half, self.masters)
        for param in (*self.half, *self.kept):
            param.grad = None


class Torchao(Autocast):
    """Trains with `torch.autocast` and torchao's float8 layers: those that O6 would choose."""

    def __init__(self, workload: Workload, mode: Mode, setting: Setting, fused: bool = True) -> None:
        super().__init__(workload, mode, setting, fused)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        chosen = {layer.name for layer in amp.explain(self.model).layers if not layer.because}
        convert_to_float8_training(
            self.model,
            config=Float8LinearConfig.from_recipe_name("tensorwise"),
            module_filter_fn=lambda _, name: name in chosen,
        )


Kind = Callable[..., Trainer]  # of a workload, a mode and a setting; picklable

# By half type: levels compute in one of their own.
LEVELS = {torch.bfloat16: ("O4", "O5"), torch.float16: ("O1", "O2", "O3")}
CONTENDERS: dict[torch.dtype, dict[str, Kind]] = {
    half: {
        "float32": Trainer,
        "autocast": Autocast,
        **{level: partial(AtLevel, level) for level in levels},
        "limit": Limit,
    }
    for half, levels in LEVELS.items()
}
FLOAT8: dict[str, Kind] = {"O6": partial(AtLevel, "O6"), "torchao": Torchao}


def list_contenders(setting: Setting) -> dict[str, Kind]:
    """Returns the contenders of a half type, those in float8 where the device has it."""
    has_float8 = setting.half is torch.bfloat16 and not find_lack("tensorwise", torch.device(setting.device))
    return CONTENDERS[setting.half] | (FLOAT8 if has_float8 else {})


@contextmanager
def open_step(
    kind: Kind, workload: Workload, mode: Mode, setting: Setting, fused: bool = True
) -> Iterator[Step]:
    """Yields the step of a contender, on a fresh model; torch is as before when the block ends."""
    trainer = kind(workload, mode, setting, fused)
    with trainer.open():
        yield trainer.choose_step()


def choose_runnable(
    kinds: Mapping[str, Kind], workload: Workload, mode: Mode, setting: Setting, fused: bool = True
) -> tuple[dict[str, Kind], dict[str, str]]:
    """Returns the contenders that can run one step here, and why the others cannot.

    There are processors for which torch has no float16 LSTM, say. Errors of ampatch itself are raised.
    """
    reasons = {name: _find_reason(kind, workload, mode, setting, fused) for name, kind in kinds.items()}
    failures = {name: reason for name, reason in reasons.items() if reason is not None}
    return {name: kind for name, kind in kinds.items() if name not in failures}, failures


def _find_reason(kind: Kind, workload: Workload, mode: Mode, setting: Setting, fused: bool) -> str | None:
    try:
        with open_step(kind, workload, mode, setting, fused) as step:
            step()
    except amp.AmpError:
        raise
    except RuntimeError as error:
        return say_reason(error)
    return None
