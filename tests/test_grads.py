"""Gradients of every make: cast, unscaled and added up to the bits that one tensor after the other gives."""

import math
from collections import Counter

import pytest
import torch
from torch.nn import Parameter, ParameterList
from torch.utils._python_dispatch import TorchDispatchMode

import ampatch as amp
from apex_rows import shows
from helpers import assert_same_bits, scaled_backward, snapshot

HALF = {"O2": torch.float16, "O5": torch.bfloat16}
SCALE = 2.0**8


def open_session(level, shapes, make=torch.optim.SGD, loss_scale=SCALE, **options):
    model = ParameterList([Parameter(torch.randn(shape)) for shape in shapes])
    optimizer = make(model.parameters(), lr=0.5, **options)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0)
    return list(model.parameters()), optimizer


class Gradient(torch.autograd.Function):
    """Gives a parameter a gradient as it is."""

    @staticmethod
    def forward(ctx, param, grad):
        ctx.grad = grad
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.grad, None


def hand_over(params, optimizer, grads):
    """A block in which parameters are given these gradients, scaled already; None where one gets none."""
    with amp.scale_loss(torch.ones(()), optimizer):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def pass_back(params, optimizer, grads):
    """A block whose backward makes these gradients, scaled already; None where it makes none."""
    pairs = [(param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None]
    with amp.scale_loss(torch.ones(()), optimizer):
        sum(Gradient.apply(*pair) for pair in pairs).backward()


def test_a_gradient_in_a_bucket_is_added_to_before_the_bucket_has_the_next():
    params, optimizer = open_session("O1", [(3, 2)])
    bucket = torch.empty(6)  # as DistributedDataParallel(gradient_as_bucket_view=True) has of one weight
    for value in (1.0, 2.0):
        with amp.scale_loss(torch.ones(()), optimizer):
            params[0].grad = bucket.fill_(value * SCALE).view(3, 2)
    assert params[0].grad.eq(3.0).all()


# Half gradients added to float32 ones


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("scale", [1.0, SCALE, amp.DynamicLossScale(SCALE)], ids=str)
def test_gradients_of_large_and_small_weights_accumulate_in_float32(level, scale):
    shapes = [(3,), (1024, 1100), (2, 5), (700_000,), (600, 1200)]
    params, optimizer = open_session(level, shapes, loss_scale=scale)
    factor = 1.0 if scale == 1.0 else SCALE
    expected = [torch.zeros(shape) for shape in shapes]
    for index in range(3):
        grads = [torch.randn(shape).to(HALF[level]) for shape in shapes]
        grads[4] = torch.randn(1200, 600).to(HALF[level]).T  # of other strides than the master's
        if index == 1:
            grads[3] = None
        pass_back(params, optimizer, grads)
        for total, grad in zip(expected, grads, strict=True):
            total += 0 if grad is None else grad.float() / factor
    assert_same_bits([master.grad for master in amp.master_params(optimizer)], expected)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("level", list(HALF))
def test_a_gradient_that_keeps_its_graph_is_unscaled_at_the_end_of_its_block(level):
    [half], optimizer = open_session(level, [(3,)])
    with amp.scale_loss(half.float().square().sum(), optimizer) as scaled_loss:
        scaled_loss.backward(create_graph=True)
    expected = 2 * half.detach().float()
    assert_same_bits([half.grad.detach()], [expected])
    assert_same_bits([next(amp.master_params(optimizer)).grad.detach()], [expected])
    half.grad = None  # which holds itself by its graph


# Gradients that must not be written where they lie


@pytest.mark.parametrize("small", [[1.0, -2.0, 4.0], 4.0], ids=["row", "number"])
@pytest.mark.parametrize("level", ["O1", "O4", *HALF])
def test_an_expanded_gradient_is_unscaled_once_in_each_place(level, small):
    (param,), optimizer = open_session(level, [(2, 3)])
    kept = torch.tensor(small, dtype=param.dtype) * SCALE
    for count in (1.0, 2.0):
        hand_over([param], optimizer, [kept.expand(2, 3)])
        for side in (param, *amp.master_params(optimizer)):
            assert torch.equal(side.grad, (count * torch.tensor(small)).expand(2, 3).to(side.dtype))
    assert torch.equal(kept.float(), torch.tensor(small) * SCALE)


@pytest.mark.parametrize("kind", ["transposed", "every second", "channels last"])
def test_a_gradient_of_any_strides_is_unscaled_where_it_lies(kind):
    grad = {
        "transposed": torch.randn(5, 4).T,
        "every second": torch.randn(8, 5)[::2],
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }[kind]
    (param,), optimizer = open_session("O1", [grad.shape])
    expected = grad / SCALE
    hand_over([param], optimizer, [grad])
    assert param.grad is grad
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("level", ["O0", "O1", "O4", "O5"])
def test_a_gradient_that_two_parameters_share_gets_both_sums(level):
    params, optimizer = open_session(level, [(3,), (3,)])
    shared = torch.full((3,), 4.0)
    for stepped in amp.master_params(optimizer):
        stepped.grad = shared
    hand_over(params, optimizer, [torch.full((3,), k * SCALE).to(params[0].dtype) for k in (1.0, 2.0)])
    assert [stepped.grad is shared for stepped in amp.master_params(optimizer)] == [True, True]
    assert shared.tolist() == [7.0] * 3


# Groups that are edited between steps


class Copies(TorchDispatchMode):
    """Counts the ops that copy, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts.update([name] if "copy" in name or name == "clone" else [])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", list(HALF))
def test_the_gradients_of_a_block_are_cast_all_at_once(level):
    def count(size):
        params, optimizer = open_session(level, [(3,)] * size)
        with Copies() as copies:
            hand_over(params, optimizer, [torch.ones(3, dtype=HALF[level]) for _ in params])
        return copies.counts

    assert count(8) == count(1)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_parameter_that_left_its_group_keeps_its_gradient_scaled(level):
    params, optimizer = open_session(level, [(3,), (3,)])
    hand_over(params, optimizer, [torch.full((3,), SCALE) for _ in params])
    optimizer.step()
    optimizer.zero_grad()
    left = optimizer.param_groups[0]["params"].pop()
    hand_over(params, optimizer, [torch.full((3,), SCALE) for _ in params])
    assert [param.grad.tolist() for param in params] == [[1.0] * 3, [SCALE] * 3]
    optimizer.param_groups[0]["params"].append(left)
    left.grad = None
    hand_over([left], optimizer, [torch.full((3,), SCALE)])
    assert left.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_that_came_into_a_group_is_skipped_with_the_rest(fused):
    dynamic = amp.DynamicLossScale(SCALE)
    params, optimizer = open_session("O1", [(3,)], torch.optim.Adam, dynamic, fused=fused)
    hand_over(params, optimizer, [torch.ones(3)])
    optimizer.step()
    new = Parameter(torch.zeros(3))
    optimizer.param_groups[0]["params"].append(new)
    before = snapshot([*params, new])
    hand_over([*params, new], optimizer, [torch.ones(3), torch.full((3,), math.inf)])
    optimizer.step()
    assert snapshot([*params, new]) == before
    assert new not in optimizer.state
    assert not new.grad.isfinite().any()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_master_that_left_its_group_still_shows_in_the_model(level):
    params, optimizer = open_session(level, [(3,), (3,)])
    left = optimizer.param_groups[0]["params"].pop()
    with torch.no_grad():
        left.fill_(0.25)
    before = params[0].clone()
    hand_over(params, optimizer, [torch.full((3,), SCALE, dtype=HALF[level]) for _ in params])
    optimizer.step()
    assert params[1].tolist() == [0.25] * 3
    assert not torch.equal(params[0], before)


# Blocks that some parameters take no part in


class Parts(torch.nn.Module):
    """Two parameters whose gradients are what they are multiplied by; 0 leaves one out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Parameter(torch.ones(3)), Parameter(torch.ones(3))

    def forward(self, first, second):
        parts = [(self.first, first), (self.second, second)]
        return sum((param * factor).sum() for param, factor in parts if factor).float()


# The factors of each block, and whether it leaves its gradients scaled.
SEQUENCES = [
    [(2.0, 1.0, False), (0, 1.0, True), (0, 1.0, False)],
    [(2.0, 1.0, False), (0, 1.0, True), (0, 1.0, True), (3.0, 1.0, False)],
    [(2.0, 1.0, False), (3.0, 1.0, True), (1.0, 1.0, False)],
    [(2.0, 1.0, False), (3.0, 1.0, False), (0, 1.0, True), (0, 1.0, False)],
    [(2.0, 1.0, True), (0, 1.0, True), (1.0, 1.0, False)],
]


DYNAMIC = amp.DynamicLossScale(init_scale=128.0)


@pytest.mark.exhaustive(keep=20)
@pytest.mark.parametrize("sequence", SEQUENCES, ids=range(len(SEQUENCES)))
@pytest.mark.parametrize("order", [(0,), (0, 1), (1, 0)], ids=["alone", "shared", "shared, turned"])
@pytest.mark.parametrize(
    ("level", "loss_scale"), [("O1", 1.0), ("O1", DYNAMIC), ("O5", 1.0), ("O5", 128.0)], ids=str
)
def test_each_gradient_counts_once_whichever_blocks_it_took_part_in(level, loss_scale, order, sequence):
    model = Parts()
    params = [[model.first, model.second], [model.first]]
    optimizers = [torch.optim.SGD(params[index], lr=1.0) for index in sorted(order)]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=loss_scale, verbosity=0)
    for first, second, delayed in sequence:
        named = [optimizers[index] for index in order]
        scaled_backward(model(first, second), named, delay_unscale=delayed)
    grads = [param.grad[0].item() for param in amp.master_params(optimizers[0])]
    assert grads == [sum(first for first, *_ in sequence), sum(second for _, second, _ in sequence)]


