"""The package that scripts see as `apex.amp`: its names, and the private ones that scripts touch."""

import copy
import gc
import inspect
import pickle
import types
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampatch
from ampatch.apex import amp
from ampatch.apex.amp import _amp_state as state_object
from ampatch.apex.amp.frontend import OVERRIDES
from ampatch.apex.amp.scaler import LossScaler
from apex_rows import changed, shows, unchanged
from helpers import assert_same_bits, snapshot

INF = float("inf")
ONE = torch.ones(1, 4)


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=2.0**-4, momentum=0.5)


def start(opt_level="O2", **arguments):
    model, optimizer = make()
    return amp.initialize(model, optimizer, opt_level=opt_level, **{"verbosity": 0} | arguments)


def loss_of(model, seed=1):
    torch.manual_seed(seed)
    return model(torch.randn(8, 4)).square().mean()


def run_step(model, optimizer, factor=1.0, seed=1, **arguments):
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, seed) * factor, optimizer, **arguments) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()


# ---- The package ----


@shows("patterns-probes", "private-frontend")
def test_the_functions_are_real_attributes_of_a_real_package():
    known = {"initialize", "scale_loss", "master_params", "state_dict", "load_state_dict", "init"}
    assert known | set(amp.__all__) <= set(amp.__dict__)


def test_a_scale_that_the_doctor_advises_can_be_pasted_where_amp_is_that_of_apex():
    start(loss_scale=amp.DynamicLossScale(init_scale=2.0**10))
    assert ampatch.get_loss_scale() == 2.0**10
    assert amp.__path__
    assert amp._amp_state is state_object  # and not the module of that name
    assert not isinstance(state_object, types.ModuleType)


def test_initialize_takes_apex_arguments_in_apex_order():
    apexs = [
        *("models", "optimizers", "enabled", "opt_level", "cast_model_type", "patch_torch_functions"),
        *("keep_batchnorm_fp32", "master_weights", "loss_scale", "cast_model_outputs", "num_losses"),
        *("verbosity", "min_loss_scale", "max_loss_scale"),
    ]
    # Not `signature`: those who select arguments by their names ask this, which follows no wrapper.
    for initialize in (amp.initialize, ampatch.initialize):
        assert inspect.getfullargspec(initialize).args[: len(apexs)] == apexs


def test_an_unknown_argument_raises_a_type_error_that_names_it():
    model, optimizer = make()
    with pytest.raises(TypeError, match=r"initialize.*'loss_scaler'"):
        amp.initialize(model, optimizer, loss_scaler=1.0)


# ---- What _amp_state shows ----


def added_names(optimizer):
    return [name for name in vars(optimizer) if "amp" in name or "master" in name]


def test_after_uninitialize_nothing_is_left_of_it():
    _, optimizer = start()
    assert added_names(optimizer)
    ampatch.uninitialize()
    assert not any(hasattr(amp._amp_state, name) for name in ("loss_scalers", "opt_properties", "handle"))
    assert added_names(optimizer) == []
    assert {"param_groups", "state", "defaults"} <= set(vars(optimizer))


@shows("patterns-initialize-twice", "patterns-return")
def test_a_call_that_raises_leaves_no_trace_of_it():
    model, optimizer = make()
    with pytest.raises(ValueError, match="unknown opt_level"):
        amp.initialize(model, optimizer, opt_level="02")  # a zero
    assert not hasattr(amp._amp_state, "opt_properties")
    assert not hasattr(optimizer, "_amp_stash")
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="given to initialize twice"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert amp._amp_state.opt_properties.opt_level == "O2"


@shows("private-options")
def test_a_disabled_call_shows_options_that_are_off():
    model, optimizer = make()
    amp.initialize(model, optimizer, enabled=False, opt_level="O2")
    assert amp._amp_state.opt_properties.enabled is False
    assert amp._amp_state.loss_scalers == []
    assert not amp._amp_state.handle.is_active()
    assert not hasattr(optimizer, "_amp_stash")


def test_a_session_under_the_newer_names_alone_is_not_followed():
    model, optimizer = make()
    ampatch.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert not hasattr(amp._amp_state, "opt_properties")
    assert amp._amp_state.loss_scalers[0].loss_scale() == 65536.0


# ---- Loss scalers ----


