"""Patched functions on a CPU against torch.autocast's CUDA rules on fake tensors, and casts by hand."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import ampatch as amp
from helpers import torch_is_before

pytestmark = pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")

FULL = torch.float32
LEVELS = {"O1": torch.float16, "O4": torch.bfloat16}

# What the arguments are cast to: stated here by hand, apart from the tables.
LOWER, FP32, PROMOTE, NATIVE = "lower", "fp32", "promote", "native"


class Make:
    """Makes the arguments of a call, alike in every run: tensors of `dtypes` in turn.

    `then` casts them once more, which is the cast by hand. On the fake device they have no values.
    """

    def __init__(self, dtypes, then=None, device="cpu"):
        self.dtypes, self.then, self.device = itertools.cycle(dtypes), then, device
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, *shape, low=0.1, high=0.9):
        dtype = next(self.dtypes)
        if self.device != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        values = low + (high - low) * torch.rand(shape, generator=self.generator)
        values = values.to(dtype)
        return values if self.then is None else values.to(self.then)

    def ints(self, *shape, high):
        count = math.prod(shape)
        return (torch.arange(count, device=self.device) % high).reshape(shape)

    def signs(self, *shape):
        """Targets of 1 and -1, in float32 whatever the inputs are."""
        count = math.prod(shape)
        values = 1.0 - 2.0 * (torch.arange(count, device=self.device) % 2)
        return values.reshape(shape)


CALLS = {
    # name: (cast, call of a Make)
    "conv1d": (LOWER, lambda t: F.conv1d(t(1, 2, 5), t(3, 2, 3), t(3))),
    "conv2d": (LOWER, lambda t: F.conv2d(t(1, 2, 5, 5), t(3, 2, 3, 3), t(3))),
    "conv1d by keywords": (LOWER, lambda t: F.conv1d(input=t(1, 2, 5), weight=t(3, 2, 3), bias=t(3))),
    "conv3d": (LOWER, lambda t: F.conv3d(t(1, 2, 4, 4, 4), t(3, 2, 3, 3, 3), t(3))),
    "conv_transpose1d": (LOWER, lambda t: F.conv_transpose1d(t(1, 2, 5), t(2, 3, 3))),
    "conv_transpose2d": (LOWER, lambda t: F.conv_transpose2d(t(1, 2, 5, 5), t(2, 3, 3, 3))),
    "conv_transpose3d": (LOWER, lambda t: F.conv_transpose3d(t(1, 2, 3, 3, 3), t(2, 3, 2, 2, 2))),
    "conv_tbc": (LOWER, lambda t: F.conv_tbc(t(5, 1, 2), t(3, 2, 3), t(3))),
    "torch.conv2d": (LOWER, lambda t: torch.conv2d(t(1, 2, 5, 5), t(3, 2, 3, 3))),
    "linear": (LOWER, lambda t: F.linear(t(2, 3), t(4, 3), t(4))),
    "linear by keywords": (LOWER, lambda t: F.linear(input=t(2, 3), weight=t(4, 3), bias=t(4))),
    "prelu": (LOWER, lambda t: F.prelu(t(2, 3), t(1))),
    "sdpa": (LOWER, lambda t: F.scaled_dot_product_attention(t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8))),
    "matmul": (LOWER, lambda t: torch.matmul(t(2, 3), t(3, 4))),
    "a @ b": (LOWER, lambda t: t(2, 3) @ t(3, 4)),
    "Tensor.matmul": (LOWER, lambda t: t(2, 3).matmul(t(3, 4))),
    "linalg.matmul": (LOWER, lambda t: torch.linalg.matmul(t(2, 3), t(3, 4))),
    "mm": (LOWER, lambda t: torch.mm(t(2, 3), t(3, 4))),
    "mm by keywords": (LOWER, lambda t: torch.mm(input=t(2, 3), mat2=t(3, 4))),
    "Tensor.mm": (LOWER, lambda t: t(2, 3).mm(t(3, 4))),
    "bmm": (LOWER, lambda t: torch.bmm(t(2, 2, 3), t(2, 3, 4))),
    "mv": (LOWER, lambda t: torch.mv(t(2, 3), t(3))),
    "addmm": (LOWER, lambda t: torch.addmm(t(2, 4), t(2, 3), t(3, 4))),
    "addmv": (LOWER, lambda t: torch.addmv(t(2), t(2, 3), t(3))),
    "addr": (LOWER, lambda t: torch.addr(t(2, 3), t(2), t(3))),
    "addbmm": (LOWER, lambda t: torch.addbmm(t(2, 4), t(2, 2, 3), t(2, 3, 4))),
    "baddbmm": (LOWER, lambda t: torch.baddbmm(t(2, 2, 4), t(2, 2, 3), t(2, 3, 4), beta=0.5)),
    "chain_matmul": (LOWER, lambda t: torch.chain_matmul(t(2, 3), t(3, 4), t(4, 2))),
    "multi_dot": (LOWER, lambda t: torch.linalg.multi_dot([t(2, 3), t(3, 4), t(4, 2)])),
    "multi_dot of a tuple": (LOWER, lambda t: torch.linalg.multi_dot((t(2, 3), t(3, 4), t(4, 2)))),
    "einsum": (LOWER, lambda t: torch.einsum("ij,jk->ik", t(2, 3), t(3, 4))),
    "einsum of a list": (LOWER, lambda t: torch.einsum("ij,jk->ik", [t(2, 3), t(3, 4)])),
    "einsum by sublists": (LOWER, lambda t: torch.einsum(t(2, 3), [0, 1], t(3, 4), [1, 2], [0, 2])),
    "vecdot": (LOWER, lambda t: torch.linalg.vecdot(t(2, 3), t(2, 3))),
    "softmax": (FP32, lambda t: F.softmax(t(2, 3), dim=1)),
    "torch.softmax": (FP32, lambda t: torch.softmax(input=t(2, 3), dim=1)),
    "Tensor.softmax": (FP32, lambda t: t(2, 3).softmax(dim=-1)),
    "softmin": (FP32, lambda t: F.softmin(t(2, 3), dim=1)),
    "log_softmax": (FP32, lambda t: F.log_softmax(t(2, 3), dim=1)),
    "softplus": (FP32, lambda t: F.softplus(t(2, 3))),
    "layer_norm": (FP32, lambda t: F.layer_norm(t(2, 3), (3,), t(3), t(3))),
    "group_norm": (FP32, lambda t: F.group_norm(t(2, 4, 3), 2, t(4), t(4))),
    "rms_norm": (FP32, lambda t: F.rms_norm(t(2, 3), (3,), t(3))),
    "normalize": (FP32, lambda t: F.normalize(t(2, 3))),
    "local_response_norm": (FP32, lambda t: F.local_response_norm(t(1, 4, 3), 2)),
    "cosine_similarity": (FP32, lambda t: F.cosine_similarity(t(2, 3), t(2, 3))),
    "pdist": (FP32, lambda t: F.pdist(t(3, 4))),
    "cdist": (FP32, lambda t: torch.cdist(t(2, 3), t(4, 3))),
    "cross_entropy": (FP32, lambda t: F.cross_entropy(t(2, 3), t.ints(2, high=3))),
    "cross_entropy with weights": (
        FP32,
        lambda t: F.cross_entropy(t(2, 3), t.ints(2, high=3), weight=t(3), label_smoothing=0.1),
    ),
    "nll_loss": (FP32, lambda t: F.nll_loss(t(2, 3), t.ints(2, high=3))),
    "mse_loss": (FP32, lambda t: F.mse_loss(t(2, 3), t(2, 3))),
    "l1_loss": (FP32, lambda t: F.l1_loss(t(2, 3), t(2, 3))),
    "smooth_l1_loss": (FP32, lambda t: F.smooth_l1_loss(t(2, 3), t(2, 3))),
    "huber_loss": (FP32, lambda t: F.huber_loss(t(2, 3), t(2, 3))),
    "kl_div": (FP32, lambda t: F.kl_div(t(2, 3), t(2, 3), reduction="batchmean")),
    "poisson_nll_loss": (FP32, lambda t: F.poisson_nll_loss(t(2, 3), t(2, 3))),
    "bce_with_logits": (FP32, lambda t: F.binary_cross_entropy_with_logits(t(2, 3), t(2, 3))),
    "soft_margin_loss": (FP32, lambda t: F.soft_margin_loss(t(4), t.signs(4))),
    "hinge_embedding_loss": (FP32, lambda t: F.hinge_embedding_loss(t(4), t.signs(4))),
    "margin_ranking_loss": (FP32, lambda t: F.margin_ranking_loss(t(4), t(4), t.signs(4))),
    "multi_margin_loss": (FP32, lambda t: F.multi_margin_loss(t(2, 3), t.ints(2, high=3))),
    "cosine_embedding_loss": (FP32, lambda t: F.cosine_embedding_loss(t(2, 3), t(2, 3), t.signs(2))),
    "triplet_margin_loss": (FP32, lambda t: F.triplet_margin_loss(t(2, 3), t(2, 3), t(2, 3))),
    "interpolate nearest": (FP32, lambda t: F.interpolate(t(1, 1, 2, 2), scale_factor=2)),
    "interpolate bilinear": (FP32, lambda t: F.interpolate(t(1, 1, 2, 2), size=(4, 4), mode="bilinear")),
    "exp": (FP32, lambda t: torch.exp(t(3))),
    "Tensor.exp": (FP32, lambda t: t(3).exp()),
    "expm1": (FP32, lambda t: torch.expm1(t(3))),
    "log": (FP32, lambda t: torch.log(t(3))),
    "log1p": (FP32, lambda t: t(3).log1p()),
    "acos": (FP32, lambda t: torch.acos(t(3))),
    "tan": (FP32, lambda t: torch.tan(t(3))),
    "sinh": (FP32, lambda t: torch.sinh(t(3))),
    "erfinv": (FP32, lambda t: torch.erfinv(t(3))),
    "rsqrt": (FP32, lambda t: torch.rsqrt(t(3))),
    "reciprocal": (FP32, lambda t: torch.reciprocal(t(3))),
    "pow": (FP32, lambda t: torch.pow(t(3), 2)),
    "pow of two tensors": (FP32, lambda t: torch.pow(t(3), t(3))),
    "x ** 2": (FP32, lambda t: t(3) ** 2),
    "x ** y": (FP32, lambda t: t(3) ** t(3)),
    "2 ** x": (FP32, lambda t: 2 ** t(3)),
    "1 / x": (FP32, lambda t: 1 / t(3)),
    "square": (FP32, lambda t: t(3).square()),
    "sum": (FP32, lambda t: torch.sum(t(2, 3))),
    "Tensor.sum": (FP32, lambda t: t(2, 3).sum(dim=1, keepdim=True)),
    "prod": (FP32, lambda t: t(2, 3).prod()),
    "cumsum": (FP32, lambda t: torch.cumsum(t(2, 3), 1)),
    "cumprod": (FP32, lambda t: t(2, 3).cumprod(dim=0)),
    "logsumexp": (FP32, lambda t: torch.logsumexp(t(2, 3), 1)),
    "norm": (FP32, lambda t: torch.norm(t(2, 3))),
    "Tensor.norm": (FP32, lambda t: t(2, 3).norm(dim=1)),
    "linalg.norm": (FP32, lambda t: torch.linalg.norm(t(2, 3))),
    "linalg.vector_norm": (FP32, lambda t: torch.linalg.vector_norm(t(2, 3), 1)),
    "linalg.matrix_norm": (FP32, lambda t: torch.linalg.matrix_norm(t(2, 3))),
    "dist": (FP32, lambda t: torch.dist(t(3), t(3))),
    "renorm": (FP32, lambda t: torch.renorm(t(2, 3), 2, 0, 0.5)),
    "bilinear": (PROMOTE, lambda t: F.bilinear(t(2, 3), t(2, 4), t(5, 3, 4), t(5))),
    "cross": (PROMOTE, lambda t: torch.cross(t(2, 3), t(2, 3), dim=1)),
    "dot": (PROMOTE, lambda t: torch.dot(input=t(3), tensor=t(3))),
    "tensordot": (PROMOTE, lambda t: torch.tensordot(t(2, 3), t(3, 4), dims=1)),
    "scatter_add": (PROMOTE, lambda t: t(4).scatter_add(0, t.ints(4, high=2), t(4))),
    "index_put": (PROMOTE, lambda t: t(4).index_put((t.ints(2, high=4),), t(2))),
    "add": (NATIVE, lambda t: t(3) + t(3)),
    "mul": (NATIVE, lambda t: torch.mul(t(3), t(3))),
    "div": (NATIVE, lambda t: t(3) / t(3)),
    "cat": (NATIVE, lambda t: torch.cat([t(2, 3), t(2, 3)])),
    "stack": (NATIVE, lambda t: torch.stack([t(2, 3), t(2, 3)])),
    "where": (NATIVE, lambda t: torch.where(t.ints(3, high=2) > 0, t(3), t(3))),
    "maximum": (NATIVE, lambda t: torch.maximum(t(3), t(3))),
    "addcmul": (NATIVE, lambda t: torch.addcmul(t(3), t(3), t(3))),
    "addcdiv": (NATIVE, lambda t: torch.addcdiv(t(3), t(3), t(3))),
    "atan2": (NATIVE, lambda t: torch.atan2(t(3), t(3))),
    "relu": (NATIVE, lambda t: F.relu(t(3))),
    "gelu": (NATIVE, lambda t: F.gelu(t(3))),
    "sigmoid": (NATIVE, lambda t: torch.sigmoid(t(3))),
    "mean": (NATIVE, lambda t: t(2, 3).mean()),
    "max_pool2d": (NATIVE, lambda t: F.max_pool2d(t(1, 1, 4, 4), 2)),
    "batch_norm": (NATIVE, lambda t: F.batch_norm(t(2, 3), torch.zeros(3), torch.ones(3))),
    "embedding": (NATIVE, lambda t: F.embedding(t.ints(3, high=2), t(2, 4))),
    "comparison": (NATIVE, lambda t: t(3) < t(3)),
    "argmax": (NATIVE, lambda t: t(2, 3).argmax()),
}

# Autocast refuses mixed types here, or has no rule; the cast by hand is the oracle.
BEYOND_AUTOCAST = {
    "vdot": (PROMOTE, lambda t: torch.vdot(t(3), t(3))),
    "inner": (PROMOTE, lambda t: torch.inner(t(2, 3), t(4, 3))),
    "lerp": (PROMOTE, lambda t: torch.lerp(t(3), t(3), 0.5)),
    "index_add": (PROMOTE, lambda t: t(4).index_add(0, t.ints(2, high=4), t(2))),
    "index_copy": (PROMOTE, lambda t: torch.index_copy(t(4), 0, t.ints(2, high=4), t(2))),
    "scatter": (PROMOTE, lambda t: t(4).scatter(0, t.ints(2, high=4), t(2))),
    "scatter_reduce": (PROMOTE, lambda t: t(4).scatter_reduce(0, t.ints(2, high=4), t(2), "amax")),
    "masked_scatter": (PROMOTE, lambda t: t(4).masked_scatter(t.ints(4, high=2) > 0, t(4))),
    "grid_sample": (
        PROMOTE,
        lambda t: F.grid_sample(t(1, 1, 3, 3), t(1, 2, 2, 2), align_corners=False),
    ),
    "embedding_bag": (
        PROMOTE,
        lambda t: F.embedding_bag(t.ints(2, 2, high=3), t(3, 4), per_sample_weights=t(2, 2), mode="sum"),
    ),
    "ctc_loss": (
        FP32,
        lambda t: F.ctc_loss(t(4, 1, 3).log(), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])),
    ),
    "gaussian_nll_loss": (FP32, lambda t: F.gaussian_nll_loss(t(2, 3), t(2, 3), t(2, 3))),
    "pairwise_distance": (FP32, lambda t: F.pairwise_distance(t(2, 3), t(2, 3))),
    "fft": (FP32, lambda t: torch.fft.rfft(t(6))),
    "stft": (
        FP32,
        lambda t: torch.stft(t(16), n_fft=4, window=t(4), return_complex=True),
    ),
    "trapezoid": (FP32, lambda t: torch.trapezoid(t(2, 3))),
    "sum_to_size": (FP32, lambda t: t(2, 3).sum_to_size(1, 3)),
    "special.log_softmax": (FP32, lambda t: torch.special.log_softmax(t(2, 3), 1)),
}
EVERY_CALL = {**CALLS, **BEYOND_AUTOCAST}


def input_dtypes(half):
    return {
        "float32": (FULL,),
        "half": (half,),
        "float32 first": (FULL, half),
        "half first": (half, FULL),
    }


def dtypes_of(result):
    return [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def ask_autocast(call, dtypes, half):
    """The dtypes that torch.autocast gives on a CUDA device, which need not be there."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", half)
    try:
        with FakeTensorMode(), torch.device("cuda"):
            return dtypes_of(call(Make(dtypes, device="cuda")))
    except RuntimeError as error:
        if "CUDA driver version is insufficient" not in str(error):
            raise
        pytest.skip("a torch built for CUDA asks the driver for the kernel, and there is none here")
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()


