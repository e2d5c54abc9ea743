"""The history of loss scales, and the alarms about them."""

import copy
import gc
import math
import pickle
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ampatch as amp
from ampatch.apex import amp as apex_amp
from ampatch.steps.scaler import BackwardOutcome
from ampatch.watching.alarms.history import MOST_UPDATES
from ampatch.watching.alarms.watch import SLOTS, Judge
from ampatch.watching.post_mortem import LastForward
from helpers import Scalar, scaled_backward
from nets import EVERY_LEVEL, X, sgd
from stepping import FUSED_MOMENTUM, INF, MOMENTUM

NAN = float("nan")


class Run:
    """A product whose loss is multiplied by what each step is given; its alarms are noted."""

    def __init__(self, level="O1", variant=MOMENTUM, loss_scale=None, **options):
        self.model = Scalar()
        self.optimizer = variant(self.model.parameters())
        scale = {} if loss_scale is None else {"loss_scale": loss_scale}
        amp.initialize(self.model, self.optimizer, opt_level=level, **{"verbosity": 0} | scale | options)
        self.alarms = []

    def __enter__(self):
        self.listening = amp.on_alarm(self.alarms.append)
        return self

    def __exit__(self, *_):
        self.listening.remove()

    def backward(self, factor=1e-3, **options):
        scaled_backward(self.model(torch.ones(3)).float().sum() * factor, self.optimizer, **options)

    def step(self, *factors, **options):
        for factor in factors:
            self.optimizer.zero_grad()
            self.backward(factor, **options)
            self.optimizer.step()

    def overflow(self, count=1):
        """Steps with a gradient that overflows, and a loss that does not."""
        for _ in range(count):
            self.optimizer.zero_grad()
            with amp.scale_loss(self.model(torch.ones(3)).float().sum() * 1e-3, self.optimizer) as scaled:
                scaled.backward()
                self.model.weight.grad[0] = INF
            self.optimizer.step()

    @property
    def kinds(self):
        return [(alarm.kind, alarm.step) for alarm in self.alarms]


@pytest.fixture
def run():
    with Run() as made:
        yield made


def rows(history):
    return [(it.step, it.scale, it.next_scale, it.skipped, it.loss_is_finite) for it in history]


# ---- The history ----


@pytest.mark.parametrize("variant", [MOMENTUM, FUSED_MOMENTUM], ids=str)
def test_a_history_has_the_first_step_and_those_at_which_something_happened(variant):
    run = Run(variant=variant)
    run.step(1e-3, 1e-3, INF, 1e-3)
    run.overflow()
    run.step(1e-3)
    history = amp.history()
    assert rows(history) == [
        (0, 2.0**16, 2.0**16, False, True),
        (2, 2.0**16, 2.0**15, True, False),
        (4, 2.0**15, 2.0**14, True, True),
    ]
    assert (history.loss_id, history.steps, history.skipped, history.forgotten) == (0, 6, 2, 0)
    assert history[-1].step == 4
    assert str(history).splitlines() == [
        "loss 0: 2 of 6 steps were skipped",
        "  step 0: scale 65536",
        "  step 2: skipped at 65536, then 32768, loss not finite",
        "  step 4: skipped at 32768, then 16384",
    ]


def test_growth_and_what_somebody_sets_are_in_the_history():
    run = Run(loss_scale=amp.DynamicLossScale(8.0, growth_interval=2))
    run.step(*[1e-3] * 3)
    amp.set_loss_scale(4.0)
    run.step(1e-3)
    assert rows(amp.history()) == [
        (0, 8, 8, False, True),
        (1, 8, 16, False, True),
        (3, 4, 8, False, True),  # two clean steps: it grows again
    ]


def test_backward_passes_that_are_added_up_are_one_step(run):
    for factor in (1e-3, INF, 1e-3):
        run.backward(factor)
    run.optimizer.step()
    assert rows(amp.history()) == [(0, 2.0**16, 2.0**15, True, False)]


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_delayed_backward_does_not_tell_whether_its_loss_is_finite(run, blocks):
    run.backward(delay_unscale=True)
    for _ in range(blocks - 1):
        run.backward()
    run.optimizer.step()
    assert rows(amp.history()) == [(0, 2.0**16, 2.0**16, False, None)]


def test_each_loss_of_each_call_has_its_own_history():
    first = Run(num_losses=2)
    second = Run("O0", loss_scale="dynamic")
    first.step(1e-3, INF, loss_id=1)
    second.step(INF)
    assert [amp.history(loss_id).steps for loss_id in range(3)] == [0, 2, 1]
    assert [amp.history(loss_id).skipped for loss_id in range(3)] == [0, 1, 1]
    with pytest.raises(amp.AmpValueError, match="loss_id 3 is out of range"):
        amp.history(3)


