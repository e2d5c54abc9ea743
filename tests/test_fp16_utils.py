"""apex.fp16_utils: half networks, masters by hand, loss scales, and the loops that scripts wrote."""

import copy
import io

import pytest
import torch
from torch import nn

from ampatch.apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from apex_rows import shows
from fp16_optimizers import names_of_apex
from helpers import assert_same_bits

HALF, FLOAT = torch.float16, torch.float32
BATCH_NORMS = [
    pytest.param(nn.BatchNorm1d, (8, 3), id="1d"),
    pytest.param(nn.BatchNorm1d, (8, 3, 4), id="1d, sequence"),
    pytest.param(nn.BatchNorm2d, (8, 3, 4, 4), id="2d"),
    pytest.param(nn.BatchNorm3d, (8, 3, 2, 2, 2), id="3d"),
    pytest.param(nn.SyncBatchNorm, (8, 3, 4, 4), id="sync"),
]


def make_net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def dtypes(module):
    return {name: tensor.dtype for name, tensor in module.state_dict().items()}


# ---- Networks in half ----


@shows("companions-fp16-utils")
def test_a_half_network_is_a_cast_and_the_network_with_batch_norm_in_float32():
    net = make_net()
    half = network_to_half(net)
    assert [type(part) for part in half] == [tofp16, nn.Sequential]
    assert half[1] is net
    kinds = dtypes(net)
    assert {name for name, dtype in kinds.items() if dtype == FLOAT} == {
        f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    }
    assert kinds["0.weight"] == kinds["4.bias"] == HALF
    assert "1.4.weight" in half.state_dict()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("kind", "shape"), BATCH_NORMS)
def test_batch_norm_in_float32_takes_half_and_returns_half(kind, shape, training):
    torch.manual_seed(0)
    reference = kind(3).train(training)
    with torch.no_grad():
        reference.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
    converted = BN_convert_float(nn.Sequential(copy.deepcopy(reference)).half())[0]
    x = torch.randn(shape).half()
    x_half, x_float = x.clone().requires_grad_(), x.float().requires_grad_()
    y, expected = converted(x_half), reference(x_float)
    y.float().pow(2).sum().backward()
    # The gradient as half has it, so that both backward passes begin alike.
    expected.backward((2 * y.detach().float()).half().float())
    assert y.dtype == x_half.grad.dtype == HALF
    assert converted.weight.grad.dtype == FLOAT
    assert_same_bits([y], [expected.half()])
    # Sums in another order: float32 rounding of a few dozen terms.
    torch.testing.assert_close(converted.weight.grad, reference.weight.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(converted.running_var, reference.running_var, rtol=1e-6, atol=0)


def test_batch_norm_without_weights_stays_half():
    net = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.InstanceNorm1d(3, affine=True)).half()
    assert BN_convert_float(net) is net
    assert set(dtypes(net).values()) == {HALF, torch.int64}
    assert net(torch.randn(4, 3, 5).half()).dtype == HALF


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_converted_network_keeps_batch_norm_and_integers(dtype):
    net = make_net()
    net.register_buffer("table", torch.arange(3))
    before = [id(tensor) for tensor in (*net.parameters(), *net.buffers())]
    net(torch.randn(2, 1, 4, 4)).sum().backward()
    assert convert_network(net, dtype) is net
    kinds = dtypes(net)
    assert kinds["4.weight"] == net[4].weight.grad.dtype == dtype
    assert kinds["1.weight"] == kinds["1.running_var"] == FLOAT
    assert kinds["table"] == torch.int64
    assert [id(tensor) for tensor in (*net.parameters(), *net.buffers())] == before
    assert net(torch.randn(2, 1, 4, 4).to(dtype)).dtype == dtype


def test_an_fp16_model_casts_its_inputs():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, a, b, mask):
            assert mask is None
            return self.linear(a + b)

    model = FP16Model(Sum())
    assert model(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.float64), None).dtype == HALF
    assert [name for name, _ in model.named_parameters()] == ["network.linear.weight", "network.linear.bias"]


