"""The memory that casts take, and the streams and threads that share them."""

import contextlib
import ctypes
import functools
import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import ampatch as amp
from ampatch.casts import cast as cast_state
from ampatch.casts import kept_cast
from ampatch.casts.cast import CASTS, SWEEP
from caching import (
    HALF,
    WITHOUT_GRAD,
    CountCasts,
    X,
    assert_fresh,
    backward,
    by_hand,
    open_session,
    open_training,
)


def by_hand_all(model):
    """What layers of a Sequential give in bfloat16, by ops that no patch sees."""
    x = X
    for layer in model:
        bias = None if layer.bias is None else layer.bias.to(HALF)
        x = torch.ops.aten.linear(x.to(HALF), layer.weight.to(HALF), bias)
    return x.detach()


@pytest.fixture
def linear():
    return open_session(nn.Linear(3, 5))


def count_half_tensors():
    gc.collect()
    return sum(type(item) is Tensor and item.dtype is HALF for item in gc.get_objects())


def find_half_memory():
    gc.collect()
    return {item.data_ptr() for item in gc.get_objects() if type(item) is Tensor and item.dtype is HALF}


@pytest.mark.parametrize("make", [torch.optim.SGD, functools.partial(torch.optim.AdamW, fused=True)])
@pytest.mark.parametrize("known", [True, False], ids=["given to initialize", "not given"])
def test_casts_are_written_again_into_the_same_memory(known, make):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
    optimizer = make(model.parameters(), lr=0.1)
    open_session(model, optimizer if known else None)
    memory, others = [], find_half_memory()
    for _ in range(3):
        loss = model(X).sum()
        assert torch.equal(model(X).detach(), by_hand_all(model))
        loss.backward()
        del loss
        memory.append(find_half_memory() - others)
        optimizer.step()
    assert len(memory[0]) == 4
    assert memory[1:] == memory[:-1]
    amp.clear_cache()
    assert not find_half_memory() - others


@pytest.mark.parametrize("holds", ["some", "all"])
def test_a_cast_that_a_graph_holds_is_left_to_it(holds):
    has_bias = holds == "some"  # whose cast no graph needs
    model = nn.Sequential(nn.Linear(3, 5, has_bias), nn.Linear(5, 4, has_bias))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)
    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    waiting = model(x).sum()
    backward(model(X).sum(), optimizer)
    optimizer.step()
    assert torch.equal(model(X).detach(), by_hand_all(model))
    assert torch.equal(torch.autograd.grad(waiting, x)[0], expected)


def test_other_memory_is_seen_in_an_iteration_though_the_version_stays(linear):
    waiting = linear(X)
    with torch.autograd._unsafe_preserve_version_counter(linear.weight), torch.no_grad():
        linear.weight.set_(torch.zeros(5, 3))
    assert_fresh(linear)
    del waiting


def evaluate_for_long(model):
    """Until the cache looks for parameters that are gone, which it does now and then."""
    with torch.no_grad():
        for _ in range(SWEEP + 1):
            model(X)
    gc.collect()


def test_the_casts_of_parameters_that_are_gone_are_freed_in_an_evaluation(linear):
    with torch.no_grad():
        linear(X)
        before = count_half_tensors()
        passing = nn.Linear(3, 5)
        with torch.enable_grad():
            torch.nn.functional.linear(X, passing.weight)
        assert count_half_tensors() == before + 1
        del passing
    evaluate_for_long(linear)
    assert count_half_tensors() == before


@pytest.mark.parametrize("zero_late", [False, True], ids=["zeroed after", "zeroed before backward"])
def test_a_step_of_no_optimizer_of_torch_is_seen_after_a_plain_backward(zero_late, linear):
    weight = linear.weight
    for byte, check in ((0x3D, contextlib.nullcontext), (0x3E, torch.no_grad), (0x3F, torch.no_grad)):
        loss = linear(X).sum()
        if zero_late:
            linear.zero_grad()
        loss.backward()
        ctypes.memset(weight.data_ptr(), byte, weight.nbytes)  # as a kernel that leaves no trace
        if not zero_late:
            linear.zero_grad()
        with check():
            assert_fresh(linear)


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_weights_that_moved_or_were_replaced_are_freed(mode):
    model = open_session(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)))
    with mode():
        model(X)
    moved = weakref.ref(model[0].weight.untyped_storage())
    model[0].weight.data = torch.zeros(5, 3)
    assert moved() is None
    replaced = weakref.ref(model[1])
    model[1] = nn.Linear(5, 4)
    evaluate_for_long(model)
    assert replaced() is None


