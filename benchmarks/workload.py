"""The models that are trained, and the batches they are given: random, since only time is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 10


@dataclass(frozen=True, slots=True)
class Workload:
    """A model that classifies, and the shape of one batch for it."""

    name: str
    make_model: Callable[[], nn.Module]
    input_shape: tuple[int, ...]  # the batch is its first dimension
    needs_gpu: bool = False

    def make(self, device: str) -> tuple[nn.Module, Tensor, Tensor]:
        """Returns the model, inputs and targets, the same ones each time."""
        torch.manual_seed(0)
        model = self.make_model().to(device)
        inputs = torch.randn(self.input_shape, device=device)
        return model, inputs, torch.randint(CLASSES, self.input_shape[:1], device=device)


def make_deep_mlp() -> nn.Module:
    """32 thin layers, whose time is what it takes to call them."""
    return _make_mlp(64, 32)


def make_wide_mlp() -> nn.Module:
    """Four wide layers, whose time is matrix products and casts of weights."""
    return _make_mlp(1024, 4)


def _make_mlp(width: int, depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def make_huge_mlp() -> nn.Module:
    """Four layers that gain from float8."""
    return _make_mlp(8192, 4)


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and the way around them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_convolve(channels, out, stride), nn.ReLU(), *_convolve(out, out, 1))
        is_same = channels == out and stride == 1
        self.around = nn.Identity() if is_same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.body(inputs) + self.around(inputs))


def _convolve(channels: int, out: int, stride: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out)


def make_conv_net() -> nn.Module:
    """A small residual net for images of 32 x 32."""
    return _make_residual_net((32, 64, 128), blocks=2)


def make_large_conv_net() -> nn.Module:
    """Has the size of ResNet-50: 25 million parameters, 4 billion products for an image of 224 x 224."""
    return _make_residual_net((80, 160, 320, 608), blocks=3, stem_stride=4)


def _make_residual_net(widths: tuple[int, ...], blocks: int, stem_stride: int = 1) -> nn.Module:
    layers: list[nn.Module] = [*_convolve(3, widths[0], stem_stride), nn.ReLU()]
    channels = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(Residual(channels, width, 2 if stage and not block else 1))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Encoder(nn.Module):
    """A transformer encoder on vectors, and a classifier of their mean."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classify = nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classify(self.encoder(inputs).mean(1))


def make_transformer() -> nn.Module:
    """A small encoder."""
    return Encoder(256, 4, layers=4)


def make_large_transformer() -> nn.Module:
    """An encoder of the size of BERT-base: 85 million parameters."""
    return Encoder(768, 12, layers=12)


class Recurrent(nn.Module):
    """An LSTM, and a classifier of its last output."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(features, hidden, num_layers=2, batch_first=True)
        self.classify = nn.Linear(hidden, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classify(self.recurrent(inputs)[0][:, -1])


def make_lstm() -> nn.Module:
    """Two layers of an LSTM."""
    return Recurrent(128, 256)


WORKLOADS = (
    Workload("deep thin MLP", make_deep_mlp, (16, 64)),
    Workload("wide MLP", make_wide_mlp, (64, 1024)),
    Workload("conv net", make_conv_net, (8, 3, 32, 32)),
    Workload("transformer", make_transformer, (4, 64, 256)),
    Workload("LSTM", make_lstm, (16, 32, 128)),
    Workload("BERT-sized encoder", make_large_transformer, (32, 128, 768), needs_gpu=True),
    Workload("huge MLP", make_huge_mlp, (8192, 8192), needs_gpu=True),
    Workload("ResNet-50-sized net", make_large_conv_net, (64, 3, 224, 224), needs_gpu=True),
)
