"""What programs do beside their models: initialize, clip, draw, print, compare, profile, autocast."""

import threading

import pytest
import torch
from torch import distributions, nn

import ampatch as amp
from helpers import scaled_backward
from nets import open_session

pytestmark = pytest.mark.exhaustive(keep=3)  # of each test

LEVELS = pytest.mark.parametrize("level", ["O2", "O4"])
PATCHED = pytest.mark.parametrize("level", ["O1"])
HALF = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
X = torch.tensor([[1.0, -0.5, 0.25], [0.5, 0.75, -1.0]])


def make_net():
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))


def open_training(level):
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return open_session(model, optimizer, opt_level=level, loss_scale=1.0), optimizer


def backward(model, optimizer):
    scaled_backward(model(X).float().pow(2).sum(), optimizer)


# ---- Weights and gradients ----

INITIALIZERS = ["xavier_uniform_", "kaiming_normal_", "trunc_normal_", "eye_"]


@pytest.mark.exhaustive(keep=10)
@LEVELS
@pytest.mark.parametrize("name", INITIALIZERS)
def test_a_weight_is_initialized_anew_with_the_numbers_that_torch_draws(name, level):
    initialize = getattr(nn.init, name)
    torch.manual_seed(1)
    expected = initialize(torch.empty(8, 3))
    model, _ = open_training(level)
    torch.manual_seed(1)
    initialize(model[0].weight)
    # Random numbers of a half type are others, of the same size.
    if model[0].weight.dtype is torch.float32 or name == "eye_":
        assert torch.equal(model[0].weight.float(), expected)
    else:
        assert 0.3 < model[0].weight.float().std() / expected.std() < 3
    assert torch.equal(model.state_dict()["0.weight"], model[0].weight.float())


@PATCHED
def test_orthogonal_weights_are_made_in_float32(level):
    model, _ = open_training(level)
    nn.init.orthogonal_(model[0].weight)
    with amp.disable_casts():
        product = model[0].weight.detach().T @ model[0].weight.detach()
    torch.testing.assert_close(product, torch.eye(3), atol=1e-5, rtol=0)


@LEVELS
@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"foreach": False}, {"norm_type": float("inf")}], ids=str
)
def test_gradients_are_clipped_by_norms_in_float32(options, level):
    model, optimizer = open_training(level)
    backward(model, optimizer)
    params = list(amp.master_params(optimizer))
    exact = torch.stack(
        [torch.linalg.vector_norm(param.grad.double(), options.get("norm_type", 2)) for param in params]
    )
    expected = torch.linalg.vector_norm(exact, options.get("norm_type", 2)).float()
    norm = nn.utils.clip_grad_norm_(params, 0.01, **options)
    torch.testing.assert_close(norm, expected)
    total = nn.utils.get_total_norm([param.grad for param in params], options.get("norm_type", 2))
    torch.testing.assert_close(total, torch.tensor(0.01), atol=1e-6, rtol=1e-4)
    nn.utils.clip_grad_value_(params, 0.001)
    assert max(param.grad.abs().max() for param in params) <= 0.001


# ---- Random numbers ----

DRAWS = {
    "Normal": lambda y: distributions.Normal(y, nn.functional.softplus(y) + 0.1),
    "Categorical": lambda y: distributions.Categorical(logits=y),
    "Bernoulli": lambda y: distributions.Bernoulli(logits=y),
    "Gumbel": lambda y: distributions.Gumbel(y, torch.ones_like(y)),
    "Laplace": lambda y: distributions.Laplace(y, torch.ones_like(y)),
    "Beta": lambda y: distributions.Beta(y.float().exp(), y.float().exp()),
    "Dirichlet": lambda y: distributions.Dirichlet(y.float().exp()),
    "Gamma": lambda y: distributions.Gamma(y.float().exp(), 1.0),
    "StudentT": lambda y: distributions.StudentT(y.float().exp() + 1),
    "MultivariateNormal": lambda y: distributions.MultivariateNormal(y.float(), scale_tril=torch.eye(2)),
}


@pytest.mark.exhaustive(keep=10)
@LEVELS
@pytest.mark.parametrize("name", DRAWS)
def test_distributions_of_a_models_output_draw_and_score(name, level):
    model = open_session(make_net(), opt_level=level)
    distribution = DRAWS[name](model(X))
    score = distribution.log_prob(distribution.sample())
    assert torch.isfinite(score).all()
    score.float().sum().backward()
    assert model[3].bias.grad is not None


# ---- Numbers of other kinds ----


