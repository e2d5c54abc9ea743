"""FP32 master params: the float32 values behind half weights, and the optimizer that steps them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import (
    TAKES_ANY_GRAD,
    allow_any_grad,
    count_users,
    forget_partition,
    give_float32_grad,
    is_expanded,
    set_grad,
)
from ampatch.levels.stack import StepLock, warn


def refine(precise: Tensor, half: Tensor) -> Tensor:
    """Returns `precise` where `half` is its rounding, and `half` in float32 where it was changed."""
    return torch.where(precise.to(half.dtype) == half, precise, half.to(precise.dtype))


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor wraps others, as a DTensor does: foreach functions may not know it."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def make_dense(tensor: Tensor) -> Tensor:
    """Returns a tensor whose elements fill its memory, in any order; others can have its strides."""
    is_dense = tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride()
    return tensor if is_dense or is_wrapper(tensor) else tensor.contiguous()


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written; one that was made in inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


def is_comparable(tensor: Tensor) -> bool:
    """Whether torch can compare the values; of sparse and meta tensors only the version tells."""
    return not tensor.is_meta and tensor.layout is torch.strided


def _count_users(tensor: Tensor) -> int | None:
    return count_users(tensor.untyped_storage()._cdata)


_ALONE = _count_users(torch.empty(1, device="cpu"))


def is_alone(tensor: Tensor) -> bool:
    """Whether nobody else has the memory of a tensor, and could write there without a trace."""
    return _ALONE is not None and _count_users(tensor) == _ALONE


class Weight:
    """A half parameter or buffer, and its float32 values: the originals while they hold, or a master.

    A float32 value counts only where the half tensor still is its rounding: what was written into the half
    tensor since, by an in-place edit or through `.data`, wins. Who reads sees that, and changes nothing:
    weights that are swapped in, saved and swapped back train on from the float32 values that they had. A step
    takes what was written. But what was written into the float32 values goes into the half tensor first: a
    `state_dict()` shows them, and who writes there, as averages of weights do, writes into the model.

    A master is a parameter that optimizers step in the place of the half one. `touched` holds the ids of
    tensors that may have been written without a trace; None where nobody watches.
    """

    __slots__ = (
        *(
            "half",
            "is_wrapper",
            "master",
            "pointer",
            "precise",
            "shown",
            "shown_version",
            "touched",
            "unedited",
        ),
        *("__weakref__", "grad_pointer", "lock", "version", "written"),
    )

    def __init__(self, half: Tensor, precise: Tensor | None = None, touched: set[int] | None = None) -> None:
        self.half = half
        self.precise = precise  # None where there are no float32 values, or none any more
        self.master: Parameter | None = None  # the same, once an optimizer steps them
        self.unedited: Tensor | None = None  # what the master was before it showed what no step has taken
        self.touched = touched
        self.lock = StepLock()
        self.shown: Tensor | None = None  # what a state_dict shows, if forwards are to look for edits of it,
        self.shown_version = 0  # and its version then
        self.grad_pointer = 0  # of the gradient of both, where each has a tensor of its own to show it
        self.is_wrapper = is_wrapper(half)
        self.mark_synced()

    # Float32 values

    def mark_synced(self) -> None:
        """Notes that the half tensor holds the rounding of the float32 values."""
        half, precise = self.half, self.precise
        self.version = version_of(half)
        self.written = 0 if precise is None else version_of(precise)
        self.pointer = 0 if self.master is None else half.data_ptr()
        if self.touched:
            self.touched.difference_update((id(half), id(precise)))

    def remember(self, precise: Tensor | None) -> None:
        """Takes float32 values of which the half tensor holds the rounding; None frees those that it had."""
        self.precise = precise
        self.mark_synced()

    def find_precise(self) -> Tensor | None:
        """The float32 values, None where there are none or they may not hold any more."""
        half, precise = self.half, self.precise
        if precise is None or precise.is_meta is not half.is_meta:  # Module.to_empty, or to("meta")
            return None
        return precise if is_comparable(half) or version_of(half) == self.version else None

    def find_written(self) -> Tensor | None:
        """What was written of the float32 values, or of those shown, and is not in the half tensor yet."""
        precise, shown = self.precise, self.shown
        if shown is not None and shown is not precise and version_of(shown) != self.shown_version:
            return shown
        if precise is None or (version_of(precise) == self.written and not self.was_asked_last()):
            return None
        return precise

    def was_asked_last(self) -> bool:
        """Whether somebody asked for `.data` of the float32 values, and wrote no half tensor since."""
        touched = self.touched
        return bool(touched) and id(self.precise) in touched and version_of(self.half) == self.version

    @torch.no_grad()
    def round_written(self) -> None:
        """Rounds the float32 values into the half tensor if they were written since; no host sync."""
        written = self.find_written()
        if written is None:
            return
        if written is self.shown:
            self._adopt(written)
        elif (unedited := self._find_unedited()) is not None:  # edits that the master shows were not written
            unedited.copy_(torch.where(written == refine(unedited, self.half), unedited, written))
        self.half.copy_(written)
        self.mark_synced()
        self._keep_touched()

    def _adopt(self, shown: Tensor) -> None:
        """Takes what somebody wrote into values that were made to be shown."""
        if self.precise is None:
            self.precise = shown
        else:
            self.precise.copy_(shown)
        self.unedited, self.shown = None, self.precise if self.master is None else None

    def _adopt_shown(self) -> None:
        """Takes what was written into shown values, or into a master that shows edits."""
        written = self.find_written()
        if written is not None and (written is self.shown or self._find_unedited() is not None):
            if written is self.shown or version_of(self.half) == self.version:
                self.round_written()
            else:
                self.unedited = None

    def round_shown(self) -> None:
        """Does so for what a state_dict showed, and frees what was made for that and not written."""
        if self.shown is not None:
            self.round_written()
            if self.shown is not self.precise:
                self.shown = None

    def read(self) -> Tensor:
        """Returns the float32 values, with what was written into the half tensor since; no host sync."""
        with self.lock as is_free:
            changed = self._find_changed(is_free)
            return self.precise.detach() if changed is None else changed  # type: ignore[union-attr]

    @torch.no_grad()
    def _find_changed(self, is_free: bool) -> Tensor | None:
        """What `read` returns where that is not in the memory of the float32 values."""
        if is_free:
            self.round_written()
        precise, half = self.find_precise(), self.half
        if precise is None:
            return half.detach().float()
        if not is_free or not is_comparable(half):
            return None
        unedited = self._find_unedited()
        values = (precise if unedited is None else unedited).detach()
        is_own = unedited is None and not precise.is_inference() and not is_expanded(precise)
        if values.device != half.device:  # by Module.to
            values, is_own = values.to(half.device), False
        return None if is_own and self._is_untouched() else refine(values, half)

    def _is_untouched(self) -> bool:
        """Whether nobody can have written the half tensor since it held the rounding."""
        half = self.half
        is_watched = self.touched is not None and not (self.is_wrapper or half.is_inference())
        return is_watched and not self.is_edited() and is_alone(half)

    def export(self, saved: Tensor) -> Tensor:
        """Returns what a state_dict shows for the half tensor, of which it holds `saved`.

        What is written there before the model's next forward, or while it is kept, goes into the model.
        """
        if self.master is not None and saved is self.half:  # state_dict(keep_vars=True)
            self.show_edit()
            return self.master
        with self.lock as is_free:
            changed = self._find_changed(is_free)
            if changed is None:
                self.shown = None if self.master is not None else self.precise
                return self.precise.detach()  # type: ignore[union-attr]
            if self._is_made_like(changed):  # for another name of a tied weight, or an earlier state_dict
                self.shown.copy_(changed)  # type: ignore[union-attr]
            else:
                self.shown = changed
            self.shown_version = version_of(self.shown)
            return self.shown.detach()

    def _is_made_like(self, changed: Tensor) -> bool:
        shown = self.shown
        is_made = shown is not None and shown is not self.precise and not shown.is_inference()
        return is_made and shown.device == changed.device and shown.shape == changed.shape

    @torch.no_grad()
    def load(self, loaded: Tensor) -> None:
        """Takes over loaded values, before they are rounded into the half tensor."""
        precise = self.find_precise()
        if precise is not None:
            precise.copy_(loaded)
            self.written = version_of(precise)  # the half tensor is about to be loaded, too
        self.unedited, self.shown = None, precise if self.shown is precise else None

    # Masters

    def make_master(self, touched: set[int], lock: StepLock, master: Parameter | None = None) -> None:
        """Makes a master of the float32 values, or takes one that optimizers step already."""
        half = self.half
        if master is None:
            master = Parameter(make_dense(self.read()), half.requires_grad)
        self.master = self.precise = master
        # Attributes that optimizers look for; what a wrapper holds is its own.
        master.__dict__.update(half.__dict__ | master.__dict__)
        self.touched, self.lock = touched, lock
        allow_any_grad(half)
        self.mark_synced()

    def is_edited(self) -> bool:
        """Whether the half tensor was written, or may have been, or swapped, since master and it agreed."""
        half = self.half
        if self.version != version_of(half) or (self.touched and id(half) in self.touched):
            return True
        return self.master is not None and self.pointer != half.data_ptr()

    @torch.no_grad()
    def adopt_edit(self) -> None:
        """Feeds the master with what was written into the half tensor; no host sync."""
        self._adopt_shown()
        unedited, self.unedited = self._find_unedited(), None
        values = self.master if unedited is None else unedited
        self.master.copy_(refine(values.detach(), self.half.detach()))  # type: ignore[union-attr]
        self.mark_synced()

    def show_edit(self) -> None:
        """Does so until the next step, which takes what is in the half tensor by then; no host sync."""
        self._adopt_shown()
        if not self.is_edited():
            return
        unedited = self._find_unedited()
        if unedited is None:
            unedited = self.master.detach().clone()  # type: ignore[union-attr]
        self.adopt_edit()
        self.unedited = unedited
        self._keep_touched()

    def _find_unedited(self) -> Tensor | None:
        if self.unedited is not None and not (self.touched and id(self.half) in self.touched):
            self.unedited = None  # a step has ended since
        return self.unedited

    def _keep_touched(self) -> None:
        """Has the next step look at what the master only shows."""
        if self.unedited is not None and self.touched is not None:
            self.touched.add(id(self.half))

    def settle(self, asked: Tensor) -> None:
        """Brings to the half tensor, or its master, what was written into the other one before.

        Its `.data` was asked for: who asks may write, which is noted, and whatever was written last counts.
        """
        with self.lock as is_free:
            if not is_free:
                return  # the step overwrites it
            if asked is self.half:
                self.round_written()
            elif self.half.device == asked.device and self.half.shape == asked.shape:
                self.show_edit()
            if self.touched is not None:
                self.touched.add(id(asked))

    # The gradient, which master and half tensor hold together

    def hold_grad(self, grad: Tensor | None) -> None:
        """Has both sides hold a gradient, or none."""
        half = self.half
        set_grad(self.master, grad)
        if grad is None or TAKES_ANY_GRAD:
            try:
                set_grad(half, grad)
            except RuntimeError:  # it was swapped for another parameter since
                allow_any_grad(half)
                set_grad(half, grad)
        elif self.is_wrapper:  # of which `.data` is not what it wraps
            set_grad(half, None)
        else:
            give_float32_grad(half, grad)
            self.grad_pointer = _pointer_of(grad)

    def has_side(self, tensor: Tensor) -> bool:
        return self.master is not None and (tensor is self.half or tensor is self.master)

    def assign_grad(self, side: Tensor, grad: Tensor | None) -> None:
        """Has both sides hold what is assigned to one; raises as an assignment to a float32 parameter.

        A half gradient may be written by who made it: the half tensor alone holds it until it is cast.
        """
        if grad is None:
            self.hold_grad(None)
        elif side is self.half and isinstance(grad, Tensor) and grad.dtype is side.dtype:
            set_grad(side, grad)
            set_grad(self.master, None)
        else:
            self.hold_grad(grad)

    def holds_grad(self) -> bool:
        """Whether both sides hold one gradient, where each has a tensor of its own to show it."""
        grad, shown = self.master.grad, self.half.grad  # type: ignore[union-attr]
        if grad is None or shown is None:
            return grad is shown or (shown is None and self.is_wrapper)
        return _pointer_of(shown) == _pointer_of(grad) == self.grad_pointer

    def find_grad(self) -> Tensor | None:
        """The gradient that counts: what a backward has made is at the half tensor."""
        grad, own = self.half.grad, self.master.grad  # type: ignore[union-attr]
        if grad is None or TAKES_ANY_GRAD or own is None:
            return own if grad is None else grad
        return own if _pointer_of(grad) == self.grad_pointer else grad


def _pointer_of(grad: Tensor) -> int:
    values = grad._values() if grad.is_sparse else grad
    return values.data_ptr() if values.layout is torch.strided else 0


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
        return self._by_half.get(id(half))

    def owns(self, param: Tensor) -> bool:
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

    def adopt_edits(self) -> None:
        """Feeds masters with what was written into the model's parameters, or swapped, since they agreed."""
        self.install_again()
        with self.lock as is_free:
            for pair in self._find_edited() if is_free else ():
                pair.adopt_edit()

    def adopt_writes(self, *_: object) -> None:
        """Does so in a step of this thread, where masters are in the param groups; a hook of the step."""
        with self.lock.mutex:
            for pair in self._find_edited():
                pair.adopt_edit()

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
            pair.unedited = None
            pair.mark_synced()

    def copy_edits_to_model(self) -> None:
        """Rounds the masters that were written outside of a step, as some optimizers do; no host sync."""
        touched = self.touched  # `Weight.round_written`, written out: this runs before each forward
        with self.lock as is_free:
            edited = [
                pair
                for pair in self.pairs
                if pair.written != pair.master._version or (touched and pair.was_asked_last())
            ]
            for pair in edited if is_free else ():
                if pair.unedited is not None:
                    pair.round_written()
            edited = [pair for pair in edited if pair.unedited is None]
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