def test_the_counter_interval_and_bounds_can_be_assigned():
    model, optimizer = start()
    scaler = amp._amp_state.loss_scalers[0]
    scaler._unskipped, scaler._scale_seq_len, scaler._max_loss_scale = 3, 4, 2.0**16 * 1.5
    assert (scaler._unskipped, scaler._scale_seq_len, scaler._max_loss_scale) == (3, 4, 2.0**16 * 1.5)
    run_step(model, optimizer)
    assert scaler.loss_scale() == 2.0**16 * 1.5
    scaler._min_loss_scale = 2.0**16
    run_step(model, optimizer, INF)
    assert scaler.loss_scale() == 2.0**16
    # Bounds that the first scale was outside of.
    scaler._min_loss_scale, scaler._loss_scale, scaler._max_loss_scale = None, 2.0**5, 2.0**6
    scaler._scale_seq_len = 1
    for _ in range(2):
        run_step(model, optimizer)
    assert scaler.loss_scale() == 2.0**6


def test_the_attributes_of_a_static_scaler_can_be_read_and_assigned():
    start(loss_scale="128.0")
    scaler = amp._amp_state.loss_scalers[0]
    assert (scaler.dynamic, scaler.loss_scale(), scaler._unskipped) == (False, 128.0, 0)
    scaler._scale_seq_len, scaler._max_loss_scale, scaler._min_loss_scale = 1, 2.0, None
    scaler._loss_scale = 4
    assert scaler.loss_scale() == 4.0
    assert scaler.update_scale() is False


def test_a_scaler_can_be_made_by_itself():
    assert amp.scaler.LossScaler(128.0).loss_scale() == 128.0
    dynamic = amp.scaler.LossScaler("dynamic", init_scale=2.0**8, scale_factor=4.0, scale_window=2)
    assert (dynamic.dynamic, dynamic.loss_scale(), dynamic._scale_seq_len) == (True, 256.0, 2)
    assert [dynamic.update_scale() for _ in range(2)] == [False, False]
    assert dynamic.loss_scale() == 1024.0


def test_a_scaler_unscales_gradients_and_remembers_an_overflow():
    scaler = LossScaler("dynamic", init_scale=4.0)
    masters = [torch.zeros(2), torch.zeros(1)]
    scaler.unscale([torch.tensor([8.0, 4.0]).half(), torch.ones(1)], masters, 4.0)
    assert_same_bits(masters, [torch.tensor([2.0, 1.0]), torch.tensor([0.25])])
    assert not scaler.update_scale()
    scaler.unscale([torch.tensor([INF])], masters[1:], 4.0)
    assert scaler.update_scale()
    assert scaler.loss_scale() == 2.0
    assert not scaler.update_scale(), "the buffer was cleared"


def test_a_scaler_pickles_in_the_layout_of_apex():
    model, optimizer = start()
    run_step(model, optimizer)
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler.__getstate__() == {
        "dynamic": True,
        "_loss_scale": 65536.0,
        "_max_loss_scale": 2.0**24,
        "_min_loss_scale": None,
        "_unskipped": 1,
        "_scale_seq_len": 2000,
    }
    loaded = pickle.loads(pickle.dumps(scaler))
    assert loaded.__getstate__() == scaler.__getstate__()
    copied = copy.deepcopy(ampatch.loss_scalers()[0])
    assert copied.state_dict() == {"loss_scale": 65536.0, "unskipped": 1}
    copied.set_scale(2.0)
    assert scaler.loss_scale() == 65536.0


# ---- The lists of functions ----


@pytest.fixture
def lists(monkeypatch):
    """The lists, which a test may edit; they are put back."""
    for module in OVERRIDES:
        for name in ("FP16_FUNCS", "BFLOAT16_FUNCS", "FP32_FUNCS", "CASTS", "BANNED_FUNCS"):
            monkeypatch.setattr(module, name, list(getattr(module, name)))
    return amp.lists


def test_the_lists_hold_the_rows_of_the_tables(lists):
    assert {"linear", "conv2d"} <= set(lists.functional_overrides.FP16_FUNCS)
    assert {"softmax", "layer_norm"} <= set(lists.functional_overrides.FP32_FUNCS)
    assert lists.functional_overrides.BANNED_FUNCS[0][0] == "binary_cross_entropy"
    assert {"cat", "stack"} == set(lists.torch_overrides.SEQUENCE_CASTS)
    assert not set(lists.torch_overrides.FP16_FUNCS) & set(lists.torch_overrides.FP32_FUNCS)


def test_functions_that_are_moved_taken_out_or_put_in_run_in_the_type_of_their_list(lists):
    functions = lists.functional_overrides
    functions.FP32_FUNCS.remove("softmax")
    functions.FP16_FUNCS.append("softmax")
    functions.FP32_FUNCS.remove("softplus")
    lists.torch_overrides.FP16_FUNCS.append("mul")
    functions.BANNED_FUNCS.clear()
    start("O1")
    half = torch.full((1, 4), 0.5).half()
    for x in (ONE, half):
        assert F.softmax(x, -1).dtype is torch.mul(x, x).dtype is torch.float16
        assert F.log_softmax(x, -1).dtype is torch.float32, "the others stay"
        assert F.softplus(x).dtype is x.dtype, "what is in no list has the type of its arguments"
    assert F.binary_cross_entropy(half, ONE).dtype is torch.float32


