"""amp_C, apex_C and multi_tensor_applier: lists of tensors, written past autograd, with an overflow flag."""

import inspect

import pytest
import torch
from torch.nn import Parameter

import ampatch as amp
from ampatch.apex import amp_C, apex_C
from ampatch.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from apex_rows import shows
from helpers import assert_same_bits, snapshot, sync_debug_mode

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
PAIRS = pytest.mark.parametrize(
    ("source", "target"), [(source, target) for source in DTYPES for target in DTYPES], ids=str
)
SHAPES = [(3,), (2, 5), (), (0,), (4, 1, 3)]


def flag():
    return torch.zeros(1, dtype=torch.int32)


def make(dtype=torch.float32, shapes=SHAPES):
    return [torch.randn(shape).to(dtype) for shape in shapes]


# The applier


def test_the_applier_hands_its_chunk_size_on_and_is_available_as_scripts_check_it():
    calls = []
    applier = MultiTensorApply(7)
    assert applier(lambda *args: calls.append(args) or "result", "flag", [[1]], 2, 3) == "result"
    assert calls == [(7, "flag", [[1]], 2, 3)]
    assert multi_tensor_applier.available
    assert multi_tensor_applier.chunk_size == 2048 * 32
    assert multi_tensor_applier.check_avail() is None
    assert (multi_tensor_applier.warned, multi_tensor_applier.import_err) == (False, None)


# Scale and axpby


@shows("companions-multi-tensor")
@PAIRS
def test_scale_rounds_once_from_float32(source, target):
    sources, targets = make(source), make(target)
    expected = [(tensor.float() * 0.37).to(target) for tensor in sources]
    before = snapshot(sources)
    buffer = flag()
    assert multi_tensor_applier(amp_C.multi_tensor_scale, buffer, [sources, targets], 0.37) is None
    assert_same_bits(targets, expected)
    assert snapshot(sources) == before
    assert buffer.tolist() == [0]


@shows("companions-multi-tensor")
@PAIRS
def test_axpby_rounds_once_from_float32(source, target):
    xs, ys, targets = make(source), make(target), make(target)
    expected = [(x.float() * 0.5 + y.float() * 3.0).to(target) for x, y in zip(xs, ys, strict=True)]
    buffer = flag()
    multi_tensor_applier(amp_C.multi_tensor_axpby, buffer, [xs, ys, targets], 0.5, 3.0, -1)
    assert_same_bits(targets, expected)
    assert buffer.tolist() == [0]


@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_sets_the_flag_where_an_input_is_not_finite(dtype, bad):
    sources, buffer = make(dtype), flag()
    sources[1][1, 2] = bad
    amp_C.multi_tensor_scale(1, buffer, [sources, make()], 1.0)
    assert buffer.tolist() == [1]


def test_scale_checks_its_input_element_by_element_and_not_its_output():
    buffer, target = flag(), torch.zeros(10, dtype=torch.float16)
    amp_C.multi_tensor_scale(1, buffer, [[torch.full((10,), 3e38)], [target]], 2.0)
    assert target.tolist() == [INF] * 10
    assert buffer.tolist() == [0]


@pytest.mark.parametrize(("where", "checked", "expected"), [
    ("x", 0, 1), ("x", 1, 0), ("x", -1, 1), ("y", 0, 0), ("y", 1, 1), ("y", -1, 1),
])  # fmt: skip
def test_axpby_checks_the_argument_it_is_told_to(where, checked, expected):
    xs, ys, buffer = [torch.ones(2)], [torch.ones(2)], flag()
    (xs if where == "x" else ys)[0][0] = INF
    amp_C.multi_tensor_axpby(1, buffer, [xs, ys, [torch.zeros(2)]], 1.0, 1.0, checked)
    assert buffer.tolist() == [expected]


def test_a_flag_that_is_set_stays_set_and_the_scaling_goes_on():
    buffer, target = flag().fill_(1), torch.zeros(2)
    amp_C.multi_tensor_scale(1, buffer, [[torch.ones(2)], [target]], 2.0)
    assert target.tolist() == [2.0, 2.0]
    assert buffer.tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bool], ids=str)
def test_flags_of_any_type_are_set_in_place_and_there_may_be_none(dtype):
    buffer = torch.zeros((), dtype=dtype)
    for each in (buffer, None):
        amp_C.multi_tensor_scale(1, each, [[torch.tensor([INF])], [torch.zeros(1)]], 1.0)
    assert buffer.item() == 1


def test_scale_in_place_and_by_a_tensor():
    tensors = make()
    expected = [tensor * 0.25 for tensor in tensors]
    amp_C.multi_tensor_scale(1, flag(), [tensors, tensors], torch.tensor([0.25]))
    assert_same_bits(tensors, expected)


