"""The parameters of an optimizer with masters, under the names that apex gave their lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from torch import Tensor

Pick = Callable[[Tensor, Tensor | None], Tensor | None]  # of what is stepped and, for a master, its half


def lists_of(what: str, pick: Pick) -> tuple[property, property]:
    """Makes properties of `MasterLists`: some of the parameters by param group, and in one list."""
    by_group = property(lambda self: self._pick(pick, by_group=True), doc=f"{what}, by param group.")
    in_one = property(lambda self: [*chain(*self._pick(pick, by_group=False))], doc=f"{what}.")
    return by_group, in_one


class MasterLists:
    """Half parameters, their masters, and the others; lists of the three go parallel. A base class."""

    def _pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        raise NotImplementedError

    def _stepped(self) -> list[list[Tensor]]:
        raise NotImplementedError

    def _pick(self, pick: Pick, by_group: bool) -> list[list[Tensor]]:
        groups, halves = self._stepped(), {id(master): half for half, master in self._pairs()}
        picked = ([pick(param, halves.get(id(param))) for param in group] for group in groups)
        return [[param for param in group if param is not None] for group in picked]

    fp16_groups, all_fp16_params = lists_of(
        "The half parameters of the model that have masters", lambda param, half: half
    )
    fp32_from_fp16_groups, all_fp32_from_fp16_params = lists_of(
        "Their masters, in the same order", lambda param, half: None if half is None else param
    )
    fp32_from_fp32_groups, all_fp32_from_fp32_params = lists_of(
        "The parameters that are trained as they are",
        lambda param, half: param if half is None and param.requires_grad else None,
    )
