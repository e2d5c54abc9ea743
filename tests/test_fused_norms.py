"""FusedLayerNorm and FusedRMSNorm: torch's normalizations, whatever types input and weights have."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampatch as amp
from ampatch.apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)
from ampatch.apex.normalization import fused_layer_norm as module
from apex_rows import shows
from helpers import assert_same_bits

HALVES = [torch.float16, torch.bfloat16]
EVERY_KIND = [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm]
KINDS = pytest.mark.parametrize("kind", EVERY_KIND)
HALF = pytest.mark.parametrize("half", HALVES, ids=str)
FEATURES = 5


def make(kind=FusedLayerNorm, *args, **kwargs):
    """A normalization whose weights are no ones and zeros."""
    layer = kind(FEATURES, *args, **kwargs)
    for param in layer.parameters():
        param.data.normal_()
    return layer


def plain(layer):
    """The same normalization by torch."""
    kind = nn.LayerNorm if isinstance(layer, nn.LayerNorm) else nn.RMSNorm
    twin = kind(layer.normalized_shape, layer.eps, layer.weight is not None)
    twin.load_state_dict(layer.state_dict())
    return twin


def batch(dtype=torch.float32):
    return torch.randn(3, FEATURES).to(dtype).requires_grad_()


def run(layer, x, dtype=None):
    """Output and gradients, of a loss that is not symmetric."""
    out = layer(x)
    grads = torch.autograd.grad((out.float() * torch.arange(out.numel()).view_as(out)).sum(),
                                [x, *layer.parameters()])  # fmt: skip
    return [out if dtype is None else out.to(dtype), *grads]


# Modules


@pytest.mark.parametrize("kind", [FusedLayerNorm, FusedRMSNorm])
def test_a_module_without_weights(kind):
    layer, x = kind(FEATURES, 1e-3, False, True), batch()
    assert layer.memory_efficient is True
    assert list(layer.parameters()) == []
    assert_same_bits(run(layer, x), run(plain(layer), x))


@KINDS
def test_a_module_is_one_of_torch_with_the_arguments_of_apex(kind):
    layer = kind(normalized_shape=(4, FEATURES), eps=1e-2, memory_efficient=True)
    assert (layer.normalized_shape, layer.eps, layer.elementwise_affine) == ((4, FEATURES), 1e-2, True)
    is_layer_norm = "Layer" in kind.__name__
    assert isinstance(layer, nn.LayerNorm if is_layer_norm else nn.RMSNorm)
    assert isinstance(layer, FusedLayerNorm if is_layer_norm else FusedRMSNorm)
    assert list(layer.state_dict()) == (["weight", "bias"] if is_layer_norm else ["weight"])
    assert layer.extra_repr() == plain(layer).extra_repr()
    x = torch.randn(2, 4, FEATURES)
    assert_same_bits([layer(x)], [plain(layer)(x)])
    assert kind(FEATURES).eps == 1e-5


@KINDS
def test_copies_and_pickles_work(kind):
    layer, x = make(kind), batch()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is kind
        assert_same_bits(run(other, x), run(layer, x))


@pytest.mark.parametrize("kind", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_a_mixed_module_has_a_weight(kind):
    assert kind(FEATURES, elementwise_affine=True).weight is not None
    with pytest.raises(RuntimeError, match="does not support elementwise_affine=False"):
        kind(FEATURES, elementwise_affine=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        kind(FEATURES, epsilon=1)


# Types


@shows("companions-normalization")
@pytest.mark.parametrize("weight_dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@KINDS
def test_types_are_computed_by_torch_and_where_they_are_mixed_in_float32(kind, dtype, weight_dtype):
    layer, x = make(kind).to(weight_dtype), batch(dtype)
    found = run(layer, x)
    if dtype is weight_dtype:
        assert_same_bits(found, run(plain(layer).to(dtype), x))
        return
    expected = plain(layer)(x.float()).to(weight_dtype if kind.__name__.startswith("Mixed") else dtype)
    assert_same_bits(found[:1], [expected])
    assert [grad.dtype for grad in found[1:]] == [dtype, *(param.dtype for param in layer.parameters())]


@KINDS
def test_modules_call_the_function_of_their_module_as_it_is_now(kind, monkeypatch):
    mixed = "mixed_dtype_" if kind.__name__.startswith("Mixed") else ""
    name = "layer" if issubclass(kind, nn.LayerNorm) else "rms"
    monkeypatch.setattr(module, f"{mixed}fused_{name}_norm_affine", lambda input, *_: input)
    x = batch()
    assert kind(FEATURES)(x) is x


# Functions


@pytest.mark.parametrize("shape", [FEATURES, (FEATURES,), torch.Size([FEATURES])], ids=str)
def test_functions_are_those_of_torch(shape):
    x, weight, bias = batch(), torch.randn(FEATURES), torch.randn(FEATURES)
    for kind, torchs, weights in (("layer", F.layer_norm, (weight, bias)), ("rms", F.rms_norm, (weight,))):
        name = {"layer": "LayerNorm", "rms": "RMSNorm"}[kind]
        affine = [
            getattr(module, f"fused_{kind}_norm_affine"),
            getattr(module, f"mixed_dtype_fused_{kind}_norm_affine"),
            getattr(module, f"Fused{name}AffineFunction").apply,
            getattr(module, f"Fused{name}AffineMixedDtypesFunction").apply,
        ]
        expected = torchs(x, (FEATURES,), *weights, 1e-3)
        for function in affine:
            assert_same_bits([function(x, *weights, shape, 1e-3, True)], [expected])
        for function in (
            getattr(module, f"fused_{kind}_norm"),
            getattr(module, f"Fused{name}Function").apply,
        ):
            assert_same_bits([function(x, shape, 1e-3)], [torchs(x, (FEATURES,), eps=1e-3)])
            small = x * 1e-3  # where eps counts
            assert_same_bits([function(small, shape)], [torchs(small, (FEATURES,), eps=1e-6)])


def test_the_affine_layer_norm_takes_no_bias():
    x, weight = batch(torch.float16), torch.randn(FEATURES)
    expected = F.layer_norm(x.float(), (FEATURES,), weight).half()
    assert_same_bits([module.fused_layer_norm_affine(x, weight, None, FEATURES, 1e-5)], [expected])


@HALF
def test_manual_rms_norm_is_that_of_torch(half):
    x, weight = batch(), torch.randn(FEATURES)
    # Sums in another order.
    close = {"rtol": 1e-5, "atol": 1e-6}
    expected = F.rms_norm(x, (FEATURES,), weight, 1e-5)
    torch.testing.assert_close(module.manual_rms_norm(x, (FEATURES,), weight, 1e-5), expected, **close)
    torch.testing.assert_close(
        module.manual_rms_norm(x, FEATURES, None, 1e-5), F.rms_norm(x, (FEATURES,), None, 1e-5), **close
    )
    assert module.manual_rms_norm(x, FEATURES, weight.to(half), 1e-5).dtype is half
    assert module.manual_rms_norm(x.to(half), FEATURES, weight, 1e-5).dtype is torch.float32


# Sessions


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(FEATURES, FEATURES), make(kind), nn.Linear(FEATURES, 1)

    def forward(self, x):
        self.hidden = self.norm(self.linear(x))
        return self.out(self.hidden)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@KINDS
def test_a_model_computes_what_it_does_with_modules_of_torch(kind, level):
    nets = [Net(kind) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    nets[1].norm = plain(nets[0].norm)
    amp.initialize(nets, opt_level=level, verbosity=0)
    x = torch.randn(4, FEATURES)
    outputs = [net(x) for net in nets]
    for out in outputs:
        out.float().sum().backward()
    assert_same_bits([outputs[0], nets[0].hidden], [outputs[1], nets[1].hidden])
    grads = [[param.grad for param in net.parameters()] for net in nets]
    assert_same_bits(*grads)


@pytest.mark.parametrize("level", ["O1", "O4"])
@KINDS
def test_patched_functions_make_it_float32(kind, level):
    layer = make(kind)
    torchs = plain(layer)
    amp.initialize(layer, opt_level=level, verbosity=0)
    x = torch.randn(2, FEATURES).to(torch.float16 if level == "O1" else torch.bfloat16)
    assert layer(x).dtype is torch.float32
    assert_same_bits(run(layer, x.requires_grad_()), run(torchs, x))
    with amp.disable_casts():
        assert layer(x).dtype is (torch.float32 if "Mixed" in kind.__name__ else x.dtype)


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("level", ["O4", "O5"])
@KINDS
def test_it_compiles_whole_as_a_part_of_a_model(kind, level):
    net, x = Net(kind), torch.randn(3, FEATURES)
    amp.initialize(net, opt_level=level, verbosity=0)
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert_same_bits([compiled(x)], [net(x)])
    torch.compiler.reset()


@KINDS
def test_mixed_types_compile_whole(kind):
    layer, x = make(kind), torch.randn(3, FEATURES, dtype=torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: layer(x) * 2, fullgraph=True, backend="aot_eager")
    assert_same_bits([compiled(x)], [layer(x) * 2])
    torch.compiler.reset()
