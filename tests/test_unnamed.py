"""Gradients that a block of scale_loss makes for optimizers that it does not name, or after it has ended."""

import contextlib
import functools
import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

import ampatch as amp
from apex_rows import shows
from helpers import assert_same_bits, scaled_backward, snapshot
from test_misuse import lines_of

SCALE = amp.DynamicLossScale(2.0**8)
X = torch.linspace(-1, 1, 24).reshape(8, 3)
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
}


class Pair:
    """Two models in a row, each with an optimizer; a block may name the first optimizer alone, or both."""

    def __init__(self, names_both, level="O1", kind="sgd", calls=1, later=None, **options):
        torch.manual_seed(0)
        self.models = [
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        ]
        self.first, self.second = [OPTIMIZERS[kind](model.parameters()) for model in self.models]
        options = {"opt_level": level, "verbosity": 0, "loss_scale": SCALE} | options
        groups = [[0, 1]] if calls == 1 else [[0], [1]]
        for group in groups:
            optimizers = [[self.first, self.second][one] for one in group]
            amp.initialize([self.models[one] for one in group], optimizers, **options)
            options["loss_scale"] = later or options["loss_scale"]
        self.named = [self.first, self.second] if names_both else self.first

    def loss(self, x=X):
        return self.models[1](torch.tanh(self.models[0](x))).float().pow(2).mean()

    def zero_grad(self, **options):
        self.first.zero_grad(**options)
        self.second.zero_grad(**options)

    def step(self):
        self.first.step()
        self.second.step()

    def bits(self):
        return snapshot([list(amp.master_params(one)) for one in (self.first, self.second)])


def in_one_block(pair, **options):
    for _ in range(3):
        pair.zero_grad(**options)
        scaled_backward(pair.loss(), pair.named)
        pair.step()


def before_a_block_of_its_own_call(pair):
    scaled_backward(pair.loss(), pair.named)
    loss = pair.models[1](X @ torch.eye(3, 4)).float().pow(2).mean()
    scaled_backward(loss, pair.second)
    pair.step()


def clipped(pair):
    for _ in range(2):
        pair.zero_grad()
        scaled_backward(pair.loss(), pair.named)
        torch.nn.utils.clip_grad_norm_(amp.master_params(pair.second), 0.01)
        pair.step()


def clipped_as_they_are(clip, pair):
    for _ in range(2):
        pair.zero_grad()
        scaled_backward(pair.loss(), pair.named)
        clip([param for param in pair.models[1].parameters() if param.dtype is torch.float32], 0.01)
        pair.step()


def averaged_by_hand(pair):
    for _ in range(3):
        pair.zero_grad()
        scaled_backward(pair.loss(), pair.named)
        is_named = pair.named is not pair.first
        for param in amp.master_params(pair.second) if is_named else pair.models[1].parameters():
            param.grad.div_(2)  # as of two ranks
        pair.step()


def at_a_scale_that_is_set(pair):
    amp.set_loss_scale(256)
    in_one_block(pair)


def stepped_inside(pair):
    pair.zero_grad()
    with amp.scale_loss(pair.loss(), pair.named) as scaled:
        scaled.backward()
        pair.second.step()
    pair.first.step()


def around_a_block_that_names_the_other(pair):
    loss = pair.models[1](torch.ones(2, 4)).float().sum()
    with amp.scale_loss(pair.loss(), pair.first) as scaled:
        scaled.backward()
        if pair.named is pair.first:
            scaled_backward(loss, pair.second)
    if pair.named is not pair.first:
        scaled_backward(loss, pair.second)
    pair.step()


