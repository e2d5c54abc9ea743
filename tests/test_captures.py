"""Training in CUDA graphs: what replays do is what the same steps do eagerly."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampatch as amp

pytestmark = pytest.mark.exhaustive(keep=6)  # of each test

INF = float("inf")
WARM = 3
LEVELS = ["O0", "O1", "O2", "O4", "O5"]
DYNAMIC = ["O1", "O2"]
OPTIMIZERS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def capture(function):
    """Returns a graph that replays a function, and what the function returned while it was captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, function()


@contextlib.contextmanager
def side_stream(device):
    """Runs what comes before a capture on another stream, as torch asks for."""
    if device == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class Training:
    """A small net with all that a training step needs; `x` and `y` are what replays read."""

    def __init__(self, level, device, how="fused", *, adam=False, verbosity=0, **kwargs):
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).to(device)
        self.clean = torch.randn(16, 8, device=device)
        self.x, self.y = self.clean.clone(), torch.randint(4, (16,), device=device)
        self.factor = torch.ones((), device=device)
        options = dict(OPTIMIZERS[how])
        if adam:
            options["capturable"] = device == "cuda"
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **options)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, **options)
        amp.initialize(self.model, self.optimizer, opt_level=level, verbosity=verbosity, **kwargs)

    def backward(self, **kwargs):
        loss = F.cross_entropy(self.model(self.x).float(), self.y) * self.factor
        with amp.scale_loss(loss, self.optimizer, **kwargs) as scaled:
            scaled.backward()

    def step(self):
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def warm_up(self):
        with side_stream(self.device):
            for _ in range(WARM):
                self.step()
        self.optimizer.zero_grad()

    def follow(self, advance, factors):
        """Runs a step for each factor of the loss; returns (weights, scale, skipped) after each."""
        found = []
        for factor in factors:
            self.factor.fill_(factor)
            advance()
            weights = [param.detach().clone() for param in amp.master_params(self.optimizer)]
            found.append((weights, amp.get_loss_scale(), amp.step_was_skipped(self.optimizer)))
        return found


def assert_same(found, expected):
    assert [scale for _, scale, _ in found] == [scale for _, scale, _ in expected]
    assert [skipped for _, _, skipped in found] == [skipped for _, _, skipped in expected]
    for (weights, _, _), (others, _, _) in zip(found, expected, strict=True):
        for weight, other in zip(weights, others, strict=True):
            torch.testing.assert_close(weight, other, rtol=0, atol=1e-6)


def run_eagerly(factors, *args, **kwargs):
    training = Training(*args, **kwargs)
    training.warm_up()
    found = training.follow(training.step, factors)
    amp.uninitialize()
    return found


FACTORS = {"O0": [1] * 5, "O4": [1] * 5, "O5": [1] * 5}
POISONED = [1, INF, INF, 1, 1, INF, 1]


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_is_captured_as_a_whole_skips_and_scales_as_eager_steps_do(level, adam, device):
    factors = FACTORS.get(level, POISONED)
    rule = amp.DynamicLossScale(growth_interval=2) if level in DYNAMIC else None
    expected = run_eagerly(factors, level, device, adam=adam, loss_scale=rule)
    training = Training(level, device, adam=adam, loss_scale=rule)
    training.warm_up()
    graph, _ = capture(training.step)
    assert_same(training.follow(graph.replay, factors), expected)
    assert level in ("O0", "O1", "O4") or not any(p.grad is not None for p in masters(training))
    assert_same(training.follow(training.step, [1]), run_eagerly_after(factors, level, device, adam, rule))


def masters(training):
    return [master for _, master in amp.master_pairs(training.optimizer)]


def run_eagerly_after(factors, level, device, adam, rule):
    amp.uninitialize()
    return run_eagerly([*factors, 1], level, device, adam=adam, loss_scale=rule)[-1:]


