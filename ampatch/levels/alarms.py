"""The limits of alarms, which `initialize(alarms=...)` takes: when one is raised about a loss."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.loss_scale import is_number


@dataclass(frozen=True, slots=True)
class Alarms:
    """Describes when an alarm is raised about a loss; None switches one kind off.

    ```python
    amp.initialize(model, optimizer, alarms=amp.Alarms(skipped=10, scale_below=None))
    ```

    - `"loss"` (with `loss`): the loss is inf or NaN.
    - `"skipped"`: so many steps in a row were skipped.
    - `"falls"`: the scale fell so many times `within` so many steps; steps skipped in a row count as one.
    - `"low"`: the scale fell below `scale_below`, where small gradients become 0 in float16.
    - `"minimum"` (with `minimum`): gradients overflow, and the scale may fall no further.

    Each is raised once, and again only after `within` steps in which it had no reason. A dynamic scale looks
    for its size in the first steps, and after each growth: overflows of that search are not counted, until
    the scale is below 128. Steps are counted for each loss, from 0.

    Raises AmpTypeError and AmpValueError for limits that cannot work, all of them at once.
    """

    loss: bool = True
    skipped: int | None = 5
    falls: int | None = 5
    within: int = 1000
    scale_below: float | None = 128.0
    minimum: bool = True

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={getattr(self, name)!r}: expected a whole number, 1 or more"
            for name in ("skipped", "falls", "within")
            if not _is_count(getattr(self, name), optional=name != "within")
        ]
        if self.scale_below is not None and not (is_number(self.scale_below) and self.scale_below > 0):
            wrong.append(f"scale_below={self.scale_below!r}: expected a number above 0, or None")
        if wrong:
            raise AmpValueError("Alarms: " + "; ".join(wrong))


def _is_count(value: object, *, optional: bool) -> bool:
    if value is None:
        return optional
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def parse_alarms(value: object) -> Alarms | None:
    """Reads what a user may pass as `alarms`: limits, True for the usual ones, None or False for none."""
    if value is None or value is False:
        return None
    if value is True:
        return Alarms()
    if not isinstance(value, Alarms):
        names = ", ".join(one.name for one in fields(Alarms))
        raise AmpTypeError(f"alarms is {value!r}: expected an amp.Alarms({names}), or None for no alarms")
    return value
