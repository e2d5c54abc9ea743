"""On a real GPU: what a CPU cannot show, each level beside torch's own or a run of plain torch."""

import contextlib
import io
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils.checkpoint import checkpoint

import ampatch as amp
from helpers import scaled_backward
from nets import EVERY_LEVEL

DEVICE = "cuda"
INF = float("inf")
HALF = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
OPTIMIZERS = {
    "sgd": lambda params, **how: torch.optim.SGD(params, lr=0.05, momentum=0.9, **how),
    "adamw": lambda params, **how: torch.optim.AdamW(params, lr=3e-3, **how),
}
FUSED, FOREACH, PLAIN = {"fused": True}, {"foreach": True}, {"foreach": False}

pytestmark = pytest.mark.cuda


class Conv(nn.Module):
    shape = (32, 3, 16, 16)

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, 2, bias=False), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 32, 3, 2), nn.Linear(288, 10)

    def forward(self, x):
        return self.head(torch.relu(self.second(torch.relu(self.norm(self.first(x))))).flatten(1))


class Transformer(nn.Module):
    shape = (32, 12, 16)

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.first, self.head = nn.Linear(16, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.body(self.first(x)).mean(1))


class Recurrent(nn.Module):
    shape = (32, 12, 16)

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(16, 32, 2, batch_first=True), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


NETS = [Conv, Transformer, Recurrent]


def make(net, optimizer="adamw", **how):
    torch.manual_seed(0)
    model = net().to(DEVICE)
    data = torch.randn(net.shape, device=DEVICE), torch.randint(10, net.shape[:1], device=DEVICE)
    return model, OPTIMIZERS[optimizer](model.parameters(), **how), data


def train_step(model, optimizer, data, factor=1.0):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data[0]).float(), data[1]) * factor
    scaled_backward(loss, optimizer)
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_every_level_learns(level, net):
    model, optimizer, data = make(net, "sgd" if level == "O3" else "adamw", **FUSED)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    losses = torch.stack([train_step(model, optimizer, data) for _ in range(60)]).tolist()
    assert all(map(math.isfinite, losses))
    assert losses[-1] < (1.0 if level == "O3" else 0.6) * losses[0]


