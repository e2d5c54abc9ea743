"""`ampatch.sweep`: a sweep of a function, from Python; all runs are in this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from ampatch import AmpError, AmpValueError
from ampatch.apex.script import Script
from ampatch.sweeps.campaign import SweepCampaign, SweepProgress
from ampatch.sweeps.child import FunctionRunner, Train
from ampatch.sweeps.plan import DEFAULTS, SEED, Plan, in_use, parse_rows
from ampatch.sweeps.results import open_results
from ampatch.sweeps.rows import DEFAULT_LEVELS, Settings, Sweep
from ampatch.tools.process import Stop

logger = logging.getLogger("ampatch")


def sweep(
    train: Train,
    levels: Sequence[str] | None = None,
    seeds: int = DEFAULTS.seeds,
    *,
    variants: Sequence[str] = (),
    repeat: int = DEFAULTS.repeat,
    steps: int | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Sweep:
    """Trains with a function at several opt levels, and compares speed, memory and accuracy.

    ```python
    result = amp.sweep(train, levels=["O0", "O4"], seeds=3)
    print(result)
    ```

    `train(opt_level, seed)` calls `initialize`, which uses the level (or variant) of the run whatever it is
    given, and trains. Its metrics are those that it passes to `report`, or returns as a dict. The sweep seeds
    everything by `seed`, from 0 up, before the call. `levels` (None: all but O6, cut short where they are
    slow) and `variants` are those of the command line, as are the other arguments.

    All runs are in this process, one after the other, so a function of a notebook will do; for runs that each
    have a process of their own there is `ampatch sweep`. `out` is a folder that gets sweep.json and
    sweep.html. Nothing is printed.

    Returns a `Sweep`, with `records` of the runs, `rows` and a `recommendation`. Raises AmpValueError for
    arguments that cannot work, among them a `train` that never calls `initialize`, and AmpError in a process
    that has called `initialize` itself: a session that is open would end with the first run.
    """
    if not callable(train):
        raise AmpValueError(f"train is {train!r}: expected a function of (opt_level, seed)")
    if in_use():
        raise AmpError("this process has called initialize: call ampatch.uninitialize() first")
    rows = parse_rows(DEFAULT_LEVELS if levels is None else levels, variants)
    name = f"{getattr(train, '__module__', '?')}.{getattr(train, '__qualname__', type(train).__name__)}"
    settings = Settings(
        script=name,
        arguments=(),
        rows=tuple(row.name for row in rows),
        seeds=seeds,
        repeat=repeat,
        steps=steps,
        in_full=levels is not None,
    )
    # No process starts; a script that takes the seed keeps its own seeds.
    plan = Plan(Script(__name__, (SEED,), is_module=True), rows, settings)
    with open_results(None if out is None else str(out)) as results:
        campaign = SweepCampaign(plan, results, Stop(), FunctionRunner(train))
        campaign.carry_out(log_progress)
        result = campaign.sweep()
        results.save(result)
    return result


def log_progress(now: SweepProgress) -> None:
    """Logs how a run ended, and how long the rest takes."""
    if now.record is not None:
        logger.info("sweep: %s", now)