def open_session(opt_level, **kwargs):
    amp.initialize(nn.Linear(1, 1), opt_level=opt_level, verbosity=0, **kwargs)


@pytest.mark.exhaustive(keep=24)
@pytest.mark.parametrize("opt_level", LEVELS)
@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_dtypes_that_autocast_gives(name, opt_level):
    if name == "rms_norm" and torch_is_before("2.13"):
        pytest.skip("autocast knows rms_norm from torch 2.13 on")
    half, (_, call) = LEVELS[opt_level], CALLS[name]
    inputs = input_dtypes(half)
    expected = {kind: ask_autocast(call, dtypes, half) for kind, dtypes in inputs.items()}
    open_session(opt_level)
    found = {kind: dtypes_of(call(Make(dtypes))) for kind, dtypes in inputs.items()}
    assert found == expected


def assert_same(found, expected):
    """Same dtypes, same bits."""
    for mine, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs)


def cast_by_hand(cast, dtypes, half):
    """The dtype that every floating argument is brought to; None leaves them."""
    if cast == LOWER:
        return half
    if cast == FP32 or (cast == PROMOTE and FULL in dtypes):
        return FULL
    return None


@pytest.mark.exhaustive(keep=24)
@pytest.mark.parametrize("name", EVERY_CALL)
def test_results_are_those_of_the_function_on_arguments_cast_by_hand(name):
    half = torch.bfloat16
    cast, call = EVERY_CALL[name]
    inputs = input_dtypes(half)
    expected = {
        kind: call(Make(dtypes, then=cast_by_hand(cast, dtypes, half))) for kind, dtypes in inputs.items()
    }
    open_session("O4")
    for kind, dtypes in inputs.items():
        assert_same(call(Make(dtypes)), expected[kind])


