"""What has gone from torch, NumPy, Python and other packages, with the arguments and results it had."""

from __future__ import annotations

import collections.abc
import functools
import html
import importlib
import inspect
import math
from collections import namedtuple
from collections.abc import Callable, Iterable
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

ArgSpec = namedtuple("ArgSpec", "args varargs keywords defaults")


# The rows that name these say until which version each was there.
getargspec = lambda function: ArgSpec(*inspect.getfullargspec(function)[:4])
escape = lambda s, quote=None: html.escape(s, bool(quote)).replace("&#x27;", "'")

# ---- NumPy, and methods of its arrays ----

NINF, PZERO, NZERO = -np.inf, 0.0, -0.0
in1d = lambda first, *args, **kwargs: np.isin(np.ravel(first), *args, **kwargs)  # of one dimension
msort = lambda a: np.sort(a, axis=0)
asfarray = lambda a, dtype=float: np.asarray(a, dtype if np.issubdtype(dtype, np.inexact) else float)
find_common_type = lambda array_types, scalar_types: np.result_type(*array_types, *scalar_types)
obj2sctype = lambda rep, default=None: np.dtype(rep).type
asscalar = lambda array: array.item()
ptp = lambda array, *args, **kwargs: np.ptp(np.asarray(array), *args, **kwargs)
newbyteorder = lambda array, new_order="S": array.view(array.dtype.newbyteorder(new_order))
tostring = lambda array, order="C": array.tobytes(order)


class TypeCasts:
    """What `numpy.cast` was up to NumPy 1.26: functions that cast, by type."""

    def __getitem__(self, dtype: object) -> Callable[[object], np.ndarray]:
        return functools.partial(np.asarray, dtype=dtype)


cast = TypeCasts()


def itemset(array: np.ndarray, *args: object) -> None:
    """Does what the method `itemset` did up to NumPy 1.26: `array.itemset(3, value)` counts all elements."""
    *index, value = args
    if index and isinstance(index[0], tuple):
        array[index[0]] = value
    else:
        array.flat[index[0] if index else 0] = value


# ---- Other packages ----

getsize = lambda font, text, *args, **kwargs: font.getbbox(text, *args, **kwargs)[2:]
tostring_rgb = lambda canvas: np.asarray(canvas.buffer_rgba())[..., :3].tobytes()


def textsize(
    draw: object, text: str, font: object = None, *args: object, **kwargs: object
) -> tuple[int, int]:
    """Does what the method `textsize` of drawings did up to Pillow 9."""
    return tuple(map(int, draw.textbbox((0, 0), text, font, None, *args, **kwargs)[2:]))


def compare_ssim(
    X: np.ndarray, Y: np.ndarray, *args: object, multichannel: bool = False, **kwargs: object
) -> object:
    """Does what `skimage.measure.compare_ssim` did up to scikit-image 0.17."""
    from skimage.metrics import structural_similarity

    named = dict(zip(("win_size", "gradient", "data_range"), args, strict=False))
    return structural_similarity(X, Y, **named, channel_axis=-1 if multichannel else None, **kwargs)


def linear_assignment(cost: np.ndarray) -> np.ndarray:
    """Does what `sklearn.utils.linear_assignment_.linear_assignment` did up to scikit-learn 0.22."""
    from scipy.optimize import linear_sum_assignment

    return np.stack(linear_sum_assignment(cost), axis=1)


def schedule(kind: str, optimizer: Optimizer, *args: object, **kwargs: object) -> object:
    return getattr(importlib.import_module("transformers"), f"get_{kind}_schedule_with_warmup")(
        optimizer, *args, **kwargs
    )


WarmupConstantSchedule = lambda optimizer, warmup_steps, last_epoch=-1: schedule(
    "constant", optimizer, warmup_steps, last_epoch
)
WarmupLinearSchedule = lambda optimizer, warmup_steps, t_total, last_epoch=-1: schedule(
    "linear", optimizer, warmup_steps, t_total, last_epoch
)
WarmupCosineSchedule = lambda optimizer, warmup_steps, t_total, cycles=0.5, last_epoch=-1: schedule(
    "cosine", optimizer, warmup_steps, t_total, cycles, last_epoch
)

# ---- Torch ----

_use_shared_memory = False  # as whoever imported it had it
numpy_type_map = MappingProxyType(
    {
        "float64": torch.DoubleTensor,
        "float32": torch.FloatTensor,
        "float16": torch.HalfTensor,
        "int64": torch.LongTensor,
        "int32": torch.IntTensor,
        "int16": torch.ShortTensor,
        "int8": torch.CharTensor,
        "uint8": torch.ByteTensor,
    }
)


def zero_gradients(x: Tensor | Iterable) -> None:
    """Does what `torch.autograd.gradcheck.zero_gradients` did up to torch 1.8."""
    for each in (x,) if isinstance(x, Tensor) else x:
        if not isinstance(each, Tensor):
            zero_gradients(each)
        elif each.grad is not None:
            each.grad.detach_().zero_()


