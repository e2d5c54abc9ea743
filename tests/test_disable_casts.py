"""Where casts are off: in `disable_casts`, and while an optimizer steps."""

import contextlib
import threading
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp
from ampatch.casts.cast import CASTS
from ampatch.casts.thread import ThreadState
from apex_rows import shows

FULL, HALF = torch.float32, torch.bfloat16


def open_session(model=None, optimizer=None, opt_level="O4", **kwargs):
    return amp.initialize(model or nn.Linear(2, 2), optimizer, opt_level=opt_level, verbosity=0, **kwargs)


def product():
    """The dtype of a whitelisted function's result: half where casts are on."""
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_casts_are_on_in_a_session_and_off_in_the_block_however_it_is_entered_and_left():
    @amp.disable_casts()
    def leave():
        with amp.disable_casts():
            return product()

    open_session()
    block = amp.disable_casts()
    assert product() is HALF
    for _ in range(2):
        with block:
            assert product() is FULL
            assert leave() is FULL
            assert product() is FULL
            continue
    assert product() is HALF


def test_every_kind_of_row_is_off_in_the_block():
    open_session()
    half, mixed = torch.ones(2, dtype=HALF), torch.ones(2)
    with amp.disable_casts():
        assert half.exp().dtype is HALF
        assert half.exp_() is half
        assert F.binary_cross_entropy(half.clamp(0, 1), half.clamp(0, 1)).dtype is HALF
        with pytest.raises(RuntimeError, match=r"same dtype|expected"):
            torch.dot(half, mixed)


@shows("o1-disable-casts-defect")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_ends_the_block(error):
    open_session()
    with pytest.raises(error), amp.disable_casts(), amp.disable_casts():
        raise error
    assert product() is HALF


def test_sessions_that_open_and_close_in_a_block_keep_the_count_right():
    with amp.disable_casts():
        open_session()
        assert product() is FULL
    assert product() is HALF
    for reopen in (True, False):
        with amp.disable_casts():
            amp.uninitialize()
            if reopen:
                open_session()
        open_session()
        assert product() is HALF
        with amp.disable_casts():
            assert product() is FULL


@shows("never-casts-where-wanted")
def test_a_block_holds_inside_and_around_a_forward():
    class Model(nn.Linear):
        def forward(self, x):
            with amp.disable_casts():
                inside = super().forward(x).dtype
            return inside, super().forward(x).dtype

    model = open_session(Model(2, 2))
    assert model(torch.ones(1, 2)) == (FULL, HALF)
    with amp.disable_casts():
        assert model(torch.ones(1, 2)) == (FULL, FULL)


def in_a_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_a_block_holds_for_its_own_thread_alone():
    open_session()
    with amp.disable_casts():
        assert in_a_thread(product) is HALF
        assert product() is FULL


# ---- In the threads of the autograd engine ----


class Nested(torch.autograd.Function):
    """Its backward runs backward again, and at last `work`: deeper than 60, in a thread of the engine's."""

    @staticmethod
    def forward(ctx, x, depth, work):
        ctx.depth, ctx.work = depth, work
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth == 0:
            ctx.work()
        else:
            run_backward(ctx.work, ctx.depth - 1)
        return grad, None, None


def run_backward(work, depth=70):
    with torch.enable_grad():
        Nested.apply(torch.ones(2, requires_grad=True), depth, work).sum().backward()


def in_the_engine(work):
    """Runs `work` in a thread of the autograd engine, which waits for this one."""
    results = []
    run_backward(lambda: results.append((threading.get_ident(), work())))
    ((thread, result),) = results
    assert thread != threading.get_ident()
    return result


@torch.enable_grad()
def all_kinds(model, optimizer):
    """The dtypes of products in blocks, checkpoints, forwards and steps, one after the other."""

    def region(x):
        with amp.disable_casts():
            inside = product()
        return x * 1, [inside, product()]

    found = [product()]
    with amp.disable_casts():
        found.append(product())
    found.append(product())
    x = torch.ones(1, 2, requires_grad=True)
    for use_reentrant in (True, False):
        found += torch.utils.checkpoint.checkpoint(region, x, use_reentrant=use_reentrant)[1]
    found.append(model(x).dtype)
    model.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    return [*found, optimizer.seen, product()]


def test_what_turns_casts_off_and_on_does_so_in_the_engines_threads():
    model = Outer()
    model.kept.error = None
    optimizer = Watching(model.parameters(), lr=0.1)
    open_session(model, optimizer, keep_fp32="kept")
    for block in (contextlib.nullcontext, amp.disable_casts, contextlib.nullcontext):
        with block():
            here = all_kinds(model, optimizer)
            for _ in range(2):
                assert in_the_engine(lambda: all_kinds(model, optimizer)) == here
        assert here.count(FULL) == (len(here) if block is amp.disable_casts else 4)
    assert in_a_thread(lambda: in_the_engine(product)) is HALF


def test_a_block_holds_in_a_thread_of_the_engine_that_python_has_met():
    state = ThreadState()

    def ask():
        threading.current_thread()  # as logging does
        return state.is_off()

    with state.disabled():
        assert in_the_engine(ask)
    assert not in_the_engine(ask)


