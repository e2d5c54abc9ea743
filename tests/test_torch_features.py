"""What torch does with functions behind the scenes, while they are patched."""

import pytest
import torch
from torch import nn
from torch.jit import _builtins
from torch.nn import functional as F

import ampatch as amp

# torch 2.13 calls torch.jit.script deprecated, and uses it itself.
SCRIPTS = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return F.softmax(self.norm(self.linear(x)), dim=-1)


def open_session():
    amp.initialize(nn.Linear(2, 2), opt_level="O4", verbosity=0)


@SCRIPTS
def test_torch_script_compiles_other_models_and_runs_them_uncast():
    model, x = Small(), torch.ones(2, 3)
    expected = model(x)
    open_session()
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(x), expected)


@SCRIPTS
def test_forward_mode_ad_whose_rules_torch_scripts_on_first_use_works():
    open_session()
    _, tangent = torch.func.jvp(
        lambda x: F.linear(x, torch.ones(4, 3)).float(), (torch.ones(3),), (torch.ones(3),)
    )
    assert torch.equal(tangent, torch.full((4,), 3.0))


def test_torch_script_knows_no_more_functions_after_uninitialize():
    before = dict(_builtins._get_builtin_table())
    open_session()
    assert len(_builtins._get_builtin_table()) > len(before)
    amp.uninitialize()
    assert _builtins._get_builtin_table() == before


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_model_with_a_sparse_buffer_saves_it_and_gets_it_back(level):
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", (torch.eye(2) / 3).to_sparse())
    amp.initialize(model, opt_level=level, verbosity=0)
    assert model.state_dict()["adjacency"].dtype is torch.float32
    amp.uninitialize()
    exact = torch.eye(2) / 3
    expected = exact.half().float() if level == "O3" else exact
    assert torch.equal(model.adjacency.to_dense(), expected)


def test_a_call_that_is_enabled_wins_over_an_earlier_one_that_was_not():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, enabled=False)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    loss = model(torch.ones(1, 2)).sum()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert torch.equal(scaled_loss, loss * 2.0**16)


def test_blocks_of_one_optimizer_cannot_be_nested_and_the_outer_one_goes_on():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O4", loss_scale=8.0, verbosity=0)
    x = torch.ones(1, 2)
    inner = amp.scale_loss(model(x).sum(), optimizer)
    with amp.scale_loss(model(x).sum(), optimizer) as outer:
        with pytest.raises(amp.AmpError, match=r"SGD is inside another block .* end that block first"):
            inner.__enter__()
        outer.backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


def test_a_model_initialized_in_inference_mode_trains():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with torch.inference_mode():
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert torch.equal(next(amp.master_params(optimizer)), before - 0.1)


@SCRIPTS
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_scripted_part_of_a_model_to_cast_is_refused(level):
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(amp.AmpValueError, match=r"module '0' is scripted.*expected .*script it after"):
        amp.initialize(model, opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_model_on_the_meta_device_comes_back_as_float32(level):
    model = nn.Linear(2, 2, device="meta")
    amp.initialize(model, opt_level=level, verbosity=0)
    amp.uninitialize()
    assert model.weight.dtype is torch.float32