@pytest.mark.exhaustive(keep=24)
@pytest.mark.parametrize("name", [name for name, (cast, _) in EVERY_CALL.items() if cast != NATIVE])
def test_float64_arguments_give_what_they_give_without_ampatch(name):
    _, call = EVERY_CALL[name]
    dtypes = (torch.float64,)
    try:
        expected = call(Make(dtypes))
    except RuntimeError as error:
        pytest.skip(f"torch itself refuses: {error}")
    open_session("O4")
    assert_same(call(Make(dtypes)), expected)


@pytest.mark.parametrize("name", ["linear", "einsum", "softmax", "x ** 2", "cross", "a @ b"])
def test_with_casts_disabled_results_are_those_of_plain_torch(name):
    _, call = EVERY_CALL[name]
    expected = call(Make((FULL,)))
    open_session("O4")
    with amp.disable_casts():
        assert_same(call(Make((FULL,))), expected)


NATIVE_PLACES = [
    (torch, "add"),
    (torch, "mul"),
    (torch, "div"),
    (torch, "cat"),
    (torch, "stack"),
    (torch, "where"),
    (torch, "addcmul"),
    (torch, "addcdiv"),
    (torch, "atan2"),
    (torch, "eq"),
    (torch, "lt"),
    (torch, "maximum"),
    (F, "embedding"),
    (F, "relu"),
    (torch.Tensor, "__add__"),
    (torch.Tensor, "__mul__"),
    (torch.Tensor, "__truediv__"),
    (torch.Tensor, "add_"),
    (torch.Tensor, "copy_"),
]