@pytest.mark.exhaustive(keep=12)
@pytest.mark.parametrize("how", list(OPTIMIZERS))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clears", [False, True])
def test_forward_and_backward_are_captured_and_steps_are_not(level, how, clears, device):
    factors = FACTORS.get(level, POISONED)
    expected = run_eagerly(factors, level, device, how)
    training = Training(level, device, how)
    training.warm_up()
    graph, _ = capture(training.backward)

    def advance():
        if clears:
            training.optimizer.zero_grad()
        graph.replay()
        training.optimizer.step()

    assert_same(training.follow(advance, factors), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_accumulation_in_a_graph_is_accumulation(level, device):
    """Blocks that unscale and those that delay, one of them with an overflow."""

    def accumulate(training):
        training.backward(delay_unscale=True)
        training.backward()
        training.backward()

    def advance(training):
        training.optimizer.zero_grad()
        accumulate(training)
        training.optimizer.step()

    factors = FACTORS.get(level, POISONED)
    eager = Training(level, device)
    eager.warm_up()
    expected = eager.follow(lambda: advance(eager), factors)
    amp.uninitialize()
    training = Training(level, device)
    training.warm_up()
    graph, _ = capture(lambda: accumulate(training))

    def replay():
        graph.replay()
        training.optimizer.step()

    assert_same(training.follow(replay, factors), expected)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_block_that_delays_is_settled_by_the_step_in_a_graph_or_outside(level, whole, device):
    factors = FACTORS.get(level, POISONED)
    eager = Training(level, device)
    eager.warm_up()

    def advance():
        eager.optimizer.zero_grad()
        eager.backward(delay_unscale=True)
        eager.optimizer.step()

    expected = eager.follow(advance, factors)
    amp.uninitialize()
    training = Training(level, device)
    training.warm_up()

    def captured():
        training.backward(delay_unscale=True)
        if whole:
            training.optimizer.step()

    graph, _ = capture(captured)

    def replay():
        graph.replay()
        if not whole:
            training.optimizer.step()

    assert_same(training.follow(replay, factors), expected)
    assert_same(training.follow(training.step, [1]), eager_after(expected, level, device, factors))


def eager_after(expected, level, device, factors):
    """The step that follows delayed ones, done eagerly throughout."""
    amp.uninitialize()
    eager = Training(level, device)
    eager.warm_up()
    for factor in factors:
        eager.factor.fill_(factor)
        eager.optimizer.zero_grad()
        eager.backward(delay_unscale=True)
        eager.optimizer.step()
    return eager.follow(eager.step, [1])


def test_an_overflow_that_a_graph_left_unchecked_counts_at_the_next_update(device):
    training = Training("O1", device)
    training.warm_up()
    graph, _ = capture(lambda: training.backward(delay_overflow_check=True))
    training.factor.fill_(INF)
    for _ in range(2):
        graph.replay()
        training.optimizer.step()
        assert amp.step_was_skipped(training.optimizer)
        assert amp.get_loss_scale() == 65536
        training.optimizer.zero_grad()
    for scale in (32768, 16384):
        graph.replay()
        training.factor.fill_(1)
        training.backward()
        assert amp.get_loss_scale() == scale
        training.factor.fill_(INF)


def test_an_eager_block_scales_by_what_a_replay_left(device):
    training = Training("O1", device)
    training.warm_up()
    graph, _ = capture(training.backward)
    training.backward(delay_overflow_check=True)
    training.factor.fill_(INF)
    graph.replay()
    with amp.scale_loss(torch.ones((), device=device), training.optimizer) as scaled:
        assert scaled.item() == 32768


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("level", DYNAMIC)
def test_each_skipped_replay_prints_its_line_and_a_capture_none(level, whole, device, capsys):
    training = Training(level, device, verbosity=1)
    training.warm_up()
    capsys.readouterr()
    graph, _ = capture(training.step if whole else training.backward)
    assert capsys.readouterr().out == ""
    training.follow(graph.replay if whole else lambda: (graph.replay(), training.optimizer.step()), POISONED)
    lines = [line for line in capsys.readouterr().out.splitlines() if "overflow" in line]
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["32768.0", "16384.0", "8192.0"]


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_graph_adds_to_gradients_from_before_its_capture_and_brings_none_back(level, device):
    training = Training(level, device, loss_scale=128.0)
    training.warm_up()
    training.backward()
    expected = [2 * param.grad for param in training.model.parameters()]
    training.optimizer.zero_grad(set_to_none=False)
    graph, _ = capture(training.backward)
    for _ in range(2):
        graph.replay()
    for param, grad in zip(training.model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0.02, atol=1e-3)  # half products
    training.optimizer.zero_grad()
    graph.replay()
    assert all(param.grad is None for param in training.model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_a_replay_adds_to_what_an_eager_block_made(level, device):
    training = Training(level, device, loss_scale=128.0)
    training.warm_up()
    graph, _ = capture(training.backward)
    training.optimizer.zero_grad()
    training.backward()
    expected = [2 * param.grad for param in amp.master_params(training.optimizer)]
    graph.replay()
    for param, grad in zip(amp.master_params(training.optimizer), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0.02, atol=1e-3)  # half products


@pytest.mark.parametrize("level", LEVELS)
def test_a_whole_step_that_ends_by_zero_grad_leaves_no_gradient_to_eager_steps(level, device):
    def step(training):
        training.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()

    eager = Training(level, device)
    eager.warm_up()
    expected = eager.follow(lambda: step(eager), [1, 1, 1])
    amp.uninitialize()
    training = Training(level, device)
    training.warm_up()
    graph, _ = capture(lambda: step(training))
    found = training.follow(graph.replay, [1])
    assert_same(found + training.follow(lambda: step(training), [1, 1]), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_a_capture_without_a_replay_leaves_eager_training_as_it_was(level, device):
    expected = run_eagerly([1, 1], level, device)
    training = Training(level, device)
    training.warm_up()
    capture(training.backward)
    assert_same(training.follow(training.step, [1, 1]), expected)


@pytest.mark.parametrize("level", DYNAMIC)
def test_a_step_that_must_read_the_device_is_refused_in_a_capture_with_the_way_out(level, device):
    training = Training(level, device, "foreach")
    training.warm_up()
    with pytest.raises(amp.AmpError, match="fused=True"):
        capture(training.step)


def test_a_first_step_is_refused_in_a_capture(device):
    training = Training("O1", device)
    with pytest.raises(amp.AmpError, match="has stepped before"):
        capture(training.step)


@pytest.mark.parametrize("level", DYNAMIC)
def test_a_step_that_is_captured_without_its_block_is_refused(level, device):
    training = Training(level, device)
    training.warm_up()
    training.backward()
    with pytest.raises(amp.AmpError, match="together with step"):
        capture(training.optimizer.step)


def test_gradients_of_masters_from_before_a_capture_are_refused(device):
    training = Training("O5", device)
    training.warm_up()
    training.backward()
    with pytest.raises(amp.AmpError, match="zero_grad"):
        capture(training.backward)