@pytest.mark.parametrize("loss_scale", [1.0, 128.0])
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_block_that_raises_keeps_the_earlier_gradient_of_a_parameter_that_two_optimizers_step(
    level, loss_scale
):
    model = torch.nn.Linear(2, 1, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    amp.initialize(model, optimizers, opt_level=level, loss_scale=loss_scale, verbosity=0)
    scaled_backward(model(torch.ones(1, 2)).sum(), optimizers)
    before = model.weight.grad.clone()
    with pytest.raises(KeyError), amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizers):
        raise KeyError
    assert torch.equal(model.weight.grad, before)
    for optimizer in optimizers:
        assert all(torch.equal(param.grad, torch.ones(1, 2)) for param in amp.master_params(optimizer))


# Parameters that join when they have a gradient already


def join(model, optimizer, moment):
    """Adds the second parameter when blocks of another one have given it a gradient of 2, or more."""

    def run(*, delay=False, inside=False):
        with amp.scale_loss(model(1.0, 2.0), optimizer, delay_unscale=delay) as scaled_loss:
            scaled_loss.backward()
            if inside:
                optimizer.add_param_group({"params": [model.second]})

    run()
    if moment != "after a block":
        run(delay=moment == "after a delayed block", inside=moment == "in a block")
    if moment != "in a block":
        optimizer.add_param_group({"params": [model.second]})