# ---- What is on the optimizer ----


@shows("private-stash")
def test_the_stash_lists_half_params_masters_and_the_others():
    model, optimizer = start()
    stash = optimizer._amp_stash
    halves = [id(param) for param in model.parameters() if param.dtype is torch.float16]
    assert [*map(id, stash.all_fp16_params)] == halves
    assert_same_bits(stash.all_fp16_params, [param.half() for param in stash.all_fp32_from_fp16_params])
    assert [*map(id, stash.all_fp32_from_fp32_params)] == [*map(id, model[1].parameters())]
    model[1].bias.requires_grad_(False)  # frozen ones are in no list
    assert [*map(id, stash.all_fp32_from_fp32_params)] == [id(model[1].weight)]


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_without_masters_there_is_no_method_to_copy_them(level):
    _, optimizer = start(level)
    assert not hasattr(optimizer, "_master_params_to_model_params")
    assert optimizer._amp_stash.all_fp16_params == []


@pytest.mark.parametrize("name", ["optim", "base_optimizer"])
def test_each_of_several_optimizers_and_one_inside_a_wrapper_gets_its_own(name):
    (first, optimizer), (second, inner) = make(), make()
    wrapper = types.SimpleNamespace(**{name: inner})
    amp.initialize([first, second], [optimizer, wrapper], opt_level="O2", verbosity=0)
    assert len(optimizer._amp_stash.all_fp16_params) == 4
    assert inner._amp_stash.all_fp16_params[0] is second[0].weight


# ---- Loops that do the work of scale_loss by themselves ----


def run_by_hand(model, optimizer, factor=1.0, seed=1):
    """One iteration in the manner of code that copied the body of scale_loss; returns if it skipped."""
    optimizer.zero_grad()
    scaler = amp._amp_state.loss_scalers[0]
    loss = loss_of(model, seed) * factor
    optimizer._prepare_amp_backward()
    (loss.float() * scaler.loss_scale()).backward()
    scaler.clear_overflow_state()
    optimizer._post_amp_backward(scaler)
    optimizer._amp_stash.params_have_scaled_gradients = False
    should_skip = scaler.update_scale()
    if not should_skip:
        optimizer.step()
    return should_skip


@shows("patterns-by-hand")
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("loss_scale", ["dynamic", 8.0])
def test_a_loop_by_hand_does_what_scale_loss_does(level, loss_scale):
    factors = (1.0, 1.0, INF, 1.0, 1.0) if loss_scale == "dynamic" else (1.0,) * 5
    weights = []
    for run in (run_step, run_by_hand):
        model, optimizer = start(level, loss_scale=loss_scale)
        for seed, factor in enumerate(factors):
            run(model, optimizer, factor, seed)
        weights.append((snapshot(list(amp.master_params(optimizer))), amp.state_dict()))
        ampatch.uninitialize()
    assert weights[0] == weights[1]


def test_gradients_from_before_a_backward_by_hand_are_added_to():
    model, optimizer = start("O1")
    scaler = amp._amp_state.loss_scalers[0]
    grads = []
    for _ in range(2):
        optimizer._prepare_amp_backward()
        (loss_of(model) * scaler.loss_scale()).backward()
        optimizer._post_amp_backward(scaler)
        grads.append([param.grad.clone() for param in model.parameters()])
    assert_same_bits(grads[1], [grad * 2 for grad in grads[0]])


@shows("patterns-by-hand")
def test_a_loop_that_checks_overflows_with_a_buffer_of_its_own_skips_by_itself():
    """All-reduce after accumulation: no check in scale_loss, an own overflow buffer, own skipping."""
    model, optimizer = start()
    buffer = torch.zeros(1, dtype=torch.int32)
    for factor, watched in ((INF, unchanged), (1.0, changed)):
        with amp.scale_loss(loss_of(model) * factor, optimizer, delay_overflow_check=True) as scaled_loss:
            scaled_loss.backward()
        scaler = amp._amp_state.loss_scalers[0]
        grads = [param.grad for param in amp.master_params(optimizer) if param.grad is not None]
        buffer.copy_(torch.tensor([not all(bool(grad.isfinite().all()) for grad in grads)]))
        old_buffer, scaler._overflow_buf = scaler._overflow_buf, buffer
        had_overflow = scaler.update_scale()
        scaler._overflow_buf = old_buffer
        assert had_overflow == (factor == INF)
        with watched(model):
            if had_overflow:
                for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                    param.grad = None
            else:
                optimizer.step()
        for param in model.parameters():
            param.grad = None
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 1}}


