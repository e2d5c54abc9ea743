"""Reports of the doctor to make pages and tables of: growth that overflows, a level that departs, nothing."""

import math
from dataclasses import replace

from ampatch.doctor.finding import Finding, Report
from ampatch.doctor.fixes import Keep, Words
from ampatch.doctor.growth.curves import describe_growth
from ampatch.doctor.instruments.watch import Attempt

STEPS = 60
SCALE = 1024.0
HOSTILE = '</style><script>alert("1")</script>'


def notes_of(layers, overflows=None):
    """What `Growth` leaves of layers by their names: output, scaled gradient, weight; curves or constants."""
    rows = []
    for name, given in layers.items():
        output, gradient, weight = (it if isinstance(it, list) else [it] * STEPS for it in given)
        counts = (overflows or {}).get(name, [0, 0])
        curves = {"output": output, "gradient": gradient, "gradient_norm": gradient, "weight": weight}
        about = {"model": "model", "module": name, "dtype": "float16"}
        rows.append(about | dict(zip(("overflows", "gradient_overflows"), counts, strict=True)) | curves)
    return {"layers": rows, "attempts": list(range(STEPS))}


def growing(start, factor, first=1.0):
    """A curve that stays, with some noise, and grows from a point on, to inf where half ends."""
    values = [first * (1 + 0.1 * math.sin(step)) * factor ** max(0, step - start) for step in range(STEPS)]
    return [value if value < 65504 else math.inf for value in values]


def attempts_of(scale=SCALE):
    return [Attempt(step, scale, True) for step in range(STEPS)]


def sample_growth():
    """The weights of blocks.1 grow from step 20 on; what follows hands it on, and the head overflows."""
    layers = {
        "stem": (2.0, 30.0, 0.5),
        "blocks.0": (growing(99, 1, 2.0), 30.0, 0.5),
        "blocks.1": (growing(20, 1.2, 3.0), 30.0, growing(20, 1.18, 0.3)),
        "blocks.2": (growing(21, 1.25, 5.0), 40.0, 0.5),
        "head": (growing(21, 1.32, 9.0), 50.0, 0.5),
    }
    return describe_growth(notes_of(layers, {"head": [8, 0]}), attempts_of())


def sample_finding(**given):
    values = {
        "step": 53,
        "micro_step": 0,
        "phase": "forward",
        "model": "model",
        "module": "head",
        "call": 0,
        "op": "linear",
        "parameter": None,
        "kind": "inf",
        "where": "examples/a_long_folder_of_scripts/train.py:48",
        "element": (8, 3),
        "sample": 8,
        "count": 135,
        "largest_finite": 65472.0,
        "dtype": "float16",
        "input_largest": 4720.0,
        "node": None,
        "steps": (53, 54, 55),
        "float32_survives": True,
        "why": "linear made 135 inf in float16; its largest input is 4720. float16 ends at 65504.",
        "remedies": (Words("divide before the sum"), Keep(("head",), "model")),
    }
    return Finding(**values | given)


def row(phase, module, error, **given):
    values = {"phase": phase, "model": "model", "module": module, "call": 0, "parameter": None}
    return values | {"dtype": "float16", "error": error, "lost": 0.0, "departs": False} | given


def sample_against():
    return {
        "level": "O0",
        "attempt": 0,
        "half": "float16",
        "allowed": {"forward": 0.0039, "backward": 0.0625},
        "first": 4,
        "rows": [
            row("forward", "stem", 3.4e-4),
            row("forward", "blocks.0", 5.2e-4),
            row("forward", "head", 6e-4),
            row("backward", "head", 1.5e-4),
            row("backward", "blocks.0", 0.97, lost=0.93, departs=True),
            row("backward", "stem", None, parameter="stem.weight", departs=True),
        ],
    }


def sample_speed():
    at = {"module": "head", "where": "train.py:48", "count": 4}
    small = at | {"op": "linear", "sizes": [32, 10, 128]}
    return {
        "steps": 2,
        "compiled": False,
        "syncs": [at | {"op": "item", "module": "", "where": "train.py:90"}],
        "products": 6,
        "uneven": [small],
        "tiny": [small],
        "islands": [at | {"ops": ["layer_norm", "gelu"]}],
    }


def sample_report():
    """Everything that a page can show."""
    scale = {
        "history": [[0, 65536.0], [3, 8192.0], [53, 1024.0]],
        "skipped": [0, 1, 2, 53, 54, 55],
        "search": False,
    }
    findings = (
        sample_finding(),
        sample_finding(op="div", module="blocks.1", float32_survives=None, remedies=()),
    )
    beside = {"growth": sample_growth(), "against": sample_against(), "speed": sample_speed()}
    silent = (sample_fault("model", "head"),)
    return Report(
        findings, (sample_finding(),), scale, ("head",), 7, ("it may differ",), silent=silent, **beside
    )


def sample_fault(model, module):
    where = "train.py:9"
    return Finding(
        "clipped_while_scaled", 2, "backward", model, module, "clip_grad_norm_", where, why="It was."
    )


def extreme_reports():
    """Pages of these must hold as well."""
    words = {"where": HOSTILE, "why": HOSTILE, "remedies": (Words(HOSTILE),)}
    hostile = sample_finding(module=HOSTILE, op=HOSTILE, **words)
    long = {
        f"encoder.layers.{i}.self_attention.output_projection": (growing(i, 1.3), 3.0, 1.0) for i in range(90)
    }
    nothing = {"layers": [], "attempts": []}
    once = describe_growth(notes_of({"": (1.0, 1.0, 1.0)}), [Attempt(0, None)])
    return {
        "sample": sample_report(),
        "sound": Report(runs=2),
        "nothing ran": Report(growth=describe_growth(nothing, []), speed=sample_speed() | {"products": 0}),
        "hostile": Report(
            (hostile,),
            unknown=(HOSTILE,),
            silent=(replace(sample_fault(HOSTILE, HOSTILE), **words),),
            growth=describe_growth(notes_of({HOSTILE: (9.0, 1.0, 1.0)}), attempts_of()),
        ),
        "long": Report(
            growth=describe_growth(notes_of(long), attempts_of()),
            against=sample_against() | {"rows": sample_against()["rows"] * 40},
        ),
        "one step": Report(growth=once, speed=sample_speed() | {"steps": 0}),  # which raised an error
        "all alike": Report(against=sample_against() | {"first": None, "rows": [row("forward", "", 0.0)]}),
    }