def test_a_loss_of_two_optimizers_is_one_step():
    models = [Scalar(), Scalar()]
    optimizers = [MOMENTUM(model.parameters()) for model in models]
    amp.initialize(models, optimizers, opt_level="O1", verbosity=0)
    for _ in range(3):
        scaled_backward(sum(model(torch.ones(3)).sum() for model in models) * INF, optimizers)
        for optimizer in optimizers:
            optimizer.step()
    assert (amp.history().steps, amp.history().skipped) == (3, 3)


def test_a_step_of_another_thread_while_one_reads_what_became_known(run, monkeypatch):
    """Python may switch threads between a look at what is known and taking it."""
    other, is_known, looks = Run(), BackwardOutcome.is_known, []

    def step_elsewhere_at_the_first_look(outcome):
        known = is_known(outcome)
        looks.append(outcome)
        if len(looks) == 1:
            thread = threading.Thread(target=other.step, args=(1e-3,))
            thread.start()
            thread.join()
        return known

    monkeypatch.setattr(BackwardOutcome, "is_known", step_elsewhere_at_the_first_look)
    run.step(1e-3)
    assert len(looks) > 1  # the other step was looked at, too
    assert [amp.history(loss_id).steps for loss_id in (0, 1)] == [1, 1]


def test_a_history_is_asked_for_while_another_thread_notes_an_overflow(run, monkeypatch):
    """Python may switch threads while it copies what is kept."""
    run.step(1e-3)

    def copy_slowly(updates):
        copying = iter(updates)
        first = next(copying)
        threads.append(threading.Thread(target=run.step, args=(math.inf,)))
        threads[0].start()
        threads[0].join(0.2)  # it may wait for this thread
        return (first, *copying)

    threads = []
    monkeypatch.setattr("ampatch.watching.alarms.history.tuple", copy_slowly, raising=False)
    assert len(amp.history()) == 1
    threads[0].join()
    monkeypatch.undo()
    assert len(amp.history()) == 2


def test_a_history_forgets_the_oldest():
    run = Run(loss_scale=amp.DynamicLossScale(2.0**20, backoff_factor=0.999), alarms=None)
    for _ in range(MOST_UPDATES + 5):
        run.step(INF)
    history = amp.history()
    assert (len(history), history[0].step, history.forgotten) == (MOST_UPDATES, 5, 5)
    assert (history.steps, history.skipped) == (MOST_UPDATES + 5, MOST_UPDATES + 5)


@pytest.mark.parametrize("level", EVERY_LEVEL)
def test_losses_at_a_static_scale_are_known_when_somebody_asks(level):
    run = Run(level, loss_scale=1.0)
    run.step(1e-3, NAN, 1e-3)
    assert rows(amp.history())[:2] == [(0, 1, 1, False, True), (1, 1, 1, False, False)]
    assert amp.history().steps == 3
    assert amp.history().skipped == 0


def test_a_static_scale_that_a_script_changes_counts_from_its_step_on():
    model = nn.Linear(2, 2)
    model, optimizer = apex_amp.initialize(model, sgd(model), opt_level="O1", loss_scale=128.0, verbosity=0)
    for scale in (128.0, 128.0, 64.0, 64.0):
        apex_amp._amp_state.loss_scalers[0]._loss_scale = scale
        scaled_backward(model(torch.ones(2, 2)).float().mean(), optimizer)
        optimizer.step()
    assert [(update.step, update.scale) for update in amp.history()] == [(0, 128.0), (2, 64.0)]
    assert amp.history().steps == 4


def test_a_history_begins_empty_with_each_session_and_stays_so_where_calls_are_disabled():
    with pytest.raises(amp.NotInitializedError):
        amp.history()
    amp.initialize(nn.Linear(2, 2), enabled=False)
    assert (len(amp.history()), amp.history().steps) == (0, 0)
    amp.uninitialize()
    Run().step(INF)
    amp.uninitialize()
    Run()
    assert amp.history().steps == 0


# ---- What it costs ----


# ---- The judge, against one that looks at all steps each time ----


