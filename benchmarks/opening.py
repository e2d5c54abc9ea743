"""How long it takes to initialize a model of many small parameters, and to undo it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

import ampatch as amp
from benchmarks.comparison import Comparison
from benchmarks.options import Options
from benchmarks.series import PartClock, Step
from benchmarks.setting import Setting

LAYERS, WIDTH = 500, 8  # a weight and a bias each
SUBJECT = f"{2 * LAYERS:,} parameters"


def measure(options: Options, setting: Setting) -> Iterator[Comparison]:
    """Yields the milliseconds of `initialize` and those of `uninitialize`, at each level that runs here."""
    levels = [level for level, policy in amp.OPT_LEVELS.items() if not policy.find_lack()]
    for part in ("initialize", "uninitialize"):
        clock = PartClock(setting.device)
        contenders = {level: partial(open_part, part, level, setting, clock) for level in levels}
        series = options.time(contenders, setting, clock)
        yield Comparison("micro", SUBJECT, part, "ms", setting, series)


@contextmanager
def open_part(part: str, level: str, setting: Setting, clock: PartClock) -> Iterator[Step]:
    """Yields both, of which the clock sees one."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def initialize() -> None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)

    def step() -> None:
        if part == "initialize":
            with clock.run():
                initialize()
            amp.uninitialize()
            return
        initialize()
        with clock.run():
            amp.uninitialize()

    yield step
