"""A model at O2, O3 and O5: its weights, what goes in and what comes out."""

import copy
import functools
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import ampatch as amp
from apex_rows import shows
from nets import EVERY_LEVEL, FULL, HALVES, MASTERED, Net, X, open_session

# ---- Weights ----


@shows("initialize-same-objects", "initialize-float64")
@pytest.mark.parametrize("opt_level", HALVES)
def test_floating_weights_and_buffers_are_rounded_to_half_in_the_same_objects(opt_level):
    half, model = HALVES[opt_level], Net()
    before = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    weight = model.linear.weight.detach().clone()
    open_session(model, opt_level=opt_level)
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == before
    assert model.linear.weight.dtype is model.linear.bias.dtype is model.scale.dtype is half
    assert torch.equal(model.linear.weight.detach(), weight.to(half))
    others = (model.steps.dtype, model.angles.dtype, model.waves.dtype)
    assert others == (torch.int64, torch.float64, torch.complex64)


@pytest.mark.parametrize("opt_level", HALVES)
def test_a_module_that_takes_the_place_of_one_casts_its_inputs_by_the_same_hook(opt_level):
    """As torch.ao.quantization has it, which does not ask whether a hook takes keywords."""
    model = open_session(nn.Linear(3, 2), None, opt_level)
    successor = nn.Linear(3, 2).to(HALVES[opt_level])
    for hook in model._forward_pre_hooks.values():
        successor.register_forward_pre_hook(hook)
    assert successor(torch.ones(2, 3)).dtype is HALVES[opt_level]


@shows("initialize-strings")
@pytest.mark.parametrize(
    ("opt_level", "override", "expected"),
    [
        ("O2", None, FULL),
        ("O5", None, FULL),
        ("O3", None, torch.float16),
        ("O3", True, FULL),
        ("O2", False, torch.float16),
        ("O5", "False", torch.bfloat16),
        ("O3", "True", FULL),
    ],
)
def test_batchnorm_is_float32_where_the_level_or_the_override_says(opt_level, override, expected):
    model = open_session(Net(), opt_level=opt_level, keep_batchnorm_fp32=override)
    norm = model.norm
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    assert {tensor.dtype for tensor in tensors} == {expected}
    assert model(X).dtype is FULL


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_every_kind_of_batchnorm_is_kept(kind):
    norm = kind(2)
    open_session(nn.Sequential(norm))
    assert norm.weight.dtype is norm.running_var.dtype is FULL


def test_batchnorm_itself_may_be_the_model():
    model = open_session(nn.BatchNorm1d(3))
    assert model.weight.dtype is model(X).dtype is FULL


def test_other_normalizations_are_cast():
    model = open_session(
        nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3, affine=True))
    )
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_a_model_without_parameters_runs_in_float32_where_a_cpu_has_no_half_kernel():
    assert open_session(nn.AvgPool3d(2))(torch.ones(1, 2, 2, 2)).item() == 1


class Rotary(nn.Module):
    """Adds the cosines of positions times frequencies; at position 400 half is wrong by whole turns."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.tensor([1.0, 0.9, 0.7]))

    def forward(self, x):
        positions = torch.arange(len(x), dtype=self.frequencies.dtype)
        return x + torch.outer(positions, self.frequencies).cos().to(x.dtype)


class Mean(nn.Module):
    """Subtracts a moving average, which half never moves from 0.9."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((3,), 0.9))

    def forward(self, x):
        self.mean.lerp_(x.detach().to(self.mean.dtype).mean(0), 0.001)
        return x - self.mean


