"""Features of torch that casts must fit: autocast, compile, checkpoints, fused kernels, TorchScript.

Imports `casts`, `levels` and `patching.patcher`.
"""
