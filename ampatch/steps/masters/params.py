"""FP32 master params behind one optimizer: it steps them, and the model's half params follow."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import forget_partition
from ampatch.levels.stack import StepLock, warn
from ampatch.steps.masters.weight import Weight


class MasterParams:
    """The masters of one optimizer, put into its param groups in the place of half parameters.

    `optimizers` are the optimizer and those inside it. `touched` holds the ids of parameters that may
    have been written without a trace.
    """

    def __init__(self, optimizers: Sequence[Optimizer], touched: set[int]) -> None:
        self.touched = touched
        self.lock = StepLock()
        self.pairs: list[Weight] = []
        self._plain: tuple[list[Tensor], list[Tensor]] = [], []  # halves and masters that are no wrappers
        self._by_half: dict[int, Weight] = {}
        self.by_master: dict[int, Weight] = {}
        self.optimizers = optimizers
        self._was_checked = False

    def _forget(self) -> None:
        for known in (self.pairs, *self._plain, self._by_half, self.by_master):
            known.clear()

    def __iter__(self) -> Iterator[Weight]:
        return iter(self.pairs)

    def get(self, half: Tensor) -> Weight | None:
        """Returns the pair of a half parameter, None if it has no master here."""
        return self._by_half.get(id(half))

    def owns(self, param: Tensor) -> bool:
        """Whether a parameter is one of the masters."""
        return id(param) in self.by_master

    def stepped_params(self) -> list[Tensor]:
        """The parameters that hold the gradients in float32, each once: masters, and those that need none."""
        known = self.by_master
        params = {  # torch takes one twice in a group
            id(param): param
            for group in self.optimizers[0].param_groups
            for param in group["params"]
            if id(param) not in known
        }
        stepped = list(params.values())
        for pair in self.pairs:
            stepped.append(pair.master)
        return stepped

    def own_params(self) -> list[Tensor]:
        """The parameters that are no masters, and so hold their gradients themselves."""
        return [param for param in self.stepped_params() if not self.owns(param)]

    def model_params(self) -> list[Tensor]:
        """The parameters that backward gives gradients to."""
        return [*self.own_params(), *(pair.half for pair in self.pairs)]

    def add(self, pair: Weight, master: Parameter | None = None) -> None:
        """Makes a master of a weight's float32 values, or takes one that is in the param groups already."""
        pair.make_master(self.touched, self.lock, master)
        self.share(pair)

    def share(self, pair: Weight) -> None:
        """Takes a master that another optimizer steps as well."""
        self.pairs.append(pair)
        if not pair.is_wrapper:
            for known, param in zip(self._plain, (pair.half, pair.master), strict=True):
                known.append(param)
        self._by_half[id(pair.half)] = pair
        self.by_master[id(pair.master)] = pair

    def install(self) -> None:
        """Puts masters into the param groups, and their state under their name, bit for bit."""
        self._replace({key: pair.master for key, pair in self._by_half.items()})
        for optimizer in self.optimizers:
            self.align_state(optimizer)

    def install_again(self, *_: object) -> None:
        """Puts masters back where a script wrote their half parameters into a group since; a hook, too."""
        halves = self._by_half.keys()
        for optimizer in self.optimizers if halves else ():
            for group in optimizer.param_groups:
                if not halves.isdisjoint(map(id, group["params"])):
                    self.install()

    def align_state(self, optimizer: Optimizer) -> None:
        """Gives the state of masters their strides, for fused kernels; a hook for loaded state, too."""
        for pair in self.pairs:
            master, state = pair.master, optimizer.state.get(pair.master, {})
            for name, value in state.items():
                is_plain = type(value) is Tensor and value.layout is torch.strided
                if is_plain and value.shape == master.shape and value.stride() != master.stride():
                    aligned = torch.empty_like(master, dtype=value.dtype, device=value.device)
                    state[name] = aligned.copy_(value)

    def remove(self) -> None:
        """Puts the model's parameters back, with the state that the masters have by now, for good."""
        self._replace({key: pair.half for key, pair in self.by_master.items()})
        self._forget()  # or whoever holds a method of ours would put the masters back

    def _replace(self, by_id: dict[int, Parameter]) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                params = group["params"]
                params[:] = [by_id.get(id(param), param) for param in params]
            for name, own in list(vars(optimizer).items()):  # of parameters, which some step instead
                if type(own) in (list, tuple) and not by_id.keys().isdisjoint(map(id, own)):
                    setattr(optimizer, name, type(own)(by_id.get(id(param), param) for param in own))
            state = optimizer.state
            items = [(by_id.get(id(param), param), value) for param, value in state.items()]
            state.clear()
            state.update(items)
            forget_partition(optimizer)

    def take_edits(self) -> None:
        """Feeds masters with what was written into the model's parameters, or swapped, since they agreed."""
        self.install_again()
        with self.lock as is_free:
            for pair in self._find_edited() if is_free else ():
                pair.take_edit()

    def take_writes(self, *_: object) -> None:
        """Does so in a step of this thread, where masters are in the param groups; a hook of the step."""
        with self.lock.mutex:
            for pair in self._find_edited():
                pair.take_edit()

    def show_edits(self) -> None:
        """Has masters show what was written into the model, for who reads them; the next step takes it."""
        self.install_again()
        with self.lock as is_free:
            for pair in self._find_edited() if is_free else ():
                pair.show_edit()

    def _find_edited(self) -> list[Weight]:
        touched = self.touched  # `Weight.is_edited`, written out: this runs for each at each step
        return [
            pair
            for pair in self.pairs
            if pair.version != (half := pair.half)._version
            or pair.pointer != half.data_ptr()
            or (touched and id(half) in touched)
        ]

    def copy_to_model(self) -> None:
        """Rounds the masters into the model's parameters; no host sync."""
        with self.lock.mutex:
            _round(self.pairs, *self._plain)

    def end_step(self, optimizer: Optimizer, *_: object) -> None:
        """Rounds the masters into the model; the first time warns of one that steps half weights itself.

        Where hooks of the step were there first, it is one, too, and runs before them.
        """
        wrote_half = not self._was_checked and any(pair.is_edited() for pair in self.pairs)
        self._was_checked = True
        self.copy_to_model()
        if wrote_half:
            warn(
                f"{type(optimizer).__name__}.step wrote into the half weights of the model, which its "
                f"float32 masters overwrite: nothing is trained by that; have it step the params in its "
                f"param_groups, or use O1 or O4"
            )

    def repeat_step(self) -> None:
        """Notes that a step ran in a CUDA graph that was replayed, which took no edits."""
        for pair in self.pairs:
            pair.kept = None
            pair.mark_synced()

    def copy_edits_to_model(self) -> None:
        """Rounds the masters that were written outside of a step, as some optimizers do; no host sync."""
        touched = self.touched  # `Weight.follow`, written out: this runs before each forward
        with self.lock as is_free:
            edited = [
                pair
                for pair in self.pairs
                if pair.written != pair.master._version or (touched and pair.was_asked_last())
            ]
            for pair in edited if is_free else ():
                if pair.kept is not None:
                    pair.follow()
            edited = [pair for pair in edited if pair.kept is None]
            if edited and is_free:  # else a step rounds them when it ends
                plain = [pair for pair in edited if not pair.is_wrapper]
                _round(edited, [pair.half for pair in plain], [pair.master for pair in plain])


