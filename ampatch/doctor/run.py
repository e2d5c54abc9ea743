"""What one run of a script is asked to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ampatch.doctor.text.source import Change


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """One run of a script, which is watched, and traced as well if `traces`.

    `level` is the opt level that it is made to use, None for its own; `float32` turns off what torch itself
    casts and scales; `keep_fp32` are the modules that run in float32. `window` are the attempts at a step
    that are traced, after which the run ends unless it `goes_on`; None: all of them. What was seen is written
    to the file `out`. `looks` are attempts of a traced run that are looked at for silent faults alone.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    out: str = ""
    level: str | None = None
    float32: bool = False
    traces: bool = False
    window: tuple[int, ...] | None = None
    looks: tuple[int, ...] = ()
    goes_on: bool = False
    raises: bool = False  # whether the script is known to raise an error
    is_brief: bool = False  # of many backward passes of an attempt the first are traced
    keep_fp32: tuple[str, ...] = ()
    grows: bool = False  # whether layers whose numbers grow are noted
    sample: int | None = None  # the attempt whose numbers go to the folder `samples`
    samples: str = ""
    device: str | None = None  # as of a `Script`
    legacy: bool = False
    unsafe_load: bool = False
    seed: int = 0  # other than 0 it shifts those that the script sets
    most: int | None = None  # attempts, after which the run ends
    seconds: float | None = None  # after which it ends with the attempt that runs then
    # What is tried: other lines of files, bfloat16 where torch.autocast takes float16, what a dynamic loss
    # scale starts with, a part of the rate.
    changes: tuple[Change, ...] = ()
    bfloat16: bool = False
    init_scale: float | None = None
    rate: float = 1.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ScriptRun:
        """Reads them."""
        values: Mapping[str, object] = json.loads(text)
        changes = tuple(Change(**each | {"lines": tuple(each["lines"])}) for each in values["changes"])
        return cls(**values | {"changes": changes})