class Units(nn.Module):
    """Physical units, which half cannot hold."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([288.15, 101325.0, 0.5]))
        self.register_buffer("std", torch.tensor([1.0, 500.0, 0.1]))

    def forward(self, y):
        return y * self.std + self.mean


class Physical(nn.Linear):
    """Ends in units, in a container, and as they are or after a change in place."""

    def __init__(self, gain=None):
        super().__init__(3, 3)
        self.units, self.gain = Units(), gain

    def forward(self, x):
        y = super().forward(x)
        result = self.units(y)
        return {"result": result if self.gain is None else result.mul_(self.gain), "half": y}


MODES = {"eager": lambda run: run, "compiled": functools.partial(torch.compile, backend="aot_eager")}


@pytest.mark.exhaustive(keep=6)
@shows("initialize-buffers")
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("opt_level", MASTERED)
def test_what_buffers_alone_return_last_is_as_under_autocast(opt_level, mode, grad):
    model = Physical()
    with torch.autocast("cpu", MASTERED[opt_level]):
        expected = model(X)
    assert expected["result"].dtype is FULL
    open_session(model, opt_level=opt_level)
    with grad():
        found = MODES[mode](model)(X)
    assert torch.equal(found["result"], expected["result"])
    assert torch.equal(found["half"], expected["half"].float())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_what_is_changed_in_place_before_it_is_returned_keeps_the_change_and_its_gradient(mode, gain):
    factor = nn.Parameter(torch.tensor(gain))
    model = open_session(Physical(factor), opt_level="O5")
    result = MODES[mode](model)(X)["result"]
    result[:, 0].sum().backward()
    precise = Units()(nn.functional.linear(X.bfloat16(), model.weight, model.bias).float())
    rounded = precise.bfloat16()
    assert torch.equal(result, precise if gain == 1 else rounded.mul(gain).float())
    assert factor.grad == rounded[:, 0].sum()


class Spread(nn.Module):
    """A frozen normalization, whose variance is inf in float16."""

    def __init__(self):
        super().__init__()
        self.register_buffer("var", torch.full((3,), 1e6))

    def normalize(self, x):
        return (x + 1) * 1000 / self.var.sqrt()

    def forward(self, x):
        return self.normalize(x)


class Called(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.spread = Spread()

    def forward(self, x):
        return super().forward(self.spread.normalize(x))


@pytest.mark.parametrize("opt_level", MASTERED)
def test_methods_of_buffers_alone_compute_in_float32_and_return_what_they_are_given(opt_level):
    model, half = open_session(Called(), opt_level=opt_level), MASTERED[opt_level]
    between = Spread().normalize(X.to(half).float()).to(half)
    assert torch.equal(model(X), nn.functional.linear(between, model.weight, model.bias).float())
    assert torch.equal(model.spread.normalize(X), Spread().normalize(X))  # outside of a forward as it is
    duplicate = copy.deepcopy(model)
    duplicate.spread.var.mul_(4)
    assert not torch.equal(duplicate(X), model(X))
    amp.uninitialize()
    assert "normalize" not in vars(model.spread)


@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("keep", [(), "2"])
@pytest.mark.parametrize("opt_level", HALVES)
def test_a_model_that_is_cast_to_float32_afterwards_trains_in_float32(opt_level, keep, when):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Rotary(), nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    open_session(model, optimizer, opt_level=opt_level, loss_scale=1.0)
    for index in range(4):
        if index == when:
            model.float()
        before = [param.clone() for param in amp.master_params(optimizer)]
        optimizer.zero_grad()
        with amp.scale_loss(model(X).pow(2).mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
    assert {tensor.dtype for tensor in model.parameters()} == {FULL}
    for param, old, master in zip(model.parameters(), before, amp.master_params(optimizer), strict=True):
        assert torch.equal(param, master)
        assert torch.allclose(param, old - 0.01 * param.grad, rtol=1e-6, atol=1e-8)  # one rounding


MIXED = {  # what a script does after initialize, and what torch's error is to name
    "a head": (
        lambda model: model.__setitem__(1, nn.Linear(3, 3)),
        r"parameters of '1' \(Linear\) are float32",
    ),
    "a part in float32": (lambda model: model[0].float(), r"parameters of '0' \(Linear\) are float32"),
}


@pytest.mark.parametrize("change", MIXED)
@pytest.mark.parametrize("opt_level", HALVES)
def test_an_error_where_two_types_meet_names_what_is_float32_and_the_way_out(opt_level, change):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    open_session(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=opt_level)
    act, message = MIXED[change]
    act(model)
    with pytest.raises(
        RuntimeError, match=f"^mat1 and mat2 must have the same dtype.*{message}.*uninitialize"
    ):
        model(X)
    amp.uninitialize()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer, opt_level=opt_level)
    model(X).sum().backward()


@pytest.mark.parametrize("opt_level", MASTERED)
def test_an_error_where_a_float32_buffer_is_read_names_its_module(opt_level):
    class Reader(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.mean = Mean()

        def forward(self, x):
            return super().forward(x - self.mean.mean)

    model = open_session(Reader(), opt_level=opt_level)
    with pytest.raises(
        RuntimeError, match=r"same dtype.*'mean' \(Mean\) computes in float32.*buffer.to\(x.dtype\)"
    ):
        model(X)


@shows("initialize-buffers")
@pytest.mark.parametrize("part", [Rotary(), Mean(), Spread(), nn.Sequential(nn.ReLU(), Rotary())])
@pytest.mark.parametrize("opt_level", MASTERED)
def test_a_part_of_buffers_alone_computes_in_float32_among_half_layers(opt_level, part):
    first, last = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    nn.init.zeros_(first.weight)
    nn.init.zeros_(first.bias)
    nn.init.eye_(last.weight)
    plain = copy.deepcopy(part)
    model = open_session(nn.Sequential(first, copy.deepcopy(part), last), opt_level=opt_level)
    for _ in range(50):
        expected, found = plain(torch.zeros(400, 3)), model(torch.zeros(400, 3))
    assert torch.equal(found, expected.to(MASTERED[opt_level]).float())


@pytest.mark.parametrize(
    ("opt_level", "override", "expected"),
    [("O5", None, FULL), ("O3", None, torch.float16), ("O5", False, torch.bfloat16)],
)
def test_buffers_alone_are_kept_where_batchnorm_is(opt_level, override, expected):
    model = nn.Sequential(nn.Linear(3, 3), Mean())
    model.table = nn.Module()  # which others read: it has no forward
    model.table.register_buffer("rows", torch.randn(3))
    open_session(model, opt_level=opt_level, keep_batchnorm_fp32=override)
    assert model[1].mean.dtype is expected
    assert model.table.rows.dtype is HALVES[opt_level]


@pytest.mark.parametrize("opt_level", MASTERED)
def test_a_loss_with_class_weights_stays_in_float32(opt_level):
    class Classifier(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.loss = nn.CrossEntropyLoss(torch.tensor([1.1, 0.3, 2.7]))

        def forward(self, x):
            self.logits = super().forward(x)
            return self.loss(self.logits, torch.arange(3))

    model = open_session(Classifier(), opt_level=opt_level)
    loss = model(X)
    assert model.logits.dtype is MASTERED[opt_level]
    assert torch.equal(
        loss, nn.functional.cross_entropy(model.logits.float(), torch.arange(3), model.loss.weight)
    )


# ---- Inputs ----

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Batch:
    x: torch.Tensor
    ids: torch.Tensor


class Custom:
    def __init__(self, x):
        self.x = x

    def to(self, dtype):
        return Custom(self.x.to(dtype))


class Show(nn.Module):
    """Keeps what reaches its forward, and returns what it is told to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.result = None

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return self.result


