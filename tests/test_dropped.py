"""What a script drops is freed: models, optimizers, masters and gradients, though nothing was undone."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ampatch as amp
from ampatch.apex import amp as apex_amp
from nets import EVERY_LEVEL, HALVES, MASTERED, X, assert_same_state, clone_state

pytestmark = pytest.mark.exhaustive(keep=3)  # of each test


class Net(nn.Module):
    """A recurrent net, a norm, tied weights, a buffer, functions bound early; a cycle, as users have them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.recurrent = nn.GRU(3, 3, batch_first=True)
        self.out.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))
        self.act = torch.nn.functional.softplus
        self.acts = (torch.tanh, lambda x: self.act(x))

    def forward(self, x):
        x = self.acts[1](self.norm(self.first(x)))
        return self.out(self.recurrent(x[None])[0][0]) * self.scale


class Wrapper:
    """An optimizer's wrapper as LARC is one, with an `__eq__` that must not be asked."""

    def __init__(self, optim):
        self.optim = optim

    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("compared")

    @property
    def param_groups(self):
        return self.optim.param_groups

    def zero_grad(self, *args, **kwargs):
        self.optim.zero_grad(*args, **kwargs)

    def step(self, *args, **kwargs):
        return self.optim.step(*args, **kwargs)


class SlottedWrapper:
    """One that takes no weak references."""

    __slots__ = ("optim",)
    __init__ = Wrapper.__init__
    param_groups, zero_grad, step = Wrapper.param_groups, Wrapper.zero_grad, Wrapper.step


class Boom(Exception):
    pass


def watch(model, optimizer):
    """Weak references to all that should go: objects, and the memory of tensors."""
    tensors = [*model.parameters(), *model.buffers(), *apex_amp.master_params(optimizer)]
    tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
    inner = getattr(optimizer, "optim", optimizer)
    tensors += [item for state in inner.state.values() for item in state.values() if torch.is_tensor(item)]
    objects = [*model.modules(), inner, *([optimizer] if type(optimizer) is Wrapper else [])]
    return [*map(weakref.ref, objects), *(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)]


def alive(watched):
    gc.collect()
    objects = [ref() for ref in watched if isinstance(ref, weakref.ref) and ref() is not None]
    memory = [ref for ref in watched if not isinstance(ref, weakref.ref) and not ref.expired()]
    return [type(item).__name__ for item in objects] + ["memory"] * len(memory)


def make(wrap=lambda optimizer: optimizer):
    model = Net()
    return model, wrap(torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4))


