"""The layer that computes in float8: torchao's, which heeds where our casts are off. Needs torchao."""

from __future__ import annotations

from dataclasses import replace as replace_fields

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import Linear, Module, functional
from torch.overrides import handle_torch_function, has_torch_function_variadic
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear as TorchaoLinear
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args as Torchaos

from ampatch.casts.cast import CASTS
from ampatch.errors import AmpValueError
from ampatch.levels.precision import ELIGIBLE
from ampatch.levels.private import forward_ad_level, is_exporting, is_transformed


@torch.compiler.allow_in_graph
class Product(Torchaos):  # type: ignore[misc]  # torchao has no types
    """The three products of a layer by torchao; nothing is cast inside of them, nor in the backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, *args: object) -> Tensor:
        """Multiplies input and weight; a script may write into the output, unlike into torchao's, a view."""
        with CASTS.thread.disabled():
            return Torchaos.forward(ctx, *args).detach()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Multiplies the gradient with both; for a gradient of a gradient in the type of this one."""
        with CASTS.thread.disabled():
            if not torch.is_grad_enabled():
                return Torchaos.backward(ctx, grad)
            input, weight = ctx.saved_tensors
            weight_grad = input.reshape(-1, len(weight)).t() @ grad.reshape(-1, weight.shape[1])
            return grad @ weight.t().to(grad.dtype), weight_grad.to(weight.dtype), None, None


class Float8Linear(TorchaoLinear):  # type: ignore[misc]
    """A linear layer whose three products run in float8, on what O4 would give `F.linear`.

    Where casts are off, and after `uninitialize` on a copy, it is `torch.nn.Linear`.
    """

    ampatch_stands_for = Linear  # the class that it takes the place of

    def __prepare_scriptable__(self) -> Linear:
        """Returns what TorchScript compiles in its place, with the same parameters."""
        plain = torch.nn.utils.skip_init(Linear, self.in_features, self.out_features, device="meta")
        plain.weight, plain.bias = self.weight, self.bias
        return plain.train(self.training)

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies in float8, and returns the half type."""
        half, thread = CASTS.half, CASTS.thread
        if half is None or (thread.off and thread.is_off()) or not _is_taken(input, self.weight):
            return functional.linear(input, self.weight, self.bias)  # patched: as at O4
        rows = input.numel() // input.shape[-1]
        mm_config = self.padded_mm_config if rows % 16 else self.linear_mm_config
        return float8_linear(input.to(half), self.weight, self.bias, mm_config, self.config)


def _is_taken(input: Tensor, weight: Tensor) -> bool:
    """Whether torchao multiplies such an input: it knows no empty one, and neither transforms nor export."""
    is_plain = input.dtype in ELIGIBLE and input.layout is torch.strided and not input.is_nested
    if not is_plain or is_transformed() or forward_ad_level() >= 0 or is_exporting():
        return False
    return input.numel() > 0 and input.shape[-1:] == weight.shape[1:]  # else torch's own error


def float8_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, mm_config: object, config: object
) -> Tensor:
    """Multiplies in float8; one operation to function modes, which torchao's tensors are not for."""
    if has_torch_function_variadic(input, weight):
        arguments = input, weight, bias, mm_config, config
        return handle_torch_function(float8_linear, (input, weight), *arguments)
    output = Product.apply(input, weight.t(), mm_config, config)
    return output if bias is None else output + bias.to(output.dtype)


def make_attributes(recipe: str, is_emulated: bool) -> dict[str, object]:
    """Returns what torchao's layer has beside what a linear layer has.

    Batches have any size: where their rows are no multiple of 16 they are padded, which copies both factors.
    """
    config = replace_fields(Float8LinearConfig.from_recipe_name(recipe), emulate=is_emulated)
    with torch.device("meta"):
        plain = Linear(16, 16)
    made = vars(convert_to_float8_training(plain, config=config))
    padded = made["linear_mm_config"]._make(
        one._replace(pad_inner_dim=True) for one in made["linear_mm_config"]
    )
    return {name: made[name] for name in made.keys() - vars(plain)} | {"padded_mm_config": padded}


def replace(layer: Linear, attributes: dict[str, object]) -> None:
    """Makes a linear layer one in float8, in place; one that is so by an earlier call stays as it is."""
    cls = type(layer)
    if not issubclass(cls, Float8Linear):
        own = sorted(vars(layer).keys() & attributes)
        if own:
            raise AmpValueError(
                f"a linear layer of the model has an attribute {own[0]!r} of its own, which torchao's layer "
                f"needs: rename it, or name the layer in keep_fp32"
            )
        sharded = {"ampatch_stands_for": cls}
        layer.__class__ = Float8Linear if cls is Linear else _rebase(cls, Linear, Float8Linear, sharded)
        vars(layer).update(attributes)
    elif layer.config != attributes["config"]:
        raise AmpValueError(
            "a linear layer of the model has another float8_recipe from an earlier initialize: use the "
            "same one, or call ampatch.uninitialize() first"
        )


def restore(layer: Module) -> None:
    """Makes it a linear layer again, also under what a script or FSDP2 put on top since."""
    cls = type(layer)
    if not issubclass(cls, Float8Linear):  # one that was not reached
        return
    before = vars(cls).get("ampatch_stands_for")
    layer.__class__ = before or _rebase(cls, Float8Linear, Linear, {})
    for name in ATTRIBUTES:
        vars(layer).pop(name, None)


def _rebase(cls: type, old: type, new: type, more: dict[str, object]) -> type:
    """Returns a class of FSDP2's, or of a parametrization, on another one."""
    bases = tuple(new if base is old else base for base in cls.__bases__)
    rest = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace(old.__name__, new.__name__), bases, rest | more)


ATTRIBUTES = frozenset(make_attributes("tensorwise", is_emulated=True))
