"""What tools see of a session: its loss scalers, and half parameters with their masters."""

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import ampatch as amp
from helpers import assert_same_bits, scaled_backward, snapshot

INF = float("inf")


def start(opt_level="O2", **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **arguments)
    return model, optimizer


def run_block(model, optimizer, factor=1.0, **arguments):
    torch.manual_seed(1)
    loss = model(torch.randn(8, 4)).square().mean() * factor
    scaled_backward(loss, optimizer, **arguments)


def test_the_scalers_are_numbered_as_in_the_state_dict():
    start(num_losses=2)
    start(loss_scale=8.0)
    scalers = amp.loss_scalers()
    assert [scaler.loss_id for scaler in scalers] == [0, 1, 2]
    assert [scaler.get_scale() for scaler in scalers] == [65536.0, 65536.0, 8.0]
    assert [scaler.state_dict() for scaler in scalers] == list(amp.state_dict().values())


def test_a_scale_that_is_set_on_a_scaler_is_the_one_that_is_used():
    _, optimizer = start()
    amp.loss_scalers()[0].set_scale(4.0)
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss == 4.0


def test_another_config_holds_from_the_next_update_on():
    model, optimizer = start()
    (scaler,) = amp.loss_scalers()
    scaler.config = amp.DynamicLossScale(growth_interval=1, growth_factor=4.0)
    run_block(model, optimizer)
    assert scaler.get_scale() == 4 * 65536


def test_there_are_no_scalers_before_initialize_nor_when_all_is_disabled():
    with pytest.raises(amp.NotInitializedError, match="not initialized"):
        amp.loss_scalers()
    amp.initialize(nn.Linear(1, 1), enabled=False)
    assert amp.loss_scalers() == ()


def test_did_overflow_tells_of_the_last_backward():
    model, optimizer = start()
    (scaler,) = amp.loss_scalers()
    seen = [scaler.did_overflow()]
    for factor in (1.0, INF, 1.0):
        run_block(model, optimizer, factor)
        seen.append(scaler.did_overflow())
    assert seen == [False, False, True, False]


@pytest.mark.parametrize("overflows", ["", "1", "0", "0100", "00001", "110", "0001000"])
def test_updating_by_hand_follows_grad_scaler(overflows):
    config = amp.DynamicLossScale(init_scale=16.0, growth_interval=3)
    scaler = amp.LossScaler(0, config, torch.device("cpu"))
    oracle = GradScaler("cpu", init_scale=16.0, growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for overflow in map(int, overflows):
        oracle.scale(weight.sum()).backward()
        weight.grad = torch.tensor([INF if overflow else 1.0])
        oracle.step(optimizer)
        oracle.update()
        assert scaler.update(torch.tensor([overflow], dtype=torch.int32)) == bool(overflow)
        assert scaler.get_scale() == oracle.get_scale()
    assert scaler.state_dict()["unskipped"] == oracle.state_dict()["_growth_tracker"]


def test_an_update_by_hand_counts_delayed_overflows_and_takes_the_skip_over():
    model, optimizer = start()
    (scaler,) = amp.loss_scalers()
    run_block(model, optimizer, INF, delay_overflow_check=True)
    assert scaler.get_scale() == 65536.0
    assert scaler.update() is True
    assert scaler.get_scale() == 32768.0
    assert scaler.update() is False, "an overflow counts once"
    optimizer.zero_grad()
    run_block(model, optimizer)
    optimizer.step()
    assert not amp.step_was_skipped(optimizer), "the loop that updates by hand skips by itself"


def test_a_static_scale_is_not_updated_by_hand():
    start(loss_scale=8.0)
    (scaler,) = amp.loss_scalers()
    assert scaler.update(torch.ones(1)) is False
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_pairs_hold_every_half_parameter_and_its_master(level):
    model, optimizer = start(level)
    pairs = list(amp.master_pairs(optimizer))
    halves = [param for param in model.parameters() if param.dtype is not torch.float32]
    assert len(halves) == 4
    assert [id(half) for half, _ in pairs] == [id(half) for half in halves]
    stepped = {id(param) for param in amp.master_params(optimizer)}
    assert all(id(master) in stepped and master.dtype is torch.float32 for _, master in pairs)


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_there_are_no_pairs_without_masters(level):
    _, optimizer = start(level)
    assert list(amp.master_pairs(optimizer)) == []


def test_an_optimizer_that_initialize_did_not_return_has_no_pairs_to_ask_for():
    start()
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(amp.AmpValueError, match="pass it to initialize first"):
        list(amp.master_pairs(stranger))


def half_beside_float():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=2.0**-4)


def test_a_half_model_is_refused_and_the_message_names_the_way():
    model, optimizer = half_beside_float()
    with pytest.raises(amp.AmpValueError, match=r"'0.weight' is torch.bfloat16.*allow_half_params=True"):
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)


def test_a_half_model_that_is_allowed_trains_with_masters_and_stays_half_afterwards():
    model, optimizer = half_beside_float()
    reference = [param.detach().float().clone() for param in model.parameters()]
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, allow_half_params=True)
    assert_same_bits(amp.master_params(optimizer), reference)
    run_block(model, optimizer)
    optimizer.step()
    masters = [master.detach().clone() for master in amp.master_params(optimizer)]
    assert snapshot(masters) != snapshot(reference)
    assert_same_bits(model.state_dict().values(), masters)
    amp.uninitialize()
    assert [param.dtype for param in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert_same_bits(model[0].parameters(), [master.bfloat16() for master in masters[:2]])


def test_a_half_model_that_is_allowed_may_have_another_half_type_than_the_level():
    model, optimizer = half_beside_float()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, allow_half_params=True)
    assert [param.dtype for param in model.parameters()] == [torch.bfloat16] * 2 + [torch.float16] * 2


def test_the_state_of_half_parameters_has_the_type_of_what_the_optimizer_steps():
    model, _ = half_beside_float()
    optimizer = torch.optim.Adam(model.parameters(), lr=2.0**-4)

    def state():
        return [optimizer.state[param]["exp_avg"] for param in amp.master_params(optimizer)]

    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = [each.clone() for each in state()]
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, allow_half_params=True)
    assert_same_bits(state(), [each.float() for each in before])
    run_block(model, optimizer)
    optimizer.step()
    amp.uninitialize()
    assert [each.dtype for each in state()] == [param.dtype for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