def count_objects():
    gc.collect()
    return len(gc.get_objects())


def test_many_iterations_leave_no_growth():
    model = nn.Linear(3, 5)
    optimizer = open_training(model)

    def iterate():
        for _ in range(20):
            backward(model(X).sum(), optimizer)
            optimizer.step()
            with torch.no_grad():
                model(X)

    iterate()
    before = count_objects()
    iterate()
    assert count_objects() - before <= 2


def test_a_model_that_returns_what_it_is_given_leaves_no_growth():
    model = open_session(nn.Identity())
    x = torch.ones(2, requires_grad=True) * 2
    model(x)
    before = count_objects()
    for _ in range(50):
        model(x)
    assert count_objects() - before <= 2


@pytest.fixture
def streams(monkeypatch):
    """Has the CPU pass for a CUDA device; returns a function that changes its current stream."""
    current = [0]
    monkeypatch.setattr(cast_state, "_find_device", lambda parameter: 1)
    for module in (cast_state, kept_cast):
        monkeypatch.setattr(module, "find_stream", lambda device: current[device - 1])
    return lambda stream: current.__setitem__(0, stream)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_cast_that_one_stream_made_is_not_read_by_another(streams, mode, linear):
    """Which waits for the weight, and not for a cast of it, nor is the memory kept until it is done."""
    outputs, counts = [], []
    for stream in (1, 1, 2, 2, 1):
        streams(stream)
        with CountCasts() as casts, mode():
            outputs.append(linear(torch.ones(2, 3)))
        counts.append(casts.count)
    assert counts == [1, 0, 1, 0, 1]


@pytest.mark.cuda
def test_two_streams_that_share_a_weight_and_wait_for_it_alone_get_right_results():
    model = nn.Linear(2048, 2048).cuda()
    x = torch.randn(64, 2048, device="cuda")
    open_session(model)
    for _ in range(3):
        with torch.no_grad():
            model.weight.neg_()  # or memory that is used again holds the right cast from before
        expected = torch.ops.aten.linear(x.to(HALF), model.weight.to(HALF), model.bias.to(HALF))
        torch.cuda.synchronize()
        amp.clear_cache()
        streams, outputs = [torch.cuda.Stream(), torch.cuda.Stream()], []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if index == 0:
                    torch.cuda._sleep(50_000_000)
                outputs.append(model(x))
        torch.cuda.synchronize()
        for output in outputs:
            torch.testing.assert_close(output, expected, rtol=0.02, atol=0.05)


@pytest.mark.cuda
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_training_on_a_side_stream_gives_what_the_default_stream_gives(level):
    def train(stream):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.randn(16, 32, device="cuda")
        open_session(model, optimizer, level)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in range(8):
                factor = torch.tensor(float("inf") if step == 4 and level in ("O1", "O2") else 1.0)
                backward(model(x).float().sum() * factor.cuda(), optimizer)
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()
        weights = [param.detach().clone() for param in model.parameters()]
        amp.uninitialize()
        return weights

    default, side = train(torch.cuda.current_stream()), train(torch.cuda.Stream())
    assert all(map(torch.equal, default, side))


def run_in_threads(work, count=4):
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def test_threads_that_share_a_model_get_right_results(linear):
    expected = by_hand(linear)

    def work(index):
        choose = random.Random(index)
        for _ in range(30):
            with choose.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])():
                assert torch.equal(linear(X).detach(), expected)
            if choose.random() < 0.2:
                amp.clear_cache()

    run_in_threads(work)


def test_a_cast_that_is_freed_while_another_thread_adds_one(linear, monkeypatch):
    """PyTorch lets other threads run while it frees memory."""
    late, convert, cache = nn.Linear(3, 5), torch.Tensor.bfloat16, CASTS.get_cache(HALF)

    def in_another_thread(module):
        thread = threading.Thread(target=module, args=(X,))
        thread.start()
        thread.join()

    def convert_twice(tensor):
        if tensor is linear.bias:
            monkeypatch.setattr(cache, "_convert", convert)
            in_another_thread(linear)  # makes a cast of its own, and ends its iteration
            weakref.finalize(cache.waiting[id(tensor)].cast, in_another_thread, late)
        return convert(tensor)

    monkeypatch.setattr(cache, "_convert", convert_twice)
    linear.requires_grad_(False)(X)
    assert_fresh(linear)
    assert_fresh(late)
