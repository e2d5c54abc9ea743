"""The lists of methods of `torch.Tensor`: to run in half, in float32, in the widest type."""

import torch

from ampatch.apex.amp.lists.edits import list_banned, list_names

MODULE = torch.Tensor
FP16_FUNCS = list_names("torch.Tensor", "LOWER")
BFLOAT16_FUNCS = list_names("torch.Tensor", "LOWER")
FP32_FUNCS = list_names("torch.Tensor", "FP32")
BANNED_FUNCS = list_banned("torch.Tensor")
CASTS = list_names("torch.Tensor", "PROMOTE")
SEQUENCE_CASTS = [name for name in ("cat", "stack") if hasattr(MODULE, name)]