@pytest.mark.parametrize("how", [FUSED, FOREACH, PLAIN], ids=["fused", "foreach", "plain"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_scale_skips_and_weights_are_those_of_autocast_and_grad_scaler(kind, how):
    # Under GradScaler fused SGD makes its momentum of uninitialized memory where its first step overflows.
    overflows = {4, 5, 13} if (kind, how) == ("sgd", FUSED) else {0, 4, 5, 13}
    factors = [torch.tensor(INF if step in overflows else 1.0, device=DEVICE) for step in range(20)]
    model, optimizer, (x, y) = make(Conv, kind, **how)
    scaler = torch.amp.GradScaler(DEVICE, growth_interval=3)
    expected = []
    for factor in factors:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        expected.append(scaler.get_scale())
    other, optimizer, data = make(Conv, kind, **how)
    rule = amp.DynamicLossScale(growth_interval=3, max_scale=None)
    amp.initialize(other, optimizer, opt_level="O1", loss_scale=rule, verbosity=0)
    found, skipped = [], set()
    for step, factor in enumerate(factors):
        train_step(other, optimizer, data, factor)
        found.append(amp.get_loss_scale())
        skipped |= {step} if amp.step_was_skipped(optimizer) else set()
    assert (found, skipped) == (expected, overflows)
    for one, two in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-2)  # 20 float16 steps, atomics in convolutions


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflows_are_told_without_a_wait_each_once_and_in_order(level, capsys):
    model, optimizer, data = make(Conv, "adamw", **FUSED)
    amp.initialize(model, optimizer, opt_level=level, verbosity=1)
    for step in range(12):
        train_step(model, optimizer, data, torch.tensor(INF if step in (2, 3, 7) else 1.0, device=DEVICE))
    torch.cuda.synchronize()
    train_step(model, optimizer, data)
    lines = [line for line in capsys.readouterr().out.splitlines() if "overflow" in line]
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["32768.0", "16384.0", "8192.0"]


@pytest.mark.filterwarnings(
    "ignore:.*defaults to a non-deterministic algorithm"
)  # attention, of so few numbers
@pytest.mark.parametrize(("kind", "how"), [("adamw", FUSED), ("sgd", FOREACH)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("level", ["O0", *HALF])
def test_a_resumed_run_is_bit_equal(level, kind, how):
    def start(saved=None):
        model, optimizer, data = make(Transformer, kind, **how)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            amp.load_state_dict(saved["amp"])
        return model, optimizer, data

    def run(model, optimizer, data, count):
        for _ in range(count):
            train_step(model, optimizer, data)
        weights = [param.detach().clone() for param in amp.master_params(optimizer)]
        return weights, amp.state_dict()

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model, optimizer, data = start()
        run(model, optimizer, data, 5)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        expected, scales = run(model, optimizer, data, 5)
        amp.uninitialize()
        buffer.seek(0)
        found, others = run(*start(torch.load(buffer)), 5)
    finally:
        torch.use_deterministic_algorithms(False)
    assert others == scales
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # by inductor itself
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # inductor's first
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("level", HALF)
def test_a_compiled_model_trains_as_an_eager_one(level, mode):
    losses = []
    for is_compiled in (False, True):
        model, optimizer, data = make(Transformer, "sgd", **FUSED)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        called = torch.compile(model, mode=mode) if is_compiled else model
        losses.append(torch.stack([train_step(called, optimizer, data).clone() for _ in range(6)]))
        amp.uninitialize()
    torch._dynamo.reset()
    torch.testing.assert_close(losses[1], losses[0], rtol=0.1, atol=0)


def call_listed():
    """Runs what torch's own tests run under autocast; returns the type of each result that comes out."""
    lists, found = AutocastTestLists(torch.device(DEVICE)), {}
    for kind in ("torch_fp16", "torch_fp32", "nn_fp16", "nn_fp32", "torch_need_autocast_promote"):
        place = F if kind.startswith("nn_") else torch
        for name, args, *rest in getattr(lists, kind):
            if not name.startswith(("_", "cudnn_", "einsum")) and hasattr(place, name) and True not in rest:
                kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
                try:
                    result = getattr(place, name)(*args, **kwargs)
                except RuntimeError:  # bfloat16's autocast takes no float16
                    continue
                found[kind, name] = (result[0] if isinstance(result, tuple) else result).dtype
    return found


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.filterwarnings("ignore:Using torch.cross without")
@pytest.mark.parametrize(("level", "half"), [("O1", torch.float16), ("O4", torch.bfloat16)])
def test_torchs_own_calls_have_the_types_that_autocast_gives_them(level, half):
    with torch.autocast(DEVICE, half):
        expected = call_listed()
    amp.initialize(nn.Linear(2, 2).to(DEVICE), opt_level=level, verbosity=0)
    found = call_listed()
    assert len(expected) > 60
    assert {key: (found[key], value) for key, value in expected.items() if found[key] != value} == {}


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_checkpointing_with_dropout_has_the_gradients_of_a_run_without(level):
    class Net(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.first, self.second, self.reentrant = nn.Linear(32, 32), nn.Linear(32, 4), reentrant

        def part(self, x):
            return F.dropout(torch.relu(self.first(x)), 0.3)

        def forward(self, x):
            is_plain = self.reentrant is None
            hidden = self.part(x) if is_plain else checkpoint(self.part, x, use_reentrant=self.reentrant)
            return self.second(hidden)

    grads = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = Net(reentrant).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 32, device=DEVICE, requires_grad=True)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
        torch.manual_seed(3)
        scaled_backward(model(x).float().pow(2).mean(), optimizer)
        grads.append([param.grad.clone() for param in amp.master_params(optimizer)])
        amp.uninitialize()
    for others in grads[1:]:
        assert all(torch.equal(one, two) for one, two in zip(others, grads[0], strict=True))


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize(
    "way", [F.cross_entropy, lambda out, y: F.softmax(out, -1).sum()], ids=["loss", "softmax"]
)
def test_a_softmax_over_many_classes_takes_no_more_memory_than_under_autocast(level, way):
    layer, x = nn.Linear(64, 8192).to(DEVICE), torch.randn(1024, 64, device=DEVICE)
    y = torch.randint(8192, (1024,), device=DEVICE)

    def measure(context):
        for _ in range(2):  # the first time a library takes memory of its own
            layer.zero_grad()
            amp.clear_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with context:
                out = layer(x)
                loss = way(out, y)
                del out
            loss.backward()
        return torch.cuda.max_memory_allocated() - before

    expected = measure(torch.autocast(DEVICE, HALF[level]))
    amp.initialize(layer, opt_level=level, verbosity=0)
    assert measure(contextlib.nullcontext()) <= expected + 2**21  # half of the logits are 16 MiB


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_attention_takes_the_flash_kernel(level):
    amp.initialize(nn.Linear(2, 2).to(DEVICE), opt_level=level, verbosity=0)
    query = torch.randn(2, 4, 128, 64, device=DEVICE, requires_grad=True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        result = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        result.float().sum().backward()
    assert result.dtype is HALF[level]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_channels_last_after_initialize_trains_as_contiguous(level, fused):
    losses = []
    for is_last in (False, True):
        model, optimizer, data = make(Conv, "adamw", fused=fused and is_last)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if is_last:
            model.to(memory_format=torch.channels_last)
        losses.append(torch.stack([train_step(model, optimizer, data) for _ in range(15)]))
        amp.uninitialize()
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0.1)
