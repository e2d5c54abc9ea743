"""A finding to make reports and trials of."""

from ampatch.doctor.finding import Finding
from ampatch.doctor.fixes import Keep, Words


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
