"""Has the ops of `torch.library` run as they are written: kernels, fakes and backwards see torch uncast."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ampatch.casts.cast import CASTS
from ampatch.levels.private import BACKWARDS, OPS
from ampatch.patching.patcher import Patcher

Function = Callable[..., object]
_BACKWARD = "_backward_fn"


def leave_ops_uncast(patcher: Patcher) -> None:
    """Turns casts off inside of every op that is called from Python, made before or later.

    An op promises its types: a body that is cast returns others than its fake declares. Torch looks no
    kernel up that Python could see, so that what is replaced are the calls of ops, under which kernels, fakes
    and rules of `vmap` and dispatch modes run, compiled or not. Backwards run under the autograd engine:
    there the attribute is replaced by which torch finds them.
    """
    ops, backwards = [[name.find() for name in names if not name.is_missing()] for names in (OPS, BACKWARDS)]
    for kind in [each for op in ops for each in (op, *op.__subclasses__())]:
        if "__call__" in vars(kind):
            patcher.replace(kind, "__call__", _uncast(vars(kind)["__call__"]))
    for kind in backwards:
        patcher.put(kind, _BACKWARD, property(_read_backward, _write_backward))


def _uncast(function: Function) -> Function:
    thread = CASTS.thread

    @functools.wraps(function)
    def call(*args, **kwargs):
        thread.disabled_by += 1  # `ThreadState.disable`, written out: torch calls ops around each step
        thread.off += 1
        try:
            return function(*args, **kwargs)
        finally:
            thread.disabled_by -= 1
            thread.off -= 1

    return call


def _read_backward(op: object) -> Function | None:
    function = vars(op)[_BACKWARD]
    return None if function is None else _uncast(function)


def _write_backward(op: object, function: Function | None) -> None:
    vars(op)[_BACKWARD] = function
