"""The lists of functions in `torch`: to run in half, in float32, in the widest type."""

import torch

from ampatch.apex.amp.lists.edits import list_banned, list_names

MODULE = torch
FP16_FUNCS = list_names("torch", "LOWER")
BFLOAT16_FUNCS = list_names("torch", "LOWER")
FP32_FUNCS = list_names("torch", "FP32")
BANNED_FUNCS = list_banned("torch")
CASTS = list_names("torch", "PROMOTE")
SEQUENCE_CASTS = [name for name in ("cat", "stack") if hasattr(MODULE, name)]
