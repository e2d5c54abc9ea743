"""Modules that run in float32 at every level: by name, by class, by instance."""

import copy
import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp
from apex_rows import shows

FULL = torch.float32
# One that patches, and of those that cast the model one of each type; O3 keeps no BatchNorm.
HALVES = {"O3": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
CASTING = ["O3", "O5"]
EVERY_LEVEL = ["O0", *HALVES]
X = torch.tensor([[1.0, -2.0], [0.25, 3.0]])


class Spy(nn.Linear):
    """Notes the type that it computes in."""

    def __init__(self, size=2):
        super().__init__(size, size)
        self.seen = []

    def forward(self, x):
        result = super().forward(x)
        self.seen.append(result.dtype)
        return result


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Spy(), Spy()

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Block(), Block()
        self.head = Spy()

    def forward(self, x):
        return self.head(self.decoder(self.encoder(x)))


def open_session(model, opt_level="O5", optimizer=None, **kwargs):
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **kwargs)
    return model


class Layers(nn.Module):
    """Keeps its layers in containers that it never calls."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ModuleList([Spy(), Spy()])
        self.named = nn.ModuleDict({"a": Spy()})
        self.chain = nn.Sequential(Spy(), Spy())
        self.head = Spy()

    def forward(self, x):
        for layer in self.listed:
            x = layer(x)
        x = self.named["a"](x)
        return self.head(self.chain[1](self.chain[0](x)))


class Bracketed(nn.Module):
    """Has parts whose names would do as patterns."""

    def __init__(self):
        super().__init__()
        self.named = nn.ModuleDict({name: Spy() for name in ("a[0]", "a0", "a*")})

    def forward(self, x):
        for layer in self.named.values():
            x = layer(x)
        return x


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.spy = Spy()

    def forward(self, x, depth=2):
        return self.spy(x) if depth == 0 else self(x, depth - 1)


def make_shared():
    """One instance in two places."""
    shared = Spy()
    return nn.Sequential(shared, Spy(), shared)


ENCODER = ["encoder.first", "encoder.second"]
# The model, what is kept of it, and the spies that run in float32 then.
WAYS = {
    "name of a parent": (Model, "encoder", ENCODER),
    "pattern of parent and children": (Model, "encoder*", ENCODER),
    "pattern of children": (Model, "encoder.*", ENCODER),
    "name of a child": (Model, "encoder.second", ["encoder.second"]),
    "pattern across parents": (Model, "*.first", ["encoder.first", "decoder.first"]),
    "class": (Model, Block, [*ENCODER, "decoder.first", "decoder.second"]),
    "instance": (Model, lambda model: model.head, ["head"]),
    "list": (
        Model,
        lambda model: ["head", model.encoder.first, "decoder.sec???"],
        ["head", "encoder.first", "decoder.second"],
    ),
    "a name that is a pattern for another": (Bracketed, "named.a[0]", ["named.a[0]"]),
    "a star in a name": (Bracketed, ["named.a*"], ["named.a*"]),
    "a pattern beside such names": (Bracketed, "named.a?", ["named.a0", "named.a*"]),
    "set of characters": (Model, ("[hx]ead",), ["head"]),
    "nothing": (Model, (), []),
    "none": (Model, None, []),
    "list of modules": (Layers, "listed", ["listed.0", "listed.1"]),
    "modules by name": (Layers, "named", ["named.a"]),
    "chain that is not called": (Layers, "chain", ["chain.0", "chain.1"]),
    "its children": (Layers, "chain.*", ["chain.0", "chain.1"]),
    "called within itself": (lambda: nn.Sequential(Spy(), Recursive(), Spy()), "1", ["1.spy"]),
    "in two places": (make_shared, "2", ["0"]),
}


@pytest.mark.exhaustive(keep=24)
@shows("never-keep-fp32", "never-casts-where-wanted")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("opt_level", HALVES)
def test_what_is_named_runs_in_float32_and_the_rest_does_not(opt_level, way):
    make, keep, kept = WAYS[way]
    model = make()
    open_session(model, opt_level, keep_fp32=keep(model) if inspect.isfunction(keep) else keep)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            model(X)
    for name, module in model.named_modules():
        if isinstance(module, Spy):
            expected = FULL if name in kept else HALVES[opt_level]
            assert set(module.seen) == {expected}, name
            assert opt_level == "O4" or module.weight.dtype is expected, name


@pytest.mark.parametrize("opt_level", HALVES)
@pytest.mark.parametrize("options", [{}, {"cast_model_outputs": FULL}], ids=["", "cast_model_outputs"])
def test_a_kept_head_returns_what_float32_can_hold_alone(opt_level, options):
    body, head = nn.Linear(2, 2), nn.Linear(2, 2)
    nn.init.constant_(head.weight, 2e5 + 1)
    half = HALVES[opt_level]
    expected = head(copy.deepcopy(body).to(half)(X.to(half)).float())
    assert float(expected.detach().abs().max()) > 65504, "float16 could not hold it"
    model = open_session(nn.Sequential(body, head), opt_level, keep_fp32="1", **options)
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("opt_level", CASTING)
def test_half_modules_cast_what_a_kept_module_returns_and_nothing_else_does(opt_level):
    model = nn.Sequential(Spy(), Spy(), nn.ReLU(), nn.Sequential(nn.Softmax(-1), Spy()))
    half, given = HALVES[opt_level], []
    body, kept, rest = (copy.deepcopy(model[index]) for index in (0, 1, 3))
    hidden = kept(body.to(half)(X.to(half)).float()).relu().softmax(-1)
    expected = rest[1].to(half)(hidden.to(half)).float()
    model[3].register_forward_pre_hook(lambda module, args: given.append(args[0].dtype))
    open_session(model, opt_level, keep_fp32="1")
    assert torch.equal(model(X), expected)
    assert given == [FULL]


@pytest.mark.parametrize("opt_level", CASTING)
@pytest.mark.parametrize("named", ["1", "1.1"])
def test_a_kept_module_in_a_model_inside_of_another_model_returns_float32(opt_level, named):
    body, inner, half = nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), HALVES[opt_level]
    expected = inner(copy.deepcopy(body).to(half)(X.to(half)).float())
    model = nn.Sequential(body, inner)
    amp.initialize([model, inner], opt_level=opt_level, verbosity=0, keep_fp32=named)
    assert torch.equal(model(X), expected)


def test_a_float32_copy_of_a_model_with_a_kept_part_is_cast_nowhere():
    copied = copy.deepcopy(open_session(Model(), keep_fp32="encoder")).float()
    copied(X)
    assert {seen for part in copied.modules() if isinstance(part, Spy) for seen in part.seen} == {FULL}


@pytest.mark.parametrize("opt_level", CASTING)
def test_a_copy_of_a_model_with_a_kept_part_trains_in_a_later_session(opt_level):
    copied = copy.deepcopy(open_session(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "O4", keep_fp32="1"))
    amp.uninitialize()
    open_session(copied, opt_level)
    assert copied(X).isfinite().all()


@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_where_nothing_is_kept_no_part_of_a_model_has_a_hook(opt_level):
    model = open_session(Model(), opt_level)
    parts = [part for part in model.modules() if part is not model]
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in parts)


# ---- Modules that compute with the weights of their children ----


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class AdaptiveSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(2, 6, [2, 4], div_value=1.0)

    def forward(self, x):
        return self.loss(x.flatten(0, 1), torch.arange(6)).output


class LinearLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.LinearCrossEntropyLoss(2, 6)

    def forward(self, x):
        return self.loss(x.flatten(0, 1), torch.arange(6))


def normed_linear():
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2, bias=False))


OWNERS = {
    "attention": (Attends, ["*.out_proj"]),
    "attention, of a class": (Attends, [nn.Linear]),
    "adaptive softmax": (AdaptiveSoftmax, ["*.head"]),
    "parametrized": (normed_linear, ["1.parametrizations.weight"]),
}
if hasattr(nn, "LinearCrossEntropyLoss"):
    OWNERS["linear loss"] = (LinearLoss, ["*.linear"])
THREE = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("opt_level", CASTING)
def test_what_computes_with_the_weights_of_a_kept_child_is_kept_with_it(opt_level, name, is_training):
    make, keep = OWNERS[name]
    model = nn.Sequential(nn.LayerNorm(2), make()).train(is_training)
    expected = model[1](copy.deepcopy(model[0]).to(HALVES[opt_level])(THREE.to(HALVES[opt_level])).float())
    open_session(model, opt_level, keep_fp32=keep)
    assert torch.equal(model(THREE), expected)


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("opt_level", CASTING)
def test_what_computes_with_the_weights_of_half_children_casts_its_inputs(opt_level, name):
    make, _ = OWNERS[name]
    model, half = nn.Sequential(nn.LayerNorm(2), make()), HALVES[opt_level]
    hidden = model[0](THREE.to(half).float()).to(half)
    expected = copy.deepcopy(model[1]).to(half)(hidden).float()
    open_session(model, opt_level, keep_fp32=nn.LayerNorm)
    assert torch.equal(model(THREE), expected)


@pytest.mark.parametrize("keep", [[nn.Linear], [nn.LayerNorm], ["layers.0"], ["layers.1.self_attn"]], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("opt_level", CASTING)
def test_an_encoder_with_kept_parts_evaluates_padded_sequences(opt_level, keep):
    """It makes nested tensors of them, which attention takes only as query, key and value at once."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 3, 4)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        found = open_session(model, opt_level, keep_fp32=keep)(x, src_key_padding_mask=padding)
    assert found.dtype is FULL
    assert torch.allclose(found, expected, atol=0.05)  # half has three digits


