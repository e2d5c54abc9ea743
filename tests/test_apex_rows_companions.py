"""What scripts import next to `apex.amp`, with its keywords, row by row of docs/apex-behaviour.md."""

import importlib
import warnings

import pytest
import torch
from torch import nn

from ampatch.apex import amp
from apex_rows import Net, X, copy_of, is_same, make, shows


def companion(name):
    """A module of those that stand for apex's."""
    return importlib.import_module(f"ampatch.apex.{name}")


def trains(net, optimizer, steps=5):
    """Whether some steps make the loss smaller."""
    net.eval()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(X).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[-1] < losses[0]


# ---- apex.parallel ----


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


DDP_KEYWORDS = {
    "message_size": 10_000_000,
    "delay_allreduce": True,
    "shared_param": None,
    "allreduce_trigger_params": None,
    "retain_allreduce_buffers": False,
    "allreduce_always_fp32": True,
    "num_allreduce_streams": 1,
    "allreduce_communicators": None,
    "gradient_average": True,
    "gradient_predivide_factor": 1.0,
    "gradient_average_split_factor": None,
    "prof": False,
}


@shows("companions-ddp")
@pytest.mark.parametrize("keywords", [{}, DDP_KEYWORDS], ids=["none", "all"])
def test_distributed_data_parallel_takes_its_keywords_and_trains_after_initialize(one_process, keywords):
    net, optimizer = make()
    amp.initialize(net, optimizer, opt_level="O4", verbosity=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it names keywords that have no meaning today
        wrapped = companion("parallel").DistributedDataParallel(net, **keywords)
    before = copy_of(net)
    with amp.scale_loss(wrapped(X).float().pow(2).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert wrapped.module is net
    assert not is_same(copy_of(net), before)


@shows("companions-reducer")
def test_a_reducer_averages_gradients_when_it_is_told(one_process):
    net, _ = make()
    reducer = companion("parallel").Reducer(net)
    net(X).sum().backward()
    expected = [param.grad.clone() for param in net.parameters()]
    reducer.reduce()
    assert is_same([param.grad for param in net.parameters()], expected)  # of one process


@shows("companions-syncbn")
def test_batchnorms_are_converted_with_their_values():
    parallel = companion("parallel")
    net = Net()
    with torch.no_grad():
        net.norm.weight.fill_(3.0)
    converted = parallel.convert_syncbn_model(net)
    assert isinstance(converted.norm, parallel.SyncBatchNorm)
    assert torch.equal(converted.norm.weight, torch.full((6,), 3.0))
    assert set(converted.state_dict()) == set(Net().state_dict())


@shows("companions-syncbn")
def test_sync_batchnorm_takes_its_keywords():
    norm = companion("parallel").SyncBatchNorm(
        6, eps=1e-4, momentum=0.2, process_group=None, channel_last=False
    )
    assert (norm.num_features, norm.eps, norm.momentum) == (6, 1e-4, 0.2)


@shows("companions-larc", "optimizers-larc")
@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_larc_is_no_optimizer_and_trains_under_amp(level):
    net, inner = make()
    optimizer = companion("parallel").LARC(inner, trust_coefficient=0.5, clip=False, eps=1e-8)
    assert not isinstance(optimizer, torch.optim.Optimizer)
    _, back = amp.initialize(net, optimizer, opt_level=level, verbosity=0)
    assert back is optimizer
    before = copy_of(net)
    with amp.scale_loss(net(X).float().pow(2).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    assert not is_same(copy_of(net), before)


@shows("companions-multiproc")
def test_multiproc_is_a_module():
    assert importlib.util.find_spec("ampatch.apex.parallel.multiproc") is not None


# ---- apex.optimizers ----

FUSED = {
    "FusedAdam": {
        "lr": 0.01,
        "bias_correction": True,
        "betas": (0.9, 0.99),
        "eps": 1e-6,
        "adam_w_mode": False,
        "weight_decay": 0.01,
        "amsgrad": False,
        "set_grad_none": True,
    },
    "FusedSGD": {
        "lr": 0.01,
        "momentum": 0.9,
        "dampening": 0,
        "weight_decay": 0.01,
        "nesterov": True,
        "wd_after_momentum": False,
        "materialize_master_grads": True,
        "set_grad_none": False,
    },
    "FusedLAMB": {
        "lr": 0.01,
        "bias_correction": True,
        "betas": (0.9, 0.99),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "amsgrad": False,
        "adam_w_mode": True,
        "grad_averaging": True,
        "set_grad_none": True,
        "max_grad_norm": 1.0,
        "use_nvlamb": False,
    },
    "FusedNovoGrad": {
        "lr": 0.01,
        "bias_correction": True,
        "betas": (0.9, 0.99),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "amsgrad": False,
        "reg_inside_moment": False,
        "grad_averaging": True,
        "norm_type": 2,
        "init_zero": False,
        "set_grad_none": True,
    },
    "FusedAdagrad": {
        "lr": 0.01,
        "eps": 1e-8,
        "weight_decay": 0.01,
        "set_grad_none": True,
        "adagrad_w_mode": False,
    },
}


@shows("companions-optimizers")
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_takes_its_keywords_and_trains(name):
    net = Net()
    optimizer = getattr(companion("optimizers"), name)(net.parameters(), **FUSED[name])
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert trains(net, optimizer)


@shows("companions-optimizers")
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_trains_under_amp_and_skips_on_overflow(name, level):
    net = Net()
    optimizer = getattr(companion("optimizers"), name)(net.parameters(), lr=0.01)
    amp.initialize(net, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    before = copy_of(net)
    for factor in (float("inf"), 2.0**-8):
        optimizer.zero_grad()
        with amp.scale_loss(net(X).float().pow(2).mean() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        assert is_same(copy_of(net), before) == (factor > 1)


@shows("companions-optimizers")
def test_a_fused_adam_in_fp16_optimizer_trains_a_half_model():
    optimizers = companion("optimizers")
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).half()
    inner = optimizers.FusedAdam(net.parameters(), lr=0.01)
    optimizer = optimizers.FP16_Optimizer(
        inner, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 16}
    )
    before = copy_of(net)
    optimizer.zero_grad()
    optimizer.backward(net(X.half()).float().pow(2).mean())
    optimizer.step()
    assert not is_same(copy_of(net), before)


# ---- apex.normalization ----


@shows("companions-normalization")
@pytest.mark.parametrize("affine", [True, False])
def test_fused_layer_norm_is_layer_norm(affine):
    norm = companion("normalization").FusedLayerNorm(4, eps=1e-6, elementwise_affine=affine)
    assert torch.equal(norm(X), nn.functional.layer_norm(X, [4], eps=1e-6))
    assert set(norm.state_dict()) == ({"weight", "bias"} if affine else set())


@shows("companions-normalization")
def test_mixed_fused_layer_norm_gives_the_type_of_its_weight():
    norm = companion("normalization").MixedFusedLayerNorm(4, eps=1e-6)
    assert norm(X.half()).dtype is norm.weight.dtype is torch.float32


@shows("companions-normalization")
def test_fused_rms_norm_divides_by_the_root_of_the_mean_square():
    norm = companion("normalization").FusedRMSNorm(4, eps=1e-6, elementwise_affine=True)
    expected = X / (X.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(X), expected)  # rsqrt in the place of a quotient


# ---- apex.multi_tensor_apply and amp_C ----


@shows("companions-multi-tensor", "patterns-amp-c")
def test_multi_tensor_applier_scales_adds_and_measures_lists_of_tensors():
    amp_C, applier = companion("amp_C"), companion("multi_tensor_apply").multi_tensor_applier
    assert applier.available
    buffer = torch.zeros(1, dtype=torch.int32)
    ones, twos = [torch.ones(2), torch.ones(3)], [torch.full((2,), 2.0), torch.full((3,), 2.0)]
    out = [torch.empty(2), torch.empty(3)]
    applier(amp_C.multi_tensor_scale, buffer, [twos, out], 0.25)
    assert all(torch.equal(tensor, torch.full_like(tensor, 0.5)) for tensor in out)
    applier(amp_C.multi_tensor_axpby, buffer, [ones, twos, out], 3.0, 0.5, -1)
    assert all(torch.equal(tensor, torch.full_like(tensor, 4.0)) for tensor in out)
    norm, _ = applier(amp_C.multi_tensor_l2norm, buffer, [twos], False)
    torch.testing.assert_close(norm.reshape(()), torch.tensor(20.0).sqrt())
    assert buffer.item() == 0


# ---- apex.fp16_utils ----


@shows("companions-fp16-utils")
def test_a_network_is_converted_to_half_but_for_batchnorm():
    fp16_utils = companion("fp16_utils")
    net = fp16_utils.network_to_half(Net())
    types = {param.dtype for param in net.parameters()}
    assert types == {torch.float16, torch.float32}
    assert fp16_utils.convert_network(Net(), torch.float16).norm.weight.dtype is torch.float32
    assert fp16_utils.BN_convert_float(Net().half()).norm.weight.dtype is torch.float32
    assert fp16_utils.FP16Model(Net().eval())(X).dtype is torch.float16


@shows("companions-fp16-utils")
@pytest.mark.parametrize("flat", [False, True])
def test_masters_are_kept_by_hand(flat):
    fp16_utils = companion("fp16_utils")
    net = nn.Linear(4, 2).half()
    model, masters = fp16_utils.prep_param_lists(net, flat_master=flat)
    optimizer = torch.optim.SGD(masters, lr=0.5)
    net(X.half()).float().sum().backward()
    fp16_utils.model_grads_to_master_grads(model, masters, flat_master=flat)
    before = [param.detach().float() for param in net.parameters()]
    optimizer.step()
    fp16_utils.master_params_to_model_params(model, masters, flat_master=flat)
    for param, old in zip(net.parameters(), before, strict=True):
        assert torch.equal(param, (old - 0.5 * param.grad.float()).half())


@shows("companions-fp16-utils")
@pytest.mark.parametrize(
    "options", [{}, {"static_loss_scale": 64.0}, {"dynamic_loss_scale": True, "verbose": False}], ids=str
)
def test_fp16_optimizer_trains_a_half_model_clips_and_resumes(options):
    fp16_utils = companion("fp16_utils")
    net = nn.Linear(4, 2).half()
    optimizer = fp16_utils.FP16_Optimizer(torch.optim.SGD(net.parameters(), lr=0.1), **options)
    before = copy_of(net)
    optimizer.zero_grad()
    optimizer.backward(net(X.half()).float().pow(2).mean() * 2.0**-8, update_master_grads=False)
    optimizer.update_master_grads()
    assert optimizer.clip_master_grads(1.0) >= 0
    optimizer.step()
    assert not is_same(copy_of(net), before)
    optimizer.load_state_dict(optimizer.state_dict())


@shows("companions-fp16-utils")
def test_the_loss_scalers_have_a_scale_to_read():
    fp16_utils = companion("fp16_utils")
    assert fp16_utils.LossScaler(128.0).loss_scale == 128.0
    scaler = fp16_utils.DynamicLossScaler(init_scale=2.0**10, scale_factor=2.0, scale_window=1)
    scaler.update_scale(True)
    assert scaler.loss_scale == 2.0**9
