"""What apex hands out is the object itself where it was in apex: scripts write through it, or keep it."""

import copy
import operator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD

import ampatch
from ampatch.apex import amp, fp16_utils, optimizers
from ampatch.apex.contrib import optimizers as contrib
from ampatch.apex.parallel import LARC
from apex_rows import shows
from fp16_optimizers import make_net

X = torch.ones(4, 4)


def run_own(optimizer, net):
    optimizer.backward(net(X.half()).float().pow(2).mean())


def run_amp(optimizer, net):
    with amp.scale_loss(net(X).float().pow(2).mean(), optimizer) as scaled:
        scaled.backward()


def run_plain(optimizer, net):
    net(X.to(net[0].weight.dtype)).float().pow(2).mean().backward()


def make_flat(kind):
    net = nn.Sequential(nn.Linear(4, 3)).half()
    inner = SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, kind(inner, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0}), run_own


def make_mixed():
    net = make_net()
    inner = SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, fp16_utils.FP16_Optimizer(inner, dynamic_loss_scale=True), run_own


def make_amp(level, wrap=lambda optimizer: optimizer):
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = wrap(SGD(net.parameters(), lr=0.1, momentum=0.9))
    amp.initialize(net, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    return net, optimizer, run_amp


def make_fused(kind, **options):
    net = nn.Sequential(nn.Linear(4, 3)).half()
    return net, kind(net.parameters(), lr=0.1, **options), run_plain


def of_groups(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def flat(groups):
    return [item for group in groups for item in group]


def states(optimizer):
    """The tensors that an optimizer remembers, in the order of its parameters."""
    return [value for param in of_groups(optimizer) for value in optimizer.state[param].values()]


def saved(state):
    return [value for index in sorted(state["state"]) for value in state["state"][index].values()]


def halves(net):
    return [param for param in net.parameters() if param.dtype is torch.float16]


def masters(it):
    return [param for param in of_groups(it.optimizer) if all(param is not own for own in it.params)]


MAKERS = {
    "fp16_utils": make_mixed,
    "optimizers": lambda: make_flat(optimizers.FP16_Optimizer),
    "contrib": lambda: make_flat(contrib.FP16_Optimizer),
    "O1": lambda: make_amp("O1"),
    "O2": lambda: make_amp("O2"),
    "O2, LARC": lambda: make_amp("O2", LARC),
    "FusedAdam": lambda: make_fused(optimizers.FusedAdam, master_weights=True),
    "FusedSGD": lambda: make_fused(optimizers.FusedSGD, momentum=0.9),
    "FusedLAMB": lambda: make_fused(optimizers.FusedLAMB),
    "FusedNovoGrad": lambda: make_fused(optimizers.FusedNovoGrad),
    "FusedAdagrad": lambda: make_fused(optimizers.FusedAdagrad),
}
OWN, INNER, AMP = ("fp16_utils", "optimizers", "contrib"), ("O2, LARC",), ("O1", "O2")
# Who hands it out: what is found there, and what it is in apex.
ROWS = {
    "inner optimizer": (OWN, lambda it: [it.optimizer.optimizer], lambda it: [it.inner]),
    "param_groups, state": (
        OWN + INNER,
        lambda it: [it.optimizer.param_groups, it.optimizer.state],
        lambda it: [it.inner.param_groups, it.inner.state],
    ),
    "parameters": (tuple(MAKERS), lambda it: [*it.net.parameters()], lambda it: it.params),
    "half params": (OWN, lambda it: flat(it.optimizer.fp16_groups), lambda it: halves(it.net)),
    "all half params": (OWN, lambda it: it.optimizer.all_fp16_params, lambda it: halves(it.net)),
    "masters": (OWN, lambda it: it.optimizer.all_fp32_from_fp16_params, masters),
    "masters by group": (OWN, lambda it: flat(it.optimizer.fp32_from_fp16_groups), masters),
    "saved masters": (
        ("fp16_utils",),
        lambda it: flat(it.optimizer.state_dict()["fp32_from_fp16"]),
        masters,
    ),
    "saved scaler": (
        ("fp16_utils",),
        lambda it: [it.optimizer.state_dict()["loss_scaler"]],
        lambda it: [it.optimizer.loss_scaler],
    ),
    "fp32_groups": (
        ("optimizers", "contrib"),
        lambda it: [*it.optimizer.fp32_groups, *it.optimizer.state_dict()["fp32_groups"]],
        lambda it: [group["params"] for group in it.inner.param_groups] * 2,
    ),
    "gradients, cleared": (
        OWN[:1],
        lambda it: [it.clear(), *(param.grad for param in it.all_params())][1:],
        lambda it: it.grads,
    ),
    "saved state": (
        tuple(name for name in MAKERS if name not in OWN),
        lambda it: saved(it.optimizer.state_dict()),
        lambda it: states(it.optimizer),
    ),
    "state, stepped": (tuple(MAKERS), lambda it: it.step() or states(it.optimizer), lambda it: it.states),
    "master_params": (tuple(MAKERS), lambda it: [*amp.master_params(it.optimizer)], lambda it: it.stepped),
    "stash": (
        ("O2",),
        lambda it: [*it.stash.all_fp16_params, *it.stash.all_fp32_from_fp16_params],
        lambda it: [*halves(it.net), *masters(it)],
    ),
    "stash by group": (
        ("O2",),
        lambda it: flat(
            it.stash.fp16_groups + it.stash.fp32_from_fp16_groups + it.stash.fp32_from_fp32_groups
        ),
        lambda it: [*halves(it.net), *masters(it), *it.net[1].parameters()],
    ),
    "loss scalers": (
        AMP,
        lambda it: [amp._amp_state.loss_scalers, *amp._amp_state.loss_scalers],
        lambda it: [it.scalers, *it.scalers],
    ),
    "FusedAdam's masters": (
        ("FusedAdam",),
        lambda it: flat(group["params"] for group in it.optimizer.param_groups_master),
        lambda it: [it.optimizer.state[param]["master_param"] for param in it.params],
    ),
}
PAIRS = [(maker, row) for row, (makers, *_) in ROWS.items() for maker in makers]


def make(name):
    """A net and its optimizer after a first step, with what it had before that."""
    torch.manual_seed(0)
    net, optimizer, run = MAKERS[name]()
    it = SimpleNamespace(net=net, optimizer=optimizer, params=[*net.parameters()])
    it.inner = getattr(optimizer, "optimizer", getattr(optimizer, "optim", optimizer))
    it.stash = getattr(it.inner, "_amp_stash", None)
    it.scalers = amp._amp_state.loss_scalers if it.stash else []
    it.all_params = lambda: [*net.parameters(), *masters(it)]
    it.clear = optimizer.zero_grad
    it.stepped = of_groups(optimizer)

    def step():
        run(optimizer, net)
        optimizer.step()

    it.step = step
    step()
    it.states, it.grads = states(optimizer), [param.grad for param in it.all_params()]
    return it


@shows("companions-identity")
@pytest.mark.parametrize(("maker", "row"), PAIRS, ids=[f"{maker}: {row}" for maker, row in PAIRS])
def test_what_is_handed_out_is_the_object_itself(maker, row):
    it = make(maker)
    _, find, expect = ROWS[row]
    found, expected = find(it), expect(it)
    assert len(expected) > 0
    assert [id(each) for each in found] == [id(each) for each in expected]
    if row == "saved masters":
        assert [each.data_ptr() for each in found] == [each.data_ptr() for each in expected]


@shows("private-stash-groups")
def test_groups_of_masters_are_there_where_masters_are():
    assert not hasattr(make("O1").stash, "fp16_groups")


MASTERS = {
    "fp16_utils": lambda it: it.optimizer.state_dict()["fp32_from_fp16"][0],
    "contrib": lambda it: it.optimizer.state_dict()["fp32_groups"][0],
    "O2": lambda it: it.stash.fp32_from_fp16_groups[0],
    "FusedAdam": lambda it: it.optimizer.param_groups_master[0]["params"],
}


@pytest.mark.parametrize("write", ["in place", "data", "in place of data"])
@pytest.mark.parametrize("maker", MASTERS)
def test_what_is_pruned_through_masters_that_were_handed_out_once_stays_so(maker, write):
    it = make(maker)
    handed_out, pruned = MASTERS[maker](it), halves(it.net)[0]
    for _ in range(3):
        it.step()
        with torch.no_grad():
            if write == "data":
                handed_out[0].data = handed_out[0].data * torch.arange(4).clamp(max=1)
            elif write == "in place":
                handed_out[0][:, 0] = 0
            else:
                handed_out[0].data.mul_(torch.arange(4).clamp(max=1))
    for group in it.optimizer.param_groups:
        group["lr"] = 0.0
        group["momentum"] = 0.0
    it.step()
    assert not pruned[:, 0].any()
    assert pruned[:, 1:].all()


@pytest.mark.parametrize("maker", ["O2", "FusedAdam"])
def test_what_is_written_into_the_model_counts_though_masters_were_handed_out(maker):
    it = make(maker)
    handed_out, weight = MASTERS[maker](it)[0], halves(it.net)[0]
    for group in it.optimizer.param_groups:
        group["lr"] = 0.0
    for value in (0.5, 0.25):
        it.step()
        weight.data[0] = value
        it.step()
        assert (weight[0] == value).all()
        assert (handed_out[0] == value).all()


@shows("private-scaler-replaced")
def test_a_scaler_that_is_put_in_the_place_of_another_scales_losses():
    it = make("O2")
    mine = amp.scaler.LossScaler("dynamic", init_scale=8.0, scale_window=1)
    amp._amp_state.loss_scalers[0] = mine
    with amp.scale_loss(it.net(X).sum(), it.optimizer) as scaled:
        scaled.backward()
    assert amp._amp_state.loss_scalers[0] is mine
    assert amp._amp_state.loss_scalers[0].loss_scale() == 16.0
    with pytest.raises(TypeError, match=r"loss_scalers\[0\] = 4.0: expected an apex.amp.scaler.LossScaler"):
        amp._amp_state.loss_scalers[0] = 4.0


STATE, Scaler = amp._amp_state, amp.scaler.LossScaler


@pytest.mark.parametrize(
    "put",
    [
        lambda new: operator.setitem(STATE.loss_scalers, slice(None), new),
        lambda new: setattr(STATE, "loss_scalers", new),
        lambda new: [operator.setitem(STATE.loss_scalers, place, new[place]) for place in (-1, -2)],
    ],
    ids=["slice", "attribute", "negative"],
)
def test_all_scalers_may_be_put_in_the_place_of_others(put):
    amp.initialize(nn.Linear(3, 2), opt_level="O1", num_losses=2)
    new = [Scaler(8.0), Scaler("dynamic", init_scale=4.0)]
    put(new)
    assert all(one is other for one, other in zip(STATE.loss_scalers, new, strict=True))
    assert [state["loss_scale"] for state in amp.state_dict().values()] == [8.0, 4.0]
    assert [each.loss_scale() for each in copy.deepcopy(STATE.loss_scalers)] == [8.0, 4.0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda it: it.append(Scaler(8.0)), "holds one for each of num_losses, 2 here"),
        (lambda it: it.reverse(), "holds one for each of num_losses, 2 here"),
        (lambda it: operator.delitem(it, 0), "holds one for each of num_losses, 2 here"),
        (lambda it: setattr(STATE, "loss_scalers", []), "holds one for each of num_losses, 2 here"),
        (lambda it: setattr(STATE, "loss_scalers", [Scaler(8.0)] * 2), "into two places"),
        (lambda it: operator.setitem(it, slice(None), it[::-1]), "into that of another"),
        (lambda it: operator.setitem(it, 0, it[1]), "into two places, or into that of another"),
        (lambda it: operator.setitem(it, 0, type("My", (Scaler,), {})(8.0)), "no subclass"),
    ],
)
def test_what_cannot_be_done_to_the_scalers_is_refused_and_nothing_is_changed(change, told):
    amp.initialize(nn.Linear(3, 2), opt_level="O1", num_losses=2)
    before = [*STATE.loss_scalers]
    with pytest.raises(ampatch.AmpError, match=told):
        change(STATE.loss_scalers)
    assert all(one is other for one, other in zip(STATE.loss_scalers, before, strict=True))
    assert [state["loss_scale"] for state in amp.state_dict().values()] == [65536.0] * 2


def test_a_flat_masters_gradient_stays_where_a_script_keeps_it():
    model_params, (master,) = fp16_utils.prep_param_lists(nn.Linear(4, 3).half(), flat_master=True)
    kept = master.grad
    for param in model_params:
        param.grad = torch.ones_like(param)
    fp16_utils.model_grads_to_master_grads(model_params, [master], flat_master=True)
    assert master.grad is kept
    assert kept.tolist() == [1.0] * 15
