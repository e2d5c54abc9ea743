"""What torch does with functions behind the scenes, while they are patched."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ampatch as amp
from patched import backward, start

ONES = torch.ones(1, 2)
# torch 2.13 calls torch.jit.script deprecated, and uses it itself.
SCRIPTS = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")


def test_a_call_that_is_enabled_wins_over_an_earlier_one_that_was_not():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, enabled=False)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    loss = model(ONES).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert torch.equal(scaled_loss, loss * 2.0**16)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_model_initialized_in_inference_mode_trains(level):
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with torch.inference_mode():
        _, optimizer = start(level, model)
    backward(model(ONES).sum() / 4, optimizer)
    optimizer.step()
    assert torch.allclose(next(amp.master_params(optimizer)), before - 0.1 / 4)


@SCRIPTS
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_scripted_part_of_a_model_to_cast_is_refused(level):
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(amp.AmpValueError, match=r"module '0' is scripted.*expected .*script it after"):
        amp.initialize(model, opt_level=level, verbosity=0)


@SCRIPTS
@pytest.mark.parametrize("option", ["cast_model_type", "cast_model_outputs"])
def test_a_scripted_model_whose_inputs_or_outputs_would_be_cast_is_refused(option):
    model = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(amp.AmpValueError, match=rf"module '' is scripted.*without .*{option}"):
        amp.initialize(model, opt_level="O4", verbosity=0, **{option: torch.float32})
    assert amp.initialize(model, opt_level="O4", verbosity=0) is model


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is commonly written: `step` is never called."""

    def __init__(self, params, base, **options):
        super().__init__(params, {"rho": 0.05, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.detach().clone()
                p.add_(p.grad * (group["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["before"])
        self.base_optimizer.step()
        self.zero_grad()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_an_optimizer_that_writes_parameters_by_itself_trains(level):
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.02)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    losses = []
    for _ in range(6):
        for step in (optimizer.first_step, optimizer.second_step):
            loss = model(x).float().square().sum()
            losses.append(loss.item())
            backward(loss, optimizer)
            step()
    ascents = [losses[i + 1] > losses[i] for i in range(0, 12, 2)]
    assert all(ascents)
    assert losses[-2] < losses[0] / 4


class Wrapper:
    """As LARC: no Optimizer, but around one."""

    def __init__(self, optim):
        self.optim, self.param_groups, self.steps = optim, optim.param_groups, 0

    def step(self, closure=None):
        self.steps += 1
        return self.optim.step(closure)


class SlowWeights(torch.optim.Optimizer):
    """A Lookahead in the manner of the first published ones: the inner one is `base_optimizer`."""

    def __init__(self, params):
        self.base_optimizer = base_optimizer = torch.optim.SGD(params, lr=0.0)
        self.param_groups, self.defaults = base_optimizer.param_groups, base_optimizer.defaults
        self.state, self.steps = base_optimizer.state, 0

    def zero_grad(self, set_to_none=True):
        self.base_optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        self.steps += 1
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.mul_(0.5)  # whatever the gradients are
        return self.base_optimizer.step(closure)


class NeedsGrads(torch.optim.Optimizer):
    """Raises where there is no gradient, as some published ones do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        params = self.param_groups[0]["params"]
        torch.stack([param.grad for param in params if param.grad is not None][:1])
        for param in params:
            param.mul_(0.5)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("scheduled", ["never", "before", "after"])
@pytest.mark.parametrize("make", [SlowWeights, NeedsGrads])
def test_the_step_of_an_optimizer_of_somebody_elses_is_not_run_on_an_overflow(make, level, scheduled):
    model, schedule = nn.Linear(2, 2), torch.optim.lr_scheduler.StepLR
    optimizer = make(model.parameters())
    scheduler = schedule(optimizer, 1) if scheduled == "before" else None
    own_step = vars(optimizer).get("step")
    amp.initialize(model, optimizer, opt_level=level, loss_scale=amp.DynamicLossScale(8.0), verbosity=0)
    scheduler = schedule(optimizer, 1) if scheduled == "after" else scheduler
    weight = next(amp.master_params(optimizer))
    before = weight.clone()
    for factor, steps in ((float("inf"), 0), (1.0, 1)):
        optimizer.zero_grad()
        backward(model(ONES).sum() * factor, optimizer)
        optimizer.step()
        assert amp.step_was_skipped(optimizer) == (steps == 0)
        assert optimizer.steps == steps
        assert torch.equal(weight, before / 2**steps)
        if scheduler is not None:
            scheduler.step()  # which warns of a step that was forgotten
    amp.uninitialize()
    if scheduled != "after":  # then the scheduler's step goes on to call ours, which passes on
        assert vars(optimizer).get("step") is own_step
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(model.weight, before / 4)
    assert optimizer.steps == 2


def test_an_optimizer_with_plain_dictionaries_of_hooks_of_its_step_alone_is_taken():
    """As timm's Lookahead, which does not call Optimizer's `__init__`."""
    model = nn.Linear(2, 2)
    optimizer = NeedsGrads(model.parameters())
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = {}, {}
    for name in [name for name in vars(optimizer) if "_state_dict_" in name]:
        delattr(optimizer, name)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)


class AsksForGrads(Wrapper):
    """As Lookahead: steps the optimizer inside, and then looks which parameters have gradients."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.fill_(7.0)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_gradients_are_there_until_the_whole_step_of_a_wrapper_is_over(level):
    model, optimizer = start(level, wrap=AsksForGrads, lr=0.5, loss_scale=8.0)
    for _ in range(2):
        backward(model(ONES).sum(), optimizer)
        optimizer.step()
        assert all(bool((param == 7.0).all()) for param in model.parameters())
        model.zero_grad()
    if level in ("O2", "O5"):
        assert all(param.grad is None for param in amp.master_params(optimizer))


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_wrapper_can_be_pickled_and_its_copy_steps_the_copied_model(level):
    _, optimizer = start(level, wrap=Wrapper, lr=0.5)
    before = [param.detach().clone() for param in amp.master_params(optimizer)]
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        for param in copied.optim.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        copied.step()
        assert (optimizer.steps, copied.steps) == (0, 1)
        assert torch.equal(copied.optim.param_groups[0]["params"][0], before[0] - 0.5)
    assert all(map(torch.equal, before, amp.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_step_inside_the_block_sees_unscaled_gradients_once(level):
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    _, optimizer = start(level, model, lr=0.25, loss_scale=8.0)
    for _ in range(2):
        with amp.scale_loss(model(ONES).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    # The derivative of a sum of outputs by each weight and bias is 1.
    assert all(torch.equal(value, torch.zeros_like(value)) for value in model.state_dict().values())
    assert all(param.grad is None for param in model.parameters())


THIRD = torch.eye(2) / 3
BUFFERS = {
    "dense": lambda: THIRD.clone(),
    "sparse": lambda: THIRD.to_sparse(),
    "sparse, written before": lambda: (torch.eye(2) / 6).to_sparse().mul_(2),
}


@pytest.mark.parametrize("kind", BUFFERS)
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_buffer_is_saved_and_comes_back_with_its_float32_values(level, kind):
    model = nn.Linear(2, 2)
    model.register_buffer("table", BUFFERS[kind]())
    amp.initialize(model, opt_level=level, verbosity=0)
    expected = THIRD.half().float() if level == "O3" else THIRD
    if kind == "dense":
        model._apply(torch.clone)  # as Module.to does: buffers are replaced
    assert model.state_dict()["table"].dtype is torch.float32
    assert torch.equal(model.state_dict()["table"].to_dense(), expected)
    amp.uninitialize()
    assert torch.equal(model.table.to_dense(), expected)


def test_a_sparse_buffer_that_was_written_since_keeps_what_was_written():
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.eye(2).to_sparse())
    amp.initialize(model, opt_level="O5", verbosity=0)
    model.table.mul_(2)
    model._apply(torch.clone)
    assert torch.equal(model.state_dict()["table"].to_dense(), torch.eye(2) * 2)
    amp.uninitialize()
    assert torch.equal(model.table.to_dense(), torch.eye(2) * 2)
