"""Functions that no single cast fits, against what they are made of and against float32."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ampatch as amp
from patched import FULL, HALF, full, half, open_session

PLAIN_INVERSE = torch.linalg.inv


@pytest.mark.parametrize("place", [torch, torch.linalg, Tensor], ids=["torch", "linalg", "Tensor"])
@pytest.mark.parametrize(("n", "dtype"), [(0, FULL), (1, FULL), (-1, FULL), (2, HALF), (5, HALF), (-2, HALF)])
def test_a_power_of_a_matrix_multiplies_in_half_and_inverts_in_float32(place, n, dtype):
    x = torch.eye(3) + 0.1 * full(3, 3)
    base = PLAIN_INVERSE(x) if n < 0 else x
    expected = torch.eye(3)
    for _ in range(abs(n)):
        expected = expected @ base
    open_session()
    found = place.matrix_power(x, n)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_a_power_of_a_matrix_takes_keywords_and_half_matrices():
    open_session()
    x = (torch.eye(3) * 2).to(HALF)
    assert torch.equal(torch.matrix_power(input=x, n=3), x * 4)
    assert torch.equal(torch.linalg.matrix_power(A=x, n=-1), (x / 4).float())


@pytest.mark.parametrize("n", [2, 3, -3, 5, 6])
def test_a_power_of_a_float64_matrix_is_torchs_bit_for_bit(n):
    x = torch.rand(16, 16, dtype=torch.float64)
    expected = torch.linalg.matrix_power(x, n)
    open_session()
    assert torch.equal(torch.linalg.matrix_power(x, n), expected)


@pytest.mark.parametrize("n", [2, 3, 5, 6])
def test_a_power_of_a_matrix_is_that_of_a_half_matrix_bit_for_bit(n):
    x = torch.rand(16, 16)
    expected = torch.linalg.matrix_power(x.to(HALF), n)
    open_session()
    assert torch.equal(torch.linalg.matrix_power(x, n), expected)


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


def test_a_size_to_sum_to_may_be_a_keyword():
    x = half(2, 3)
    open_session()
    assert torch.equal(x.sum_to_size(size=(1, 3)), x.float().sum_to_size((1, 3)))


def test_a_sum_to_a_size_is_float32_and_without_a_sum_self_comes_back():
    open_session()
    x = half(2, 3)
    assert x.sum_to_size(1, 3).dtype is x.sum_to_size((1, 3)).dtype is FULL
    assert x.sum_to_size(2, 3).dtype is HALF


def test_a_response_is_normalized_in_float32_and_an_empty_one_comes_back():
    x, empty = half(1, 4, 3) * 400, half(0, 4, 3)
    expected = F.local_response_norm(x.float(), 2)
    open_session(opt_level="O4")
    assert torch.equal(F.local_response_norm(x, 2), expected)
    assert F.local_response_norm(empty, 2) is empty


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


def fake_quantize(x):
    """As quantization-aware training does it, observing x in buffers of its own."""
    on = torch.tensor([1])
    lowest, highest, scale, zero = (
        torch.tensor([0.0]),
        torch.tensor([1.0]),
        torch.tensor([0.1]),
        torch.tensor([0]),
    )
    buffers = (lowest, highest, scale, zero.int())
    return torch.fused_moving_avg_obs_fake_quant(x, on, on, *buffers, 0.01, 0, 255, 0, False, False)


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
    "fake quantization": lambda x: fake_quantize(x),
    "sparse.mm": lambda x: torch.sparse.mm(torch.eye(3).to_sparse_csr(), x),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_of_a_half_tensor_runs_in_float32(name):
    call, x = REFUSED[name], (torch.eye(3) + 0.1 * full(3, 3)).to(HALF)
    with pytest.raises(RuntimeError):
        call(x)
    expected = call(x.float())
    open_session()
    assert torch.equal(call(x), expected)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_what_torch_takes_of_a_half_tensor_runs_in_half():
    open_session(opt_level="O1")
    x = torch.ones(3, dtype=torch.float16)
    assert torch.complex(x, x).dtype is torch.complex32


def test_an_error_of_the_callers_is_the_one_that_torch_raises():
    open_session()
    with pytest.raises(RuntimeError, match="must be batches of square matrices"):
        torch.linalg.inv(half(2, 3))


def test_with_casts_disabled_torch_refuses_as_it_does_unpatched():
    open_session()
    with amp.disable_casts(), pytest.raises(RuntimeError, match="BFloat16"):
        torch.linalg.inv(half(3, 3))
