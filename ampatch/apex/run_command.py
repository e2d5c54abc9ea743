"""`ampatch run`: its arguments, and what is set up before the script starts."""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence

import ampatch as amp
from ampatch import OPT_LEVELS, apex
from ampatch.apex.legacy import rows
from ampatch.apex.legacy.patterns import find_cause
from ampatch.apex.script import Script, find_script, level_overrides
from ampatch.levels.loss_scale import parse_loss_scale
from ampatch.levels.overrides import find_level, parse_half
from ampatch.levels.stack import asked

SUMMARY = "run a script that was written for apex, unchanged"
HINT = "; the script's own arguments follow the script"
VALUED = ("--opt-level", "--dtype", "--loss-scale", "--device")
# What torch says on a machine without CUDA, to each way of asking for it.
NO_CUDA = re.compile(
    "Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
    "|Cannot access accelerator device|without ATen_cuda library|requires CUDA support"
    "|Tried to instantiate dummy base class|Attempting to deserialize object on a CUDA device"
    "|has no attribute '_cuda_|have NCCL built in|ProcessGroupNCCL is only supported with GPUs"
    "|compiled without CUDA support|NVTX functions not installed|driver version is insufficient"
    "|requires at least one CUDA device|invalid argument to reset_peak_memory_stats"
)
OVERRIDING = ("opt_level", "dtype", "loss_scale")  # which are given to `initialize`
NO_OPTION = "which a script without that option refuses: start it by torchrun, which does not pass it"
LEGACY_HELP = "put back what torch, NumPy and Python have removed since the script was written"
UNSAFE_HELP = "with --legacy: also load files that may run any code, and name each of them"
DEVICE_HELP = "run a script that asks for CUDA on the CPU: .cuda(), streams, nccl, map_location and so on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `ampatch run` accepts before the script."""
    parser.usage = "ampatch run [OPTIONS] SCRIPT [ARGS...]\n       ampatch run [OPTIONS] -m MODULE [ARGS...]"
    parser.epilog = (
        "SCRIPT is what `python` takes: a file, a folder or archive with __main__.py, or - for the "
        "standard input. Everything after SCRIPT is passed to the script."
    )
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="a script that imports apex")
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as `python -m` does")
    levels = "use this level instead of the script's: " + ", ".join(OPT_LEVELS)
    parser.add_argument("--opt-level", metavar="L", help=levels)
    parser.add_argument("--dtype", metavar="T", help="the half type of the level: float16 or bfloat16")
    parser.add_argument("--loss-scale", metavar="S", help='use this loss scale: a number, or "dynamic"')
    parser.add_argument("--device", choices=["cpu"], help=DEVICE_HELP)
    parser.add_argument("--legacy", action="store_true", help=LEGACY_HELP)
    parser.add_argument("--unsafe-load", action="store_true", help=UNSAFE_HELP)


def split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Parts our arguments from those of the script, which are all that follow it.

    By hand: argparse takes options out of what follows, too.

    >>> split(["run", "--opt-level", "O2", "train.py", "--opt-level", "O1"])
    (['run', '--opt-level', 'O2', 'train.py'], ('--opt-level', 'O1'))
    >>> split(["run", "-m", "package.train", "-m"])
    (['run', '-m', 'package.train'], ('-m',))
    """
    place = 1
    while place < len(argv):
        word = argv[place]
        place += 1
        if word == "-" or not word.startswith("-"):
            break
        if word in VALUED or word in ("-m", "--"):
            place += 1
        if word.startswith("-m") or word == "--":
            break
    return list(argv[:place]), tuple(argv[place:])


def run(arguments: argparse.Namespace) -> Callable[[], int]:
    """Sets up what the script will find, and returns what runs it."""
    script = find_script(arguments)
    os.environ.setdefault("AMPATCH_POST_MORTEM", "ampatch-post-mortem")  # also of ranks and other children
    overrides = read_overrides(arguments)
    apex.install(**overrides)
    script.validate()
    options = [f"--{name.replace('_', '-')}" for name in OVERRIDING if getattr(arguments, name) is not None]
    run = functools.partial(run_overridden if options else run_advised, script, *options)
    return run if "TORCHELASTIC_ERROR_FILE" not in os.environ else record_errors(run)


class InitializeWatch(amp.Observer):
    """Notes whether `initialize` was called."""

    was_called = False

    def on_initialize(self, policy: object) -> None:
        self.was_called = True


def run_overridden(script: Script, *options: str) -> int:
    """Runs a script, and says so at its end if options of ours had nothing that they could override."""
    watch = InitializeWatch()
    with amp.observe(watch):
        status = run_advised(script)
    if not watch.was_called:
        asked.warning(
            "%r never called initialize in this process, so %s changed nothing: add the line "
            "`model, optimizer = amp.initialize(model, optimizer)` (import ampatch as amp)",
            script.name,
            ", ".join(options),
        )
    return status


def run_advised(script: Script) -> int:
    """Runs a script; an error that an option would have spared it names the option."""
    try:
        return script.run()
    except Exception as error:
        for line in advice(script, error):
            add_line(error, line)
        raise
    except SystemExit as exit:
        # What launchers passed; argparse has said that it does not know it, with this status.
        is_rank = any(each.startswith("--local-rank") for each in script.arguments)
        if exit.code == 2 and is_rank:
            asked.warning("--local_rank, %s", NO_OPTION if script.legacy else rows.RANK.advice)
        raise


def advice(script: Script, error: Exception) -> Iterator[str]:
    """Yields a line for each option that was not given and would have spared a script its error."""
    if script.device is None and NO_CUDA.search(str(error)):
        yield "`ampatch run --device cpu` runs this script on the CPU"
    cause = None if script.legacy else find_cause(error)
    if cause:
        yield f"{cause.name}, {cause.advice}"


def add_line(error: Exception, line: str) -> None:
    """Has a line follow what an error says."""
    if sys.version_info >= (3, 11):
        error.add_note(line)
        return
    error.args = (f"{error}\n{line}",)
    if isinstance(error, AttributeError):
        error.name = None  # else Python's own guess follows
    if isinstance(error, (ImportError, SyntaxError)):  # which say another attribute
        error.msg = f"{error.msg}\n{line}"


def record_errors(run: Callable[[], int]) -> Callable[[], int]:
    """Has torchrun, which started this process, say the exception that ends it and the rank."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(run)


def read_overrides(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns what `initialize` is made to use; raises AmpValueError for what it could not."""
    overrides: dict[str, object] = {}
    if arguments.opt_level is not None:
        overrides |= level_overrides(find_level(arguments.opt_level).opt_level)
    if arguments.dtype is not None:
        # The script's own would contradict it.
        overrides |= {"cast_model_type": None, "patch_torch_functions_type": None}
        overrides["dtype"] = parse_half("--dtype", arguments.dtype)
    if arguments.loss_scale is not None:
        parse_loss_scale(arguments.loss_scale)  # which raises for what is none
        overrides["loss_scale"] = arguments.loss_scale
    return overrides