@torch.no_grad()
def _round(pairs: list[Weight], halves: list[Tensor], masters: list[Tensor]) -> None:
    """Rounds masters into half parameters; `halves` and `masters` are those that are no wrappers."""
    if not pairs:
        return
    if halves:
        torch._foreach_copy_(halves, masters)
    for pair in pairs if len(halves) < len(pairs) else ():
        if pair.is_wrapper:
            pair.half.copy_(pair.master)
    touched = pairs[0].touched
    for pair in pairs:  # `Weight.mark_synced`, written out: this runs for each at each step
        half, master = pair.half, pair.master
        pair.version, pair.written, pair.pointer = half._version, master._version, half.data_ptr()
        if touched:
            touched.difference_update((id(half), id(master)))


def fit_states(optimizers: Iterable[weakref.ref[Optimizer]]) -> None:
    """Casts state to the dtype of its parameters, which have no masters, in the optimizers that are alive.

    As `Optimizer.load_state_dict` would: most kernels refuse a state of another dtype.
    """
    alive = [optimizer for reference in optimizers if (optimizer := reference()) is not None]
    for param, state in [item for optimizer in alive for item in optimizer.state.items()]:
        if isinstance(param, Tensor) and param.dtype in (torch.float32, *HALF_TYPES):
            # Optimizers count steps in float32 whatever the parameters are.
            state.update({key: _cast_value(state[key], param.dtype) for key in state if key != "step"})


def _cast_value(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, list):  # LBFGS keeps its history in some
        return [_cast_value(item, dtype) for item in value]
    sources = {torch.float32} if dtype in HALF_TYPES else set(HALF_TYPES)
    return value.to(dtype) if isinstance(value, Tensor) and value.dtype in sources else value
