"""`ampatch env`: the versions, machine and settings that a report of a fault needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from pathlib import Path

import torch

import ampatch
from ampatch.sweeps.environment import describe_machine

SUMMARY = "print versions, machine and settings, to add to a report of a fault"
PACKAGES = ("wrapt", "numpy", "rich", "apex")
# What wraps models and optimizers, or the loop; named where it is there.
WRAPPERS = (
    "accelerate",
    "lightning",
    "pytorch-lightning",
    "transformers",
    "timm",
    "torchao",
    "deepspeed",
    "tensorboard",
)
ABSENT = "not installed"
# By name, since others may hold what nobody should send.
SETTINGS = (
    *(
        "AMPATCH_POST_MORTEM",
        "AMPATCH_FLOAT8_EMULATE",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_LAUNCH_BLOCKING",
        "NVIDIA_TF32_OVERRIDE",
    ),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LD_PRELOAD", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"),
    *("WORLD_SIZE", "RANK", "LOCAL_RANK"),
)


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each thing; returns the exit status."""
    found = collect()
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value}")
    return 0


def collect() -> dict[str, object]:
    """Looks around; nothing raises."""
    machine = describe_machine()
    wrappers = {name: version for name in WRAPPERS if (version := find_version(name)) != ABSENT}
    return {
        "ampatch": f"{machine['ampatch']} in {Path(ampatch.__file__).parent}",
        "python": machine["python"],
        "torch": machine["torch"],
        **{name: find_version(name) for name in PACKAGES},
        **wrappers,
        "platform": machine["platform"],
        "cpu": f"{machine['cpu']}; half: {machine['half'] or 'no instructions known'}",
        "cores": f"{machine['cores']} of {os.cpu_count()}, torch uses {machine['threads']} threads",
        "cuda": describe_cuda(),
        **{name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def find_version(package: str) -> str:
    """Returns the version of an installed package, or that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ABSENT


def describe_cuda() -> str:
    """Returns the CUDA that torch was built for, cuDNN's version and the devices."""
    if not torch.cuda.is_available():
        return f"not available (torch built for {torch.version.cuda or 'the CPU'})"
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    names = [f"{device.name} (sm_{device.major}{device.minor})" for device in found]
    return f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}: {', '.join(names)}"
