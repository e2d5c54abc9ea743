"""How the loss is scaled: a constant, or a scale that follows the overflows; and when an alarm is raised."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from numbers import Real

from ampatch.errors import AmpTypeError, AmpValueError

# Below float32's smallest normal number the reciprocal of a scale overflows, so that unscaling
# would turn finite gradients into inf. No scale falls below it, whatever min_scale says.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**127


@dataclass(frozen=True, slots=True)
class DynamicLossScale:
    """Describes a loss scale that backs off on overflow and grows after clean iterations.

    The scale is multiplied by `backoff_factor` after `hysteresis` overflows in a row (and after
    each further one), and by `growth_factor` after `growth_interval` clean iterations in a row.
    It stays between `min_scale` and `max_scale`; None means no bound, but it never reaches 0.
    With the default hysteresis this is the rule of `torch.amp.GradScaler`, bit for bit.

    Raises AmpValueError for values that cannot work, all of them at once.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float | None = None
    max_scale: float | None = 2.0**24

    def __post_init__(self) -> None:
        # Values that are no numbers come first: the other checks compare them.
        faults = list(self._find_wrong_types()) or list(self._find_wrong_values())
        if faults:
            raise AmpValueError("DynamicLossScale: " + "; ".join(faults))

    def _find_wrong_types(self) -> Iterator[str]:
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, name)
            if not is_number(value) and not (value is None and name.startswith("m")):
                yield f"{name}={value!r} must be a number"
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                yield f"{name}={value!r} must be a whole number"

    def _find_wrong_values(self) -> Iterator[str]:
        low, high = self.floor, self.ceiling
        if not _is_in_range(self.init_scale):
            yield f"init_scale={self.init_scale!r} must be a finite number above 0"
        elif low <= high and not low <= self.init_scale <= high:
            yield f"init_scale={self.init_scale!r} lies outside min_scale={low!r} to max_scale={high!r}"
        if not 1 < self.growth_factor < math.inf:
            yield f"growth_factor={self.growth_factor!r} must be above 1 and finite"
        if not 0 < self.backoff_factor < 1:
            yield f"backoff_factor={self.backoff_factor!r} must lie between 0 and 1"
        if self.growth_interval < 1:
            yield f"growth_interval={self.growth_interval!r} must be 1 or more"
        if self.hysteresis < 1:
            yield f"hysteresis={self.hysteresis!r} must be 1 or more"
        if self.min_scale is not None and not self.min_scale > 0:
            yield f"min_scale={self.min_scale!r} must be above 0"
        if not low <= high:
            yield f"min_scale={low!r} lies above max_scale={high!r}"

    @property
    def floor(self) -> float:
        """The smallest value the scale can take."""
        return SMALLEST_SCALE if self.min_scale is None else max(self.min_scale, SMALLEST_SCALE)

    @property
    def ceiling(self) -> float:
        """The largest value the scale can take; inf without a bound."""
        return math.inf if self.max_scale is None else self.max_scale

    def __str__(self) -> str:
        changed = [field for field in fields(self) if getattr(self, field.name) != field.default]
        values = ", ".join(f"{field.name}={getattr(self, field.name)}" for field in changed)
        return f"dynamic ({values})" if values else "dynamic"


@dataclass(frozen=True, slots=True)
class StaticLossScale:
    """Describes a loss scale that never changes; overflows are neither looked for nor skipped."""

    value: float = 1.0

    def __post_init__(self) -> None:
        if not (is_number(self.value) and _is_in_range(self.value)):
            raise AmpValueError(
                f"loss_scale {self.value!r} is not a finite number above 0: expected one from 2**-126 to "
                f'2**127, "dynamic" or an amp.DynamicLossScale'
            )

    def __str__(self) -> str:
        return str(self.value)


LossScale = DynamicLossScale | StaticLossScale


def is_number(value: object) -> bool:
    """Whether a value is a real number; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_in_range(value: float) -> bool:
    return SMALLEST_SCALE <= value <= LARGEST_SCALE


def validate_scale(name: str, value: object) -> None:
    """Raises unless `value` is a number that can scale float32 losses and unscale their gradients."""
    if not is_number(value):
        raise AmpTypeError(f"{name} {value!r} is a {type(value).__name__}: expected a number above 0")
    if not _is_in_range(value):  # type: ignore[arg-type]
        raise AmpValueError(f"{name} {value!r}: expected a finite number above 0, from 2**-126 to 2**127")


def parse_loss_scale(value: object, min_scale: object = None, max_scale: object = 2.0**24) -> LossScale:
    """Reads what a user may pass as `loss_scale`: a number, one in a string, "dynamic" or a description.

    The bounds apply only to "dynamic": a static scale has none, and a DynamicLossScale its own.
    """
    bound = "expected a number above 0 or None"
    low = None if min_scale is None else _parse_number("min_loss_scale", min_scale, bound)
    high = None if max_scale is None else _parse_number("max_loss_scale", max_scale, bound)
    if isinstance(value, (DynamicLossScale, StaticLossScale)):
        return value
    if isinstance(value, str) and value == "dynamic":
        # As in apex: 0 is no bound, and the first scale is 2**16, unless the bounds say otherwise.
        init = max(min(2.0**16, math.inf if high is None else high), low or 0.0)
        return DynamicLossScale(init_scale=init, min_scale=low or None, max_scale=high)
    expected = 'expected a number above 0, "dynamic" or an amp.DynamicLossScale'
    return StaticLossScale(_parse_number("loss_scale", value, expected))


def _parse_number(name: str, value: object, expected: str) -> float:
    if not is_number(value) and not isinstance(value, str):
        raise AmpTypeError(f"{name}={value!r} is a {type(value).__name__}: {expected}")
    try:
        return float(value)  # type: ignore[arg-type]
    except ValueError:
        raise AmpValueError(f"{name}={value!r} is not a number: {expected}") from None


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
