"""The life of a session: what `initialize` returns, and what `uninitialize` undoes."""

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.levels.patcher import Patcher
from ampatch.session.session import SESSION
from apex_rows import shows
from helpers import scaled_backward
from nets import EVERY_LEVEL, FULL, X, make_trained, open_session
from pictures import assert_same_picture, picture

UNROUNDED = ["O0", "O1", "O2", "O4", "O5"]  # O3 keeps no float32 values


def make():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# ---- Undo ----


@shows("initialize-undo-defect", "never-way-back")
@pytest.mark.parametrize("opt_level", UNROUNDED)
def test_uninitialize_restores_everything_bit_for_bit_any_number_of_times(opt_level):
    model, optimizer = make_trained()
    model.eval()
    before = picture(model, optimizer)
    for evaluated, kept in [(False, ()), (True, ()), (True, "out"), (False, "*")]:
        amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, keep_fp32=kept)
        if evaluated:
            model(X)
            with torch.no_grad():
                model(X)
        amp.uninitialize()
        assert_same_picture(picture(model, optimizer), before)


@pytest.mark.parametrize("opt_level", EVERY_LEVEL)
def test_gradients_that_were_there_before_count_in_the_next_step(opt_level):
    def run(initialize):
        torch.manual_seed(2)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).sum().backward()
        if initialize:
            amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, loss_scale=4.0)
            scaled_backward(model(X).float().sum(), optimizer)
        else:
            model(X).sum().backward()
        return torch.cat([param.grad.float().flatten() for param in amp.master_params(optimizer)])

    # The gradients are sums of three inputs, exact in bfloat16 as well.
    assert torch.equal(run(initialize=True), run(initialize=False))


def test_uninitialize_at_o3_restores_everything_but_the_rounding():
    model, optimizer = make_trained()
    optimizer.state.clear()
    expected = picture(model, optimizer)
    rounded = [param.half().float().tolist() for param in model.parameters()]
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    amp.uninitialize()
    found = picture(model, optimizer)
    assert found[0]["modules"] == expected[0]["modules"]
    assert found[1] == expected[1]
    assert {param.dtype for param in model.parameters()} == {FULL}
    assert [param.tolist() for param in model.parameters()] == rounded


def test_uninitialize_undoes_every_call():
    pairs = [make_trained() for _ in range(3)]
    before = [picture(*pair) for pair in pairs]
    for (model, optimizer), opt_level in zip(pairs, ["O2", "O4", "O5"], strict=True):
        amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    amp.uninitialize()
    for pair, expected in zip(pairs, before, strict=True):
        assert_same_picture(picture(*pair), expected)


def test_an_unfinished_block_does_not_keep_uninitialize_from_undoing():
    model, optimizer = make_trained()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, loss_scale=4.0)
    scaled_backward(model(X).sum(), optimizer, delay_unscale=True)
    amp.uninitialize()
    assert {param.dtype for param in model.parameters()} == {FULL}
    assert {param.grad.dtype for param in model.parameters()} == {FULL}


def test_hooks_of_the_user_stay():
    model, optimizer = make_trained()
    calls = []
    model.register_forward_hook(lambda *_: calls.append("forward"))
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    model.register_forward_hook(lambda *_: calls.append("later"))
    amp.uninitialize()
    model(X)
    optimizer.step()
    assert calls == ["forward", "later", "step"]


# ---- What comes back ----


@shows("initialize-shapes", "patterns-return")
@pytest.mark.parametrize("enabled", [True, False])
def test_what_comes_back_has_the_shape_of_what_went_in(enabled):
    def call(*args):
        return amp.initialize(*args, enabled=enabled, opt_level="O0", verbosity=0)

    (a, o), (b, p), (c, q), (d, r), (e, s), (f, t) = (make() for _ in range(6))
    assert call(a) is a
    result = call(b, p)
    assert type(result) is tuple
    assert result == (b, p)
    models, optimizers = call([c, d], [q, r])
    assert (models, optimizers) == ([c, d], [q, r])
    assert type(models) is type(optimizers) is list
    assert call([e], s) == ([e], s)
    assert call((a, b)) == (a, b)
    assert call((f,), (t,)) == ((f,), (t,))
    assert call(a, []) == (a, [])
    assert call([a], [o]) == ([a], [o])