LEVELS = pytest.mark.parametrize("level", ["O1", "O5"])


@shows("optimizers-join-scaled")
@LEVELS
@pytest.mark.parametrize("loss_scale", [128.0, amp.DynamicLossScale(init_scale=128.0)], ids=str)
@pytest.mark.parametrize("moment", ["after a block", "after a delayed block", "in a block"])
def test_a_gradient_that_may_be_scaled_does_not_count_when_its_parameter_joins(
    level, loss_scale, moment, caplog
):
    model = Parts()
    optimizer = torch.optim.SGD([model.first], lr=2.0**-6)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale)
    join(model, optimizer, moment)
    assert "1 new parameter had a gradient" in caplog.text
    scaled_backward(model(1.0, 3.0), optimizer)
    grads = [param.grad[0].item() for param in amp.master_params(optimizer)]
    assert grads == [2.0 if moment == "after a block" else 3.0, 3.0]
    optimizer.step()
    assert model.second.tolist() == [1 - 3.0 / 64] * 3


@LEVELS
@pytest.mark.parametrize("case", ["a scale of 1", "no block yet", "stepped by another"])
def test_a_gradient_that_is_known_counts_when_its_parameter_joins(level, case, caplog):
    model = Parts()
    optimizers = [torch.optim.SGD([model.first], lr=0.5), torch.optim.SGD([model.second], lr=0.0)]
    named = optimizers if case == "stepped by another" else optimizers[:1]
    loss_scale = 1.0 if case == "a scale of 1" else 128.0
    amp.initialize(model, named, opt_level=level, loss_scale=loss_scale, verbosity=0)
    if case == "no block yet":
        model(1.0, 2.0).backward()
    else:
        scaled_backward(model(1.0, 2.0), named)
    optimizers[0].add_param_group({"params": [model.second]})
    optimizers[0].step()
    assert [param.tolist() for param in model.parameters()] == [[0.5] * 3, [0.0] * 3]
    assert caplog.text == ""


