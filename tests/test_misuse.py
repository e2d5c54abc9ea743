"""What trains wrongly without an error is warned of once, at the line to change; what is right is not."""

import copy
import functools
import inspect
import logging
import re
import sys
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import ampatch as amp
from apex_rows import shows
from helpers import assert_same_bits, needs_torch, scaled_backward
from nets import HALVES, MASTERED, Net, X, open_session, sgd
from test_readme import explained


@pytest.fixture
def warned(caplog):
    """Runs an action, and returns its warnings (text, file, line), each of which is in the log as well."""

    def run(action, *args, **kwargs):
        caplog.clear()
        with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING, "ampatch"):
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", FutureWarning)  # of torch, at its old names
            action(*args, **kwargs)
        logged = [line for line in caplog.messages if re.match(r"\S+\.py:\d+: ", line)]
        assert logged == [f"{it.filename}:{it.lineno}: {it.message}" for it in caught]
        for it in caught:
            assert any(re.fullmatch(pattern, str(it.message)) for pattern in explained()), it.message
        return [(str(it.message), it.filename, it.lineno) for it in caught]

    return run


def make(level="O1", **options):
    model = Net()
    optimizer = sgd(model)
    open_session(model, optimizer, level, **options)
    return model, optimizer


def scaled_step(model, optimizer):
    optimizer.zero_grad()
    scaled_backward(model(X).pow(2).mean(), optimizer)
    optimizer.step()


def lines_of(function, word):
    """Where a word stands in the source of a function."""
    lines, first = inspect.getsourcelines(function)
    return {first + index for index, line in enumerate(lines) if word in line}


@pytest.mark.parametrize(
    ("at_prompt", "level", "count"), [(True, "O0", 1), (True, "O1", 0), (False, "O0", 0)]
)
def test_a_level_without_casts_after_one_with_is_warned_of_at_a_prompt(
    at_prompt, level, count, warned, monkeypatch
):
    if at_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    make("O1")
    said = warned(make, level)
    assert [text[:23] for text, *_ in said] == ["O0 patches no functions"] * count
    assert warned(make, level) == []
    amp.uninitialize()
    assert warned(make, level) == []


# ---- Wrong: a warning each, at the line that holds the word `wrong` ----


def backward_of_the_loss_itself(model, optimizer):
    loss = model(X).pow(2).mean()
    with amp.scale_loss(loss, optimizer):
        loss.backward()  # wrong
    optimizer.step()


def backward_of_a_part_of_the_loss(model, optimizer):
    loss = model(X).pow(2).mean()
    with amp.scale_loss(loss / 4, optimizer):
        (loss / 2).backward()  # wrong
    optimizer.step()


def no_block_after_a_right_step(model, optimizer):
    scaled_step(model, optimizer)
    optimizer.zero_grad()
    torch.autograd.backward([model(X).pow(2).mean()])  # wrong
    optimizer.step()


def clip_in_the_block(clip, read, model, optimizer):
    with amp.scale_loss(model(X).pow(2).mean(), optimizer) as scaled:
        scaled.backward()
        clip(read(model, optimizer), 1.0)  # wrong
    optimizer.step()


# Bound before a session.
CLIP_NORM, CLIP_VALUE = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_
CLIP_BY = torch.nn.utils.clip_grads_with_norm_
clip_norm_of_the_model = functools.partial(clip_in_the_block, CLIP_NORM, lambda model, _: model.parameters())
clip_norm_of_masters = functools.partial(
    clip_in_the_block, CLIP_NORM, lambda _, optimizer: list(amp.master_params(optimizer))
)
clip_value_of_masters = functools.partial(
    clip_in_the_block, CLIP_VALUE, lambda _, optimizer: amp.master_params(optimizer)
)
clip_by_a_norm_of_ones_own = functools.partial(
    clip_in_the_block,
    functools.partial(CLIP_BY, total_norm=torch.ones(())),
    lambda model, _: model.parameters(),
)