def reasons_at(updates, i, limits, floor):
    """The kinds that have a reason at a step, from the rules alone."""

    def is_excused(k):
        starts = [j for j in range(k + 1) if j == 0 or updates[j].scale > updates[j - 1].next_scale]
        has_grown = k > 0 and updates[k - 1].next_scale > updates[k - 1].scale
        return has_grown or all(it.skipped and it.next_scale >= 128 for it in updates[starts[-1] : k])

    def row_of(k):
        start = k
        while start > 0 and updates[start - 1].skipped:
            start -= 1
        return [m for m in range(start, k + 1) if not is_excused(m)]

    now = updates[i]
    if now.skipped and limits.skipped is not None and len(row_of(i)) >= limits.skipped:
        yield "skipped"
    if now.loss_is_finite is False and limits.loss:
        yield "loss"
    fell = {
        next(m for m in row_of(k) if updates[m].next_scale < updates[m].scale)
        for k in range(i + 1)
        if updates[k].skipped and any(updates[m].next_scale < updates[m].scale for m in row_of(k))
    }
    recent = [k for k in fell if i - k < limits.within]
    if now.skipped and limits.falls is not None and len(recent) >= limits.falls:
        yield "falls"
    low = limits.scale_below or 0
    under = next((k for k in range(i, -1, -1) if updates[k].next_scale >= low), -1)
    if any(updates[k].skipped for k in range(under + 1, i + 1)):
        yield "low"
    if (
        limits.minimum
        and now.skipped
        and now.next_scale <= floor
        and (not is_excused(i) or now.scale <= floor)
    ):
        yield "minimum"


def judge_by_hand(updates, limits, floor):
    held = [set(reasons_at(updates, i, limits, floor)) for i in range(len(updates))]
    return [
        {kind for kind in now if not any(kind in before for before in held[max(0, i - limits.within) : i])}
        for i, now in enumerate(held)
    ]


SCALES = st.sampled_from([16.0, 64.0, 128.0, 256.0, 512.0])
STEPS = st.tuples(
    st.sampled_from([None, None, None, 256.0, 64.0]),
    st.sampled_from([0.5, 0.5, 1.0, 2.0]),
    st.booleans(),
    st.sampled_from([True, True, False, None]),
)
LIMITS = st.builds(
    amp.Alarms,
    loss=st.booleans(),
    skipped=st.none() | st.integers(1, 3),
    falls=st.none() | st.integers(1, 3),
    within=st.integers(1, 6),
    scale_below=st.none() | SCALES,
    minimum=st.booleans(),
)


@settings(max_examples=300)
@given(st.lists(STEPS, max_size=24), LIMITS, st.sampled_from([0.0, 16.0, 128.0]))
def test_the_judge_says_what_the_rules_say(steps, limits, floor):
    updates, scale = [], 256.0
    for step, (given_scale, factor, skipped, finite) in enumerate(steps):
        scale = given_scale or scale  # somebody set it
        updates.append(amp.ScaleUpdate(step, scale, scale * factor, skipped, finite))
        scale *= factor
    judge = Judge(limits)
    assert [set(judge.take(update, floor)) for update in updates] == judge_by_hand(updates, limits, floor)


# ---- Alarms of a run ----


def test_a_loss_that_is_not_finite_raises_one_alarm(caplog):
    with Run(verbosity=1) as run:
        caplog.clear()
        run.step(1e-3, NAN, NAN, 1e-3, NAN)
    assert run.kinds == [("loss", 1)]
    assert caplog.text.count("the loss is inf or NaN before it is scaled") == 1
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("ampatch", "WARNING")
    (alarm,) = run.alarms
    assert (alarm.loss_id, alarm.scale, alarm.post_mortem) == (0, 2.0**16, None)
    assert str(alarm) == alarm.message == record.getMessage()


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
def test_a_loss_at_a_static_scale_raises_it_some_steps_later(level):
    with Run(level) as run:
        run.step(1e-3, NAN, *[1e-3] * (SLOTS - 3))
        assert run.kinds == []
        run.step(1e-3)
    assert run.kinds == [("loss", 1)]


def fall_now_and_then(run):
    for _ in range(6):
        run.step(*[1e-3] * 3)
        run.overflow()


@pytest.mark.parametrize(
    ("scale", "train", "kinds", "said"),
    [
        ({}, lambda run: (run.step(1e-3), run.overflow(6)), [("skipped", 5)], "5 steps in a row"),
        ({}, fall_now_and_then, [("falls", 19)], "fell 5 times within 1000 steps, now to 2048"),
        ({"growth_interval": 2}, fall_now_and_then, [("falls", 19)], "within 1000 steps, now to 65536"),
        (
            {"init_scale": 2.0**15, "min_scale": 2.0**14},
            lambda run: (run.step(1e-3), run.overflow()),
            [("minimum", 1)],
            "overflow at a loss scale of 16384, the least allowed",
        ),
        (
            {"init_scale": 256.0},
            lambda run: (run.step(1e-3), run.overflow(2)),
            [("low", 2)],
            "fell to 64, below 128: small gradients are 0 in float16",
        ),
        ({"init_scale": 2.0**30, "max_scale": 2.0**40}, lambda run: run.overflow(22), [], ""),  # it searches
    ],
)
def test_a_scale_that_falls_raises_an_alarm_unless_it_searches(scale, train, kinds, said):
    with Run(loss_scale=amp.DynamicLossScale(**scale)) as run:
        train(run)
    assert run.kinds == kinds
    assert said in "".join(alarm.message for alarm in run.alarms)