def test_a_checkpoint_recomputed_in_the_engines_threads_casts_as_its_forward_did():
    open_session()
    seen = []

    def region(x):
        seen.append(product())
        with amp.disable_casts():
            seen.append(product())
        return x.exp()

    x, on, off = torch.ones(2, requires_grad=True), contextlib.nullcontext, amp.disable_casts
    for before, after in ((on, off), (off, on)):
        with before():
            output = torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)
        with after():
            in_the_engine(output.sum().backward)
    assert seen == [HALF, FULL, HALF, FULL, FULL, FULL, FULL, FULL]


def test_a_thread_that_ended_leaves_nothing_behind():
    def work():
        with amp.disable_casts():
            in_the_engine(product)
        CASTS.thread.kept = model = nn.Linear(2, 2)
        return weakref.ref(model)

    open_session()
    kept = in_a_thread(work)
    until = time.monotonic() + 10
    while kept() is not None and time.monotonic() < until:  # torch lets go a little after Python does
        time.sleep(0.01)
    assert kept() is None


@pytest.mark.cuda
def test_a_block_around_backward_holds_on_a_gpu():
    open_session(nn.Linear(2, 2).cuda())
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.mm(grad, grad).dtype)
            return grad

    x = torch.ones(2, 2, device="cuda", requires_grad=True)
    for block in (contextlib.nullcontext, amp.disable_casts, contextlib.nullcontext):
        with block():
            Product.apply(x).backward(torch.ones_like(x))
    assert seen == [HALF, FULL, HALF]


# ---- Inside an optimizer's step ----


class Watching(torch.optim.SGD):
    """Notes the dtype of a product inside of its step, and raises where it is told to."""

    fails = False

    def step(self, closure=None):
        self.seen = product()
        if self.fails:
            raise ArithmeticError
        return super().step(closure)


@pytest.fixture(params=[True, False], ids=["given to initialize", "not given"])
def watching(request):
    model = nn.Linear(2, 2)
    optimizer = Watching(model.parameters(), lr=0.1)
    open_session(*(model, optimizer) if request.param else ())
    model(torch.ones(1, 2)).sum().backward()
    return optimizer


@shows("o1-step-uncast")
def test_casts_are_off_inside_a_step_and_on_after_it(watching):
    watching.step()
    assert (watching.seen, product()) == (FULL, HALF)


def test_a_step_that_raised_leaves_casts_as_they_were(watching):
    watching.fails = True
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            watching.step()
        assert (watching.seen, product()) == (FULL, HALF)
    with amp.disable_casts():
        with pytest.raises(ArithmeticError):
            watching.step()
        assert product() is FULL
    assert product() is HALF
    amp.uninitialize()
    open_session()
    assert product() is HALF


def test_a_closure_runs_with_casts_on_and_the_step_around_it_with_casts_off(watching):
    seen = []

    def closure():
        seen.extend([product(), in_the_engine(product)])
        return torch.ones(())

    watching.step(closure)
    assert (watching.seen, seen, product()) == (FULL, [HALF, HALF], HALF)


def test_casts_are_off_in_the_whole_of_a_step_that_steps_another_optimizer(watching):
    class Around(Watching):
        def step(self, closure=None):
            watching.step(closure)
            return super().step()  # which looks at the types once more, and ends a step as well

    seen = []
    around = Around(nn.Linear(2, 2).parameters(), lr=0.1)

    def closure():
        seen.append(product())
        Watching(nn.Linear(2, 2).parameters(), lr=0.1).step()  # begins and ends inside
        seen.append(product())

    around.step(closure)
    assert (watching.seen, around.seen, seen, product()) == (FULL, FULL, [HALF, HALF], HALF)


def test_a_closure_that_raises_in_a_step_that_goes_on_leaves_the_rest_of_it_uncast():
    class Careful(Watching):
        def step(self, closure=None):
            with contextlib.suppress(ArithmeticError):
                closure()
            return super().step()

    def fail():
        raise ArithmeticError

    open_session()
    careful = Careful(nn.Linear(2, 2).parameters(), lr=0.1)
    careful.step(fail)
    assert (careful.seen, product()) == (FULL, HALF)


# ---- Interrupted forwards ----


class Interrupted(nn.Module):
    error = KeyboardInterrupt

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return self.linear(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept, self.linear = Interrupted(), nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(self.kept(x))


INTERRUPTIONS = [ValueError, KeyboardInterrupt, SystemExit]


def mixed_product():
    return torch.dot(torch.ones(2), torch.ones(2, dtype=HALF)).dtype


@pytest.mark.parametrize("error", INTERRUPTIONS)
def test_a_forward_interrupted_in_a_kept_module_leaves_casts_on(error):
    model = open_session(Outer(), keep_fp32="kept")
    model.kept.error = error
    for call, dtype in ((mixed_product, FULL), (product, HALF)):
        with pytest.raises(error):
            model(torch.ones(1, 2))
        assert call() is dtype
    model.kept.error = None
    assert model(torch.ones(1, 2)).dtype is HALF
    model.kept.error = error
    with pytest.raises(error):
        model(torch.ones(1, 2))
    amp.uninitialize()
    open_session()
    assert product() is HALF


@pytest.mark.parametrize("error", INTERRUPTIONS)
def test_a_forward_interrupted_in_a_model_at_o0_leaves_casts_on_for_one_at_o4(error):
    model = open_session()
    plain = open_session(Interrupted(), opt_level="O0")
    plain.error = error
    with pytest.raises(error):
        plain(torch.ones(1, 2))
    assert model(torch.ones(1, 2)).dtype is HALF
    plain.error = None
    assert plain(torch.ones(1, 2)).dtype is FULL
    assert product() is HALF