def a_scaler_beside_the_block(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with amp.scale_loss(model(X).pow(2).mean(), optimizer) as scaled:
        scaler.scale(scaled).backward()
    for param in amp.master_params(optimizer):  # which has them checked
        param.grad = torch.zeros_like(param)
    scaler.step(optimizer)  # wrong


WRONG = [
    (backward_of_the_loss_itself, "began at a loss that is not scaled"),
    (backward_of_a_part_of_the_loss, "began at a loss that is not scaled"),
    (no_block_after_a_right_step, "outside of scale_loss"),
    (clip_norm_of_the_model, "clipped at 1 inside a block .* loss scale .65536."),
    (clip_norm_of_masters, "clipped at 1 inside a block"),
    (clip_value_of_masters, "clipped at 1 inside a block"),
    (clip_by_a_norm_of_ones_own, "clipped at 1 inside a block"),
    (a_scaler_beside_the_block, "a GradScaler steps"),
]
DYNAMIC, STATIC = {"loss_scale": "dynamic"}, {"loss_scale": 65536.0}
EITHER = pytest.mark.parametrize(
    ("level", "options"), [("O5", DYNAMIC), ("O1", STATIC)], ids=["dynamic", "static"]
)


@shows("scale-misuse")
@pytest.mark.exhaustive(keep=14)
@EITHER
@pytest.mark.parametrize(("script", "message"), WRONG)
def test_a_script_that_trains_wrongly_is_warned_once_at_the_line_to_change(
    warned, script, message, level, options
):
    if options is STATIC and "no_block" in getattr(script, "__name__", ""):
        return  # those gradients are what they would be
    source = getattr(script, "func", script)
    for _ in range(2):
        pair = make(level, **options)
        [(text, file, line)] = warned(script, *pair)
        assert re.search(message, text)
        assert (file, {line}) == (__file__, lines_of(source, "# wrong"))
        assert warned(script, *make(level, **options)) == []  # said already
        amp.uninitialize()  # and again in the next session


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_at_a_static_scale_of_1_nothing_is_wrong_with_them(warned, level):
    for script, _ in WRONG[:-1]:
        assert warned(script, *make(level, loss_scale=1.0)) == []
        amp.uninitialize()


def test_a_block_of_a_static_scale_hides_nothing_from_those_of_a_dynamic_one(warned):
    static, dynamic = make(loss_scale=128.0), make()
    scaled_step(*static)
    [(text, _, _)] = warned(no_block_after_a_right_step, *dynamic)
    assert "outside of scale_loss" in text


# ---- The same, at the levels where it matters ----


def backward_beside_a_block(model, optimizer):
    """Plain gradients that are added to those of a block, as apex took them at O1."""
    scaled_backward(model(X).pow(2).mean(), optimizer)
    model(X).abs().mean().backward()
    optimizer.step()


def clip_the_model_after_blocks(clip, model, optimizer):
    for _ in range(2):
        scaled_backward(model(X).pow(2).mean(), optimizer)
    clip(model.parameters(), 1e-4)
    optimizer.step()


clip_norm_after_blocks = functools.partial(clip_the_model_after_blocks, CLIP_NORM)
clip_value_after_blocks = functools.partial(clip_the_model_after_blocks, CLIP_VALUE)


def a_scaler_alone(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    before = [param.detach().clone() for param in model.parameters()]
    scaler.scale(model(X).pow(2).mean()).backward()
    scaler.step(optimizer)
    moved = [param - old for param, old in zip(model.parameters(), before, strict=True)]
    assert (
        0 < max(it.abs().max() for it in moved) < 1
    )  # what the scaler did not unscale would be 128 times it


def a_scaler_that_skips(model, optimizer):
    """It skips the step by which it would be known."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
    with amp.scale_loss(model(X).pow(2).mean(), optimizer) as scaled:
        (scaler.scale(scaled) * float("inf")).backward()
    scaler.step(optimizer)  # wrong


def step_with_zeros(optimizer):
    for param in amp.master_params(optimizer):
        param.grad = torch.zeros_like(param)
    optimizer.step()


def half_model(model, optimizer):
    model.half()  # wrong
    step_with_zeros(optimizer)


def half_part(model, optimizer):
    model.norm.to(torch.bfloat16)  # wrong
    step_with_zeros(optimizer)


def half_data(model, optimizer):
    model.linear.weight.data = model.linear.weight.data.half()  # wrong
    step_with_zeros(optimizer)


def half_at_the_end(model, optimizer):
    scaled_step(model, optimizer)
    model.half()


@shows("scale-misuse")
@pytest.mark.parametrize(
    ("script", "message", "wrong_at", "right_at"),
    [
        (backward_beside_a_block, "", [], ["O1", "O2", "O4", "O5"]),
        (clip_norm_after_blocks, "", [], ["O1", "O2", "O4", "O5"]),
        (clip_value_after_blocks, "", [], ["O1", "O2", "O4", "O5"]),
        (a_scaler_alone, "", [], ["O1", "O2", "O4", "O5"]),
        (a_scaler_that_skips, "a GradScaler steps an optimizer whose", ["O1", "O2"], []),
        (half_model, "became torch.float16 after initialize", ["O1", "O2", "O4", "O5"], []),
        (half_part, "became torch.bfloat16 after initialize", ["O1", "O2", "O4", "O5"], []),
        (half_data, "became torch.float16 after initialize", ["O1", "O4"], ["O2", "O5"]),
        (half_at_the_end, "", [], ["O1", "O2", "O4", "O5"]),
    ],
)
def test_what_is_wrong_at_some_levels_is_told_there_alone(warned, script, message, wrong_at, right_at):
    source = getattr(script, "func", script)
    for level in (*wrong_at, *right_at):
        found = warned(script, *make(level))
        amp.uninitialize()
        if level in right_at:
            assert found == [], level
            continue
        [(text, file, line)] = found
        assert re.search(message, text), level
        assert (file, {line}) == (__file__, lines_of(source, "# wrong")), level


# ---- Right, though it looks much the same: no warning ----


def attack(model, optimizer):
    """A plain backward for the sake of the input, between the iterations."""
    for _ in range(2):
        x = X.clone().requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None
        scaled_step(model, optimizer)


def loss_made_of_the_scaled_one(model, optimizer):
    loss = model(X).pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        (model(X).abs().mean() * (scaled / loss.detach()).exp2().log2()).backward()
    optimizer.step()


def scaled_by_hand(model, optimizer):
    loss = model(X).pow(2).mean()
    with amp.scale_loss(loss, optimizer):
        loss.backward(torch.tensor(amp.get_loss_scale()))
    optimizer.step()


def second_loss_scaled_by_what_the_first_tells(model, optimizer):
    loss = model(X).pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        (model(X).abs().mean() * (scaled / loss).item()).backward()
    optimizer.step()


def another_models_loss_in_the_block(model, optimizer):
    other = nn.Linear(3, 1)
    other_optimizer = sgd(other)
    with amp.scale_loss(model(X).pow(2).mean(), optimizer) as scaled:
        other(X).sum().backward()
        scaled.backward()
        CLIP_NORM(other.parameters(), 1.0)
    other(X).sum().backward()
    other_optimizer.step()
    optimizer.step()


def clipping_that_knows_the_scale(model, optimizer):
    with amp.scale_loss(model(X).pow(2).mean(), optimizer) as scaled:
        scaled.backward()
        CLIP_NORM(model.parameters(), 0.1 * amp.get_loss_scale())
        torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
        for param in model.parameters():
            param.grad.data.clamp_(-1e4, 1e4)
    CLIP_NORM(amp.master_params(optimizer), 1.0)
    CLIP_VALUE(amp.master_params(optimizer), 0.5)
    optimizer.step()


def clipping_at_infinity_to_read_the_norm(model, optimizer):
    with amp.scale_loss(model(X).pow(2).mean(), optimizer) as scaled:
        scaled.backward()
        CLIP_NORM(model.parameters(), float("inf"))
    optimizer.step()


def step_before_any_backward_and_twice(model, optimizer):
    optimizer.step()
    scaled_step(model, optimizer)
    optimizer.step()
    nn.Linear(3, 1)(X).sum().backward()
    optimizer.step()


def a_scaler_that_is_off(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with amp.scale_loss(model(X).pow(2).mean(), optimizer) as scaled:
        scaler.scale(scaled).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def scaled_by_the_scaler_itself(model, optimizer):
    (scaler,) = amp.loss_scalers()
    scaler.scale(model(X).float().pow(2).mean()).backward()
    found_inf = scaler.new_found_inf()
    scaler.unscale_(
        [param.grad for param in amp.master_params(optimizer) if param.grad is not None], found_inf
    )
    if not scaler.update(found_inf):
        optimizer.step()


def zeros_after_a_probe(model, optimizer):
    model(X).pow(2).mean().backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


RIGHT = [
    *(attack, loss_made_of_the_scaled_one, scaled_by_hand, second_loss_scaled_by_what_the_first_tells),
    *(another_models_loss_in_the_block, scaled_by_the_scaler_itself, zeros_after_a_probe),
    *(clipping_that_knows_the_scale, clipping_at_infinity_to_read_the_norm, a_scaler_that_is_off),
    step_before_any_backward_and_twice,
]


@pytest.mark.exhaustive(keep=20)
@EITHER
@pytest.mark.parametrize("script", RIGHT)
def test_a_script_that_is_right_is_not_warned(warned, script, level, options):
    assert warned(script, *make(level, **options)) == []


def test_a_scaler_in_the_place_of_scale_loss_is_right_beside_a_watch(warned):
    def run():
        model, optimizer = make("O1", diagnose=True)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(X).pow(2).mean()).backward()
        scaler.step(optimizer)

    assert warned(run) == []


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_scaler_in_the_place_of_scale_loss_skips_the_step_of_a_fused_optimizer(level):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    open_session(model, optimizer, level)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor, moves in ((1.0, True), (float("inf"), False), (1.0, True)):
        before = model.linear.weight.detach().clone()
        optimizer.zero_grad()
        (scaler.scale(model(X).pow(2).mean()) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.linear.weight, before) is not moves
        assert torch.isfinite(model.linear.weight).all()


def test_a_warning_that_is_an_error_stops_the_step_with_nothing_half_done():
    model, optimizer = make("O1")
    before = [param.detach().clone() for param in model.parameters()]
    model(X).pow(2).mean().backward()
    with pytest.raises(UserWarning, match="outside of scale_loss"):
        optimizer.step()
    assert_same_bits(model.parameters(), before)
    scaled_step(model, optimizer)
    assert not torch.equal(model.linear.weight, before[0])


def test_a_torch_without_the_private_names_is_left_alone(monkeypatch):
    module = torch.nn.utils.clip_grad
    with monkeypatch.context() as patch:
        patch.delattr(module, "_clip_grads_with_norm_")
        make("O1")
        amp.uninitialize()
        assert not hasattr(module, "_clip_grads_with_norm_")


def run_backward(loss: torch.Tensor):
    torch.autograd.backward([loss])


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_scripted_code_still_takes_backward():
    make("O1")
    torch.jit.script(run_backward)


@needs_torch("2.9", "clip_grad_norm_ in a graph, patched or not")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_and_backward_compile_in_one_piece_as_before(level):
    model, optimizer = make(level)
    clip = torch.compile(torch.nn.utils.clip_grad_norm_, backend="eager", fullgraph=True)
    for _ in range(2):
        scaled_backward(model(X).pow(2).mean(), optimizer)
        clip(list(amp.master_params(optimizer)), 1.0)
        optimizer.step()


def test_two_threads_have_blocks_of_their_own(warned):
    model, optimizer = make("O1")
    other = nn.Linear(3, 2)
    other_optimizer = sgd(other)

    def train_other():
        other(X).sum().backward()
        CLIP_NORM(other.parameters(), 1.0)
        other_optimizer.step()

    def run():
        with amp.scale_loss(model(X).pow(2).mean(), optimizer) as scaled:
            thread = threading.Thread(target=train_other)
            thread.start()
            thread.join()
            scaled.backward()
        optimizer.step()

    assert warned(run) == []


# ---- Optimizers that initialize never saw, float64, eps, rounded buffers ----


def step_by_a_stranger(level, **options):
    model = Net()
    open_session(model, None, level, **options)
    optimizer = sgd(model)
    for _ in range(2):
        model(X).pow(2).mean().backward()
        optimizer.step()  # wrong


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_half_parameters_that_should_have_masters_are_not_stepped_by_a_stranger(warned, level):
    found = warned(step_by_a_stranger, level)
    if level not in MASTERED:
        assert found == []
        return
    [(text, file, line)] = found
    assert "SGD steps half parameters of an initialized model" in text
    assert (file, {line}) == (__file__, lines_of(step_by_a_stranger, "# wrong"))


def step_what_a_block_scaled(pair, other, optimizer):
    for _ in range(2):
        with amp.scale_loss((pair[0](X) * other(X)).sum(), pair[1]) as scaled:
            scaled.backward()
        optimizer.step()  # wrong


@pytest.mark.parametrize(
    ("level", "options", "is_told"), [("O1", {}, True), ("O1", STATIC, True), ("O4", {}, False)]
)
@pytest.mark.parametrize("is_part", [True, False])
def test_an_optimizer_that_initialize_never_saw_steps_no_scaled_gradients_in_silence(
    warned, level, options, is_told, is_part
):
    pair, other = make(level, **options), nn.Linear(3, 2)
    if is_part:
        amp.initialize(other, opt_level=level, verbosity=0, **options)
    found = warned(step_what_a_block_scaled, pair, other, sgd(other))
    assert ["initialize never saw it" in text for text, *_ in found] == [True] * is_told
    assert {line for *_, line in found} <= lines_of(step_what_a_block_scaled, "# wrong")


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_stranger_that_has_gradients_of_its_own_is_left_alone(warned, is_plain):
    pair, critic = make("O1"), nn.Linear(2, 1)
    optimizer = sgd(critic)

    def train():
        for _ in range(3):
            critic.zero_grad()
            loss = critic(pair[0](X).detach()).sum()
            loss.backward() if is_plain else (loss * amp.get_loss_scale()).backward()
            optimizer.step()
            scaled_backward(critic(pair[0](X)).sum(), pair[1])

    assert warned(train) == []


def test_other_optimizers_and_copies_are_no_strangers(warned):
    def run():
        model, optimizer = make("O5")
        copied, optimizer_of_the_copy = copy.deepcopy((model, optimizer))
        copied(X).pow(2).mean().backward()
        optimizer_of_the_copy.step()
        scaled_step(model, optimizer)
        own = nn.Linear(3, 2).half()
        own.weight.grad = torch.zeros_like(own.weight)
        sgd(own).step()

    assert warned(run) == []


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_model_in_float64_is_told_that_nothing_is_cast(warned, level):
    found = warned(lambda: open_session(Net().double(), None, level))
    if level == "O0":
        assert found == []
    else:
        assert re.search(f"is float64, which {level} does not cast", found[0][0])
        assert found[0][2] in lines_of(open_session, "amp.initialize")


def test_a_model_with_a_part_in_float64_is_not_told(warned):
    model = Net()
    model.out.double()
    assert warned(lambda: open_session(model, None, "O1")) == []


RAMP = torch.linspace(1e-4, 0.02, 1000)
SPREAD = torch.outer(torch.arange(2048.0), 1e4 ** -torch.linspace(0, 1, 6))
STEPS, OFF = "moves its steps", "moves a number by more than 1/32"
NUMBERS = {  # values, and what bfloat16 and float16 do to them
    "positions": (torch.arange(5000.0), STEPS, STEPS),
    "few positions": (torch.arange(256.0), None, None),
    "places": (
        torch.stack(torch.meshgrid(torch.arange(2999.0), torch.arange(2.0), indexing="ij")),
        *(STEPS, STEPS),
    ),
    "a grid": (
        torch.stack(torch.meshgrid(torch.linspace(0, 9, 999), torch.linspace(0, 9, 2), indexing="ij")),
        *(STEPS, None),
    ),
    "eight rates": (torch.linspace(0.1, 0.9, 8), STEPS, STEPS),
    "noise levels": (torch.cumprod(1 - RAMP, 0)[None], STEPS, STEPS),
    "angles": (SPREAD, STEPS, STEPS),
    "some angles": (SPREAD[300:310, 1], STEPS, STEPS),
    "angles in disorder": (torch.arange(20.0).mul(7).remainder(20) * 4.6 + 270.3, OFF, OFF),
    "units": (torch.tensor([288.15, 101325.0]), OFF, "makes inf of a number"),
    "priors": (torch.tensor([1e-9, 3e-9]), None, "makes 0 of a number"),
    "pictures": (torch.tensor([123.675, 116.28, 103.53])[:, None, None], None, None),
    "slopes": (2.0 ** -torch.arange(8.0), None, None),
    "sines": (RAMP.sin() * torch.ones(2, 1), None, None),
    "a window": (torch.exp(-(torch.linspace(-5, 5, 40) ** 2)), None, None),
    "a mask": (torch.full((4, 4), -1e9).triu(1), None, None),
    "a limit": (torch.tensor(1e10), None, None),
    "endless": (torch.full((4, 4), -torch.inf).triu(1), None, None),
    "the least": (torch.full((9,), torch.finfo(torch.float32).min), None, None),
}


@pytest.mark.exhaustive(keep=38)
@pytest.mark.parametrize("as_held", [nn.Buffer, functools.partial(nn.Parameter, requires_grad=False)])
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("level", HALVES)
def test_what_no_step_trains_is_named_by_what_half_does_to_its_numbers(warned, level, name, as_held):
    values, in_bfloat16, in_float16 = NUMBERS[name]
    effect = in_bfloat16 if HALVES[level] is torch.bfloat16 else in_float16
    if as_held is not nn.Buffer and effect in (OFF, "makes 0 of a number"):
        effect = None  # of frozen weights no single number is looked at
    model = Net()
    model.table = as_held(values.clone())
    found = [text for text, *_ in warned(lambda: open_session(model, None, level))]
    expected = f"{level} rounds 'table' of Net to {HALVES[level]}, which {effect}"
    assert [text.startswith(expected) for text in found] == [True] * (effect is not None)
    amp.uninitialize()
    assert warned(lambda: open_session(nn.Sequential(model), None, level, keep_fp32=Net)) == []


@pytest.mark.parametrize("kind", ["std", "var"])
@pytest.mark.parametrize("level", MASTERED)
def test_a_mean_is_named_if_it_moves_far_for_its_deviation(warned, level, kind):
    for size, is_told in ((1.0, True), (500.0, False)):
        model = Net()
        model.mean = nn.Buffer(torch.full((5,), 2001.3))
        setattr(model, kind, nn.Buffer(torch.full((5,), size if kind == "std" else size**2 / 9)))
        found = warned(lambda model=model: open_session(model, None, level))
        assert ["'mean' of Net" in text for text, *_ in found] == [True] * is_told
        amp.uninitialize()


class Angles(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([1.0, 0.9, 0.7]))

    def forward(self, count):
        return torch.arange(count)[:, None] * self.frequencies


class Turning(Net):
    """Turns by angles, as rotary embeddings do; or returns them."""

    def __init__(self, count, returns=False):
        super().__init__()
        self.angles, self.count, self.returns = nn.Sequential(Angles()), count, returns

    def forward(self, x):
        angles = self.angles(self.count)
        return angles if self.returns else super().forward(x * angles[-1].cos().to(x.dtype))


@pytest.mark.parametrize(
    ("count", "returns", "is_told"), [(900, False, True), (9, False, False), (900, True, False)]
)
@pytest.mark.parametrize("level", MASTERED)
def test_what_buffers_alone_return_is_named_if_half_moves_it_too_far(warned, level, count, returns, is_told):
    plain = Turning(count, returns)
    expected = plain(X)
    model = open_session(copy.deepcopy(plain), None, level)
    found = [text for text, *_ in warned(lambda: (model(X), model(X)))]
    amp.uninitialize()
    assert [f"{level} rounds what 'angles' returns (by up to" in text for text in found] == [True] * is_told
    if is_told:
        assert "keep_fp32=['angles']" in found[0]
        model = open_session(copy.deepcopy(plain), None, level, keep_fp32=["angles"])
        assert warned(lambda: torch.testing.assert_close(model(X), expected, rtol=0.02, atol=0.02)) == []


def multiply(net, y):
    net.key.data = net.key.data * 0.99 + net.first.weight.data * 0.01


WRITES = {  # what a forward does to a buffer, and whether it adds to it
    "a count": (lambda net, y: net.seen.add_(1), True),
    "a count by item": (lambda net, y: net.seen.__setitem__(0, net.seen[0] + 1), True),
    "an average": (lambda net, y: net.seen.lerp_(y.mean(0), 0.01), True),
    "one by .data": (lambda net, y: net.seen.data.mul_(0.9).add_(y.mean(0), alpha=0.1), True),
    "one by copy_": (lambda net, y: net.seen.copy_(0.9 * net.seen.float() + 0.1 * y.mean(0).float()), True),
    "one by name": (lambda net, y: setattr(net, "seen", 0.9 * net.seen + 0.1 * y.mean(0)), True),
    "a slow copy of a weight": (multiply, True),
    "a cache": (lambda net, y: net.seen.copy_(y[0]), False),
    "another cache": (lambda net, y: setattr(net, "seen", y[0] - 1), False),
    "a queue": (lambda net, y: net.key.data[:1].copy_(y[:1, :1].expand(1, net.key.shape[1])), False),
    "an iteration": (
        lambda net, y: net.seen.copy_(nn.functional.normalize(y.T @ y @ net.seen, dim=0)),
        False,
    ),
    "nothing": (lambda net, y: y - net.seen, False),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("level", HALVES)
def test_a_buffer_that_the_forward_adds_to_is_named_once(warned, level, write):
    act, is_told = WRITES[write]

    class Writing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 2)
            self.key = nn.Parameter(torch.randn(2, 3), requires_grad=False)
            self.register_buffer("seen", torch.ones(2))

        def forward(self, x):
            y = self.first(x)
            act(self, y.detach())
            return y

    model = open_session(Writing(), None, level)
    found = [text for text, *_ in warned(lambda: [model(X) for _ in range(4)])]
    name = "key" if act is multiply else "seen"
    assert [f"the forward of Writing adds to '{name}', which {level} has made" in it for it in found] == (
        [True] * is_told
    )
    assert "forward" not in vars(model)


EPS = [
    *((name, {}) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")),
    *((name, {"fused": True}) for name in ("Adam", "AdamW", "Adagrad")),
    *(("Adam", {"eps": 1e-4}), ("SGD", {}), ("Adafactor", {})),
]


@pytest.mark.parametrize(
    "options", [{"opt_level": "O3"}, {"opt_level": "O3", "dtype": torch.bfloat16}], ids=str
)
@pytest.mark.parametrize(("name", "arguments"), EPS)
def test_an_eps_that_is_0_in_float16_is_told_where_small_gradients_become_nan(
    warned, name, arguments, options
):
    model = nn.Linear(4, 3, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **arguments)
    found = warned(lambda: open_session(model, optimizer, **options))
    for _ in range(8):
        optimizer.zero_grad()
        (model(torch.ones(2, 4) / 128)[:, :2].float().sum() / 128).backward()
        optimizer.step()
    assert bool(found) == bool(model.weight.isnan().any())
    assert all("divide by 0" in text for text, _, _ in found)


# ---- Averages ----


def average_beside_training(level, averaged_as, average=None, **options):
    """Trains on a slope; returns how far the average's weights moved, and the exact one, from the masters."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = sgd(model, lr=1e-3)
    open_session(model, optimizer, level, loss_scale=1.0)
    averaged = averaged_as(AveragedModel(model, multi_avg_fn=average, **options))
    exact = None
    for count in range(40):
        scaled_step(model, optimizer)
        averaged.update_parameters(model)
        now = [param.detach().double() for param in amp.master_params(optimizer)]
        if exact is None:
            exact = first = now
        elif average is None:
            exact = [old + (new - old) / (count + 1) for old, new in zip(exact, now, strict=True)]
        else:
            exact = [old + (new - old) * 0.1 for old, new in zip(exact, now, strict=True)]
    update_bn([X, X], averaged)
    assert averaged(X).dtype is model(X).dtype
    moved = [one.double() - start for one, start in zip(averaged.module.parameters(), first, strict=True)]
    return moved, [one - start for one, start in zip(exact, first, strict=True)]


@pytest.mark.parametrize(
    ("average", "use_buffers"),
    [(None, False), (get_ema_multi_avg_fn(0.9), True)],
    ids=["mean", "exponential"],
)
@pytest.mark.parametrize("level", ["O1", "O3", "O5"])
def test_an_averaged_model_in_float32_moves_as_the_float32_values_do(warned, level, use_buffers, average):
    def run():
        moved, exact = average_beside_training(level, AveragedModel.float, average, use_buffers=use_buffers)
        for one, other in zip(moved, exact, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)

    assert warned(run) == []


@pytest.mark.parametrize("level", HALVES)
def test_an_averaged_model_of_half_parameters_is_told_of(warned, level):
    [(text, file, line)] = warned(average_beside_training, level, lambda averaged: averaged)
    assert "AveragedModel(model).float()" in text
    assert (file, {line}) == (__file__, lines_of(average_beside_training, "update_parameters"))


RATE = 1e-3


def average_data(target, model):
    for old, new in zip(target.parameters(), model.parameters(), strict=True):
        old.data.mul_(1 - RATE).add_(new.data, alpha=RATE)


def average_by_another(target, model):
    for old, new in zip(target.parameters(), model.parameters(), strict=True):
        old.data = (1 - RATE) * old.data + RATE * new.data


@torch.no_grad()
def average_in_place(target, model):
    for old, new in zip(target.parameters(), model.parameters(), strict=True):
        old.lerp_(new, RATE)


@torch.no_grad()
def average_at_once(target, model):
    torch._foreach_lerp_(list(target.parameters()), list(model.parameters()), RATE)


@torch.no_grad()
def average_state(target, model):
    for old, new in zip(target.state_dict().values(), model.state_dict().values(), strict=True):
        old.lerp_(new, RATE)


def run_target(level, update, make_target=copy.deepcopy, result=None):
    """Trains a net and updates a target after each step; returns how far that moved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if level:
        amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0)
    target = make_target(model)
    first = [value.clone().float() for value in target.state_dict().values()]
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(50):
        optimizer.zero_grad()
        loss = (model(x).float() - x.sum(1, keepdim=True).sin()).square().mean()
        if level:
            scaled_backward(loss, optimizer)
        else:
            loss.backward()
        optimizer.step()
        update(target, model)
        target(x)
    moved = zip(target.state_dict().values(), first, strict=True)
    moved = sum((new.float() - old).square().sum().item() for new, old in moved) ** 0.5
    if result is not None:
        result.append(moved)
    amp.uninitialize()
    return moved


SOFT = [average_data, average_by_another, average_in_place, average_at_once]


@pytest.mark.exhaustive(keep=6)
@pytest.mark.parametrize("level", HALVES)
@pytest.mark.parametrize("update", SOFT)
def test_a_soft_update_of_a_half_model_is_told_of_once_with_what_to_write(warned, update, level):
    [(text, _, _)] = warned(run_target, level, update)
    assert "copy.deepcopy(model).float()" in text
    assert "target.state_dict()" in text


@pytest.mark.exhaustive(keep=4)
@pytest.mark.parametrize("level", ["O1", *HALVES])
@pytest.mark.parametrize(
    ("update", "make_target"),
    [(average_data, lambda model: copy.deepcopy(model).float()), (average_state, copy.deepcopy)],
    ids=["in float32", "over state_dicts"],
)
def test_a_soft_update_as_that_says_moves_as_in_float32(warned, update, make_target, level):
    found = []
    assert warned(run_target, level, update, make_target, found) == []
    # Of rounded weights, which differ by 2 ** -9 from those of float32.
    assert found[0] == pytest.approx(run_target(None, update), rel=0.02)


COPIES = {
    "copied as a whole": lambda target, model: target.load_state_dict(model.state_dict()),
    "read": lambda target, model: [param.data.norm() for param in target.parameters()],
    "made anew": lambda target, model: copy.deepcopy(model),
    "left alone": lambda target, model: None,
}


@pytest.mark.exhaustive(keep=6)
@pytest.mark.parametrize("level", HALVES)
@pytest.mark.parametrize("update", COPIES.values(), ids=COPIES)
def test_a_copy_that_is_not_averaged_is_not_told_of(warned, update, level):
    assert warned(run_target, level, update) == []


def test_an_averaged_model_follows_what_was_written_into_half_weights_since_the_step(warned):
    model, _ = make("O5")
    averaged = AveragedModel(model).float()
    with torch.no_grad():
        model.linear.weight.fill_(3.0)
    assert warned(averaged.update_parameters, model) == []
    assert averaged.module.linear.weight.unique().item() == 3.0


def test_an_average_that_is_older_than_the_session_or_of_a_half_model_of_ones_own_works(warned):
    model = Net()
    averaged, own = AveragedModel(model), nn.Linear(3, 2).half()
    averaged_own = AveragedModel(own)

    def run():
        open_session(model, sgd(model), "O5")
        for _ in range(2):
            averaged.update_parameters(model)
            averaged_own.update_parameters(own)

    assert warned(run) == []
    assert averaged.module.linear.weight.dtype is torch.float32


def test_an_eps_is_looked_at_whatever_the_default_device():
    model = torch.nn.Linear(2, 2)
    with torch.device("meta"), pytest.warns(UserWarning, match="eps=1e-08 of Adam is 0 in float16"):
        amp.initialize(model, torch.optim.Adam(model.parameters()), opt_level="O3", verbosity=0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
def test_an_eps_is_looked_at_of_half_tensors_of_ones_own_where_they_have_no_masters(level, warned):
    own = torch.ones(2, dtype=torch.float16, requires_grad=True)
    optimizer = torch.optim.Adam([*(model := nn.Linear(2, 2)).parameters(), own])
    said = warned(amp.initialize, model, optimizer, opt_level=level)
    assert ["eps=1e-08 of Adam is 0 in float16" in text for text, *_ in said] == [True] * (level != "O2")
    optimizer.zero_grad()
    own.grad = torch.full_like(own, 1e-3)
    optimizer.step()
    assert own.isfinite().all() == (level == "O2")


TRAINER = """
def backward(loss):
    loss.backward()
"""


@pytest.mark.parametrize("name", ["accelerate.accelerator", "lightning.pytorch.strategies", "transformers"])
def test_a_warning_points_at_the_line_that_calls_a_trainer(name):
    trainer = {"__name__": name}
    exec(compile(TRAINER, "trainer.py", "exec"), trainer)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    trainer["backward"](model(torch.ones(2, 2)).float().sum())
    with pytest.warns(UserWarning, match="outside of scale_loss") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