def test_tofp16_casts_bytes_of_an_image():
    found = tofp16()(torch.arange(3, dtype=torch.uint8))
    assert_same_bits([found], [torch.tensor([0.0, 1.0, 2.0]).half()])


# ---- Masters ----


@shows("companions-fp16-utils")
@pytest.mark.parametrize("flat", [False, True], ids=["single", "flat"])
def test_gradients_go_to_the_masters_and_values_come_back(flat):
    net = BN_convert_float(make_net().half())
    net[0].weight.requires_grad_(False)
    model_params, master_params = prep_param_lists(net, flat_master=flat)
    assert [id(p) for p in model_params] == [id(p) for p in net.parameters() if p.requires_grad]
    values = torch.cat([p.detach().float().flatten() for p in model_params])
    assert_same_bits([torch.cat([master.detach().flatten() for master in master_params])], [values])
    assert not flat or not master_params[0].grad.any()
    for _ in range(2):  # with and without gradients on the masters
        net.zero_grad()
        net(torch.randn(2, 1, 4, 4).half()).float().sum().backward()
        model_grads_to_master_grads(model_params, master_params, flat_master=flat)
        found = torch.cat([master.grad.flatten() for master in master_params])
        assert_same_bits([found], [torch.cat([p.grad.float().flatten() for p in model_params])])
    with torch.no_grad():
        for master in master_params:
            master.add_(1 / 3)
    expected = [(p + 1 / 3 if p.dtype == FLOAT else (p.float() + 1 / 3).half()) for p in model_params]
    master_params_to_model_params(model_params, master_params, flat_master=flat)
    assert_same_bits(model_params, expected)


def test_a_gradient_of_a_master_is_no_view_of_the_models():
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    master = nn.Parameter(torch.ones(2))
    model_grads_to_master_grads([param], [master])
    master.grad.zero_()
    assert param.grad.tolist() == [1, 1]


def test_a_parameter_without_gradient_leaves_none_to_its_master():
    params = [nn.Parameter(torch.ones(2).half()) for _ in range(2)]
    masters = [nn.Parameter(p.detach().float()) for p in params]
    flat = nn.Parameter(torch.ones(4))
    params[0].grad = torch.full_like(params[0], 3)
    masters[1].grad = torch.ones(2)  # of an iteration before
    model_grads_to_master_grads(params, masters)
    model_grads_to_master_grads(params, [flat], flat_master=True)
    assert masters[0].grad.tolist() == [3, 3]
    assert masters[1].grad is None
    assert flat.grad.tolist() == [3, 3, 0, 0]


def test_small_helpers():
    assert to_python_float(torch.tensor([2.5])) == to_python_float([2.5]) == 2.5
    assert clip_grad_norm is torch.nn.utils.clip_grad_norm_


# ---- Loss scales ----


def leaf_with_grad(*values):
    param = nn.Parameter(torch.zeros(len(values)))
    param.grad = torch.tensor(values)
    return param


def test_a_static_scale_multiplies_and_never_looks():
    scaler = LossScaler(128)
    assert scaler.loss_scale == scaler.cur_scale == 128
    assert not scaler.has_overflow([leaf_with_grad(float("inf"))])
    scaler.update_scale(True)
    assert scaler.loss_scale == 128
    assert scaler.scale_gradient(None, (torch.ones(1), None), None) == (torch.tensor([128.0]), None)


def test_a_scaled_backward_keeps_gradients_that_half_would_lose():
    param = nn.Parameter(torch.ones(1, dtype=HALF))
    for scaler, expected in [(LossScaler(1), 0.0), (LossScaler(2.0**10), 2.0**-20)]:
        param.grad = None
        scaler.backward(param.sum().float() * 2.0**-30)
        assert param.grad.item() == expected