def train(script, names_both, **options):
    """Returns the weights and the warnings of a script."""
    pair = Pair(names_both, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script(pair)
    weights = [
        param.detach().clone() for one in (pair.first, pair.second) for param in amp.master_params(one)
    ]
    amp.uninitialize()
    return weights, [str(it.message) for it in caught]


CASES = [
    (in_one_block, {}),
    (in_one_block, {"kind": "fused"}),
    (in_one_block, {"calls": 2}),
    (in_one_block, {"loss_scale": 128.0}),
    (before_a_block_of_its_own_call, {"loss_scale": 128.0, "calls": 2, "later": 1.0}),
    *[(script, {}) for script in (clipped, averaged_by_hand, stepped_inside)],
    (at_a_scale_that_is_set, {"loss_scale": 1.0}),
    (functools.partial(clipped_as_they_are, torch.nn.utils.clip_grad_norm_), {}),
    (functools.partial(clipped_as_they_are, torch.nn.utils.clip_grad_value_), {}),
    (around_a_block_that_names_the_other, {"loss_scale": 128.0}),
]


@pytest.mark.exhaustive(keep=12)
@shows("scale-defect-unnamed")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize(("script", "options"), CASES)
def test_an_optimizer_that_a_block_does_not_name_steps_what_it_would_if_named(script, options, level):
    expected, said = train(script, names_both=True, level=level, **options)
    assert said == []
    found, said = train(script, names_both=False, level=level, **options)
    assert_same_bits(found, expected)
    assert said == []


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_plain_backward_in_the_block_adds_to_what_is_unscaled(level):
    pair = Pair(False, level, loss_scale=128.0)
    with amp.scale_loss(pair.loss(), pair.first) as scaled:
        scaled.backward()
        pair.models[1](torch.ones(2, 4)).float().sum().backward()
    found = [param.grad.clone() for param in pair.models[1].parameters()]
    pair.zero_grad()
    scaled_backward(pair.loss(), [pair.first, pair.second])
    pair.models[1](torch.ones(2, 4)).float().sum().backward()
    expected = [param.grad for param in pair.models[1].parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)  # BatchNorm has moved


def test_a_parameter_of_two_unnamed_optimizers_is_unscaled_once():
    moves = []
    for names_all in (True, False):
        pair = Pair(False, "O1")
        third = torch.optim.SGD(pair.models[1].parameters(), lr=0.1)
        amp.initialize([], [third], opt_level="O1", verbosity=0, loss_scale=SCALE)
        named = [pair.first, pair.second, third] if names_all else pair.first
        scaled_backward(pair.loss(), named)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pair.second.step()
            third.step()
        moves.append([param.detach().clone() for param in pair.models[1].parameters()])
        amp.uninitialize()
    assert_same_bits(*moves)


def test_an_unnamed_optimizer_that_steps_inside_of_the_backward_is_refused():
    pair = Pair(False, "O1")
    pair.models[1][2].bias.register_post_accumulate_grad_hook(lambda _: pair.second.step())
    with pytest.raises(amp.AmpError, match="does not name steps inside of its backward"):
        scaled_backward(pair.loss(), pair.named)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("is_named", [True, False])
def test_an_optimizer_that_shares_parameters_steps_in_the_block_what_it_would_after_it(is_named, level):
    def run(inside):
        pair = Pair(True, level, loss_scale=128.0)
        third = torch.optim.SGD(pair.models[0 if is_named else 1].parameters(), lr=0.1)
        amp.initialize([], [third], opt_level=level, verbosity=0, loss_scale=128.0)
        with amp.scale_loss(pair.loss(), pair.first) as scaled:
            scaled.backward()
            if inside:
                third.step()
        if not inside:
            third.step()
        pair.step()
        weights = [param.detach().clone() for model in pair.models for param in model.parameters()]
        amp.uninitialize()
        return weights

    assert_same_bits(run(inside=True), run(inside=False))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_of_an_optimizer_that_is_not_named_skips_its_step_alone(level):
    pair = Pair(False, level)
    pair.models[1][2].bias.register_hook(lambda grad: grad * float("inf"))
    before = pair.bits()
    scaled_backward(pair.loss(), pair.named)
    pair.step()
    after = pair.bits()
    assert (after[0] == before[0], after[1] == before[1]) == (False, True)
    assert amp.get_loss_scale() == 2.0**7


# ---- A GAN: the generator's loss leaves gradients at the discriminator, and nobody steps these ----


def train_gan(pair, *, is_plain=False, sets_to_none=True):
    for _ in range(3):
        pair.second.zero_grad(set_to_none=sets_to_none)
        fake = torch.tanh(pair.models[0](X)).detach()
        loss = pair.models[1](fake).float().pow(2).mean()
        loss.backward() if is_plain else scaled_backward(loss, pair.second)
        pair.second.step()
        pair.first.zero_grad()
        scaled_backward(pair.loss(-X), pair.first)
        pair.first.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_closure_may_clear_what_overflowed_before_it(level):
    pair, is_bad = Pair(False, level), [True]
    pair.models[1][2].bias.register_hook(lambda grad: grad * float("inf") if is_bad else grad)

    def evaluate():
        pair.second.zero_grad()
        scaled_backward(pair.loss(), pair.second)

    scaled_backward(pair.loss(), pair.first)
    is_bad.clear()
    pair.second.step(evaluate)
    assert not amp.step_was_skipped(pair.second)
    assert amp.get_loss_scale() == 2.0**8


def test_a_discriminator_that_is_trained_without_blocks_steps_its_own_gradients():
    def run(sets_to_none):
        pair = Pair(False, "O1")
        amp.uninitialize()
        for model, optimizer, level in zip(pair.models, (pair.first, pair.second), ("O1", "O0"), strict=True):
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        with amp.disable_casts():
            train_gan(pair, is_plain=True, sets_to_none=sets_to_none)
        return pair.bits()

    assert run(sets_to_none=True) == run(sets_to_none=False)


def test_two_threads_train_a_gan_each_as_if_alone():
    pairs = [Pair(False, "O1") for _ in range(3)]
    train_gan(pairs[0])
    inside, begun = threading.Event(), threading.Event()

    def begin_inside(grad):  # the other thread's first backward runs inside of this one's
        inside.set()
        assert begun.wait(60)

    pairs[1].models[0][0].weight.register_hook(begin_inside)
    pairs[2].models[0][0].weight.register_hook(lambda grad: begun.set())
    threads = [
        threading.Thread(target=train_gan, args=(pairs[1],)),
        threading.Thread(target=lambda: inside.wait(60) and train_gan(pairs[2])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pair in pairs[1:]:
        assert pair.bits() == pairs[0].bits()


# ---- backward() after the block ----


def late(pair):
    for _ in range(3):
        pair.zero_grad()
        with amp.scale_loss(pair.loss(), pair.named) as scaled:
            pass
        scaled.backward()  # wrong
        pair.step()


def late_by_a_part(pair):
    for _ in range(3):
        pair.zero_grad()
        with amp.scale_loss(2 * pair.loss(), pair.named) as scaled:
            pass
        torch.autograd.backward([scaled / 2])  # wrong
        pair.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_late_backwards_accumulate(level):
    def accumulate(pair, is_late):
        for x in (*X.split(4), *X.split(4)):
            with amp.scale_loss(pair.loss(x), pair.named) as scaled:
                if not is_late:
                    scaled.backward()
            if is_late:
                scaled.backward()
            if x[0, 0] > 0:
                pair.step()
                pair.zero_grad(set_to_none=False)

    expected, _ = train(functools.partial(accumulate, is_late=False), names_both=True, level=level)
    found, [text] = train(functools.partial(accumulate, is_late=True), names_both=True, level=level)
    assert_same_bits(found, expected)
    assert "had ended" in text


def late_by_a_part_alone(pair):
    for _ in range(3):
        pair.zero_grad()
        with amp.scale_loss(2 * pair.loss(), pair.named) as scaled:
            half = scaled / 2
        del scaled
        half.backward()  # wrong
        pair.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("script", [late, late_by_a_part, late_by_a_part_alone])
def test_a_backward_after_its_block_trains_as_one_inside_and_is_told_with_its_line(script, level):
    expected, _ = train(in_one_block, names_both=True, level=level)
    pair = Pair(True, level)
    with pytest.warns(UserWarning, match=r"move backward\(\) into the block") as caught:
        script(pair)
    assert_same_bits([*amp.master_params(pair.first), *amp.master_params(pair.second)], expected)
    assert [(it.filename, it.lineno) for it in caught] == [(__file__, *lines_of(script, "# wrong"))]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_was_computed_from_the_scaled_loss_goes_backward_late_beside_it(level):
    def train_twice(pair, is_late):
        with amp.scale_loss(pair.loss(), pair.named) as scaled:
            again = scaled * 2
            scaled.backward(retain_graph=True)
            if not is_late:
                again.backward()
        del scaled
        if is_late:
            again.backward()
        pair.step()

    expected, _ = train(functools.partial(train_twice, is_late=False), names_both=True, level=level)
    found, [text] = train(functools.partial(train_twice, is_late=True), names_both=True, level=level)
    assert_same_bits(found, expected)
    assert "had ended" in text


@pytest.mark.parametrize("is_late", [True, False])
def test_a_second_backward_after_the_block_is_told_and_one_of_another_loss_is_not(is_late):
    pair = Pair(True, "O1")
    with amp.scale_loss(pair.loss(), pair.named) as scaled:
        scaled.backward(retain_graph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (scaled if is_late else X.clone().requires_grad_().square().sum()).backward()
        pair.step()
    assert ["had ended" in str(it.message) for it in caught] == [True] * is_late


def test_a_stranger_that_a_script_has_dropped_is_not_kept():
    pair, other = Pair(True, "O1"), nn.Linear(1, 1)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(2):
        with amp.scale_loss(other(pair.loss().reshape(1, 1)).sum(), pair.named) as scaled:
            scaled.backward()
        with contextlib.suppress(UserWarning):
            stranger.step()
    params = [weakref.ref(param) for param in other.parameters()]
    del stranger, other, scaled
    gc.collect()
    scaled_backward(pair.loss(), pair.named)
    amp.clear_cache()
    gc.collect()
    assert [find() for find in params] == [None, None]
