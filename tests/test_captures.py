"""Training in CUDA graphs: what replays do is what the same steps do eagerly."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampatch as amp

pytestmark = pytest.mark.exhaustive(keep=3)  # of each test

INF = float("inf")
WARM = 3
LEVELS = ["O1", "O2", "O4"]  # O5 is O2 with a static scale, as O4 is O1
DYNAMIC = ["O1", "O2"]
OPTIMIZERS = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def capture(function):
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


FACTORS = {"O0": [1] * 5, "O4": [1] * 5, "O5": [1] * 5}
POISONED = [1, INF, INF, 1, 1, INF, 1]


def assert_as_eagerly(level, device, eager, captured, outside=None, how="fused", factors=None, **kwargs):
    """Fails unless replays, each followed by `outside`, do what `eager` does, as does an eager step later."""
    factors = factors or FACTORS.get(level, POISONED)
    training = Training(level, device, how, **kwargs)
    training.warm_up()
    expected = training.follow(lambda: eager(training), [*factors, 1])
    amp.uninitialize()
    training = Training(level, device, how, **kwargs)
    training.warm_up()
    graph, _ = capture(lambda: captured(training))

    def advance():
        graph.replay()
        if outside:
            outside(training)

    found = training.follow(advance, factors)
    assert_same(found + training.follow(lambda: eager(training), [1]), expected)


def step(training):
    training.optimizer.step()


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adamw"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_that_is_captured_as_a_whole_skips_and_scales_as_eager_steps_do(level, adam, device):
    rule = amp.DynamicLossScale(growth_interval=2) if level in DYNAMIC else None
    assert_as_eagerly(level, device, Training.step, Training.step, adam=adam, loss_scale=rule)


@pytest.mark.exhaustive(keep=6)
@pytest.mark.parametrize("how", list(OPTIMIZERS))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clears", [False, True])
def test_forward_and_backward_are_captured_and_steps_are_not(level, how, clears, device):
    def outside(training):
        step(training)
        if clears:
            training.optimizer.zero_grad()

    assert_as_eagerly(level, device, Training.step, Training.backward, outside, how)


@pytest.mark.parametrize("level", LEVELS)
def test_accumulation_in_a_graph_is_accumulation(level, device):
    """Blocks that unscale and those that delay, one of them with an overflow."""

    def accumulate(training):
        training.backward(delay_unscale=True)
        training.backward()
        training.backward()

    def eager(training):
        training.optimizer.zero_grad()
        accumulate(training)
        step(training)

    assert_as_eagerly(level, device, eager, accumulate, step)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_block_that_delays_is_settled_by_the_step_in_a_graph_or_outside(level, whole, device):
    def delay(training):
        training.backward(delay_unscale=True)

    def delay_and_step(training):
        delay(training)
        step(training)

    def eager(training):
        training.optimizer.zero_grad()
        delay_and_step(training)

    captured, outside = (delay_and_step, None) if whole else (delay, step)
    assert_as_eagerly(level, device, eager, captured, outside)


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
    def whole(training):
        training.backward()
        step(training)
        training.optimizer.zero_grad()

    assert_as_eagerly(level, device, whole, whole, factors=[1])


@pytest.mark.parametrize("level", LEVELS)
def test_a_capture_without_a_replay_leaves_eager_training_as_it_was(level, device):
    found = []
    for captures in (False, True):
        training = Training(level, device)
        training.warm_up()
        if captures:
            capture(training.backward)
        found.append(training.follow(training.step, [1, 1]))
        amp.uninitialize()
    assert_same(*found)


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_a_step_of_gradients_that_are_in_place_is_captured_alone(level, device):
    found = []
    for captures in (False, True):
        training = Training(level, device)
        training.warm_up()
        for param in training.model.parameters():
            param.grad = torch.ones_like(param)
        advance = capture(training.optimizer.step)[0].replay if captures else training.optimizer.step
        found.append(training.follow(advance, [1, 1]))
        amp.uninitialize()
    assert_same(*found)


def test_an_observer_is_told_of_each_replayed_step(device):
    class Counts(amp.Observer):
        begun = 0

        def on_step_begin(self, optimizer):
            self.begun += 1

    training, observer = Training("O4", device), Counts()
    training.warm_up()
    graph, _ = capture(training.step)
    with amp.observe(observer):
        for _ in range(3):
            graph.replay()
    assert observer.begun == 3


@pytest.mark.parametrize("method", ["backward", "step"])
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_a_replay_after_the_optimizer_is_gone_computes_and_notes_nothing(level, method, played):
    training = Training(level, "cpu")
    training.warm_up()
    graph, _ = capture(getattr(training, method))
    scale, gone = amp.get_loss_scale(), weakref.ref(training.optimizer)
    del training.optimizer
    gc.collect()
    assert gone() is None
    graph.replay()
    assert amp.get_loss_scale() == scale


@pytest.mark.parametrize(
    ("level", "how", "warm", "blocks", "method", "message"),
    [
        *((level, "foreach", True, [], "step", "fused=True") for level in DYNAMIC),
        ("O1", "fused", False, [], "step", "has stepped before"),
        *((level, "fused", True, [{}], "step_alone", "together with step") for level in DYNAMIC),
        ("O1", "fused", True, [{"delay_unscale": True}], "step_alone", "together with step"),
        ("O5", "fused", True, [{}], "backward", "zero_grad"),
    ],
)
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # since it was refused
def test_what_no_graph_can_do_is_refused_in_a_capture_with_the_way_out(
    level, how, warm, blocks, method, message, device
):
    training = Training(level, device, how)
    training.step_alone = training.optimizer.step
    if warm:
        training.warm_up()
    for options in blocks:
        training.backward(**options)
    with pytest.raises(amp.AmpError, match=message):
        capture(getattr(training, method))