def run(module, model, optimizer, loss_id=0, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        with module.scale_loss(model(X).float().square().mean(), optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
        optimizer.step()


# ---- Each does what a fold of a cross-validation may do with a model ----


def start(module, level, wrap=lambda optimizer: optimizer, **options):
    model, optimizer = make(wrap)
    module.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return model, optimizer


def trained(module, level, **options):
    model, optimizer = start(module, level, **options)
    run(module, model, optimizer)
    return watch(model, optimizer)


def evaluated(module, level):
    model, optimizer = start(module, level, num_losses=2)
    run(module, model, optimizer, loss_id=1)
    with torch.no_grad():
        model.eval()(X)
        model.load_state_dict(model.state_dict())
    return watch(model, optimizer)


def compiled(module, level):
    model, optimizer = start(module, level)
    run(module, torch.compile(model, backend="eager"), optimizer)
    return watch(model, optimizer)


def failed_in_forward(module, level):
    model, optimizer = start(module, level)
    run(module, model, optimizer)
    with pytest.raises(RuntimeError):
        model(X[:, :2])
    return watch(model, optimizer)


def failed_in_backward(module, level):
    model, optimizer = start(module, level)
    loss = model(X).float().sum()
    loss.register_hook(fail)
    with pytest.raises(Boom), module.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    return watch(model, optimizer)


def fail(grad):
    raise Boom


FOLDS = {
    "trained": trained,
    "evaluated": evaluated,
    "kept_float32": functools.partial(trained, keep_fp32=["out", "*recurrent"]),
    "wrapped": functools.partial(trained, wrap=Wrapper),
    "wrapped_without_weak_references": functools.partial(trained, wrap=SlottedWrapper),
    "disabled": functools.partial(trained, enabled=False),
    "failed_in_forward": failed_in_forward,
    "failed_in_backward": failed_in_backward,
}
MODULES = [pytest.param(amp, id="native"), pytest.param(apex_amp, id="drop-in")]


@pytest.mark.exhaustive(keep=8)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("fold", FOLDS.values(), ids=FOLDS)
@pytest.mark.parametrize("level", ["O0", "O2", "O4"])
def test_a_model_and_an_optimizer_that_a_script_drops_are_freed(level, fold, module):
    assert alive(fold(module, level)) == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own look
@pytest.mark.parametrize("level", ["O2", "O4"])
def test_a_compiled_model_that_a_script_drops_is_freed(level):
    assert alive(compiled(amp, level)) == []


# ---- What is freed by the next call of `initialize` at the latest ----


def failed_in_step(module, level):
    model, optimizer = start(module, level)
    run(module, model, optimizer)
    optimizer.param_groups[0]["lr"] = "a word"
    with pytest.raises(TypeError):
        run(module, model, optimizer)
    return watch(model, optimizer)


def interrupted(module, level):
    model, optimizer = start(module, level)
    model.acts = (None, interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    return watch(model, optimizer)


def interrupt(x):
    raise KeyboardInterrupt


def evaluated_with_a_weight_that_knows_its_model(module, level):
    model, optimizer = start(module, level)
    model.first.bias.register_hook(model.forward)
    with torch.no_grad():
        model(X)
    return watch(model, optimizer)


@pytest.mark.parametrize(
    "fold",
    [failed_in_step, interrupted, evaluated_with_a_weight_that_knows_its_model],
    ids=lambda fold: fold.__name__,
)
@pytest.mark.parametrize("level", ["O2", "O4"])
def test_what_an_exception_or_a_cached_cast_holds_is_freed_by_the_next_call(level, fold):
    dropped = fold(amp, level)
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    assert alive(dropped) == []


# ---- One of two is dropped ----


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_of_two_models_in_one_call_each_is_freed_by_itself_and_the_other_is_restored(level):
    (kept, for_kept), (dropped, for_dropped) = make(), make()
    amp.initialize([kept, dropped], [for_kept, for_dropped], opt_level=level, verbosity=0, loss_scale=1.0)
    for model, optimizer in ((kept, for_kept), (dropped, for_dropped)):
        run(amp, model, optimizer)
    watched = watch(dropped, for_dropped)
    del dropped, for_dropped, model, optimizer
    assert alive(watched) == []
    run(amp, kept, for_kept)
    expected = clone_state(kept)
    amp.uninitialize()
    assert not kept._forward_pre_hooks
    if level != "O3":
        assert_same_state(dict(kept.state_dict()), expected)
    assert {param.dtype for param in kept.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", MASTERED)
def test_a_model_keeps_its_masters_and_not_its_optimizer(level):
    model, optimizer = start(amp, level)
    run(amp, model, optimizer)
    expected = clone_state(model)
    watched = [weakref.ref(optimizer)]
    watched += [StorageWeakRef(s["exp_avg"].untyped_storage()) for s in optimizer.state.values()]
    del optimizer
    assert alive(watched) == []
    assert_same_state(dict(model.state_dict()), expected)
    model.eval().state_dict()["first.weight"].mul_(2)
    model(X)
    assert torch.equal(model.first.weight.float(), (expected["first.weight"] * 2).to(MASTERED[level]).float())
    amp.uninitialize()
    expected["first.weight"] = expected["out.weight"] = expected["first.weight"] * 2
    assert_same_state(dict(model.state_dict()), expected)


@pytest.mark.parametrize("level", MASTERED)
def test_a_second_optimizer_of_a_model_takes_over_the_masters_of_one_that_is_gone(level):
    torch.manual_seed(3)
    model, optimizer = start(amp, level, loss_scale=1.0)
    run(amp, model, optimizer)
    expected = clone_state(model)
    del optimizer
    gc.collect()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    assert_same_state(dict(model.state_dict()), expected)
    run(amp, model, optimizer)
    assert torch.equal(model.state_dict()["first.weight"], expected["first.weight"])
    pairs = amp.master_pairs(optimizer)
    assert all(half.grad.data_ptr() == master.grad.data_ptr() for half, master in pairs)


@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_an_optimizer_keeps_its_parameters_and_not_the_model(level):
    model, optimizer = start(amp, level)
    run(amp, model, optimizer)
    watched, expected = [*map(weakref.ref, model.modules())], model.state_dict()["first.weight"].clone()
    weight = model.first.weight
    del model
    assert alive(watched) == []
    amp.uninitialize()
    assert weight.dtype is torch.float32
    assert level == "O3" or torch.equal(weight, expected)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert not torch.equal(weight, expected)


@pytest.mark.parametrize("level", HALVES)
def test_a_part_that_is_kept_is_restored_and_the_rest_is_freed(level):
    model, optimizer = start(amp, level)
    expected = clone_state(model)
    part = model.recurrent
    watched = [*map(weakref.ref, (model, model.first, model.norm)), weakref.ref(model.first.weight)]
    del model, optimizer
    assert alive(watched) == []
    amp.uninitialize()
    if level != "O3":
        for name, value in part.state_dict().items():
            assert torch.equal(value, expected[f"recurrent.{name}"])
    assert {param.dtype for param in part.parameters()} == {torch.float32}


def test_a_wrapper_that_is_dropped_is_freed_though_its_optimizer_is_kept():
    model, optimizer = start(amp, "O2", Wrapper)
    run(amp, model, optimizer)
    inner, watched = optimizer.optim, [weakref.ref(optimizer)]
    del optimizer
    assert alive(watched) == []
    run(amp, model, inner)


def test_an_optimizer_that_has_the_id_of_one_that_is_gone_is_unknown(monkeypatch):
    _, optimizer = start(amp, "O4", Wrapper)
    inner, gone = optimizer.optim, id(optimizer)
    del optimizer
    gc.collect()
    other = Wrapper(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=inner.defaults["lr"]))
    # Python gives the id of what is gone to something new sooner or later; nothing can make it do so now.
    ids = {id(other): gone}
    monkeypatch.setattr("ampatch.session.members.id", lambda it: ids.get(id(it), id(it)), raising=False)
    with pytest.raises(amp.AmpValueError, match="not one that initialize"):
        amp.scale_loss(torch.ones(()), other)


def test_numbers_of_scalers_do_not_depend_on_what_is_freed():
    for _ in range(3):
        trained(amp, "O2")
        gc.collect()
    assert list(amp.state_dict()) == ["loss_scaler0", "loss_scaler1", "loss_scaler2"]


def test_what_is_remembered_of_a_call_is_forgotten_with_its_models():
    counts = []
    for _ in range(4):
        trained(amp, "O2")
        gc.collect()
        # Python 3.10 lists the `__dict__` of every object as well.
        counts.append(sum(type(it) is not dict for it in gc.get_objects()))
    assert counts[3] - counts[2] < 58  # the call and its loss scaler
