"""What torch.distributed adds to a training: checkpoints for another number of ranks, uneven inputs, ZeRO."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import ampatch as amp
from helpers import snapshot
from ranks import Ranks

pytestmark = pytest.mark.process

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("four"), 4)
    yield ranks
    ranks.close()


# ---- Checkpoints ----


def build(level, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    for part in (model[0], model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    scale = amp.DynamicLossScale(growth_interval=3) if level in ("O1", "O2") else None
    return amp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)


def train(model, optimizer, steps):
    for step in steps:
        # The same on every rank: its mean over ranks is exact, whatever their number.
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def get_states(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "amp": amp.state_dict()}


def full(states):
    def gather_value(value):
        if isinstance(value, dict):
            return {key: gather_value(one) for key, one in value.items()}
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)

    return gather_value(states)


def leg(level, steps, load=None, save=None):
    """Trains for some steps, from a checkpoint or to one, and returns all that there is in the end."""
    model, optimizer = build(level, seed=0 if load is None else 1)
    if load is not None:
        states = get_states(model, optimizer)
        dcp.load(states, checkpoint_id=load)
        set_state_dict(
            model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
        amp.load_state_dict(states["amp"])
    train(model, optimizer, steps)
    states = get_states(model, optimizer)
    if save is not None:
        dcp.save(states, checkpoint_id=save)
    return full(states)


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_resumes_bit_for_bit_on_another_number_of_ranks(level, two, four, tmp_path):
    two(leg, level, range(3), save=tmp_path / "first")
    four(leg, level, range(3, 5), load=tmp_path / "first", save=tmp_path / "second")
    resumed = two(leg, level, range(5, 8), load=tmp_path / "second")[0]
    whole = two(leg, level, range(8))[0]
    assert resumed["amp"] == whole["amp"]
    assert snapshot(resumed) == snapshot(whole)