@pytest.fixture(params=HALVES)
def shown(request):
    """A model at each level that casts, and the half type."""
    return open_session(Show(), opt_level=request.param), HALVES[request.param]


@shows("initialize-inputs", "patterns-inputs", "never-namedtuple")
def test_inputs_in_any_container_are_cast(shown):
    model, half = shown
    ids = torch.arange(3)
    model([X, 1], (X,), Pair(X, "b"), {"x": {"y": X}}, OrderedDict(x=X), Batch(X, ids), Custom(X))
    first, second, pair, nested, ordered, batch, custom = model.args
    tensors = (
        first[0],
        second[0],
        pair.first,
        nested["x"]["y"],
        ordered["x"],
        batch.x,
        custom.x,
    )
    assert {tensor.dtype for tensor in tensors} == {half}
    assert [type(arg) for arg in model.args] == [list, tuple, Pair, dict, OrderedDict, Batch, Custom]
    assert batch.ids is ids


def test_inputs_by_keyword_are_cast(shown):
    model, half = shown
    model(X, x=X, batch={"y": [X]}, mode="train")
    assert (model.kwargs["x"].dtype, model.kwargs["batch"]["y"][0].dtype) == (half, half)
    assert model.kwargs["mode"] == "train"


@shows("initialize-inputs-defects")
def test_inputs_that_are_no_floats_stay(shown):
    model, _ = shown
    values = (
        torch.arange(3),
        torch.ones(2, dtype=torch.bool),
        3,
        None,
        range(2),
        b"x",
        torch.ones(1).double(),
    )
    model(*values)
    assert all(mine is theirs for mine, theirs in zip(model.args, values, strict=True))


def test_gradients_reach_float32_inputs_in_float32(shown):
    model, _ = shown
    x = X.clone().requires_grad_()
    model(x)
    model.args[0].sum().backward()
    assert x.grad.dtype is FULL


def test_half_inputs_are_taken_at_o0_and_cast_up():
    model = open_session(nn.Linear(3, 2), opt_level="O0")
    assert model(X.half()).dtype is FULL


# ---- Outputs ----


def outputs(tensor):
    ids = torch.arange(2)
    return {"a": [tensor, ids], "b": (tensor, Pair(tensor, "c")), "d": OrderedDict(e=tensor)}


def leaves_of(result):
    return [result["a"][0], result["b"][0], result["b"][1].first, result["d"]["e"]]


@shows("initialize-outputs", "patterns-inputs")
def test_outputs_are_float32_in_any_container(shown):
    model, half = shown
    model.result = outputs(torch.ones(2, dtype=half))
    result = model(X)
    assert {leaf.dtype for leaf in leaves_of(result)} == {FULL}
    assert result["a"][1] is model.result["a"][1]
    assert (type(result["b"][1]), type(result["d"])) == (Pair, OrderedDict)


def test_outputs_that_are_no_tensors_stay(shown):
    model, _ = shown
    for value in (None, "text", 3, [], torch.arange(3)):
        model.result = value
        assert model(X) is value


@shows("initialize-outputs")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FULL, torch.float64], ids=str)
@pytest.mark.parametrize("opt_level", ["O0", "O2", "O4"])
def test_cast_model_outputs_holds_at_every_level(opt_level, dtype):
    model = open_session(Show(), opt_level=opt_level, cast_model_outputs=dtype)
    for given in (FULL, torch.float16, torch.bfloat16):
        model.result = outputs(torch.ones(2, dtype=given))
        assert {leaf.dtype for leaf in leaves_of(model(X))} == {dtype}


@pytest.mark.parametrize("opt_level", ["O1", "O4"])
def test_outputs_of_a_patching_level_are_left_alone(opt_level):
    model = open_session(Show(), opt_level=opt_level)
    model.result = torch.ones(2, dtype=torch.bfloat16)
    assert model(X) is model.result


@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_a_users_own_hooks_see_what_they_would_see_in_the_model(opt_level):
    model = nn.Linear(3, 2)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    open_session(model, opt_level=opt_level)
    model(X)
    assert len(seen) == 1
