"""The options of a session as apex showed them: attributes, and a dictionary of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ampatch as amp

DEFAULTS = (
    ("enabled", False),
    ("opt_level", None),
    ("cast_model_type", None),
    ("patch_torch_functions", False),
    ("keep_batchnorm_fp32", None),
    ("master_weights", None),
    ("loss_scale", 1.0),
)


class Properties:
    """Options by name, as attributes and in `options`: `loss_scale` is "dynamic" or a number."""

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        self.options = dict(DEFAULTS)
        self.take(options or {})

    def take(self, options: Mapping[str, object]) -> None:
        """Sets some of the options."""
        self.options.update(options)
        vars(self).update(self.options)

    def __repr__(self) -> str:
        return f"Properties({self.options!r})"


def list_options(policy: amp.Policy) -> dict[str, object]:
    """Returns the options of an enabled policy."""
    scale = policy.loss_scale
    shown = "dynamic" if isinstance(scale, amp.DynamicLossScale) else scale.value
    return {"enabled": True, "opt_level": policy.opt_level, **policy.options(), "loss_scale": shown}


@dataclass(frozen=True, slots=True)
class OptLevel:
    """One opt level: calling it sets its defaults on `Properties` and returns them."""

    policy: amp.Policy

    @property
    def brief(self) -> str:
        """The level in a few words."""
        return f"{self.policy.opt_level}: {self.policy.summary}"

    @property
    def more(self) -> str:
        """The level's options, one a line."""
        return "\n".join(f"{name}: {value}" for name, value in list_options(self.policy).items())

    def __call__(self, properties: Properties) -> Properties:
        properties.take(list_options(self.policy))
        return properties
