"""Batch normalization over the batches of all ranks, on a GPU and on a CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

import ampatch as amp
from ampatch.levels.ranks import has_ranks


class SyncBatchNorm(_BatchNorm):
    """Normalizes with the mean and variance of what all ranks have; they may have batches of any size.

    Takes input of two or more dimensions; channels are the second, or the last one with `channel_last`.
    `fuse_relu` applies ReLU to the output, after `z` is added where forward is given one. Statistics are
    computed in float32 for half input, and the output has the type of the input. PyTorch's own kernels
    do the work on a GPU, in evaluation and on one rank; those of a CPU know one rank only, so that the
    statistics are put together here.

    >>> SyncBatchNorm(2, fuse_relu=True)(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    tensor([[0.0000, 0.0000],
            [1.0000, 1.0000]], grad_fn=<ReluBackward0>)
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    # PyTorch's forward calls both.
    _check_input_dim = torch.nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = torch.nn.SyncBatchNorm._check_non_zero_input_channels

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalizes the input, and adds `z` of its shape."""
        last = self.channel_last and input.dim() > 2
        x = input.movedim(-1, 1) if last else input
        if x.device.type == "cpu":
            output = self._forward_on_cpu(x)
        else:
            output = torch.nn.SyncBatchNorm.forward(self, x)  # type: ignore[arg-type]
        output = output.movedim(1, -1) if last else output
        output = output if z is None else output + z
        return output.relu() if self.fuse_relu else output

    def _forward_on_cpu(self, x: Tensor) -> Tensor:
        if not self.training or _count_ranks(self.process_group) == 1:
            return super().forward(x)
        self._check_input_dim(x)
        return self._normalize(x)

    def _normalize(self, x: Tensor) -> Tensor:
        """What PyTorch's kernels do on a GPU, in functions that can be differentiated any number of times."""
        wide = x if x.dtype == torch.float64 else x.float()
        dims = [0, *range(2, x.dim())]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        count = wide.new_tensor([x.numel() // x.size(1)])
        sums = _sum_over_ranks(torch.cat([wide.sum(dims), count]), self.process_group)
        mean, count = sums[:-1] / sums[-1], sums[-1]
        centered = wide - mean.view(shape)
        var = _sum_over_ranks(centered.square().sum(dims), self.process_group) / count
        if self.track_running_stats:
            self._track(mean.detach(), var.detach() * count / (count - 1).clamp(min=1))
        output = centered * (var + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            output = output * self.weight.to(wide.dtype).view(shape)
        if self.bias is not None:
            output = output + self.bias.to(wide.dtype).view(shape)
        return output.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor) -> None:
        """Moves the running statistics; a momentum of None averages over all batches."""
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_((1 - momentum) * running.to(new.dtype) + momentum * new)


class _SumOverRanks(torch.autograd.Function):
    """Adds up a tensor of every rank; what a rank gets back is the sum of the gradients of all."""

    @staticmethod
    def forward(ctx, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_over_ranks(grad, ctx.group), None


def _sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    return _SumOverRanks.apply(tensor, group)


def _count_ranks(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if has_ranks() else 1


def convert_syncbn_model(
    module: Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> Module:
    """Replaces each BatchNorm in a model by a `SyncBatchNorm`, and returns the model.

    A model that is a BatchNorm itself is returned as a new module. Parameters and buffers stay the very
    same objects, so that an optimizer made before steps them still; hooks and the training flag stay too.
    """
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    converted = {id(each): _adopt(each, process_group, channel_last) for each in norms}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            parent._modules[name] = converted.get(id(child), child)
    return converted.get(id(module), module)


def _adopt(batch_norm: Module, group: dist.ProcessGroup | None, channel_last: bool) -> SyncBatchNorm:
    if any(torch.nn.parameter.is_lazy(param) for param in batch_norm.parameters()):
        raise amp.AmpValueError(
            f"convert_syncbn_model: a {type(batch_norm).__name__} is not initialized yet: run one forward "
            f"first, so that it has parameters to take over"
        )
    module = SyncBatchNorm.__new__(SyncBatchNorm)
    vars(module).update(vars(batch_norm))
    module.process_group, module.channel_last = group, channel_last
    module.fuse_relu = getattr(batch_norm, "fuse_relu", False)
    return module


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Splits the ranks into groups of neighbours, and returns the one that this rank is in.

    Every rank must call it. Returns None, which is all ranks, for a size of 0. Raises AmpValueError for a
    size that does not divide the number of ranks.
    """
    if group_size == 0:
        return None
    ranks = _count_ranks(None)
    if not dist.is_initialized() or not 0 < group_size <= ranks or ranks % group_size:
        raise amp.AmpValueError(
            f"create_syncbn_process_group: group_size {group_size!r} with {ranks} ranks: expected a divisor "
            f"of their number, after torch.distributed.init_process_group"
        )
    groups = [dist.new_group(range(i, i + group_size)) for i in range(0, ranks, group_size)]
    return groups[dist.get_rank() // group_size]