# ---- enabled=False ----


@pytest.fixture
def disabled():
    model, optimizer = make()
    amp.initialize(model, optimizer, enabled=False, opt_level="O2")
    return model, optimizer


def test_a_disabled_call_changes_and_prints_nothing(capsys):
    model, optimizer = make_trained()
    before = picture(model, optimizer)
    mm = torch.mm
    assert amp.initialize(model, optimizer, enabled=False, verbosity=2) == (model, optimizer)
    assert torch.mm is mm
    assert_same_picture(picture(model, optimizer), before)
    assert capsys.readouterr().out == ""


def test_a_disabled_call_does_not_look_at_its_arguments(disabled):
    model, optimizer = make()
    amp.initialize(model.half(), optimizer, enabled="False", opt_level="any")
    assert model.weight.dtype is torch.float16


@shows("initialize-disabled", "initialize-disabled-defect", "patterns-cpu")
def test_the_other_functions_pass_through_while_disabled(disabled):
    model, optimizer = disabled
    with amp.disable_casts():
        assert model(X).dtype is FULL
    assert amp.step_was_skipped(optimizer) is False
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert amp.get_loss_scale() == 1.0
    amp.set_loss_scale(4.0)
    amp.clear_cache()
    amp.report(accuracy=1.0)
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 12}})
    amp.uninitialize()


def test_an_enabled_call_may_follow_a_disabled_one(disabled):
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    assert model(X).dtype is torch.bfloat16
    loss = disabled[0](X).sum()
    with amp.scale_loss(loss, disabled[1]) as scaled:
        assert scaled is loss


def test_uninitialize_ends_a_disabled_session(disabled):
    amp.uninitialize()
    with pytest.raises(amp.NotInitializedError):
        amp.state_dict()


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (torch, "batch_norm"),
        (torch.Tensor, "data"),
        (torch.jit._recursive, "create_script_module"),
    ],
    ids=["batch_norm", "Tensor.data", "create_script_module"],
)
def test_what_others_patched_over_is_given_back_once_theirs_is_gone(place, name, level):
    model = torch.nn.Linear(2, 2)
    before = vars(place).get(name)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    ours = vars(place)[name]
    setattr(place, name, theirs := object())
    with pytest.raises(amp.PatchConflictError, match=name):
        amp.uninitialize()
    assert vars(place)[name] is theirs
    setattr(place, name, ours)
    amp.uninitialize()
    assert vars(place).get(name) is before


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")  # of torch 2.8's own LBFGS
def test_the_history_of_lbfgs_has_the_type_of_its_parameters_at_o3_and_after_it():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)

    def step():
        def closure():
            optimizer.zero_grad()
            loss = model(X).float().pow(2).mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    first = step()
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    step()
    amp.uninitialize()
    assert step() < first


def test_what_an_optimizer_keeps_beside_the_state_of_its_parameters_stays_as_it_is():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["counts"] = kept = {"total": torch.ones(1)}
    amp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    assert optimizer.state["counts"] is kept
    assert kept["total"].dtype is torch.float32
    amp.uninitialize()


def interrupted(*_):
    raise KeyboardInterrupt


class Interrupts:
    retry = property(interrupted)


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (SESSION.data_watch, "forget", interrupted),
        (Patcher, "close", interrupted),
        (SESSION, "_captures", Interrupts()),  # before anything is undone
    ],
    ids=["forget", "close", "begin"],
)
def test_an_interrupted_uninitialize_is_finished_by_the_next(owner, name, value, monkeypatch, check_torch):
    model = open_session(nn.Linear(3, 2), opt_level="O2")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value)
        with pytest.raises(KeyboardInterrupt):
            amp.uninitialize()
    amp.uninitialize()
    check_torch()
    assert model.weight.dtype is FULL
    assert not model._forward_hooks


def test_models_are_restored_where_the_undo_of_their_call_is_interrupted(check_torch):
    model = open_session(nn.Linear(3, 2), opt_level="O2")
    SESSION.calls[0].members.append(interrupted)
    with pytest.raises(KeyboardInterrupt):
        amp.uninitialize()
    check_torch()
    assert model.weight.dtype is FULL
    assert not model._forward_hooks
