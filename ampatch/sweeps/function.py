"""`ampatch.sweep`: a sweep of a function, from Python."""

from __future__ import annotations

import importlib
import json
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

from ampatch import AmpError, AmpValueError
from ampatch.apex.script import Script
from ampatch.sweeps.campaign import SweepCampaign, SweepProgress
from ampatch.sweeps.plan import DEFAULTS, LEVEL, SEED, Plan, make_plan
from ampatch.sweeps.processes.in_process import Train, call, execute_here, require_here
from ampatch.sweeps.processes.ranks import refuse_ranks
from ampatch.sweeps.processes.runner import Execute
from ampatch.sweeps.results import open_results
from ampatch.sweeps.rows import Sweep
from ampatch.sweeps.variant import list_possible, parse_rows
from ampatch.tools.numbers import write_left
from ampatch.tools.stop import Stop

CHILD = "ampatch.sweeps.function"
IN_CHILD = "AMPATCH_SWEEP_CHILD"  # set in the environment while a child loads the function
logger = logging.getLogger("ampatch")


def sweep(
    train: Train,
    levels: Sequence[str] | None = None,
    seeds: int = DEFAULTS.seeds,
    *,
    variants: Sequence[str] = (),
    repeat: int = DEFAULTS.repeat,
    steps: int | None = None,
    warmup: int | None = None,
    timeout: float | None = None,
    tolerance: float = DEFAULTS.tolerance,
    processes: bool | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Sweep:
    """Trains with a function at several opt levels, and compares speed, memory and accuracy.

    ```python
    result = amp.sweep(train, levels=["O0", "O4"], seeds=3)
    print(result)
    ```

    `train(opt_level, seed)` calls `initialize`, which uses the level (or variant) of the run whatever it is
    given, and trains. Its metrics are those that it passes to `report`, or returns as a dict. The sweep seeds
    everything by `seed`, from 0 up, before the call. `levels` (None: all that run here, cut short where they
    are slow) and `variants` are those of the command line, as are the other arguments: `steps` and `warmup`
    count steps, `timeout` seconds, `tolerance` spreads of O0.

    Each run has its own process, which imports the function by its name. With `processes=False` all are in
    this one, as by default those of a function that no other process can import: of a notebook, or a
    lambda; the log says so. `out` is a folder that takes sweep.json, sweep.csv and sweep.html. Nothing is
    printed.

    Returns a `Sweep`, with `records` of the runs, `rows` and a `recommendation`. Raises AmpValueError for
    arguments that cannot work, among them a `train` that never calls `initialize`.
    """
    require_no_child()
    place = find_place(train, processes)
    if place:
        refuse_ranks()
    else:
        require_here(timeout)
    script = Script(CHILD, (place, LEVEL, SEED), is_module=True)
    asked = {"seeds": seeds, "repeat": repeat, "steps": steps, "timeout": timeout}
    asked |= {"in_full": levels is not None}
    asked |= {"warmup": DEFAULTS.warmup if warmup is None else warmup, "tolerance": tolerance}
    plan = make_plan(
        script, parse_rows(list_possible() if levels is None else levels, variants), name_of(train), **asked
    )
    return carry_out(plan, None if place else execute_here(train), out)


def carry_out(plan: Plan, execute: Execute | None, out: str | os.PathLike[str] | None) -> Sweep:
    """Makes the runs of a plan, and writes what came of them."""
    with open_results(None if out is None else str(out)) as results:
        campaign = SweepCampaign(plan, results, Stop(), execute)
        campaign.carry_out(log_progress)
        result = campaign.sweep()
        results.save(result)
    return result


def require_no_child() -> None:
    """Raises AmpError in a process that loads the module of the function in order to call it."""
    if os.environ.get(IN_CHILD):
        raise AmpError(
            "sweep() was called again in a process that it started, which imports the module of train: put "
            "the call under if __name__ == '__main__'"
        )


def name_of(train: Train) -> str:
    """Returns what a function is called."""
    return f"{getattr(train, '__module__', '?')}.{getattr(train, '__qualname__', type(train).__name__)}"


def find_place(train: Train, processes: bool | None) -> str:
    """Returns where a child finds the function; empty if it is to be called here.

    Raises AmpValueError if it is no function, or if no child can find it and `processes` asks for them.
    """
    if not callable(train):
        raise AmpValueError(f"train is {train!r}: expected a function of (opt_level, seed)")
    place = "" if processes is False else describe(train)
    if not place and processes:
        raise AmpValueError(
            f"train ({name_of(train)}) cannot be imported by another process: define it at the top level of "
            "a module or of a script, or pass processes=False"
        )
    if not place and processes is None:
        logger.info("sweep: all runs of %s are in this process: no other can import it", name_of(train))
    return place


def describe(train: Train) -> str:
    """Says in JSON where a child finds the function; empty if no other process can import it."""
    module, name = getattr(train, "__module__", None), getattr(train, "__qualname__", "<none>")
    main = getattr(sys.modules.get("__main__"), "__file__", None) if module == "__main__" else None
    if module is None or "<" in name or (module == "__main__" and main is None):
        return ""
    file = None if main is None else str(Path(main).absolute())
    path = [os.path.abspath(part) for part in sys.path]
    return json.dumps({"path": path, "file": file, "module": module, "name": name})


def log_progress(now: SweepProgress) -> None:
    """Logs how a run ended, and how long the rest takes."""
    if now.record is not None:
        left = f", {write_left(now.left)}" if now.left else ""
        logger.info("sweep: %s %s%s", now.name, now.record.outcome, left)


# ---- In a child: `python -m ampatch.sweeps.function WHERE LEVEL SEED` ----


def main(where: str, level: str, seed: str) -> None:
    """Finds the function as `describe` says, and calls it."""
    place = json.loads(where)
    sys.path[:] = place["path"]
    os.environ[IN_CHILD] = "1"
    try:
        train = find(place["file"], place["module"], place["name"])
    except AmpError as error:
        raise RuntimeError(str(error)) from None  # of the module: no level could matter
    del os.environ[IN_CHILD]
    call(train, level, int(seed))


def find(file: str | None, module: str, name: str) -> Train:
    """Imports the module, or runs the file without what it guards by `__name__`, and returns the function."""
    if file is None:
        place: object = importlib.import_module(module)
    else:
        place = SimpleNamespace(**runpy.run_path(file, run_name="__mp_main__"))
    train: Train = attrgetter(name)(place)
    return train


if __name__ == "__main__":
    main(*sys.argv[1:])
