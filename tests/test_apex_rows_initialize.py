"""What scripts written for apex expect of `amp.initialize`, row by row of docs/apex-behaviour.md."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import ampatch
from ampatch.apex import amp
from ampatch.apex.fp16_utils import FP16_Optimizer
from apex_rows import (
    CAST,
    EVERY_LEVEL,
    MASTERED,
    PATCHED,
    Net,
    Recorder,
    X,
    backward,
    changed,
    initialized,
    is_same,
    make,
    scaler_state,
    set_scale,
    shows,
    step,
    types_of,
)

# ---- What goes in and comes out ----


@shows("initialize-batchnorm-buffers")
@pytest.mark.parametrize("level", MASTERED)
def test_a_batchnorm_without_weights_keeps_its_statistics_in_float32(level):
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))
    amp.initialize(model, opt_level=level, verbosity=0)
    x = (1000 * torch.randn(64, 4)).to(MASTERED[level])
    norm, expected = model[0], nn.BatchNorm1d(4, affine=False)
    for _ in range(5):
        model(x)
        expected(x.float())
    assert norm.running_var.min() > 65504  # inf in float16
    torch.testing.assert_close([*norm.buffers()], [*expected.buffers()])


# ---- Keywords and their values ----


@shows("initialize-strings")
@pytest.mark.parametrize("value", [0, 1])
def test_booleans_may_be_the_numbers_0_and_1(value):
    net, optimizer = initialized("O2", enabled=1, keep_batchnorm_fp32=value, master_weights=value)
    assert types_of(net.norm) == [torch.float32 if value else torch.float16] * 2
    assert amp._amp_state.opt_properties.master_weights is bool(value)
    ampatch.uninitialize()
    amp.initialize(net, optimizer, enabled=0, opt_level="O2")
    assert types_of(net) == [torch.float32] * 6


# ---- What is refused ----


@shows("initialize-wrapped")
@pytest.mark.parametrize("wrap", [DataParallel, DistributedDataParallel])
def test_a_wrapped_model_is_refused_and_wrapping_after_works(wrap, one_rank):
    net, optimizer = make()
    with pytest.raises(RuntimeError, match=rf"{wrap.__name__}.*wrap"):
        amp.initialize(wrap(net), optimizer, opt_level="O1")
    amp.initialize(net, optimizer, opt_level="O1", verbosity=0)
    assert wrap(net)(X).dtype is torch.float16


@shows("initialize-half-params")
@pytest.mark.parametrize("level", PATCHED)
def test_a_half_buffer_is_taken_as_it_is(level):
    net = Net()
    net.register_buffer("table", torch.ones(2).half())
    initialized(level, net=net)
    assert net.table.dtype is torch.float16


@shows("initialize-fp16-optimizer")
@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_an_optimizer_with_a_scale_and_masters_of_its_own_is_refused(level):
    net, optimizer = make()
    wrapped = FP16_Optimizer(optimizer, static_loss_scale=128.0, verbose=False)
    with pytest.raises(RuntimeError, match=r"optimizers\[1\] is an FP16_Optimizer.*expected the optimizer"):
        amp.initialize([net, Net()], [make()[1], wrapped], opt_level=level, verbosity=0)
    assert amp.initialize(net, wrapped, enabled=False) == (net, wrapped)


@shows("initialize-model-float32")
@pytest.mark.parametrize("level", ["O0", *PATCHED])
@pytest.mark.parametrize("value", [torch.float32, "torch.float32"], ids=repr)
def test_a_model_type_of_float32_casts_what_goes_in_and_comes_out(level, value):
    half = PATCHED.get(level, torch.float16)
    model = Recorder({"logits": X.to(half), "ids": torch.arange(2)})
    amp.initialize(model, opt_level=level, cast_model_type=value, verbosity=0)
    found = model(X.half(), [X.bfloat16()], scale=X, wide=X.double())
    types = [model.args[0].dtype, model.args[1][0].dtype, model.kwargs["scale"].dtype]
    assert types == [torch.float32] * 3
    assert model.kwargs["wide"].dtype is torch.float64
    assert found["logits"].dtype is torch.float32
    assert found["ids"].dtype is torch.int64
    assert amp._amp_state.opt_properties.cast_model_type is torch.float32


@shows("initialize-model-float32")
@pytest.mark.parametrize("level", PATCHED)
def test_a_model_with_a_model_type_of_float32_still_computes_in_half_and_trains(level):
    net, optimizer = initialized(level, cast_model_type=torch.float32)
    seen = []
    net.first.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with changed(net):
        step(net, optimizer, x=X.double().to(PATCHED[level]))
    assert seen == [PATCHED[level]]
    assert net(X.half()).dtype is torch.float32


@shows("initialize-model-false")
@pytest.mark.parametrize("level", ["O0", *CAST])
@pytest.mark.parametrize("value", [False, "False"], ids=repr)
def test_a_model_type_of_false_leaves_weights_inputs_and_outputs_alone(level, value):
    model = Recorder((X.half(), X.double()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, cast_model_type=value, verbosity=0)
    found = model(X.half(), X.bfloat16(), wide=X.double())
    assert types_of(model) == [torch.float32]
    assert [x.dtype for x in model.args] == [torch.float16, torch.bfloat16]
    assert [x.dtype for x in found] == [torch.float16, torch.float64]
    assert [*amp.master_params(optimizer)] == [model.weight]
    options = amp._amp_state.opt_properties
    assert not options.cast_model_type
    assert options.master_weights is (level in MASTERED)


@shows("initialize-model-false", "initialize-model-float32")
@pytest.mark.parametrize(
    ("level", "value", "outputs"),
    [
        *((level, False, torch.float32) for level in CAST),
        *((level, torch.float32, torch.float16) for level in ("O0", *PATCHED)),
    ],
    ids=str,
)
def test_beside_a_model_type_outputs_may_have_a_type_of_their_own(level, value, outputs):
    model = Recorder(X.half())
    amp.initialize(model, opt_level=level, cast_model_type=value, cast_model_outputs=outputs, verbosity=0)
    assert model(X.half()).dtype is outputs
    assert model.args[0].dtype is (value or torch.float16)


class HalfFirst(Net):
    """A model whose author cast one layer by hand."""

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x).float())))


@shows("initialize-model-false")
@pytest.mark.parametrize("level", MASTERED)
def test_half_parameters_of_the_scripts_own_have_masters_beside_a_model_type_of_false(level):
    half, net = MASTERED[level], HalfFirst()
    net.first.to(half)
    options = {"cast_model_type": False, "master_weights": True, "allow_half_params": True}
    _, optimizer = initialized(level, net=net, loss_scale=8.0, **options)
    masters = [*amp.master_params(optimizer)]
    assert {master.dtype for master in masters} == {torch.float32}
    before = [master.detach().clone() for master in masters]
    backward(net, optimizer, x=X.to(half))
    grads = [master.grad.clone() for master in masters]
    optimizer.step()
    expected = torch._foreach_add(before, grads, alpha=-0.1)
    assert is_same(masters, expected)
    assert types_of(net) == [half] * 2 + [torch.float32] * 4
    assert torch.equal(net.first.weight, masters[0].to(half))
    assert torch.equal(net.state_dict()["first.weight"], masters[0])
    ampatch.uninitialize()
    assert [*amp.master_params(optimizer)] == [*net.parameters()]


# ---- Loss scalers ----


@shows("initialize-bounds")
@pytest.mark.parametrize(("given", "after"), [(2.0**30, 2.0**24), (4.0, 64.0)])
def test_bounds_hold_a_scale_that_is_assigned_from_the_next_update_on(given, after):
    net, optimizer = initialized(min_loss_scale=64.0)
    set_scale(given)
    backward(net, optimizer, 0.0)
    assert scaler_state()["loss_scale"] == after


@shows("initialize-bounds")
@pytest.mark.parametrize(
    ("bounds", "first"),
    [
        ({"min_loss_scale": 2.0**20}, 2.0**20),
        ({"min_loss_scale": 0}, 65536.0),
        ({"min_loss_scale": "0"}, 65536.0),
        ({"loss_scale": 4.0, "min_loss_scale": 64.0, "max_loss_scale": 128.0}, 4.0),
    ],
)
def test_a_minimum_above_the_first_scale_is_the_first_one_but_of_static_scales(bounds, first):
    initialized("O2", **bounds)
    assert scaler_state()["loss_scale"] == first


# ---- verbosity ----


CASTS = {
    "LOWER": (lambda x, half: torch.mm(x, x), "mm"),
    "FP32": (lambda x, half: torch.exp(half), "exp"),
    "PROMOTE": (lambda x, half: torch.dot(x[0], half[0]), "dot"),
    "MATCH_SELF": (lambda x, half: x.clone().index_add_(0, torch.tensor([0]), half[:1]), "index_add_"),
    "CUSTOM": (lambda x, half: half.cpu(), "cpu"),
}


@shows("initialize-verbosity")
@pytest.mark.parametrize("kind", CASTS)
def test_verbosity_2_prints_every_cast_with_the_function(kind, capsys):
    call, name = CASTS[kind]
    x = torch.ones(2, 2)
    half = x.bfloat16()
    amp.initialize(Net(), opt_level="O4", verbosity=2)
    capsys.readouterr()
    call(x, half)
    lines = capsys.readouterr().out.splitlines()
    assert any("float32" in line and "bfloat16" in line and name in line for line in lines)


# ---- What was wrong ----


@shows("initialize-twice-defect", "never-second-initialize")
@pytest.mark.parametrize("level", PATCHED)
def test_a_second_call_does_not_wrap_the_functions_again(level):
    a, _ = initialized(level)
    once = torch.nn.functional.linear
    b, _ = initialized(level)
    assert torch.nn.functional.linear is once
    assert a(X).dtype is b(X).dtype is PATCHED[level]
