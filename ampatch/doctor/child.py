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
from ampatch.doctor.beside import listen_beside
from ampatch.doctor.instruments.clock import listen
from ampatch.doctor.instruments.operations import Enough
from ampatch.doctor.instruments.precision import keep_float32, note_autocast_without_gpu, without_casts
from ampatch.doctor.instruments.trace import Trace
from ampatch.doctor.instruments.unseen import follow_unseen
from ampatch.doctor.instruments.watch import Watch
from ampatch.doctor.silent.gradients import Sample
from ampatch.doctor.silent.watch import Silent
from ampatch.tools.seeds import set_seeds


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a script, which is watched, and traced as well if `traces`.

    `level` is the opt level that it is made to use, None for its own; `float32` turns off what torch itself
    casts and scales; `keep_fp32` are the modules that run in float32. `window` are the attempts at a step
    that are traced, after which the run ends unless it `goes_on`; None: all of them. What was seen is written
    to the file `out`.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    out: str = ""
    level: str | None = None
    float32: bool = False
    traces: bool = False
    window: tuple[int, ...] | None = None
    goes_on: bool = False
    keep_fp32: tuple[str, ...] = ()
    # What is noted beside: growth, at each so many attempts; what slows it down; tensors, into a file.
    every: int | None = None
    speed: bool = False
    capture: str = ""
    wanted: int | None = None
    sample: int | None = None  # the attempt whose gradients go to the folder `samples`
    samples: str = ""
    device: str | None = None  # as of a `Script`
    legacy: bool = False

    def to_json(self) -> str:
        """Returns the arguments of a child process."""
        return json.dumps(asdict(self))


def main(run: Run) -> None:
    """Runs the script as `__main__`; however it ends, what was seen is written."""
    overrides: dict[str, object] = level_overrides(run.level) if run.level else {}
    if run.keep_fp32:
        overrides["keep_fp32"] = list(run.keep_fp32)
    apex.install(post_mortem=False, **overrides)
    watch, trace, silent, beside = Watch(), Trace(run.window, run.goes_on), Silent(), {}

    def leave() -> None:
        seen = {"attempts": watch.to_json(), "origins": trace.to_json(), "silent": silent.to_json()}
        seen |= {"is_open": watch.is_open, "is_half": watch.is_half, "without_gpu": sorted(without_gpu)}
        Path(run.out).write_text(json.dumps(beside | seen))

    with ExitStack() as stack:
        stack.callback(leave)
        without_gpu = note_autocast_without_gpu(stack)
        if run.float32:
            without_casts(stack)
        keep_float32(run.keep_fp32, stack)
        listen(watch, stack)
        listen_beside(run, beside, stack)
        sample = None if run.sample is None else Sample(run.samples, run.sample, repeats=run.float32)
        silent.open(stack, (run.window or ()) if run.traces else None, sample)
        if run.traces:
            torch.compiler.set_stance("force_eager")
            listen(trace, stack)
            follow_unseen(trace, stack)
            stack.enter_context(trace)
        set_seeds(0)
        try:
            Script(run.script, tuple(run.arguments), run.is_module, run.device, run.legacy).run()
        except Enough:
            return


if __name__ == "__main__":
    main(Run(**json.loads(sys.argv[1])))
