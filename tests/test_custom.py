"""Functions that no single cast fits, against what they are made of and against float32."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ampatch as amp
from apex_rows import shows
from helpers import needs_torch
from patched import FULL, HALF, LEVELS, full, half, open_session

PLAIN_INVERSE = torch.linalg.inv


@pytest.mark.parametrize(("n", "dtype"), [(0, FULL), (1, FULL), (-1, FULL), (2, HALF), (5, HALF), (-2, HALF)])
def test_a_power_of_a_matrix_multiplies_in_half_and_inverts_in_float32(n, dtype):
    x = torch.eye(3) + 0.1 * full(3, 3)
    base = PLAIN_INVERSE(x) if n < 0 else x
    expected = torch.eye(3)
    for _ in range(abs(n)):
        expected = expected @ base
    open_session()
    for place in (torch, torch.linalg, Tensor):
        found = place.matrix_power(x, n)
        assert found.dtype is dtype
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_a_power_of_a_matrix_takes_keywords_and_half_matrices():
    open_session()
    x = (torch.eye(3) * 2).to(HALF)
    assert torch.equal(torch.matrix_power(input=x, n=3), x * 4)
    assert torch.equal(torch.linalg.matrix_power(A=x, n=-1), (x / 4).float())
    with pytest.raises(TypeError):
        torch.matrix_power([[2.0]], 2)
    with pytest.raises(TypeError):
        torch.matrix_power(x, 2, 2)


@pytest.mark.parametrize(
    ("dtype", "n"),
    [(torch.float64, -3), *((dtype, n) for dtype in (HALF, torch.float64) for n in (2, 3, 6))],
)
def test_a_power_of_a_matrix_is_torchs_of_a_half_or_a_float64_matrix_bit_for_bit(dtype, n):
    x = torch.rand(16, 16, dtype=torch.float64)
    expected = torch.linalg.matrix_power(x.to(dtype), n)
    open_session()
    assert torch.equal(torch.linalg.matrix_power(x if dtype is torch.float64 else x.float(), n), expected)


@pytest.mark.exhaustive(keep=4)
@pytest.mark.parametrize("equation", ["i,j->ij", "i , j", "...,f->...f", "i,i->i"])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_angles_of_positions_that_an_einsum_multiplies_are_those_of_float32(opt_level, equation):
    positions, frequencies = torch.arange(2000.0), 1e4 ** -torch.linspace(0, 1, 2000)
    expected = torch.einsum(equation, positions, frequencies)
    open_session(opt_level=opt_level)
    assert torch.equal(torch.einsum(equation, positions, frequencies), expected)
    assert torch.einsum("i,i->", frequencies, frequencies).dtype is LEVELS[opt_level]


def test_what_a_cast_would_not_change_is_not_tried_again(monkeypatch):
    calls, original = [], torch.linalg.inv

    def inv(x):
        calls.append(x.dtype)
        return original(x)

    monkeypatch.setattr(torch.linalg, "inv", inv)
    open_session()
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(torch.zeros(2, 2))
    assert calls == [FULL]
    assert torch.linalg.inv(torch.eye(2, dtype=HALF)).dtype is FULL
    assert calls == [FULL, HALF, FULL]
    amp.uninitialize()


def test_a_sum_to_a_size_is_float32_and_without_a_sum_self_comes_back():
    open_session()
    x = half(2, 3)
    expected = x.float().sum_to_size(1, 3)
    for found in (x.sum_to_size(1, 3), x.sum_to_size((1, 3)), x.sum_to_size(size=(1, 3))):
        assert torch.equal(found, expected)
    assert x.sum_to_size(2, 3) is x.sum_to_size((2, 3)) is x.sum_to_size(size=(2, 3)) is x
    with pytest.raises(TypeError, match="missing 1 required positional"):  # torch's own error
        x.sum_to_size()


def test_a_random_relu_writes_into_its_input_only_where_that_is_asked_for():
    open_session(opt_level="O1")
    x = -torch.ones(3, dtype=torch.float16)
    assert F.rrelu(x) is not x
    assert (x == -1).all()
    assert F.rrelu(x, inplace=True) is x
    assert (x > -0.5).all()


def test_a_response_is_normalized_in_float32_and_an_empty_one_comes_back():
    x, empty = half(1, 4, 3) * 400, half(0, 4, 3)
    expected = F.local_response_norm(x.float(), 2)
    open_session(opt_level="O4")
    assert torch.equal(F.local_response_norm(x, 2), expected)
    assert F.local_response_norm(empty, 2) is empty


@needs_torch("2.13", "F.linear_cross_entropy")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("types", [(FULL, FULL), (HALF, HALF), (HALF, FULL), (FULL, HALF)], ids=str)
def test_a_loss_in_chunks_takes_the_widest_type_and_computes_what_it_does_unpatched(reduction, types):
    def loss_and_gradients(x, weight):
        x, weight = (tensor.clone().requires_grad_() for tensor in (x, weight))
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2)
        loss = F.linear_cross_entropy(x, weight, target, reduction=reduction, options=options)
        return loss, *torch.autograd.grad(loss.sum(), (x, weight))

    x, weight, target = full(5, 3).to(types[0]), full(4, 3).to(types[1]), torch.arange(5) % 4
    widest = FULL if FULL in types else HALF
    expected = loss_and_gradients(x.to(widest), weight.to(widest))
    open_session()
    found = loss_and_gradients(x, weight)
    assert torch.equal(found[0], expected[0])
    for grad, tensor, other in zip(found[1:], (x, weight), expected[1:], strict=True):
        assert grad.dtype is tensor.dtype
        assert torch.equal(grad, other.to(tensor.dtype))


REFUSED = {
    "inv": lambda x: torch.linalg.inv(x),
    "Tensor.inverse": lambda x: x.inverse(),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "solve of mixed types": lambda x: torch.linalg.solve(x, torch.ones(3)),
    "solve by keywords": lambda x: torch.linalg.solve(A=x, B=x),
    "quantile": lambda x: torch.quantile(x, 0.5),
    "erfcx": lambda x: torch.special.erfcx(x),
    "rfft": lambda x: torch.fft.rfft(x),
    "complex": lambda x: torch.complex(x, x),
    "fake quantization": lambda x: torch.fused_moving_avg_obs_fake_quant(
        *(x, torch.tensor([1]), torch.tensor([1]), torch.zeros(1), torch.ones(1)),
        *(torch.tensor([0.1]), torch.tensor([0]).int(), 0.01, 0, 255, 0, False, False),
    ),
    "sparse.mm": lambda x: torch.sparse.mm(torch.eye(3).to_sparse_csr(), x),
}


@pytest.mark.exhaustive(keep=5)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_of_a_half_tensor_runs_in_float32(name):
    call, x = REFUSED[name], (torch.eye(3) + 0.1 * full(3, 3)).to(HALF)
    expected = call(x.float())
    open_session()
    with amp.disable_casts(), pytest.raises(RuntimeError):
        call(x)
    assert torch.equal(call(x), expected)


FILL = {
    "method": lambda x, mask, value: x.masked_fill(mask, value),
    "function": lambda x, mask, value: torch.masked_fill(input=x, mask=mask, value=value),
    "tensor": lambda x, mask, value: x.masked_fill(mask, torch.tensor(value)),
}


@pytest.mark.parametrize("fill", FILL.values(), ids=FILL)
def test_a_value_that_float16_cannot_hold_fills_a_float32_tensor(fill):
    mask = torch.ones(3, 3).triu(1) > 0
    x, weight = torch.rand(3, 4), torch.rand(3, 4, requires_grad=True)
    open_session(opt_level="O1")
    scores = x @ weight.T
    assert fill(scores, mask, -1e4).dtype is torch.float16
    filled = fill(scores, mask, -1e9)
    assert torch.equal(filled, fill(scores.float(), mask, -1e9))
    filled.softmax(-1)[:, 0].sum().backward()
    assert weight.grad.isfinite().all()
    assert weight.grad.any()


def test_an_error_of_the_callers_is_the_one_that_torch_raises():
    open_session()
    with pytest.raises(RuntimeError, match="must be batches of square matrices"):
        torch.linalg.inv(half(2, 3))


def test_what_runs_out_of_memory_is_not_tried_again_in_float32(monkeypatch):
    tried = []

    def run_out(x):
        tried.append(x.dtype)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.linalg, "inv", run_out)
    open_session()
    with pytest.raises(torch.OutOfMemoryError):
        torch.linalg.inv(half(2, 2))
    assert tried == [HALF]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_what_torch_takes_of_a_half_tensor_runs_in_half():
    open_session(opt_level="O1")
    x = torch.ones(3, 2, dtype=torch.float16)
    torch.view_as_complex(x).zero_()
    assert not x.any()


OF_COMPLEX_HALF = {
    "irfft": lambda x: torch.fft.irfft(x, n=6, dim=1),
    "ifftn": lambda x: torch.fft.ifftn(x).abs(),
    "det": lambda x: torch.linalg.det(x).real,
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("call", OF_COMPLEX_HALF.values(), ids=OF_COMPLEX_HALF)
def test_what_has_no_kernel_for_complex_half_runs_in_complex64_with_its_gradients(call):
    def run(dtype):
        x = leaf.to(dtype)
        result = call(x)
        return result, torch.autograd.grad(result.sum(), leaf)[0]

    half = torch.view_as_complex(torch.rand(4, 4, 2).half())
    leaf = half.to(torch.complex64).requires_grad_()
    try:
        expected = run(torch.complex64)
    except RuntimeError as error:  # before any patch
        if "MKL FFT error" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__} fails by itself on this processor: {error}")
    open_session(opt_level="O1")
    result, grad = run(torch.complex32)
    assert torch.equal(result, expected[0])
    assert torch.equal(grad, expected[1].to(torch.complex32).to(torch.complex64))


def test_a_spectrum_of_a_product_comes_back_from_complex_numbers():
    x, weight = full(3, 4), full(4, 4)
    open_session(opt_level="O1")
    product = x @ weight
    pairs = torch.complex(product, torch.zeros_like(product))
    assert pairs.dtype is torch.complex64
    assert torch.equal(torch.fft.ifft(torch.fft.fft(pairs)).real.half(), product)


# ---- Tensor.cpu ----


@shows("o1-cpu")
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_half_tensor_on_the_cpu_is_float32_and_goes_to_numpy(opt_level):
    x = torch.rand(3, 4).to(LEVELS[opt_level])
    open_session(opt_level=opt_level)
    assert x.cpu().dtype is Tensor.cpu(x).dtype is FULL
    assert torch.equal(torch.from_numpy(x.cpu().numpy()), x.float())
    with amp.disable_casts():
        assert x.cpu() is x
    amp.uninitialize()
    assert x.cpu() is x


@pytest.mark.parametrize("dtype", [FULL, torch.float64, torch.int64, torch.bool, torch.complex64], ids=str)
def test_a_tensor_that_is_not_half_is_the_same_object_on_the_cpu(dtype):
    x = torch.ones(3).to(dtype)
    open_session()
    for one in (x, torch.nn.Parameter(x, requires_grad=False)):
        assert one.cpu() is one


def test_a_half_tensor_of_a_device_without_a_model_stays_half_on_the_cpu():
    x = half(3)
    with FakeTensorMode() as mode:
        amp.initialize(torch.nn.LayerNorm(1, device="cuda"), opt_level="O4", verbosity=0)
        assert mode.from_tensor(x).cpu().dtype is HALF
        assert torch.ones(3, dtype=HALF, device="cuda").cpu().dtype is FULL
    assert x.cpu() is x


def test_a_gradient_goes_back_from_the_cpu_in_the_type_of_the_tensor():
    x, weight = half(3).requires_grad_(), full(3)
    open_session()
    (x.cpu() * weight).sum().backward()
    assert x.grad.dtype is HALF
    assert torch.equal(x.grad, weight.to(HALF))


def test_writing_into_the_copy_of_a_half_weight_changes_no_later_cast():
    weight = torch.nn.Parameter(half(3))
    expected = weight.detach().float()
    open_session()
    with torch.no_grad():
        weight.cpu().fill_(7)
        assert torch.equal(weight.cpu(), expected)
        assert torch.equal(torch.exp(weight), expected.exp())


def test_what_save_on_cpu_keeps_has_the_type_that_backward_needs():
    def gradient():
        leaf = x.detach().requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            result = (leaf * leaf).sum(dtype=HALF)
        result.backward()
        return leaf.grad

    x = half(3)
    expected = gradient()
    open_session()
    assert torch.equal(gradient(), expected)
    assert gradient().dtype is HALF


@pytest.mark.parametrize(
    ("caller", "dtype"),
    [
        ("torch", HALF),
        ("torch.distributed.checkpoint.filesystem", HALF),
        ("ampatch.steps.masters", HALF),
        ("torch.utils.tensorboard._convert_np", FULL),  # calls numpy() on it
        ("torchvision.utils", FULL),
        ("__main__", FULL),
        (None, FULL),
    ],
)
def test_a_call_of_torchs_own_code_keeps_the_type(caller, dtype):
    names = {} if caller is None else {"__name__": caller}
    exec("def move(x): return x.cpu()", names)
    open_session()
    assert names["move"](half(3)).dtype is dtype


def test_saving_printing_copying_and_moving_keep_the_half_type(tmp_path):
    x, module = half(3), torch.nn.Linear(2, 2).to(HALF)
    expected = repr(x)
    open_session()
    torch.save(x, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").dtype is HALF
    assert copy.deepcopy(x).dtype is pickle.loads(pickle.dumps(x)).dtype is HALF
    assert repr(x) == expected
    assert module.cpu().weight.dtype is HALF
