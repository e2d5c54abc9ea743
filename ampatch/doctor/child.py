"""The inside of one run: `python -m ampatch.doctor.child RUN`, where RUN is a `Run` as JSON."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from ampatch import apex
from ampatch.apex.script import Script, level_overrides
from ampatch.doctor.against.capture import Capture
from ampatch.doctor.brakes import Brakes
from ampatch.doctor.growth.notes import Growth
from ampatch.doctor.instruments.clock import listen
from ampatch.doctor.instruments.operations import Enough
from ampatch.doctor.instruments.precision import (
    Oversized,
    keep_float32,
    note_autocast_without_gpu,
    without_casts,
)
from ampatch.doctor.instruments.trace import Trace
from ampatch.doctor.instruments.unseen import follow_unseen
from ampatch.doctor.instruments.watch import Watch
from ampatch.doctor.runs import Run
from ampatch.doctor.silent.gradients import Sample
from ampatch.doctor.silent.watch import Silent
from ampatch.tools.seeds import set_seeds


def listen_for_extras(run: Run, seen: dict[str, object], undo: ExitStack) -> None:
    """Enters what a run asks for; what was noted stands in `seen` when all is undone.

    Entered before a trace, whose mode then is above that of `Brakes`.
    """
    if run.every is not None:
        growth = Growth(run.every)
        undo.callback(lambda: seen.update(growth=growth.to_json()))
        growth.listen(undo)
    if run.speed:
        brakes = Brakes()
        undo.callback(lambda: seen.update(speed=brakes.to_json()))
        brakes.listen(undo)
    if run.capture:
        capture = Capture(run.wanted)
        undo.callback(lambda: capture.save(run.capture))
        capture.listen(undo)


def main(run: Run) -> None:
    """Runs the script as `__main__`; however it ends, what was seen is written."""
    overrides: dict[str, object] = level_overrides(run.level) if run.level else {}
    if run.keep_fp32:
        overrides["keep_fp32"] = list(run.keep_fp32)
    apex.install(post_mortem=False, **overrides)
    watch, trace, silent, extras = Watch(), Trace(run.window, run.goes_on), Silent(), {}
    oversized = Oversized()

    def leave() -> None:
        seen = {"attempts": watch.to_json(), "origins": trace.to_json(), "silent": silent.to_json()}
        seen |= {"is_open": watch.is_open, "is_half": watch.is_half, "without_gpu": sorted(without_gpu)}
        seen |= {"oversized": list(oversized.names)}
        Path(run.out).write_text(json.dumps(extras | seen))

    with ExitStack() as stack:
        stack.callback(leave)
        without_gpu = note_autocast_without_gpu(stack)
        if run.float32:
            without_casts(stack)
            oversized.listen(stack)
        keep_float32(run.keep_fp32, stack)
        listen(watch, stack)
        listen_for_extras(run, extras, stack)
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
