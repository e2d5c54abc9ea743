"""The transforms of torch.func, and forward-mode AD, over initialized models."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import ampatch as amp
from nets import open_session

LEVELS = {"O1": torch.float16, "O5": torch.bfloat16}
# Torch compiles the rules of some operations with TorchScript when forward-mode AD first needs them, and
# attention on a CPU has no rule for vmap, which then goes through the batch one by one.
pytestmark = [
    pytest.mark.exhaustive(keep=3),  # of each test
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
X = torch.tensor([[1.0, -0.5, 0.25], [0.5, 0.75, -1.0], [-0.25, 0.5, 1.0], [0.0, -1.0, 0.5]])


def norm(kind):
    return lambda: nn.Sequential(nn.Linear(3, 8), kind(8), nn.Tanh(), nn.Linear(8, 2))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(-2)
        return self.attention(x, x, x, need_weights=False)[0].squeeze(-2)


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 2)),
    "batch norm": norm(nn.BatchNorm1d),
    "layer norm": norm(nn.LayerNorm),
    "instance norm": lambda: nn.Sequential(
        *(nn.Unflatten(-1, (1, 3)), nn.Conv1d(1, 4, 1), nn.InstanceNorm1d(4, affine=True)),
        *(nn.GLU(-2), nn.Flatten(-2), nn.Linear(6, 2)),
    ),
    "convolution": lambda: nn.Sequential(nn.Unflatten(-1, (1, 3)), nn.Conv1d(1, 4, 2), nn.Flatten(-2)),
    "attention": Attends,
}


def open_model(name, level):
    """An initialized model in eval, where torch lets BatchNorm be transformed."""
    return open_session(MODELS[name]().eval(), opt_level=level)


def derive_input(model, x):
    return grad(lambda x: model(x).float().pow(2).sum())(x)


def pull_back(model, x):
    output, pull = vjp(model, x)
    return pull(torch.ones_like(output))[0]


def push_forward(model, x):
    output, tangent = jvp(model, (x,), (torch.ones_like(x),))
    assert tangent.dtype is output.dtype
    return tangent


def follow_dual(model, x):
    with forward_ad.dual_level():
        output, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
    assert tangent.dtype is output.dtype
    return tangent


def derive_twice(model, x):
    return hessian(lambda row: model(row.expand(2, 3)).float().sum())(x[0])


TRANSFORMS = {
    "vmap": lambda model, x: vmap(model)(x.unsqueeze(1)),
    "grad": derive_input,
    "vjp": pull_back,
    "jacrev": lambda model, x: jacrev(model)(x),
}
# Attention on a CPU has no rule for forward-mode AD, with or without ampatch.
FORWARD_MODE = {
    "jacfwd": lambda model, x: jacfwd(model)(x),
    "jvp": push_forward,
    "hessian": derive_twice,
    "dual numbers": follow_dual,
}
PAIRS = [(name, transform) for transform in {**TRANSFORMS, **FORWARD_MODE} for name in MODELS]


@pytest.mark.exhaustive(keep=12)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("name", "transform"), [pair for pair in PAIRS if pair[0] != "attention" or pair[1] in TRANSFORMS]
)
def test_a_transform_gives_what_it_gives_in_float32(transform, name, level):
    model, run = MODELS[name]().eval(), {**TRANSFORMS, **FORWARD_MODE}[transform]
    expected = run(model, X)
    open_session(model, opt_level=level)
    found = run(model, X)
    assert expected.dtype is torch.float32
    # Numbers of the order of 1, with an error of some roundings to bfloat16, which has 8 bits.
    torch.testing.assert_close(found.float(), expected, atol=0.06, rtol=0.06)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_functional_call_are_those_of_backward(name, level):
    model = open_model(name, level)
    params = dict(model.named_parameters())
    found = grad(lambda params: functional_call(model, params, (X,)).float().pow(2).sum())(params)
    model(X).float().pow(2).sum().backward()
    for key, param in params.items():
        assert found[key].dtype is param.dtype
        # Not bitwise: a transform splits some derivatives into other operations.
        torch.testing.assert_close(found[key], param.grad, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_each_sample_are_those_of_the_samples_one_by_one(name, level):
    model = open_model(name, level)
    params = {key: param.detach() for key, param in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(params, x):
        return functional_call(model, (params, buffers), (x.unsqueeze(0),)).float().pow(2).sum()

    found = vmap(grad(loss), (None, 0))(params, X)
    for index, x in enumerate(X):
        for key, value in grad(loss)(params, x).items():
            torch.testing.assert_close(found[key][index], value, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [*MODELS, "batch norm in training"])
def test_an_ensemble_gives_what_its_models_give_and_keeps_statistics_of_its_own(name, level):
    trains = name not in MODELS
    models = [MODELS["batch norm" if trains else name]().train(trains) for _ in range(2)]
    amp.initialize(models, opt_level=level, verbosity=0)
    params, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    outputs = vmap(lambda *state: functional_call(base, state, (X,)))(params, buffers)
    for index, (output, model) in enumerate(zip(outputs, models, strict=True)):
        tolerance = 0.05 if trains else 0.02
        torch.testing.assert_close(output.float(), model(X).float(), atol=tolerance, rtol=tolerance)
        if trains:
            # Products of half matrices in one piece or in several differ by a rounding.
            mean = buffers["1.running_mean"][index]
            torch.testing.assert_close(mean, model[1].running_mean, atol=1e-3, rtol=0)
            assert mean.abs().sum() > 0


@pytest.mark.parametrize("level", LEVELS)
def test_batch_norm_itself_keeps_the_type_of_its_input_inside_of_a_transform(level):
    open_session(nn.Linear(1, 1), opt_level=level)
    seen = []

    def normalize(x):
        y = torch.nn.functional.batch_norm(x, torch.zeros(3), torch.ones(3))
        seen.append(y.dtype)
        return y

    vmap(normalize)(X.to(LEVELS[level]).expand(2, 4, 3))
    vmap(normalize)(X.double().expand(2, 4, 3).float())
    assert seen == [LEVELS[level], torch.float32]
