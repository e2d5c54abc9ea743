"""Observers, overrides and reports: how tools watch and steer a script."""

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.session.session import SESSION
from helpers import scaled_backward, snapshot
from nets import FULL, X, make_trained, train
from pictures import unchanged


def make():
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Boom(Exception):
    pass


class Recorder(amp.Observer):
    def __init__(self):
        self.events = []

    def on_initialize(self, policy):
        self.events.append(("initialize", policy.opt_level))

    def on_objects(self, models, optimizers):
        self.events.append(("objects", models, optimizers))

    def on_loss(self, loss, loss_id):
        self.events.append(("loss", loss.item(), loss_id))
        assert not loss.requires_grad

    def on_backward(self, loss_id):
        self.events.append(("backward", loss_id))

    def on_step_begin(self, optimizer):
        self.events.append(("step begins", optimizer))

    def on_step(self, optimizer):
        self.events.append(("step", optimizer))

    def on_report(self, metrics):
        self.events.append(("report", metrics))

    def on_uninitialize(self):
        self.events.append(("uninitialize",))


def test_an_observer_is_told_what_happens_in_order():
    recorder = Recorder()
    model, optimizer = make()
    with amp.observe(recorder):
        amp.initialize(model, optimizer, opt_level="O1", num_losses=2, verbosity=0)
        loss = model(X).float().sum()
        scaled_backward(loss, optimizer, loss_id=1)
        optimizer.step()
        amp.report(accuracy=0.5)
        amp.uninitialize()
    assert recorder.events == [
        ("initialize", "O1"),
        ("objects", (model,), (optimizer,)),
        ("loss", loss.item(), 1),
        ("backward", 1),
        ("step begins", optimizer),
        ("step", optimizer),
        ("report", {"accuracy": 0.5}),
        ("uninitialize",),
    ]


def test_an_observer_is_told_of_skipped_steps_too():
    recorder = Recorder()
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with amp.observe(recorder):
        scaled_backward(model(X).sum() * float("inf"), optimizer)
        optimizer.step()
    assert [event[0] for event in recorder.events] == ["loss", "backward", "step begins", "step"]


def test_a_block_that_raises_has_no_backward_to_tell_of():
    recorder = Recorder()
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    with amp.observe(recorder), pytest.raises(Boom), amp.scale_loss(model(X).sum(), optimizer):
        raise Boom
    assert [event[0] for event in recorder.events] == ["loss"]


def test_losses_of_several_calls_have_numbers_of_their_own():
    recorder = Recorder()
    with amp.observe(recorder):
        for _ in range(2):
            model, optimizer = make()
            amp.initialize(model, optimizer, opt_level="O0", num_losses=2, verbosity=0)
        scaled_backward(model(X).sum(), optimizer, loss_id=1)
    assert [event[-1] for event in recorder.events if event[0] in ("loss", "backward")] == [3, 3]


def test_the_step_begins_before_gradients_are_looked_at():
    class LookAtGrads(amp.Observer):
        def on_step_begin(self, optimizer):
            self.grad = model.weight.grad.clone()

    observer = LookAtGrads()
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=4.0, verbosity=0)
    with amp.observe(observer):
        scaled_backward(model(X).float().sum(), optimizer, delay_unscale=True)
        optimizer.step()
    assert torch.equal(observer.grad, 4 * model.weight.grad)


def test_outcomes_of_a_step_say_what_its_backward_passes_did():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O1", num_losses=2, verbosity=0)
    for loss_id, factor in ((0, 0.01), (1, float("inf"))):
        scaled_backward(model(X).float().sum() * factor, optimizer, loss_id=loss_id)
    optimizer.step()
    outcomes = amp.backward_outcomes(optimizer)
    assert [(it.loss_id, it.poll()) for it in outcomes] == [
        (0, (False, 65536.0, 65536.0)),
        (1, (True, 65536.0, 32768.0)),
    ]
    optimizer.step()
    assert amp.backward_outcomes(optimizer) == ()


def test_a_static_scale_has_no_outcomes():
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
    train(model, optimizer)
    assert amp.backward_outcomes(optimizer) == ()


def test_an_observer_is_told_nothing_outside_of_its_block_nor_of_a_disabled_call():
    recorder = Recorder()
    with amp.observe(recorder):
        amp.initialize(nn.Linear(3, 2), enabled=False)
    with pytest.raises(Boom), amp.observe(recorder):
        raise Boom
    amp.initialize(nn.Linear(3, 2), opt_level="O4", verbosity=0)
    amp.report(accuracy=1.0)
    assert recorder.events == []


def test_two_observers_are_told_and_end_independently():
    first, second = Recorder(), Recorder()
    with amp.observe(first):
        with amp.observe(second):
            amp.report(a=1)
        amp.report(a=2)
    assert (len(first.events), len(second.events)) == (2, 1)


def test_an_observer_that_raises_does_not_keep_uninitialize_from_undoing():
    class Fails(amp.Observer):
        def on_uninitialize(self):
            raise Boom

    model, optimizer = make_trained()
    with unchanged(model, optimizer):
        amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
        with amp.observe(Fails()), pytest.raises(Boom):
            amp.uninitialize()


def test_report_does_nothing_outside_of_a_tool(capsys):
    amp.report(accuracy=0.9, loss=torch.tensor(1.0))
    assert capsys.readouterr() == ("", "")


def test_an_override_wins_over_what_the_script_passes(capsys):
    with amp.override(opt_level="O5", verbosity=1):
        model = amp.initialize(nn.Linear(3, 2), opt_level="O1", verbosity=0)
    assert model.weight.dtype is torch.bfloat16
    assert "Selected optimization level O5" in capsys.readouterr().out


def test_an_override_ends_with_its_block_and_nests():
    with amp.override(opt_level="O5", verbosity=0):
        with amp.override(opt_level="O2"):
            assert amp.initialize(nn.Linear(3, 2)).weight.dtype is torch.float16
        assert amp.initialize(nn.Linear(3, 2)).weight.dtype is torch.bfloat16
    with pytest.raises(Boom), amp.override(opt_level="O5"):
        raise Boom
    assert amp.initialize(nn.Linear(3, 2), opt_level="O0", verbosity=0).weight.dtype is FULL


def test_an_override_of_what_initialize_does_not_take_is_refused():
    match = r"override: initialize has no argument 'level' \(did you mean 'opt_level'\?\), 'speed'"
    with pytest.raises(TypeError, match=match), amp.override(level="O1", speed=2):
        pass


@pytest.mark.usefixtures("emulated")
@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("level", amp.OPT_LEVELS)
def test_the_engine_trains_to_the_same_bits_with_each_listener_taken_out_and_with_none(level):
    def run():
        torch.manual_seed(0)
        model, optimizer = make()
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for _ in range(3):
            scaled_backward(model(X).float().pow(2).mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        bits = snapshot(list(amp.master_params(optimizer)))
        amp.uninitialize()
        return bits

    events, expected = SESSION.events, run()
    listeners = events._listeners
    assert len(listeners) >= 4  # the banner, misuse, alarms, the doctor
    try:
        for left in [*([one] for one in listeners), []]:
            for one in events._listeners:
                events.remove(one)
            for one in left:
                events.add(one)
            assert run() == expected
    finally:
        for one in events._listeners:
            events.remove(one)
        for one in listeners:
            events.add(one)
