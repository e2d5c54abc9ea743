"""Walks through the graphs of losses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def leads_to(roots: Sequence[Tensor], scaled: Tensor) -> bool:
    """Whether any of these tensors was computed from the scaled loss.

    Nodes of a graph are numbered as they are made, so those older than the scaled loss need no look.
    """
    target = scaled.grad_fn
    if any(root is scaled for root in roots) or target is None:
        return True
    first = target._sequence_nr()
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is target:
            return True
        inner = {one for one, _ in node.next_functions if one is not None and one._sequence_nr() >= first}
        waiting += inner - seen
        seen |= inner
    return False
