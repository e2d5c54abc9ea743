"""A finding to make reports and trials of."""

from ampatch.doctor.finding import Finding
from ampatch.doctor.fixes import Keep, Words


def sample_finding(**given):
    site = {"kind": "inf", "step": 53, "phase": "forward", "model": "model", "module": "head", "op": "linear"}
    site["where"] = "examples/a_long_folder_of_scripts/train.py:48"
    damage = {"element": (8, 3), "sample": 8, "count": 135, "largest_finite": 65472.0, "dtype": "float16"}
    came = {"input_largest": 4720.0, "steps": (53, 54, 55), "float32_survives": True}
    why = "linear made 135 inf in float16; its largest input is 4720. float16 ends at 65504."
    said = {"why": why, "remedies": (Words("divide before the sum"), Keep(("head",), "model"))}
    return Finding(**site | damage | came | said | given)
