"""The lists of methods of `torch.Tensor`: to run in half, in float32, in the widest type."""

import torch

from ampatch.apex.amp.lists.edits import list_functions

MODULE = torch.Tensor
FP16_FUNCS, BFLOAT16_FUNCS, FP32_FUNCS, CASTS, BANNED_FUNCS, SEQUENCE_CASTS = list_functions("torch.Tensor")