# ---- The handle ----


@shows("private-handle")
def test_casts_stop_where_a_script_says_that_the_handle_is_not_active():
    start("O4")
    handle = amp._amp_state.handle
    assert handle.is_active()
    assert handle._is_active
    handle._is_active = False
    assert F.linear(ONE, ONE).dtype is torch.float32
    handle._is_active = False  # twice does not count twice
    handle._is_active = True
    assert F.linear(ONE, ONE).dtype is torch.bfloat16
    with handle._disable_casts():
        assert F.linear(ONE, ONE).dtype is torch.float32
    handle._clear_cache()
    handle._is_active = False
    start("O4")
    assert F.linear(ONE, ONE).dtype is torch.bfloat16, "a handle is switched off for its own call alone"


@shows("private-handle")
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_where_no_function_is_patched_the_handle_is_not_active(level):
    start(level)
    assert not amp._amp_state.handle.is_active()
    amp._amp_state.handle._clear_cache()
    amp._amp_state.handle._deactivate()
    with amp._amp_state.handle._disable_casts():
        pass


def call_banned():
    return F.binary_cross_entropy(torch.full((2,), 0.5).half(), torch.ones(2))


@pytest.mark.parametrize(
    "begin", [lambda: amp.init() and None, lambda: start("O1")], ids=["init", "initialize"]
)
def test_deactivating_restores_torch_and_the_next_call_starts_afresh(begin, check_torch, without_gpu):
    linear = F.linear
    amp.init(allow_banned=True)
    assert call_banned().dtype is torch.float32
    amp._amp_state.handle._deactivate()
    assert F.linear is linear
    assert not amp._amp_state.handle.is_active()
    begin()
    assert amp._amp_state.handle.is_active()
    assert F.linear(ONE, ONE).dtype is torch.float16
    with pytest.raises(NotImplementedError):
        call_banned()


def test_training_goes_on_after_deactivating():
    model, optimizer = start("O1", loss_scale="dynamic")
    cast, cast_optimizer = start("O2", loss_scale="dynamic")
    amp._amp_state.handle._deactivate()
    for each, its_optimizer in ((model, optimizer), (cast, cast_optimizer)):
        with unchanged(each):
            run_step(each, its_optimizer, INF)
        with changed(each):
            run_step(each, its_optimizer)
    assert model[0](ONE).dtype is torch.float32
    assert cast[0].weight.dtype is torch.float16
    ampatch.uninitialize()
    assert cast[0].weight.dtype is torch.float32


def test_a_handle_keeps_no_optimizer_that_it_wrapped():
    handle = amp.init()
    _, optimizer = make()
    with handle.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert scaled_loss == 65536.0
    wrapper = weakref.ref(handle.wrap_optimizer(make()[1]))
    dropped = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert (dropped(), wrapper()) == (None, None)


# ---- Several calls ----


@shows("private-last-call")
def test_scalers_states_and_loss_ids_are_those_of_the_last_call():
    start(loss_scale="dynamic")
    earlier = amp._amp_state.loss_scalers[0]
    start(loss_scale="dynamic", num_losses=2)
    scalers = amp._amp_state.loss_scalers
    assert [scaler.loss_id for scaler in scalers] == [0, 1]
    assert amp._amp_state.loss_scalers[1] is scalers[1], "what is assigned to it is found again"
    scalers[0]._loss_scale = 4.0
    assert (earlier.loss_scale(), scalers[1].loss_scale()) == (65536.0, 65536.0)
    state = amp.state_dict()
    assert [entry["loss_scale"] for entry in state.values()] == [4.0, 65536.0]
    assert list(state) == ["loss_scaler0", "loss_scaler1"]
    scalers[0]._loss_scale = 8.0
    amp.load_state_dict(state)
    assert (earlier.loss_scale(), scalers[0].loss_scale()) == (65536.0, 4.0)


@shows("patterns-initialize-twice", "private-last-call")
def test_an_optimizer_of_an_earlier_call_goes_on_with_the_scalers_of_the_last():
    model, optimizer = start(loss_scale="dynamic")
    earlier = amp._amp_state.loss_scalers[0]
    start(loss_scale="dynamic", num_losses=2)
    with unchanged(model):
        run_step(model, optimizer, INF, loss_id=1)
    with changed(model):
        run_step(model, optimizer, loss_id=1)
    scales = [scaler.loss_scale() for scaler in (earlier, *amp._amp_state.loss_scalers)]
    assert scales == [65536.0, 65536.0, 32768.0]
    assert run_by_hand(model, optimizer, INF)
    assert [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers] == [32768.0, 32768.0]