def test_a_dynamic_scale_has_the_defaults_of_apex():
    scaler = DynamicLossScaler()
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    assert [getattr(scaler, name) for name in names] == [2**32, 0, -1, 2.0, 1000]


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_element_that_is_not_finite_is_an_overflow(bad):
    scaler = DynamicLossScaler()
    good = leaf_with_grad(1.0, 2.0)
    assert not scaler.has_overflow([good, nn.Parameter(torch.ones(1))])
    assert scaler.has_overflow(param for param in (good, leaf_with_grad(0.0, bad)))
    assert DynamicLossScaler._has_inf_or_nan(torch.tensor([0.0, bad]).half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_finite_gradients_whose_sum_overflows_are_none(dtype):
    param = nn.Parameter(torch.zeros(4, dtype=dtype))
    param.grad = torch.full_like(param, torch.finfo(dtype).max)
    assert not torch.isfinite(param.grad.sum())
    assert not DynamicLossScaler().has_overflow([param])
    assert not DynamicLossScaler._has_inf_or_nan(param.grad)


def test_a_sparse_gradient_is_looked_at():
    table = nn.Embedding(3, 1, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert not DynamicLossScaler().has_overflow([table.weight])
    table.weight.grad._values()[1] = float("inf")
    assert DynamicLossScaler().has_overflow([table.weight])


@shows("companions-fp16-utils")
def test_a_scale_follows_overflows_as_torchs_does():
    generator = torch.Generator().manual_seed(0)
    overflows = (torch.rand(500, generator=generator) < 0.1).tolist()
    scaler = DynamicLossScaler(2.0**40, scale_window=7)
    scale, tracker = torch.tensor(2.0**40), torch.tensor(0, dtype=torch.int32)
    seen = set()
    for overflow in overflows:
        scaler.update_scale(overflow)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 7)
        assert scaler.loss_scale == scale.item()
        seen.add(scale.item())
    assert len(seen) > 5


@pytest.mark.parametrize(
    ("scaler", "overflows", "expected"),
    [
        (DynamicLossScaler(4.0), "111", [2.0, 1.0, 1.0]),
        (DynamicLossScaler(0.5), "1", [0.5]),  # which began below 1
        (DynamicLossScaler(2.0**126, scale_window=1), "000", [2.0**127] * 3),
        (
            DynamicLossScaler(4.0, scale_window=1, min_loss_scale=2.0, max_loss_scale=8.0),
            "00111",
            [8.0, 8.0, 4.0, 2.0, 2.0],
        ),
    ],
    ids=["zero", "below one", "inf", "bounds"],
)
def test_a_scale_stays_within_its_bounds(scaler, overflows, expected):
    found = []
    for overflow in overflows:
        scaler.update_scale(overflow == "1")
        found.append(scaler.loss_scale)
    assert found == expected


# ---- Loss scales in checkpoints ----

PLAIN = {
    "cur_scale": 2048.0,
    "cur_iter": 70,
    "last_overflow_iter": 20,
    "scale_factor": 2.0,
    "scale_window": 50,
}


@pytest.mark.parametrize("package", ["ampatch.apex", "apex"])
@pytest.mark.parametrize(
    ("kind", "values"),
    [(LossScaler, {"cur_scale": 128}), (DynamicLossScaler, PLAIN)],
    ids=["static", "dynamic"],
)
def test_a_checkpoint_of_either_name_loads_as_torch_loads_by_default(monkeypatch, package, kind, values):
    file = io.BytesIO()
    with names_of_apex(monkeypatch, f"{package}.fp16_utils.loss_scaler", kind.__name__, values) as scaler:
        torch.save(scaler, file)
    loaded = torch.load(io.BytesIO(file.getvalue()))
    assert type(loaded) is kind
    assert vars(loaded) == values
    loaded.update_scale(False)
    is_dynamic = kind is DynamicLossScaler  # 50 clean iterations after the 20th
    assert loaded.loss_scale == values["cur_scale"] * (2 if is_dynamic else 1)
