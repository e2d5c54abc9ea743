"""`ampatch env`: the versions, machine and settings that a report of a fault needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path

import torch

import ampatch
from ampatch.sweeps.environment import find_cpu

SUMMARY = "print the versions, machine and settings that a report of a fault needs"
PACKAGES = ("wrapt", "numpy", "rich", "matplotlib", "apex")
HALF_FLAGS = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "asimdhp", "bf16")
# By name, since others may hold what nobody should send.
SETTINGS = (
    *("AMPATCH_POST_MORTEM", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE"),
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


def collect() -> dict[str, str]:
    """Looks around; nothing raises."""
    return {
        "ampatch": f"{ampatch.__version__} in {Path(ampatch.__file__).parent}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: find_version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": f"{find_cpu()}; half: {', '.join(find_half_flags()) or 'no instructions known'}",
        "cores": f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads",
        "cuda": describe_cuda(),
        **{name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def find_version(package: str) -> str:
    """Returns the version of an installed package, or that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def find_half_flags(path: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Returns the instructions for half types that Linux says the CPU has."""
    try:
        words = set(path.read_text().split())
    except OSError:
        return []
    return [flag for flag in HALF_FLAGS if flag in words]


def describe_cuda() -> str:
    """Returns the CUDA that torch was built for, cuDNN's version and the devices."""
    if not torch.cuda.is_available():
        return f"not available (torch built for {torch.version.cuda or 'the CPU'})"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}: {', '.join(names)}"
