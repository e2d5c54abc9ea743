"""The inside of one run: `python -m ampatch.doctor.child RUN`, where RUN is a `Run` as JSON."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ampatch import apex
from ampatch.apex.script import Script, level_overrides
from ampatch.doctor.clock import listen, wrap
from ampatch.doctor.trace import Enough, Trace
from ampatch.doctor.watch import Watch
from ampatch.sweeps.measure.seeds import set_seeds


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a script: watched, or traced at the attempts in `window`.

    `level` is the opt level that it is made to use, None for its own; `float32` turns off what torch itself
    casts and scales. What was seen is written to the file `out`.
    """

    script: str
    arguments: tuple[str, ...]
    is_module: bool
    out: str
    level: str | None = None
    float32: bool = False
    window: tuple[int, ...] | None = None
    keep_fp32: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Returns the arguments of a child process."""
        return json.dumps(asdict(self))


def main(run: Run) -> None:
    """Runs the script as `__main__`; however it ends, what was seen is written."""
    overrides = level_overrides(run.level) if run.level else {}
    if run.keep_fp32:
        overrides["keep_fp32"] = list(run.keep_fp32)
    apex.install(**overrides)
    watcher = Watch() if run.window is None else Trace(run.window)
    with ExitStack() as stack:
        if run.float32:
            without_casts(stack)
        listen(watcher, stack)
        if isinstance(watcher, Trace):
            torch.compiler.set_stance("force_eager")
            stack.enter_context(watcher)
        set_seeds(0)
        try:
            Script(run.script, tuple(run.arguments), run.is_module).run()
        except Enough:
            pass
        finally:
            Path(run.out).write_text(json.dumps(watcher.to_json()))


def without_casts(undo: ExitStack) -> None:
    """Has `torch.autocast` and `GradScaler` do nothing, as if a script had said `enabled=False`."""
    wrap(
        torch.amp.GradScaler,
        "__init__",
        lambda init, *args, **kwargs: disabled_scaler(init, args, kwargs),
        undo,
    )
    wrap(
        torch.autocast, "__init__", lambda init, *args, **kwargs: disabled_autocast(init, args, kwargs), undo
    )


def disabled_autocast(init, args: tuple, kwargs: dict) -> None:
    """Makes an autocast that casts nothing; `enabled` is the fourth argument after the device's type."""
    init(
        *args[:3],
        *[False for _ in args[3:4]],
        *args[4:],
        **(kwargs if len(args) > 3 else {**kwargs, "enabled": False}),
    )


def disabled_scaler(init, args: tuple, kwargs: dict) -> None:
    """Makes a scaler that does nothing; `enabled` is the sixth argument."""
    init(
        *args[:6], *[False for _ in args[6:7]], **(kwargs if len(args) > 6 else {**kwargs, "enabled": False})
    )


if __name__ == "__main__":
    main(Run(**json.loads(sys.argv[1])))