def test_each_call_has_its_own_limits_which_can_be_switched_off(caplog):
    with Run(alarms=None) as off, Run(alarms=amp.Alarms(loss=False)) as silent:
        for run in (off, silent):
            run.step(1e-3, NAN)
    assert (off.alarms, silent.alarms, caplog.text) == ([], [], "")
    with Run() as loud:
        off.step(NAN)
        loud.step(NAN)
    assert [(alarm.kind, alarm.loss_id) for alarm in loud.alarms] == [("loss", 2)]
    assert amp.history(0).skipped == 2


def test_a_callback_that_raises_is_logged_and_the_others_are_called(run, caplog):
    def fail(alarm):
        raise ValueError("no mail server")

    with amp.on_alarm(fail):
        last = amp.on_alarm(run.alarms.append)
        run.step(NAN)
        last.remove()
    assert run.kinds == [("loss", 0)] * 2
    assert "a callback of on_alarm raised" in caplog.text
    assert "no mail server" in caplog.text


def test_a_callback_may_ask_for_the_history(run):
    seen = []
    with amp.on_alarm(lambda alarm: seen.append(amp.history(alarm.loss_id).skipped)):
        run.step(NAN)
    assert seen == [1]


def test_a_callback_that_is_removed_is_not_called(run):
    run.listening.remove()
    run.step(NAN)
    assert run.alarms == []
    with pytest.raises(TypeError, match="expected a function"):
        amp.on_alarm("mail")


def test_what_are_no_limits_is_refused_all_at_once():
    for alarms in ("loud", 3):
        with pytest.raises(amp.AmpTypeError, match=f"alarms is {alarms!r}: expected an amp.Alarms"):
            amp.initialize(nn.Linear(2, 2), alarms=alarms)
    with pytest.raises(amp.AmpValueError, match=r"skipped=0.*falls=True.*within=None.*scale_below=-1"):
        amp.Alarms(skipped=0, falls=True, within=None, scale_below=-1)


# ---- What is kept, and for how long ----


def find_forward(model):
    (found,) = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, LastForward)]
    return found


@pytest.fixture
def watched(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0, post_mortem=tmp_path)
    return model, optimizer


def test_the_batch_is_kept_as_it_was_given_until_the_step(watched):
    model, optimizer = watched
    loss = model(X).float().sum()
    assert find_forward(model).args[0] is X
    scaled_backward(loss, optimizer)
    optimizer.step()
    assert (find_forward(model).args, find_forward(model).random) == ((), {})


def test_a_forward_without_gradients_keeps_nothing(watched):
    model, _ = watched
    with torch.no_grad():
        model(X)
    assert find_forward(model).args == ()


def test_a_compiled_model_keeps_its_batch(tmp_path):
    model = nn.Linear(3, 2)
    compiled = torch.compile(model, backend="eager")
    amp.initialize(model, opt_level="O2", verbosity=0, post_mortem=tmp_path)
    compiled(X)
    assert find_forward(model).args[0] is X


def test_a_batch_that_another_model_made_keeps_none_of_its_graph(watched):
    model, _ = watched
    generator = nn.Linear(3, 3)
    dropped = weakref.ref(generator.weight)
    model(generator(X))
    del generator
    gc.collect()
    assert dropped() is None


def test_copies_of_a_model_keep_no_batches(watched):
    model, _ = watched
    model(X)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert find_forward(made).args == ()
        made(X)
        assert find_forward(made).args == ()


def test_no_hook_is_left_behind_nor_put_on_where_none_is_needed(watched, tmp_path):
    model, _ = watched
    amp.uninitialize()
    assert not model._forward_pre_hooks
    for options in ({"alarms": None, "post_mortem": tmp_path}, {"post_mortem": False}):
        amp.initialize(model, opt_level="O1", verbosity=0, **options)
        assert not any(isinstance(hook, LastForward) for hook in model._forward_pre_hooks.values())
        amp.uninitialize()