@pytest.mark.parametrize(("place", "name"), NATIVE_PLACES, ids=lambda item: getattr(item, "__name__", item))
def test_a_function_that_torch_promotes_itself_is_not_wrapped(place, name):
    before = getattr(place, name)
    open_session("O1")
    assert getattr(place, name) is before


# ---- Gradients, against torch.autocast on the CPU ----


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.lstm = nn.Linear(6, 8), nn.LSTM(8, 8)

    def forward(self, x):
        return self.lstm(self.into(x))[0]


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)), (8, 6)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Residual(), nn.Flatten(), nn.LazyLinear(3)),
        (4, 3, 6, 6),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True),
        (2, 5, 8),
    ),
    "lstm": (Recurrent, (5, 2, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_float32_and_agree_with_autocast(name):
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    model(x)  # the lazy layer
    model.zero_grad()

    def backward():
        output = model(x)
        F.mse_loss(output.float(), torch.ones(output.shape)).backward()
        grads = {key: param.grad for key, param in model.named_parameters()}
        model.zero_grad()
        return grads

    with torch.autocast("cpu", torch.bfloat16):
        expected = backward()
    amp.initialize(model, opt_level="O4", verbosity=0)
    found = backward()
    for key, grad in found.items():
        assert grad.dtype is FULL
        # bfloat16 keeps 8 bits (2**-8 = 0.004 a rounding), and the two lists differ in a few ops,
        # so that results part by some roundings; relative to the largest gradient of the tensor.
        scale = expected[key].abs().max().clamp(min=1e-3)
        assert (grad - expected[key]).abs().max() / scale < 0.05, key


def test_gradients_of_an_input_have_its_dtype():
    open_session("O4")
    full, half = torch.randn(2, 3, requires_grad=True), torch.randn(3, 4, dtype=torch.bfloat16)
    half.requires_grad_()
    torch.mm(full, half).sum().backward()
    assert (full.grad.dtype, half.grad.dtype) == (FULL, torch.bfloat16)
