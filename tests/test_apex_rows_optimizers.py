"""What scripts written for apex expect of optimizers, and of apex's private names, row by row."""

import json

import pytest
import torch
from torch import nn

from ampatch.apex import amp
from apex_rows import (
    EVERY_LEVEL,
    INF,
    MASTERED,
    PATCHED,
    Net,
    backward,
    changed,
    initialized,
    scaler_state,
    set_scale,
    shows,
    step,
    unchanged,
)

# ---- amp._amp_state ----


@shows("private-scalers")
def test_loss_scalers_show_scale_count_interval_and_overflow():
    net, optimizer = initialized(num_losses=2)
    scaler = amp._amp_state.loss_scalers[1]
    assert len(amp._amp_state.loss_scalers) == 2
    assert (scaler.loss_scale(), scaler._loss_scale, scaler._unskipped) == (65536.0, 65536.0, 0)
    assert scaler._scale_seq_len == 2000
    backward(net, optimizer, 0.0, loss_id=1)
    assert scaler._unskipped == 1
    assert not scaler._has_overflow
    backward(net, optimizer, INF, loss_id=1)
    assert scaler._has_overflow
    assert (scaler.loss_scale(), scaler._unskipped) == (32768.0, 0)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 65536.0


@shows("private-scale-assigned", "patterns-scale-assigned")
@pytest.mark.parametrize("value", [2**20, 5, 1, 128.0])
def test_a_scale_that_is_assigned_right_after_initialize_is_used(value):
    _, optimizer = initialized()
    set_scale(value)
    with amp.scale_loss(torch.tensor(3.0), optimizer) as scaled_loss:
        assert scaled_loss == 3.0 * value
    read = amp._amp_state.loss_scalers[0].loss_scale()
    assert json.loads(json.dumps({"scale": read})) == {"scale": value}
    assert scaler_state()["loss_scale"] == value


@shows("private-options", "patterns-by-hand")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_the_options_can_be_read(level):
    initialized(level)
    options = amp._amp_state.opt_properties
    assert options.enabled
    assert options.opt_level == level
    assert options.loss_scale == ("dynamic" if level in ("O1", "O2") else 1.0)
    assert bool(options.master_weights) == (level in MASTERED)
    assert options.options["opt_level"] == level
    assert options.options["patch_torch_functions"] == (level in PATCHED)


@shows("private-half-models")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_models_are_taken_where_the_script_allows_them(level, monkeypatch):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())
    with pytest.raises(RuntimeError, match=r"1\.weight"):
        initialized(level, net=net)
    monkeypatch.setattr(amp._amp_state, "allow_incoming_model_not_fp32", True)
    _, optimizer = initialized(level, net=net)
    assert net[1].weight.dtype is torch.float16
    step(net, optimizer, 2.0**-10)


@shows("private-master-params", "private-frontend")
def test_master_params_and_frontend_are_found_where_apex_had_them():
    _, optimizer = initialized("O5")
    expected = [id(param) for param in amp.master_params(optimizer)]
    assert [id(param) for param in amp._amp_state.master_params(optimizer)] == expected
    assert amp.frontend.initialize is amp.initialize
    assert amp.frontend.state_dict is amp.state_dict
    assert amp.frontend.Properties().options["enabled"] is False
    for level in ("O0", "O1", "O2", "O3"):
        properties = amp.frontend.opt_levels[level](amp.frontend.Properties())
        assert (properties.opt_level, properties.enabled) == (level, True)


# ---- What apex put on an optimizer ----


@shows("private-lazy-init", "patterns-by-hand")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_masters_may_be_asked_for_by_hand(level):
    net, optimizer = initialized(level, loss_scale=4.0)
    assert hasattr(optimizer, "_amp_stash")
    masters = [id(param) for param in amp.master_params(optimizer)]
    if not optimizer._amp_stash.lazy_init_called:
        optimizer._lazy_init_maybe_master_weights()
        optimizer._amp_stash.lazy_init_called = True
    optimizer._amp_lazy_init()
    assert [id(param) for param in amp.master_params(optimizer)] == masters
    with changed(net):
        step(net, optimizer)


@shows("private-copy-masters")
@pytest.mark.parametrize("level", MASTERED)
def test_masters_are_copied_into_the_model_by_hand(level):
    net, optimizer = initialized(level)
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.fill_(0.3)
    optimizer._master_params_to_model_params()
    for param in net.parameters():
        assert torch.equal(param, torch.full_like(param, 0.3))


@shows("patterns-initialize-twice")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_a_second_model_may_have_a_frozen_optimizer(level):
    initialized(level)
    net, optimizer = initialized(level, net=Net().requires_grad_(False))
    with unchanged(net):
        optimizer.step()