@LEVELS
def test_complex_numbers_are_left_alone(level):
    z = torch.complex(torch.eye(3), torch.ones(3, 3))
    layer = nn.Linear(3, 3, dtype=torch.complex64)
    calls = [lambda: z @ z, lambda: torch.exp(z), lambda: torch.fft.fft(z), lambda: torch.linalg.norm(z)]
    calls += [lambda: layer(z), lambda: torch.einsum("ij,jk->ik", z, z), lambda: torch.view_as_real(z).sum()]
    expected = [call() for call in calls]
    open_session(make_net(), opt_level=level)
    for call, value in zip(calls, expected, strict=True):
        assert torch.equal(call(), value)


@LEVELS
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:.*quantize.*deprecated", "ignore:TypedStorage is deprecated")
def test_a_quantized_model_beside_ours_gives_what_it_gave(level):
    quantized = torch.ao.quantization.quantize_dynamic(make_net(), {nn.Linear}, dtype=torch.qint8)
    expected = quantized(X)
    open_session(make_net(), opt_level=level)
    with amp.disable_casts():
        assert torch.equal(quantized(X), expected)
    torch.testing.assert_close(quantized(X).float(), expected, atol=0.05, rtol=0.05)


# ---- torch.autocast in the same program ----


@PATCHED
def test_autocast_around_a_model_decides_with_its_own_type(level):
    model = open_session(make_net(), opt_level=level)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(X).dtype is torch.bfloat16
    assert model(X).dtype is HALF[level]


class Rotates(nn.Module):
    """Computes a product in float32, as authors of models write it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            product = x.float() @ x.float().T
        return product, self.linear(x)


@PATCHED
def test_one_block_of_autocast_may_be_entered_by_several_threads(level):
    """As the block of a decorator is: one object for all threads."""
    block, inside, outside = torch.autocast("cpu", enabled=False), threading.Event(), threading.Event()
    found = {}
    with block as own:  # None in torch 2.6
        pass

    class Shared(nn.Module):
        def forward(self, x):
            with block:
                inside.set()
                outside.wait(10)
                found["inside"] = (x @ x.T).dtype
            found["after"] = (x @ x.T).dtype

    model = open_session(Shared(), opt_level=level)
    thread = threading.Thread(target=model, args=(X,))
    thread.start()
    inside.wait(10)
    with block as entered:
        found["outside of a forward"] = (X @ X.T).dtype
        outside.set()
        thread.join()
    half = HALF[level]
    assert entered is own
    assert found == {"inside": torch.float32, "after": half, "outside of a forward": half}
    assert (X @ X.T).dtype is half
    with amp.disable_casts():
        assert (X @ X.T).dtype is torch.float32


@PATCHED
def test_autocast_that_is_off_inside_a_model_turns_casts_off(level):
    model = open_session(Rotates(), opt_level=level)
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            assert [output.dtype for output in model(X)] == [torch.float32, HALF[level]]
    with torch.autocast("cpu", torch.bfloat16):
        assert [output.dtype for output in model(X)] == [torch.float32, torch.bfloat16]


@PATCHED
def test_autocast_that_is_off_in_a_compiled_model_leaves_the_casts_after_it_on(level):
    """Inside the block, too: a compiled graph knows autocast's own state alone."""
    model = open_session(Rotates(), opt_level=level)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert [output.dtype for output in compiled(X)] == [HALF[level], HALF[level]]
    assert [output.dtype for output in model(X)] == [torch.float32, HALF[level]]
    torch._dynamo.reset()


@PATCHED
def test_a_block_of_autocast_may_outlive_the_session(level):
    class Closes(Rotates):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                amp.uninitialize()
            return self.linear(x)

    model = open_session(Closes(), opt_level=level)
    assert model(X).dtype is torch.float32
    open_session(nn.Linear(1, 1), opt_level=level)
    assert (X @ X.T).dtype is HALF[level]


@PATCHED
def test_blocks_of_autocast_may_end_in_another_order_than_they_began(level):
    class Crossing(nn.Module):
        def forward(self, x):
            def uncast():
                with torch.autocast("cpu", enabled=False):
                    yield (x @ x.T).dtype

            found = []
            for device in ("cpu", "cuda"):  # a block of another device turns nothing off
                first = uncast()
                found.append(next(first))
                with torch.autocast(device, enabled=False):
                    first.close()
                    found.append((x @ x.T).dtype)
            return found

    full, half = torch.float32, HALF[level]
    assert open_session(Crossing(), opt_level=level)(X) == [full, full, full, half]
    assert (X @ X.T).dtype is half