class _DataLoaderIter(_BaseDataLoaderIter):
    """What iterated over a DataLoader up to torch 1.1, with any number of workers."""

    def __new__(cls, loader: DataLoader) -> _BaseDataLoaderIter:
        return loader._get_iterator() if cls is _DataLoaderIter else super().__new__(cls)


qr = lambda input, some=True: torch.linalg.qr(input, "reduced" if some else "complete")
cholesky = lambda input, upper=False: torch.linalg.cholesky(input, upper=upper)
# The solution of AX = input, and the LU of A.
solve = lambda input, A: (torch.linalg.solve(A, input), torch.linalg.lu_factor(A).LU)


def symeig(input: Tensor, eigenvectors: bool = False, upper: bool = True) -> torch.return_types.linalg_eigh:
    """Does what `torch.symeig` did up to torch 1.13."""
    side = "U" if upper else "L"
    if eigenvectors:
        return torch.linalg.eigh(input, UPLO=side)
    return torch.return_types.linalg_eigh((torch.linalg.eigvalsh(input, UPLO=side), input.new_empty(0)))


def _dims(signal_ndim: int, normalized: bool) -> dict[str, object]:
    return {"dim": tuple(range(-signal_ndim, 0)), "norm": "ortho" if normalized else "backward"}


def rfft(input: Tensor, signal_ndim: int, normalized: bool = False, onesided: bool = True) -> Tensor:
    """Does what `torch.rfft` did up to torch 1.7: the last dimension holds real and imaginary part."""
    transform = torch.fft.rfftn if onesided else torch.fft.fftn
    return torch.view_as_real(transform(input, **_dims(signal_ndim, normalized)))


def irfft(
    input: Tensor,
    signal_ndim: int,
    normalized: bool = False,
    onesided: bool = True,
    signal_sizes: tuple[int, ...] | None = None,
) -> Tensor:
    """Does what `torch.irfft` did up to torch 1.7."""
    values, how = torch.view_as_complex(input.contiguous()), _dims(signal_ndim, normalized)
    if not onesided:
        return torch.fft.ifftn(values, **how).real
    return torch.fft.irfftn(values, s=signal_sizes, **how)


def fft(input: Tensor, signal_ndim: int, normalized: bool = False, *, inverse: bool = False) -> Tensor:
    """Does what `torch.fft` did up to torch 1.7, as a function: real and imaginary part come last."""
    transform = torch.fft.ifftn if inverse else torch.fft.fftn
    values = torch.view_as_complex(input.contiguous())
    return torch.view_as_real(transform(values, **_dims(signal_ndim, normalized)))


ifft = functools.partial(fft, inverse=True)


class AdamW(Optimizer):
    """The AdamW that transformers had up to version 4.49, step for step, with its arguments and state.

    It differs from torch's in where `eps` is added (before the bias is corrected), in what decays (the
    weight after the update) and in `correct_bias=False`, as BERT was trained.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr={lr!r}, betas={betas!r}, eps={eps!r}: expected 0 or more, betas below 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "correct_bias": correct_bias})

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict) -> None:
        if param.grad.is_sparse:
            raise RuntimeError("AdamW does not take sparse gradients: use torch.optim.SparseAdam")
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(param.grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        size = group["lr"]
        if group["correct_bias"]:
            size *= (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        param.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-size)
        if group["weight_decay"] > 0:
            param.add_(param, alpha=-group["lr"] * group["weight_decay"])


# ---- Modules ----


class torch_six:
    """The names of `torch._six`, which torch 2.0 removed."""

    PY2, PY3, PY37 = False, True, True
    string_classes = (str, bytes)
    int_classes = int
    inf, nan, container_abcs = math.inf, math.nan, collections.abc
    FileNotFoundError = FileNotFoundError
    __all__ = ("PY2", "PY3", "PY37", "FileNotFoundError", "container_abcs", "inf", "int_classes", "nan")
    __all__ += ("string_classes",)


class ModelUrls:
    """The `model_urls` that each file of `torchvision.models` had: `resnet` has that of resnet.py."""

    def __getattr__(self, name: str) -> dict[str, str]:
        if name.startswith("_"):  # as what looks at all names of modules asks for
            raise AttributeError(name)
        models = importlib.import_module(f"torchvision.models.{name}")
        names = [each.removesuffix("_Weights") for each in vars(models) if each.endswith("_Weights")]
        by_name = {name.lower(): getattr(models, f"{name}_Weights") for name in names}
        old = {"inception_v3": "inception_v3_google"}  # the key of those years
        return {
            old.get(key, key): weights.IMAGENET1K_V1.url
            for key, weights in by_name.items()
            if hasattr(weights, "IMAGENET1K_V1")
        }


model_urls = ModelUrls()
