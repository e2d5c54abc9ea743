"""Attention at every level: with any mask, and in evaluation cast as in training."""

import copy
import threading

import pytest
import torch
from torch import nn

import ampatch as amp
from nets import HALVES
from patched import FULL, HALF, open_session

# Of the samples here on purpose, and of nested tensors, which torch itself makes in evaluation.
pytestmark = [
    pytest.mark.exhaustive(keep=3),  # of each test
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]

PADDING = torch.tensor([[False, False, False, True, True], [False] * 5])
CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
MASKS = {
    "none": {},
    "bool": {"mask": CAUSAL},
    "float": {"mask": torch.zeros(5, 5).masked_fill(CAUSAL, -torch.inf)},
    "padding": {"src_key_padding_mask": PADDING},
    "float padding": {"src_key_padding_mask": torch.zeros(2, 5).masked_fill(PADDING, -torch.inf)},
    "both": {"mask": CAUSAL, "src_key_padding_mask": PADDING},
}
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "frozen": torch.enable_grad}


class SelfAttention(nn.MultiheadAttention):
    def __init__(self):
        super().__init__(8, 2, batch_first=True)

    def forward(self, x, mask=None, src_key_padding_mask=None):
        masks = {"attn_mask": mask, "key_padding_mask": src_key_padding_mask}
        return super().forward(x, x, x, **masks, need_weights=False)[0]


def make_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class Layer(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x, mask=None, src_key_padding_mask=None):
        return super().forward(x, mask, src_key_padding_mask)


MODULES = {
    "attention": SelfAttention,
    "layer": Layer,
    "encoder": lambda: nn.TransformerEncoder(make_layer(), 2),
}


def data():
    return torch.randn(2, 5, 8)


def rows(output, masks):
    """The outputs of what is no padding; those of padding are 0 on torch's fast path, else anything."""
    return output[~PADDING] if "src_key_padding_mask" in masks else output.flatten(0, 1)


# ---- Training ----


@pytest.mark.parametrize("mask", [FULL, HALF, torch.bool], ids=str)
@pytest.mark.parametrize("given", [FULL, HALF], ids=str)
def test_attention_takes_masks_of_any_type(given, mask):
    model = open_session(nn.MultiheadAttention(8, 2, batch_first=True))
    x = data().to(given)
    assert model(x, x, x, attn_mask=torch.zeros(5, 5, dtype=mask))[0].dtype is HALF


# ---- Evaluation, where torch has fast paths ----


@pytest.mark.exhaustive(keep=4)
@pytest.mark.parametrize(
    ("masks", "mode"),
    [*((masks, "no_grad") for masks in MASKS), ("padding", "inference_mode"), ("padding", "frozen")],
)
@pytest.mark.parametrize("name", MODULES)
def test_evaluation_casts_as_training_does(name, masks, mode):
    model, x = MODULES[name]().requires_grad_(False), data()
    plain = copy.deepcopy(model)
    open_session(model)
    with MODES[mode]():
        expected = rows(model(x, **MASKS[masks]), MASKS[masks])
        found = rows(model.eval()(x, **MASKS[masks]), MASKS[masks])
        with amp.disable_casts():
            in_float32 = rows(plain(x, **MASKS[masks]), MASKS[masks])
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    assert not torch.equal(found.float(), in_float32)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("opt_level", ["O3", "O5"])
def test_evaluation_of_a_half_model_is_that_of_torch_in_half(opt_level, name, masks):
    model, x, dtype = MODULES[name]().eval(), data(), HALVES[opt_level]

    def cast(mask):
        return mask.to(dtype) if mask.is_floating_point() else mask

    plain = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        expected = plain(x.to(dtype), **{key: cast(mask) for key, mask in MASKS[masks].items()})
        open_session(model, opt_level)
        found = model(x, **MASKS[masks])
    # The hooks of the model keep a layer or an attention that is the model itself off its fast path, and
    # the two paths round in different places, to 8 bits.
    tolerance = 0.0 if name == "encoder" else 0.05
    assert found.dtype is FULL
    assert (rows(found, MASKS[masks]) - rows(expected.float(), MASKS[masks])).abs().max() <= tolerance


def test_the_fast_path_is_off_where_this_thread_casts_and_on_elsewhere():
    is_enabled = torch.backends.mha.get_fastpath_enabled
    open_session()
    assert not torch.backends.mha.get_fastpath_enabled()
    with amp.disable_casts():
        assert torch.backends.mha.get_fastpath_enabled()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.backends.mha.get_fastpath_enabled()))
        thread.start()
        thread.join()
        assert seen == [False]
    amp.uninitialize()
    assert torch.backends.mha.get_fastpath_enabled is is_enabled


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("name", MODULES)
def test_evaluation_with_casts_off_is_plain_torchs(name, masks):
    model, x = MODULES[name]().eval(), data()
    with torch.no_grad():
        expected = model(x, **MASKS[masks])
        open_session(copy.deepcopy(model))
        with amp.disable_casts():
            assert torch.equal(model(x, **MASKS[masks]), expected)


def test_nested_inputs_need_the_fast_path_and_so_casts_turned_off():
    """As under torch.autocast: attention takes nested tensors on its fast path alone."""
    model = MODULES["encoder"]().eval()
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    open_session()
    with torch.no_grad():
        with pytest.raises(AssertionError, match="get_fastpath_enabled"):
            model(x)
        with amp.disable_casts():
            assert model(x).is_nested


def test_a_kept_layer_evaluates_in_float32_at_a_level_that_patches():
    model, x = MODULES["encoder"]().eval(), data()
    with torch.no_grad():
        expected = model(x)
        open_session(model, keep_fp32=model)
        assert torch.equal(model(x), expected)


# ---- Compiled and scripted ----


class Weighing(nn.Module):
    """Makes its mask in the forward, and has attention give its weights, as it does by default."""

    def __init__(self, mask):
        super().__init__()
        self.attention, self.mask = nn.MultiheadAttention(8, 2, batch_first=True), mask

    def forward(self, x):
        return self.attention(x, x, x, attn_mask=self.mask.clone())


@pytest.mark.parametrize("opt_level", HALVES)
def test_attention_that_gives_its_weights_takes_a_mask_that_a_half_forward_makes(opt_level):
    model, x = Weighing(CAUSAL), torch.randn(2, 5, 8)
    open_session(model, opt_level=opt_level)
    expected = model(x)
    model.mask = MASKS["float"]["mask"]
    assert all(map(torch.equal, model(x), expected))
