"""Functions that torch, NumPy and Python have removed, with the arguments and results they had."""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

ArgSpec = namedtuple("ArgSpec", "args varargs keywords defaults")


def getargspec(function: Callable) -> ArgSpec:
    """Does what `inspect.getargspec` did up to Python 3.10."""
    return ArgSpec(*inspect.getfullargspec(function)[:4])


def in1d(first: object, second: object, *args: object, **kwargs: object) -> np.ndarray:
    """Does what `numpy.in1d` did up to NumPy 2.3: the answer has one dimension."""
    return np.isin(np.ravel(first), second, *args, **kwargs)


def asscalar(array: np.ndarray) -> object:
    """Does what `numpy.asscalar` did up to NumPy 1.22."""
    return array.item()


def symeig(input: Tensor, eigenvectors: bool = False, upper: bool = True) -> torch.return_types.linalg_eigh:
    """Does what `torch.symeig` did up to torch 1.13."""
    side = "U" if upper else "L"
    if eigenvectors:
        return torch.linalg.eigh(input, UPLO=side)
    return torch.return_types.linalg_eigh((torch.linalg.eigvalsh(input, UPLO=side), input.new_empty(0)))


def solve(input: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Does what `torch.solve` did up to torch 1.13: the solution of AX = input, and the LU of A."""
    return torch.linalg.solve(A, input), torch.linalg.lu_factor(A).LU


def rfft(input: Tensor, signal_ndim: int, normalized: bool = False, onesided: bool = True) -> Tensor:
    """Does what `torch.rfft` did up to torch 1.7: the last dimension holds real and imaginary part."""
    dims = tuple(range(-signal_ndim, 0))
    transform = torch.fft.rfftn if onesided else torch.fft.fftn
    return torch.view_as_real(transform(input, dim=dims, norm="ortho" if normalized else "backward"))


def irfft(
    input: Tensor,
    signal_ndim: int,
    normalized: bool = False,
    onesided: bool = True,
    signal_sizes: tuple[int, ...] | None = None,
) -> Tensor:
    """Does what `torch.irfft` did up to torch 1.7."""
    dims, norm = tuple(range(-signal_ndim, 0)), "ortho" if normalized else "backward"
    values = torch.view_as_complex(input.contiguous())
    if not onesided:
        return torch.fft.ifftn(values, dim=dims, norm=norm).real
    return torch.fft.irfftn(values, s=signal_sizes, dim=dims, norm=norm)
