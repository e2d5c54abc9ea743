"""Copies and checkpoints of FusedAdam and its kin: ours, apex's and torch's."""

import copy
import pickle

import pytest
import torch

from ampatch.apex.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedNovoGrad,
)
from fused import EVERY, SHAPES, STEPS, make_grads, make_params, named, run, state_of, twins
from helpers import assert_same_bits, snapshot

OF_TORCH = named(torch.optim.AdamW, fused=True)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "checkpoint"])
def test_a_copy_goes_on_as_the_original(make, how, dtype):
    params = make_params(dtype)
    optimizer = make(params)
    history = make_grads(params, 2 * STEPS)
    run(optimizer, params, history[:STEPS])
    if how == "deepcopy":
        copied_params, copied = copy.deepcopy((params, optimizer))
    elif how == "pickle":
        copied_params, copied = pickle.loads(pickle.dumps((params, optimizer)))
    else:
        copied_params = twins(params)
        copied = make(copied_params)
        copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert state_of(copied) == state_of(optimizer)
    run(optimizer, params, history[STEPS:])
    run(copied, copied_params, history[STEPS:])
    assert_same_bits(copied_params, params)
    assert state_of(copied) == state_of(optimizer)


@EVERY
def test_a_state_that_was_loaded_stays_as_it_is(make):
    params = make_params()
    one, other = make(params), make(params)
    run(one, params, make_grads(params))
    saved = one.state_dict()
    other.load_state_dict(saved)
    before = snapshot(saved)
    run(other, params, make_grads(params))
    assert snapshot(saved) == before


@EVERY
def test_half_state_is_taken_over(make):
    """As it is in checkpoints of apex's early optimizers."""
    params = make_params(torch.float16)
    optimizer = make(params)
    run(optimizer, params, make_grads(params))
    for state in optimizer.state.values():
        state.update({name: value.half() for name, value in state.items() if name != "step"})
    run(optimizer, params, make_grads(params))
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    assert {tensor.dtype for tensor in tensors} <= {torch.float32}


def test_the_steps_of_adam_are_where_apex_had_them():
    params = make_params()
    optimizer = FusedAdam(params)
    run(optimizer, params, make_grads(params))
    assert optimizer.param_groups[0]["step"] == STEPS
    saved = optimizer.state_dict()["param_groups"][0]["step"]
    assert (saved, type(saved)) == (STEPS, int)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_count_of_steps_that_a_script_sets_counts_as_in_apex(is_loaded):
    params = make_params()
    expected, history = twins(params), make_grads(params, 2 * STEPS)
    optimizer, oracle = FusedAdam(params, weight_decay=0.01), OF_TORCH(expected)
    for each, those in ((optimizer, params), (oracle, expected)):
        run(each, those, history[:STEPS])
    for state in oracle.state.values():
        state["step"].fill_(1)
    saved = optimizer.state_dict()
    for group in (*saved["param_groups"], *optimizer.param_groups):
        group["step"] = 1
    if is_loaded:
        optimizer.load_state_dict(saved)
    for each, those in ((optimizer, params), (oracle, expected)):
        run(each, those, history[STEPS:])
    assert_same_bits(params, expected)


OF_APEX = {"params": list(range(len(SHAPES))), "eps": 1e-8, "weight_decay": 0.1}


ADAM_GROUP = OF_APEX | {"lr": 0.02, "bias_correction": True, "betas": (0.8, 0.9)}


@pytest.mark.parametrize(
    ("kind", "group", "names"),
    [
        (FusedAdam, ADAM_GROUP | {"step": 3}, ["exp_avg", "exp_avg_sq"]),
        (FusedAdam, ADAM_GROUP | {"step": torch.tensor([3], dtype=torch.int32)}, ["exp_avg", "exp_avg_sq"]),
        (FusedAdagrad, OF_APEX | {"lr": 0.1}, ["sum"]),
    ],
    ids=["adam", "capturable adam", "adagrad"],
)
def test_a_checkpoint_of_apex_goes_on_exactly(kind, group, names):
    params = make_params()
    states = [{name: torch.rand(shape) for name in names} for shape in SHAPES]
    expected = twins(params)
    options = {name: group[name] for name in ("lr", "eps", "weight_decay", "betas") if name in group}
    oracle = (torch.optim.AdamW if kind is FusedAdam else torch.optim.Adagrad)(
        expected, fused=True, **options
    )
    for param, state in zip(expected, states, strict=True):
        oracle.state[param].update({name: value.clone() for name, value in state.items()})
        oracle.state[param]["step"] = torch.tensor(3.0)  # Adagrad does not use it
    optimizer = kind(params)
    optimizer.load_state_dict({"state": dict(enumerate(states)), "param_groups": [group]})
    history = make_grads(params)
    run(optimizer, params, history)
    run(oracle, expected, history)
    assert_same_bits(params, expected)


@pytest.mark.parametrize("kinds", [(FusedAdam, OF_TORCH), (OF_TORCH, FusedAdam)], ids=["to torch", "to us"])
def test_a_checkpoint_of_adam_goes_on_in_torchs_and_back(kinds):
    params = make_params()
    optimizer = kinds[0](params, lr=0.02, weight_decay=0.1)
    history = make_grads(params, 2 * STEPS)
    run(optimizer, params, history[:STEPS])
    loaded_params = twins(params)
    loaded = kinds[1](loaded_params)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, history[STEPS:])
    run(loaded, loaded_params, history[STEPS:])
    assert_same_bits(loaded_params, params)


def novograd_checkpoint(states, kept):
    group = {
        "lr": 0.1, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0,
        "grad_averaging": True, "norm_type": 2, "init_zero": False, "step": 5, "exp_avg_sq": kept,
        "params": [0, 1, 2],
    }  # fmt: skip
    return {"state": states, "param_groups": [group]}


def test_the_norms_of_novograd_do_not_share_memory():
    params = make_params()
    optimizer = FusedNovoGrad(params)
    run(optimizer, params, make_grads(params))
    # A checkpoint would hold all of it for each.
    assert [optimizer.state[param]["exp_avg_sq"].untyped_storage().nbytes() for param in params] == [4] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_checkpoint_of_apexs_novograd_keeps_the_norms_of_a_group_together(dtype):
    params = make_params(dtype, [(2,), (3,), (4,)])  # the second never had a gradient
    states = {index: {"exp_avg": torch.ones(size, dtype=dtype)} for index, size in ((0, 2), (2, 4))}
    full, none = torch.tensor([1.25, 2.5]), torch.tensor([])
    kept = [none, full] if dtype is torch.float32 else [full, none]
    optimizer = FusedNovoGrad(params)
    optimizer.load_state_dict(novograd_checkpoint(states, kept))
    assert "exp_avg_sq" not in optimizer.param_groups[0]
    assert [optimizer.state[params[index]]["exp_avg_sq"].item() for index in (0, 2)] == [1.25, 2.5]
    run(optimizer, params, make_grads(params, 1))
    assert optimizer.param_groups[0]["step"] == 6


def test_a_checkpoint_of_novograd_with_too_few_norms_is_refused():
    optimizer = FusedNovoGrad(make_params(shapes=[(2,), (3,), (4,)]))
    states = {0: {"exp_avg": torch.ones(2)}}
    with pytest.raises(ValueError, match="found 0 norms in exp_avg_sq for 1 parameters"):
        optimizer.load_state_dict(novograd_checkpoint(states, [None, None]))