# ---- Tied weights ----


@pytest.mark.parametrize("opt_level", CASTING)
@pytest.mark.parametrize("named", ["0", "2"])
def test_tied_weights_are_kept_in_both_places(opt_level, named):
    model = nn.Sequential(Spy(), Spy(), Spy())
    model[2].weight = model[0].weight
    open_session(model, opt_level, keep_fp32=named)
    assert model(X).dtype is FULL
    assert model[0].weight is model[2].weight
    assert [layer.weight.dtype for layer in model] == [FULL, HALVES[opt_level], FULL]
    assert model[1].seen == [HALVES[opt_level]]


@pytest.mark.parametrize("opt_level", CASTING)
def test_a_module_that_only_shares_a_weight_with_a_kept_one_returns_half(opt_level):
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    seen = []
    embedding.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = nn.Sequential(embedding, nn.ReLU(), head)
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model = open_session(model, opt_level, keep_fp32=head)
    expected = head(F.embedding(torch.arange(3), embedding.weight).to(HALVES[opt_level]).relu().float())
    assert torch.equal(model(torch.arange(3)), expected)
    assert seen[-1] is HALVES[opt_level]


# ---- Other ways of running a module ----


class WithLoss(nn.Module):
    """A model that computes its loss itself, as those for speech do."""

    def __init__(self, loss):
        super().__init__()
        self.linear, self.loss = nn.Linear(4, 5), loss

    def forward(self, x, targets):
        return self.loss(self.linear(x).float().log_softmax(-1) * 1e6, targets)


class Mean(nn.Module):
    def forward(self, x, targets):
        return -x.mean()


@pytest.mark.parametrize("level", CASTING)
@pytest.mark.parametrize(
    ("loss", "keep"),
    [(nn.MultiMarginLoss, ()), (functools.partial(nn.MultiMarginLoss, reduction="none"), ()), (Mean, [Mean])],
    ids=["on-cpu", "unreduced", "kept"],
)
def test_a_loss_in_float32_inside_a_half_model_is_not_rounded(level, loss, keep):
    model, x, targets = WithLoss(loss()), torch.randn(3, 4), torch.tensor([0, 1, 2])
    amp.initialize(model, opt_level=level, verbosity=0, keep_fp32=keep)
    found = model(x, targets)
    half = model.linear.weight.dtype
    expected = loss()(model.linear(x.to(half)).float().log_softmax(-1) * 1e6, targets)
    assert float(found.detach().max()) > 65504, "float16 could not hold it"
    assert torch.equal(found, expected)