# ---- amp.init, the older way in ----


def fit(handle, wrap):
    model, optimizer = make()
    wrapped = handle.wrap_optimizer(optimizer) if wrap else optimizer
    losses = []
    for _ in range(30):
        loss = loss_of(model)
        wrapped.zero_grad()
        block = wrapped.scale_loss(loss) if wrap else handle.scale_loss(loss, optimizer)
        with block as scaled_loss:
            scaled_loss.backward()
        wrapped.step()
        losses.append(loss.item())
    return losses


@shows("patterns-old-init")
@pytest.mark.parametrize("verbose", [False, True])
def test_init_prints_if_it_is_told_to_alone_and_logs_the_alarms_of_its_wrappers(verbose, capsys, caplog):
    handle = amp.init(verbose=verbose)
    model, optimizer = make()
    wrapped = handle.wrap_optimizer(optimizer)
    with wrapped.scale_loss(loss_of(model) * INF) as scaled_loss:
        scaled_loss.backward()
    wrapped.step()
    assert ("Selected optimization level O1" in capsys.readouterr().out) == verbose
    assert "loss 0 of a later call (amp.history(1)), step 0: the loss is inf or NaN" in caplog.text


@shows("patterns-old-init")
@pytest.mark.parametrize("wrap", [True, False], ids=["wrapped", "plain"])
def test_init_patches_torch_for_every_model_and_its_handle_scales(wrap, without_gpu):
    handle = amp.init()
    assert handle is amp._amp_state.handle
    assert F.linear(ONE, ONE).dtype is torch.float16
    losses = fit(handle, wrap)
    assert losses[-1] < losses[0] / 4
    assert amp._amp_state.handle is handle
    ampatch.uninitialize()
    assert F.linear(ONE, ONE).dtype is torch.float32


@shows("patterns-old-init")
def test_a_disabled_init_lets_everything_pass():
    handle = amp.init(enabled=False)
    ampatch.uninitialize()
    assert not hasattr(amp._amp_state, "handle")
    handle = amp.init(enabled=False)
    assert F.linear(ONE, ONE).dtype is torch.float32
    assert not handle.is_active()
    assert fit(handle, wrap=True) == fit(handle, wrap=False)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_init_refuses_a_level_that_casts_models(level):
    with (
        ampatch.override(opt_level=level, loss_scale=None),
        pytest.raises(ValueError, match=f"that {level} could cast.*use --opt-level O1 or O4"),
    ):
        amp.init()
    assert F.linear(ONE, ONE).dtype is torch.float32


def test_init_takes_any_level_that_patches(monkeypatch, without_gpu):
    new = replace(ampatch.OPT_LEVELS["O4"], opt_level="O9")
    monkeypatch.setitem(ampatch.OPT_LEVELS, "O9", new)
    with ampatch.override(opt_level="O9", loss_scale=None):
        amp.init()
    assert F.linear(ONE, ONE).dtype is torch.bfloat16


def test_the_losses_of_a_wrapped_optimizer_take_turns():
    handle = amp.init(loss_scale="dynamic")
    model, optimizer = make()
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2)
    with unchanged(model):  # one overflow skips the step
        for factor in (1.0, INF):
            with wrapped.scale_loss(loss_of(model) * factor) as scaled_loss:
                scaled_loss.backward()
        wrapped.step()
    for scale in (65536.0, 32768.0):
        with wrapped.scale_loss(torch.ones(())) as scaled_loss:
            assert scaled_loss == scale


def test_a_wrapped_optimizer_is_the_optimizer_otherwise():
    handle = amp.init()
    _, optimizer = make()
    wrapped = handle.wrap_optimizer(optimizer)
    assert wrapped.param_groups is optimizer.param_groups
    assert wrapped.state_dict().keys() == optimizer.state_dict().keys()
    assert "OptimWrapper(SGD" in repr(wrapped)
    with pytest.raises(AttributeError, match="no_such_name"):
        wrapped.no_such_name


# ---- Messages ----


def test_a_script_may_print_by_maybe_print(capsys):
    from ampatch.apex.amp._amp_state import maybe_print

    start(verbosity=0)
    maybe_print("hidden")
    ampatch.uninitialize()
    start(verbosity=1)
    capsys.readouterr()
    maybe_print("shown", True)
    assert capsys.readouterr().out == "shown\n"
