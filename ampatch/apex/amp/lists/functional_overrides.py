"""The lists of functions in `torch.nn.functional`: to run in half, in float32, in the widest type."""

import torch

from ampatch.apex.amp.lists.edits import list_banned, list_names

MODULE = torch.nn.functional
FP16_FUNCS = list_names("torch.nn.functional", "LOWER")
BFLOAT16_FUNCS = list_names("torch.nn.functional", "LOWER")
FP32_FUNCS = list_names("torch.nn.functional", "FP32")
BANNED_FUNCS = list_banned("torch.nn.functional")
CASTS = list_names("torch.nn.functional", "PROMOTE")
SEQUENCE_CASTS = [name for name in ("cat", "stack") if hasattr(MODULE, name)]