@LEVELS
def test_a_gradient_that_may_be_scaled_does_not_count_for_a_later_initialize(level, caplog):
    models = [Parts(), Parts()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    amp.initialize(models[0], optimizers[0], opt_level=level, loss_scale=128.0)
    scaled_backward(models[0](1.0, 2.0) + models[1](0, 2.0), optimizers[0])
    amp.initialize(models[1], optimizers[1], opt_level=level, loss_scale=128.0, verbosity=0)
    assert "1 new parameter had a gradient" in caplog.text
    for optimizer in optimizers:
        optimizer.step()
    assert [param.tolist() for param in models[0].parameters()] == [[0.5] * 3, [0.0] * 3]
    assert [param.tolist() for param in models[1].parameters()] == [[1.0] * 3, [1.0] * 3]


# ---- One gradient, whichever side it is assigned on ----


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("loss_scale", [1.0, SCALE])
def test_a_backward_that_reaches_a_weight_and_its_master_counts_both(level, loss_scale):
    [half], optimizer = open_session(level, [(2, 3)], loss_scale=loss_scale)
    for count in (1, 2):
        [master] = amp.master_params(optimizer)
        scaled_backward(half.float().sum() + 2 * master.sum(), optimizer)
        assert snapshot(half.grad) == snapshot(master.grad) == snapshot(torch.full((2, 3), 3.0 * count))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_gradient_that_does_not_fit_is_refused_as_in_float32_and_leaves_both_sides(level):
    [half], optimizer = open_session(level, [(2, 3)])
    [master] = amp.master_params(optimizer)
    half.grad = torch.ones(2, 3)
    for param in (half, master):
        for wrong in (torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float64), "ones"):
            with pytest.raises((RuntimeError, TypeError), match="assign"):
                param.grad = wrong
            assert snapshot(half.grad) == snapshot(master.grad) == snapshot(torch.ones(2, 3))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("loss_scale", [SCALE, amp.DynamicLossScale(SCALE)], ids=str)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_the_gradient_of_a_parameter_that_is_twice_in_a_group_is_unscaled_once(level, loss_scale):
    param = Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([param, param], lr=0.5)
    model = ParameterList([param])
    amp.initialize(model, optimizer, opt_level=level, loss_scale=loss_scale, verbosity=0)
    for delays in (False, True):
        optimizer.zero_grad()
        scaled_backward(param.float().sum(), optimizer, delay_unscale=delays)
        scaled_backward(param.float().sum(), optimizer)
        assert snapshot(next(amp.master_params(optimizer)).grad) == snapshot(torch.full((3,), 2.0))
