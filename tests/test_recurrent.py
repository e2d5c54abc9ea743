"""Recurrent networks and cells at every level: in half, on packed sequences, with states of either type."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import ampatch as amp
from ampatch.casts import kernels
from ampatch.casts.cast import CASTS
from nets import sgd
from patched import FULL, HALF, LEVELS, backward, full, half, open_session

pytestmark = [
    pytest.mark.exhaustive(keep=3),  # of each test
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def leaves(value):
    return [value] if isinstance(value, torch.Tensor) else [leaf for item in value for leaf in leaves(item)]


FLOAT64 = r"dtype|must have the type torch\.float32"


def test_a_recurrent_network_checks_its_input_and_with_casts_off_is_plain_torchs():
    model, x = nn.LSTM(4, 6), full(3, 2, 4)
    expected = leaves(model(x))
    open_session(model)
    with pytest.raises(RuntimeError, match=r"input\.size"):
        model(half(3, 2, 5))
    with pytest.raises((ValueError, RuntimeError), match=FLOAT64):
        model(x.double())
    with amp.disable_casts():
        assert all(map(torch.equal, leaves(model(x)), expected))
        with pytest.raises((ValueError, RuntimeError), match=FLOAT64):
            model(x.to(HALF))


# ---- Every kind, at levels that patch and at levels that cast the model ----

EVERY_LEVEL = {**LEVELS, "O2": torch.float16, "O5": torch.bfloat16}
VARIANTS = {
    "lstm": lambda: nn.LSTM(4, 6, 2, bidirectional=True),
    "lstm with projection": lambda: nn.LSTM(4, 6, 2, bidirectional=True, proj_size=3),
    "lstm with dropout": lambda: nn.LSTM(4, 6, 2, dropout=0.5),
    "gru": lambda: nn.GRU(4, 6, 2, bidirectional=True),
    "lstm of one layer": lambda: nn.LSTM(4, 6),
    "gru without bias": lambda: nn.GRU(4, 6, bias=False),
    "rnn": lambda: nn.RNN(4, 6, 2, bidirectional=True),
    "rnn with relu": lambda: nn.RNN(4, 6, nonlinearity="relu"),
}
# The types of input and state, and whether the input is packed: each value meets each other one.
INPUTS = {
    "float32, no state, packed": (FULL, None, True),
    "float32, half state, padded": (FULL, HALF, False),
    "half, float32 state, packed": (HALF, FULL, True),
    "half, no state, padded": (HALF, None, False),
    "half, half state, packed": (HALF, HALF, True),
    "float32, float32 state, padded": (FULL, FULL, False),
}


def make_state(model, dtype):
    size = (model.num_layers * (1 + model.bidirectional), 2)
    state = torch.full((*size, model.proj_size or model.hidden_size), 0.25, dtype=dtype)
    is_lstm = isinstance(model, nn.LSTM)
    return (state, torch.full((*size, model.hidden_size), 0.5, dtype=dtype)) if is_lstm else state


def mean_square(output):
    return sum(leaf.float().pow(2).mean() for leaf in leaves(output) if leaf.is_floating_point())


def assert_equal(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.float(), theirs.float())


def leaves_of(output):
    """The tensors of an output and a state, of which a packed sequence has some that are None."""
    output, state = output
    return [output.data if isinstance(output, PackedSequence) else output, *leaves(state)]


@pytest.mark.exhaustive(keep=8)
@pytest.mark.parametrize(
    ("name", "inputs"),
    [pair for pair in itertools.product(VARIANTS, INPUTS) if pair[0] == "lstm" or "no state" in pair[1]],
)
@pytest.mark.parametrize("opt_level", ["O1", "O5"])
def test_a_recurrent_network_computes_what_it_does_in_half(opt_level, name, inputs):
    model, dtype = VARIANTS[name](), EVERY_LEVEL[opt_level]
    given, state, is_packed = INPUTS[inputs]
    x = torch.randn(3, 2, 4).to(dtype)

    def call(network, *types):
        given, state = (dtype if kind is HALF else kind for kind in types)
        y = x.to(given)
        y = pack_padded_sequence(y, torch.tensor([2, 3]), enforce_sorted=False) if is_packed else y
        torch.manual_seed(1)  # for dropout
        return leaves_of(network(y, None if state is None else make_state(network, state)))

    plain, optimizer = copy.deepcopy(model).to(dtype), sgd(model)
    expected = call(plain, HALF, state and HALF)
    mean_square(expected).backward()
    open_session(model, opt_level, optimizers=optimizer, loss_scale=1.0)
    found = call(model, given, state)
    assert {tensor.dtype for tensor in found} == {dtype if opt_level in LEVELS else FULL}
    assert_equal(found, expected)
    backward(mean_square(found), optimizer)
    for master, param in zip(amp.master_params(optimizer), plain.parameters(), strict=True):
        assert master.grad.dtype is FULL
        assert torch.equal(master.grad.to(dtype), param.grad.to(dtype))  # some kernels make it in float32
    optimizer.step()


# ---- Weights that are computed, copied, edited, replaced ----


def reparametrize(function, network, **kwargs):
    function(network, "weight_hh_l0", **kwargs)
    return network


COMPUTED = {
    "weight_norm": lambda: reparametrize(parametrizations.weight_norm, nn.LSTM(4, 6)),
    "spectral_norm": lambda: reparametrize(parametrizations.spectral_norm, nn.GRU(4, 6)),
    "orthogonal": lambda: reparametrize(parametrizations.orthogonal, nn.RNN(4, 6)),
    "older spectral_norm": lambda: reparametrize(nn.utils.spectral_norm, nn.LSTM(4, 6)),
    "pruned": lambda: reparametrize(prune.l1_unstructured, nn.GRU(4, 6), amount=0.5),
}


# torch.matrix_exp of a half CPU tensor is NaN (torch 2.13), and so is any half model with this weight.
KEPT = {"orthogonal": "*parametrizations*"}


def train(network, x, opt_level, keep_fp32=()):
    optimizer, losses = sgd(network), []
    if opt_level:
        open_session(network, opt_level, optimizers=optimizer, loss_scale=1.0, keep_fp32=keep_fp32)
    for _ in range(3):
        optimizer.zero_grad()
        loss = mean_square(network(x)[0])
        if opt_level:
            backward(loss, optimizer)
        else:
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("opt_level", ["O1", "O5"])
def test_a_network_whose_weights_are_computed_trains(opt_level, name):
    x = torch.randn(3, 2, 4)
    torch.manual_seed(1)
    expected = train(COMPUTED[name](), x, None)
    torch.manual_seed(1)
    network = COMPUTED[name]()
    found = train(network, x, opt_level, KEPT.get(name, ()))
    # bfloat16 rounds each of the few products behind an output by 0.4 %, and squaring doubles that.
    assert found == pytest.approx(expected, rel=0.05)
    amp.uninitialize()
    assert network(x)[0].dtype is FULL


@pytest.mark.parametrize("change", ["in place", "loaded", "replaced", "moved", "flattened"])
@pytest.mark.parametrize("opt_level", ["O1", "O5"])
def test_a_changed_weight_is_seen_by_the_next_forward(opt_level, change):
    network, x, dtype = nn.LSTM(4, 6), torch.randn(3, 2, 4), EVERY_LEVEL[opt_level]
    other = copy.deepcopy(network)
    if change not in ("moved", "flattened"):
        nn.init.constant_(other.weight_hh_l0, 0.25)
    open_session(network, opt_level)
    network(x)
    weight = network.weight_hh_l0
    with torch.no_grad():
        if change == "in place":
            weight.fill_(0.25)
        elif change == "loaded":
            network.load_state_dict(other.state_dict())
        elif change == "replaced":
            network.weight_hh_l0 = nn.Parameter(torch.full_like(weight, 0.25))
        elif change == "moved":
            network.to("cpu")
        else:
            network.flatten_parameters()
    assert_equal(leaves(network(x)), leaves(other.to(dtype)(x.to(dtype))))


# ---- On a GPU ----


LAID_OUT = {"lstm": (4, 4, 2, 6, 0, 2, False, True), "gru without bias": (2, 4, 3, 6, 0, 1, False, False)}


def lay_out(weights, *sizes):
    """Moves weights into one block, as `torch._cudnn_rnn_flatten_weight` does on a GPU."""
    assert sizes in LAID_OUT.values()
    block = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, block.split([weight.numel() for weight in weights]), strict=True):
        set_data(weight, part.view(weight.shape))


set_data = torch._C.TensorBase.data.__set__  # which ampatch does not see


@pytest.mark.parametrize("name", LAID_OUT)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_casts_lie_in_one_block_and_are_written_again_in_it(monkeypatch, opt_level, name):
    def is_apart(weights):
        return len({weight.untyped_storage()._cdata for weight in weights}) > 1

    def train(blocks):
        torch.manual_seed(0)
        model, seen, x = VARIANTS[name](), [], torch.ones(3, 2, 4)
        x = pack_padded_sequence(x, torch.tensor([3, 3])) if name == "lstm" else x
        monkeypatch.setattr(kernels, "_are_apart", is_apart if blocks else lambda weights: False)
        optimizer = sgd(model)
        open_session(model, opt_level, optimizers=optimizer, loss_scale=1.0)
        for step in range(4):
            if step == 3:
                with torch.no_grad():
                    model.weight_hh_l0[0, 0] = 1.0  # one is cast anew, and all move
            output, _ = model(x)
            backward(mean_square(output.data if name == "lstm" else output), optimizer)
            entries = CASTS.get_cache(LEVELS[opt_level])._list()
            assert not blocks or len({entry.cast.untyped_storage()._cdata for _, entry in entries}) == 1
            seen.append([entry.cast.data_ptr() for _, entry in entries])
            del entries  # which would hold the casts
            optimizer.step()
            optimizer.zero_grad()
        amp.uninitialize()
        return list(model.parameters()), seen

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(kernels, "FLATTEN", SimpleNamespace(find=lambda: lay_out))
    (expected, _), (found, seen) = train(blocks=False), train(blocks=True)
    assert all(map(torch.equal, found, expected))
    assert sorted(seen[0]) == sorted(seen[1]) == sorted(seen[2])
    assert len(seen[0]) == len(found)
    kernels.flatten_parameters(model := VARIANTS[name]())
    assert len({weight.untyped_storage()._cdata for weight in model.parameters()}) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_a_recurrent_network_trains_on_a_gpu(opt_level, name):
    model, dtype = VARIANTS[name]().cuda().eval(), EVERY_LEVEL[opt_level]
    x = torch.randn(3, 2, 4, device="cuda")
    expected = model(x)[0]
    optimizer = sgd(model.train())
    open_session(model, opt_level, optimizers=optimizer, loss_scale=1.0)
    found = model(x)[0]
    assert found.dtype is (dtype if opt_level in LEVELS else FULL)
    if "dropout" not in name:
        # Outputs are between -1 and 1, or of order 1; bfloat16 rounds by 0.4 % in each of a few steps.
        assert (found.float() - expected).abs().max() < 0.05
    backward(mean_square(found), optimizer)
    assert all(param.grad.dtype is FULL for param in amp.master_params(optimizer))
    optimizer.step()