def test_types_may_be_mixed_in_a_list_and_float64_is_not_rounded():
    sources = [torch.full((2,), 1 / 3, dtype=dtype) for dtype in (torch.float64, *DTYPES)]
    targets = [torch.zeros(2, dtype=dtype) for dtype in (torch.float64, torch.float32, *DTYPES[:2])]
    amp_C.multi_tensor_scale(1, flag(), [sources, targets], 3.0)
    wide = [sources[0], *(source.float() for source in sources[1:])]
    assert_same_bits(
        targets, [(each * 3.0).to(target.dtype) for each, target in zip(wide, targets, strict=True)]
    )


def test_memory_with_gaps_and_other_strides_and_shapes():
    source = torch.arange(24.0).reshape(4, 6)[:, ::2]
    strided, flat = torch.zeros(3, 4).t(), torch.zeros(12)
    amp_C.multi_tensor_scale(1, flag(), [[source, source], [strided, flat]], 2.0)
    assert torch.equal(strided, source * 2)
    assert torch.equal(flat, (source * 2).flatten())


def test_empty_lists():
    buffer = flag()
    amp_C.multi_tensor_scale(1, buffer, [[], []], 2.0)
    amp_C.multi_tensor_axpby(1, buffer, [[], [], []], 2.0, 1.0, -1)
    total, parts = amp_C.multi_tensor_l2norm(1, buffer, [[]], True)
    assert (total.tolist(), parts.tolist(), buffer.tolist()) == ([0.0], [], [0])


@pytest.mark.parametrize(("lists", "message"), [
    ([[torch.ones(1)]], r"found lists of \[1\] tensors, expected 2 lists"),
    ([[torch.ones(1)], []], r"found lists of \[1, 0\] tensors, expected 2 lists of the same length"),
    ([[torch.ones(2)], [torch.ones(3)]], r"shape '\[3\]' is invalid for input of size 2"),
    ([[torch.ones(1).to_sparse()], [torch.ones(1)]], "[Ss]parse"),
], ids=["lists", "lengths", "shapes", "sparse"])  # fmt: skip
def test_lists_that_do_not_fit_are_refused(lists, message):
    with pytest.raises((amp.AmpValueError, RuntimeError), match=message):
        amp_C.multi_tensor_scale(1, flag(), lists, 1.0)


def test_axpby_refuses_another_argument_to_check():
    with pytest.raises(amp.AmpValueError, match="arg_to_check=2"):
        amp_C.multi_tensor_axpby(1, flag(), [[], [], []], 1.0, 1.0, 2)


# Past autograd


@shows("patterns-amp-c")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_live_leaf_parameters_are_written_without_a_graph_or_a_version(dtype):
    weight = Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
    source = Parameter(torch.tensor([3.0, 4.0]))
    loss = (weight * weight).sum()  # saves the weight for its backward
    version = weight._version
    amp_C.multi_tensor_scale(1, flag(), [[source], [weight]], 2.0)
    assert weight.tolist() == [6.0, 8.0]
    assert (weight._version, weight.grad_fn, weight.requires_grad) == (version, None, True)
    loss.backward()  # raises no error of versions
    assert weight.grad is not None
    assert source.grad is None


def test_outputs_have_no_graph_when_inputs_have_one():
    source = torch.ones(2, requires_grad=True) * 2
    target = torch.zeros(2)
    amp_C.multi_tensor_axpby(1, flag(), [[source], [source], [target]], 1.0, 1.0, -1)
    total, parts = amp_C.multi_tensor_l2norm(1, flag(), [[source]], True)
    assert not any(tensor.requires_grad for tensor in (target, total, parts))


def test_under_o1_nothing_is_cast():
    big, half = torch.full((4,), 1e30), torch.full((4,), 300.0, dtype=torch.float16)
    amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)
    target, buffer = torch.zeros(4), flag()
    amp_C.multi_tensor_scale(1, buffer, [[big], [target]], 2.0)
    total, _ = amp_C.multi_tensor_l2norm(1, buffer, [[half]])
    assert target.tolist() == [2 * torch.tensor(1e30).item()] * 4
    assert total.item() == 600.0
    assert buffer.tolist() == [0]


# Norms


@shows("companions-multi-tensor")
@pytest.mark.parametrize("norm", [amp_C.multi_tensor_l2norm, amp_C.multi_tensor_l2norm_mp])
def test_l2norm_is_that_of_everything_and_of_each(norm):
    tensors, buffer = make(), flag()
    total, parts = multi_tensor_applier(norm, buffer, [tensors], True)
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors])
    assert (total.shape, total.dtype, parts.dtype) == ((1,), torch.float32, torch.float32)
    # Sums of squares in float32, in another order.
    torch.testing.assert_close(total.double(), flat.norm().reshape(1), rtol=1e-6, atol=0)
    expected = torch.stack([tensor.double().norm() for tensor in tensors])
    torch.testing.assert_close(parts.double(), expected, rtol=1e-6, atol=0)
    assert norm(1, buffer, [tensors])[1].numel() == 0  # not asked for
    assert buffer.tolist() == [0]


