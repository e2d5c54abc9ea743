"""The inside of one run, a process of its own."""

from __future__ import annotations

import io
import linecache
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import torch

from ampatch import DynamicLossScale, apex
from ampatch.apex.script import Script, level_overrides
from ampatch.doctor.instruments import precision
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Operations
from ampatch.doctor.instruments.tape import Enough, Tape
from ampatch.doctor.instruments.trace import Trace
from ampatch.doctor.instruments.watch import Growth, Watch
from ampatch.doctor.run import ScriptRun
from ampatch.doctor.runs import Seen
from ampatch.doctor.silent.gradients import Ranges, Sample
from ampatch.doctor.silent.looks import Looks
from ampatch.doctor.silent.notes import Notes
from ampatch.doctor.silent.scaled import Scaled
from ampatch.doctor.text.source import changed_texts
from ampatch.levels.patcher import Patcher
from ampatch.tools.seeds import set_seeds, shifted_seeds


def main(arguments: Sequence[str]) -> None:
    carry_out(ScriptRun.from_json(arguments[0]))


def carry_out(run: ScriptRun) -> None:
    """Runs the script as `__main__`; however it ends, what was seen is written."""
    overrides: dict[str, object] = level_overrides(run.level) if run.level else {}
    if run.keep_fp32:
        overrides["keep_fp32"] = list(run.keep_fp32)
    if run.init_scale is not None:
        overrides["loss_scale"] = DynamicLossScale(init_scale=run.init_scale)
    apex.install(post_mortem=False, **overrides)
    with ExitStack() as stack, edited(changed_texts(run.changes)):
        seen = look(run, Clock(stack))
        stack.callback(lambda: Path(run.out).write_bytes(pickle.dumps(seen())))
        set_seeds(run.seed)
        stack.enter_context(shifted_seeds(run.seed))
        try:
            flags = {"device": run.device, "legacy": run.legacy, "unsafe_load": run.unsafe_load}
            Script(run.script, tuple(run.arguments), run.is_module, **flags).run()
        except Enough:
            return


def look(run: ScriptRun, clock: Clock) -> Callable[[], Seen]:
    """Has a run looked at until its clock is undone; returns what tells what was seen."""
    clock.wrap(torch, "set_anomaly_enabled", lambda enable, mode, check_nan=True: enable(mode, False))
    if run.raises:  # an error in a backward pass with the line of its forward
        torch.set_anomaly_enabled(True, False)
        clock.undo.callback(torch.set_anomaly_enabled, False)
    without_gpu = precision.note_autocast_without_gpu(clock.undo)
    halved = precision.note_halved(clock.undo)
    change(run, clock)
    watch, growth = Watch(clock, run.most), Growth(clock) if run.grows else None
    end_late(watch, run.seconds, clock.undo)
    tape = Tape(clock)
    oversized = precision.Oversized(clock) if run.float32 else None
    scaled, ranges = Scaled(clock, notes := Notes(clock)), Ranges(clock)
    looks = Looks(tape, notes, (*run.looks, *(run.window or ())), scaled)
    if run.sample is not None:
        Sample(clock, run.samples, run.sample, ends=run.float32 or not run.traces)
    last = max(run.looks, default=0)
    trace = Trace(tape, run.window, run.goes_on, run.is_brief, last) if run.traces else None
    clock.follow_run()
    if run.keep_fp32:
        precision.Keeper(run.keep_fp32, clock)
    if trace:
        torch.compiler.set_stance("force_eager")
        Operations(tape, [looks, trace]).follow()

    def seen() -> Seen:
        scaled.close()
        return Seen(
            attempts=tuple(watch.attempts),
            is_open=watch.is_open and not watch.is_late,
            is_half=watch.is_half,
            origins=tuple(trace.found() if trace else ()),
            silent=tuple(notes.found.values()),
            shares=ranges.shares,
            growth=growth.facts() if growth else {},
            halved=tuple(halved),
            without_gpu=tuple(sorted(without_gpu)),
            autocast=min(clock.autocasts, default=None),
            oversized=tuple(oversized.names if oversized else ()),
            failed=tuple(f"{instrument.about}: {error}" for instrument, error in clock.failed.items()),
            is_late=watch.is_late,
        )

    return seen


def change(run: ScriptRun, clock: Clock) -> None:
    """Has a script use other types, scales and rates than its own, until the clock is undone."""
    if run.float32:
        precision.without_casts(clock.undo)
        precision.OwnFloat32().follow(clock.undo)
    if run.bfloat16:
        precision.make_with(torch.autocast, clock.undo, dtype=torch.bfloat16)
    if run.init_scale is not None:
        precision.make_with(torch.amp.GradScaler, clock.undo, init_scale=run.init_scale)
    if run.rate != 1.0:
        precision.LoweredRates(clock, run.rate)


def end_late(watch: Watch, seconds: float | None, undo: ExitStack) -> None:
    """Ends a run after some seconds, with its attempt; at once if that takes half as long again."""

    def note(*_: object) -> None:
        if watch.is_late:
            raise Enough
        watch.is_late = True

    if seconds is not None and hasattr(signal, "SIGALRM"):  # which Windows has not
        signal.signal(signal.SIGALRM, note)
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds / 2)
        undo.callback(signal.setitimer, signal.ITIMER_REAL, 0)


@contextmanager
def edited(texts: Mapping[str, str]) -> Iterator[None]:
    """Has scripts and modules be compiled from these texts, by the absolute paths of their files."""
    patcher, read, load = Patcher(), io.open_code, SourceFileLoader.get_code

    def open_code(path: str) -> io.BufferedIOBase:
        text = texts.get(os.path.abspath(path))
        return read(path) if text is None else io.BytesIO(text.encode())

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        text = texts.get(os.path.abspath(loader.path))
        return load(loader, name) if text is None else loader.source_to_code(text.encode(), loader.path)

    for path, text in texts.items():
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
    if texts:
        patcher.put(io, "open_code", open_code)
        patcher.put(SourceFileLoader, "get_code", get_code)
    try:
        yield
    finally:
        patcher.close()
        for path in texts:
            linecache.cache.pop(path, None)