def test_float16_values_whose_squares_overflow_have_a_finite_norm():
    tensors, buffer = [torch.full((4,), 6e4, dtype=torch.float16) for _ in range(4)], flag()
    total, parts = amp_C.multi_tensor_l2norm(1, buffer, [tensors], True)
    value = float(tensors[0][0])
    assert total.tolist() == [4 * value]
    assert parts.tolist() == [2 * value] * 4
    assert buffer.tolist() == [0]


@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
def test_a_norm_that_is_not_finite_sets_the_flag(bad):
    buffer = flag()
    total, _ = amp_C.multi_tensor_l2norm(1, buffer, [[torch.ones(2), torch.tensor([bad])]])
    assert not total.isfinite().item()
    assert buffer.tolist() == [1]


# Optimizers


def moments(count=3):
    return make(shapes=[(3, 2)] * count), make(shapes=[(3, 2)] * count)


def run_adam(lists, buffer=None, **options):
    options = {"step": 1, "mode": 1, "bias_correction": 1} | options
    amp_C.multi_tensor_adam(
        1, buffer, lists, 0.1, 0.9, 0.99, 1e-8, options["step"], options["mode"],
        options["bias_correction"], 0.1,
    )  # fmt: skip


def run_torch(optimizer, params, grads, steps=1):
    for _ in range(steps):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()


@pytest.mark.parametrize(("mode", "kind"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
def test_adam_is_that_of_torch(mode, kind):
    grads, params = moments()
    zeros = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    expected = [Parameter(param.clone()) for param in params]
    run_torch(kind(expected, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1), expected, grads, 3)
    for step in (1, 2, 3):
        run_adam([grads, params, *zeros], step=step, mode=mode)
    assert_same_bits(params, expected)


def test_half_parameters_take_float32_moments():
    grads, params = moments(2)
    halves = [param.half() for param in params]
    full = [half.float() for half in halves]
    lists = [[torch.zeros_like(param) for param in params] for _ in range(4)]
    run_adam([[grad.half() for grad in grads], halves, *lists[:2]])
    run_adam([[grad.half().float() for grad in grads], full, *lists[2:]])
    assert_same_bits(halves, [param.half() for param in full])
    assert_same_bits([*lists[0], *lists[1]], [*lists[2], *lists[3]])


@pytest.mark.parametrize("is_set", [False, True])
def test_a_step_is_a_no_op_while_the_flag_is_set(is_set):
    grads, params = moments()
    lists = [grads, params, *([tensor.abs() for tensor in tensors] for tensors in moments())]
    before = snapshot(lists)
    run_adam(lists, flag().fill_(int(is_set)))
    assert (snapshot(lists) == before) is is_set


def test_a_step_of_empty_lists_does_nothing_and_one_of_more_numbers_is_refused():
    run_adam([[], [], [], []], flag())
    lists = [*moments(), *moments()]
    before = snapshot(lists)
    with pytest.raises(ValueError, match="too many values"):
        amp_C.multi_tensor_adam(1, flag(), lists, *[torch.ones(1)] * 9)
    assert snapshot(lists) == before


def test_help_shows_the_arguments_that_a_call_takes():
    first = [*inspect.signature(amp_C.multi_tensor_scale).parameters][:3]
    assert first == ["chunk_size", "noop_flag", "tensor_lists"]


# apex_C


def test_flatten_and_views_that_share_its_memory():
    tensors = make()
    flat = apex_C.flatten(tensors)
    assert_same_bits([flat], [torch.cat([tensor.reshape(-1) for tensor in tensors])])
    views = apex_C.unflatten(flat, tensors)
    assert_same_bits(views, tensors)
    views[0].fill_(7.0)
    assert flat[:3].tolist() == [7.0] * 3


@pytest.mark.cuda
def test_no_host_sync_on_a_gpu():
    tensors = [torch.randn(5, device="cuda") for _ in range(3)]
    targets = [torch.zeros(5, device="cuda", dtype=torch.float16) for _ in range(3)]
    buffer = torch.zeros(1, dtype=torch.int32, device="cuda")
    with sync_debug_mode("error"):
        amp_C.multi_tensor_scale(1, buffer, [tensors, targets], 2.0)
        amp_C.multi_tensor_axpby(1, buffer, [tensors, tensors, targets], 2.0, 1.0, -1)
        amp_C.multi_tensor_l2norm(1, buffer, [tensors], True)
    assert buffer.tolist() == [0]
