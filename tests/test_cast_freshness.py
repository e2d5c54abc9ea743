"""The cast cache is never stale: whatever writes to a weight, the next forward sees it."""

import contextlib
import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.casts import cast as cast_state
from ampatch.casts.cast import CASTS
from apex_rows import shows
from caching import HALF, MODES, WITHOUT_GRAD, X, assert_fresh, backward, by_hand, open_session, open_training


@pytest.fixture
def linear():
    return open_session(nn.Linear(3, 5))


def load(model, **kwargs):
    model.load_state_dict({name: value - 2 for name, value in model.state_dict().items()}, **kwargs)


def flatten_and_back(model):
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector - 2, model.parameters())


def move_memory_and_edit(model):
    model.weight.data = model.weight.data.clone()
    model.weight.data.sub_(2)


def grow_memory(model):
    """As FSDP2 does, which takes memory for a weight, and writes there past its version."""
    storage = model.weight.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    with torch.autograd._unsafe_preserve_version_counter(model.weight):
        model.weight.sub_(2)


def move_there_and_back(model):
    model.double()
    model.weight.sub_(2)
    model.float()


def convert_by_swapping(model):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
        load(model)
        model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def load_average(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    for param in average.parameters():
        param.data.mul_(-2)
    model.load_state_dict(average.module.state_dict())


# Each runs under no_grad.
EDITS = {
    "in place": lambda model: model.weight.mul_(-3),
    "a view": lambda model: model.weight[0].fill_(7),
    "foreach": lambda model: torch._foreach_add_(list(model.parameters()), 2.0),
    "other memory": lambda model: model.weight.set_(model.weight.detach() - 2),
    "initialized": lambda model: torch.nn.init.constant_(model.weight, 3.0),
    "loaded": load,
    "loaded by assignment": lambda model: load(model, assign=True),
    "loaded from an average": load_average,
    "assigned data": lambda model: setattr(model.weight, "data", model.weight.data - 2),
    "assigned parameter": lambda model: setattr(model, "weight", nn.Parameter(model.weight.detach() - 2)),
    "flattened and back": flatten_and_back,
    "moved memory": move_memory_and_edit,
    "grown memory": grow_memory,
    "moved there and back": move_there_and_back,
}
# These take no tensor that a graph holds.
SWAPS = {
    "swapped": lambda model: torch.utils.swap_tensors(model.weight, nn.Parameter(model.weight.detach() - 2)),
    "converted by swapping": convert_by_swapping,
}


@pytest.mark.parametrize("name", [*EDITS, *SWAPS])
def test_an_edit_between_two_forwards_is_seen(name):
    models = [nn.Linear(3, 5).requires_grad_(trained) for _ in MODES for trained in (True, False)]
    open_session(models)
    for model, mode in zip(models, [mode for mode in MODES for _ in range(2)], strict=True):
        with mode():
            assert_fresh(model)
        with torch.no_grad():
            {**EDITS, **SWAPS}[name](model)
        with mode():
            assert_fresh(model)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_weights_that_are_swapped_train_on(level, order):
    """Torch has the graphs of both raise from then on, and so those of casts that are kept."""
    layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(3, 5)])
    amp.initialize(layers, opt_level=level, loss_scale=1.0, verbosity=0)
    weights = [layer.weight for layer in layers]

    def train():
        for index in order:
            weights[index].grad = None
        sum((index + 1) * nn.functional.linear(X, weights[index]).float().sum() for index in order).backward()
        return [weight.grad for weight in weights]

    expected = train()
    torch.utils.swap_tensors(*weights)
    assert all(map(torch.equal, train(), expected))


def write_data(model):
    for param in model.parameters():
        param.data.mul_(-3)  # the same memory, and no new version


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "sgd loop": (torch.optim.SGD, {"foreach": False}),
    "sgd foreach": (torch.optim.SGD, {"foreach": True}),
    "sgd fused": (torch.optim.SGD, {"fused": True}),
    "adam fused": (torch.optim.Adam, {"fused": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "adagrad fused": (torch.optim.Adagrad, {"fused": True}),
}


def flatten(model):
    """All weights lie in one tensor."""
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    model.weight.data, model.bias.data = flat[:15].view(5, 3), flat[15:]
    return flat.fill_


def take_from(convert):
    """The weight lies in memory that is not torch's."""

    def take(model):
        array = np.frombuffer(bytearray(60), np.float32)
        model.weight.data = convert(array).view(5, 3)
        return array.fill

    return take


KEEPERS = {
    "data": lambda model: model.weight.data.fill_,
    "an array": lambda model: model.weight.detach().numpy().fill,
    "a row of data": lambda model: model.weight.data[1].fill_,
    "flat memory": flatten,
    "numpy's": take_from(torch.from_numpy),
    "dlpack's": take_from(torch.from_dlpack),
    "bytes": take_from(lambda array: torch.frombuffer(array.data, dtype=torch.float32)),
}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_write_by_another_process_is_seen_by_the_next_evaluation(when):
    """As of a process that evaluates what others train, in memory that they share."""
    model = nn.Linear(3, 5)
    if when == "before":
        model.share_memory()
    open_session(model)
    with torch.no_grad():
        assert_fresh(model)
        model.share_memory()
        assert_fresh(model)
        handle = model.weight.untyped_storage()._share_fd_cpu_()
        there = torch.UntypedStorage._new_shared_fd_cpu(*handle)  # what another process would open
        for value in (1.0, -2.0):
            torch.tensor([], dtype=torch.float32).set_(there, 0, (5, 3)).fill_(value)
            assert model.weight[0, 0] == value
            assert_fresh(model)


WRITES = {
    "all": write_data,
    "state_dict": lambda model: [value.data.mul_(-3) for value in model.state_dict().values()],
    "a row": lambda model: model.weight[1].data.add_(2.0),
    "a slice of the bias": lambda model: model.bias[1:3].data.add_(2.0),  # as of a forget gate
    "a view": lambda model: model.weight.view(-1).data.mul_(-3),
    "a transpose": lambda model: model.weight.t().data.add_(1),
    "a chunk": lambda model: model.weight.chunk(2)[0].data.add_(1),
    "what is detached": lambda model: model.weight.detach().data.mul_(-3),
}


class Decorated(nn.Linear):
    """Turns gradients off by itself, as teachers and feature extractors do."""

    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("make", [Decorated, lambda *sizes: nn.Linear(*sizes).requires_grad_(False)])
def test_a_write_to_flat_memory_is_seen_where_a_forward_leaves_no_graph(make):
    model = make(3, 5)
    write = flatten(model)
    open_session(model)
    for value in (1.0, -2.0, 3.0):
        assert_fresh(model)
        write(value)
        assert_fresh(model)


def test_a_write_by_another_thread_while_a_cast_is_made_is_seen(linear, monkeypatch):
    """A server that loads weights while it answers: no step ever comes."""
    convert, cache = torch.Tensor.bfloat16, CASTS.get_cache(HALF)

    def convert_late(tensor):
        cast = convert(tensor)
        if tensor is linear.weight:
            with torch.no_grad():
                tensor.mul_(-3)
        return cast

    monkeypatch.setattr(cache, "_convert", convert_late)
    with torch.no_grad():
        linear(X)
        monkeypatch.setattr(cache, "_convert", convert)
        assert_fresh(linear)


class Interrupted(nn.Linear):
    error = None

    def forward(self, x):
        y = super().forward(x)
        if self.error is not None:
            raise self.error
        return y


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_write_to_flat_memory_is_seen_after_an_evaluation_that_was_interrupted(error, mode):
    model = Interrupted(3, 5)
    write = flatten(model)
    open_session(model)
    for value in (1.0, -2.0):
        with mode():
            model.error = error
            with pytest.raises(error):
                model(X)
            write(value)
            model.error = None
            assert_fresh(model)


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_a_write_to_memory_that_somebody_has_got_since_the_last_evaluation_is_seen(mode, linear):
    with mode():
        assert_fresh(linear)
        other = torch.empty(0).set_(linear.weight.untyped_storage())
        other.fill_(7)
        assert_fresh(linear)


@pytest.mark.parametrize("mode", WITHOUT_GRAD)
def test_a_write_to_flat_memory_is_seen_by_functions_outside_of_any_model(mode, linear):
    write = flatten(linear)
    for value in (1.0, -2.0):
        with mode():
            found = torch.nn.functional.linear(X, linear.weight, linear.bias)
        assert torch.equal(found, by_hand(linear))
        write(value)


def test_a_part_that_is_called_without_grad_after_a_training_step_sees_a_write_to_flat_memory():
    model = nn.Sequential(nn.Linear(3, 5))
    write = flatten(model[0])
    open_session(model)
    for value in (1.0, -2.0):
        model(X).sum().backward()
        write(value)
        with torch.no_grad():
            assert_fresh(model[0])


@amp.half_function
def halve_(weight):
    with torch.no_grad():
        return weight.div_(2)


def test_a_users_function_that_writes_into_a_cast_changes_no_later_forward(linear):
    with torch.no_grad():
        assert_fresh(linear)
    halve_(linear.weight)
    for _ in range(2):
        with torch.no_grad():
            linear(X)
    with torch.no_grad():
        assert_fresh(linear)


def test_a_leaf_made_of_a_weight_that_had_a_graph_gets_its_gradient():
    model = open_session(nn.Linear(3, 5, bias=False))
    weight, hyper = model.weight, torch.randn(5, 3, requires_grad=True)
    weight.requires_grad_(False)
    weight.copy_(hyper * 2)
    model(X).sum().backward(retain_graph=True)
    weight.detach_().requires_grad_(True)
    model(X).sum().backward()
    assert weight.grad is not None


@shows("scale-defect-cache-exception")
def test_an_exception_in_a_block_leaves_no_cast_behind():
    model = nn.Linear(3, 5)
    optimizer = open_training(model)
    with pytest.raises(KeyError), amp.scale_loss(model(X).sum(), optimizer):
        raise KeyError
    write_data(model)
    assert_fresh(model)


def test_uninitialize_forgets_the_casts(linear):
    linear(X)
    amp.uninitialize()
    write_data(linear)
    open_session(linear)
    assert_fresh(linear)


def interrupt(run, act):
    """Runs a function again and again, with an act before another instruction in the cache."""
    for moment in itertools.count():
        instructions = itertools.count()

        def trace(frame, event, arg, moment=moment, instructions=instructions):
            if frame.f_code.co_filename != cast_state.__file__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and next(instructions) == moment:
                act()
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            run()
        finally:
            sys.settrace(before)
        if next(instructions) <= moment:
            return
        yield moment


@pytest.mark.parametrize("name", ["block", "step"])
def test_a_write_by_another_thread_while_casts_are_moved_is_seen(name):
    """Python may switch threads between any two instructions, and the write comes between these."""
    model, other = nn.Linear(3, 5), nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session([model, other], optimizer)

    def prepare():
        loss = model(X).sum()
        assert_fresh(other)
        block = amp.scale_loss(loss, optimizer)
        block.__enter__().backward()
        return block

    def end_block(block):
        block.__exit__(None, None, None)

    def negate():
        for param in other.parameters():
            param.data.neg_()

    block = prepare()
    run = {"block": lambda: end_block(block), "step": optimizer.step}[name]
    if name == "step":
        end_block(block)
    for _ in interrupt(run, negate):
        assert_fresh(other)
        block = prepare()
        if name == "step":
            end_block(block)


def test_steps_in_threads_in_turn_keep_one_cast_of_each_weight():
    """As a pool of threads makes them: each thread's steps end the casts that it made."""
    model = nn.Linear(3, 5)
    optimizer = open_training(model)
    sizes = []

    def train():
        backward(model(X).float().sum(), optimizer)
        optimizer.step()
        sizes.append(CASTS.get_cache(HALF).nbytes)

    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(4)]
        for pool in pools:
            pool.submit(train).result()
    assert sizes == [sizes[0]] * 4


@pytest.mark.exhaustive(keep=0)
def test_a_step_by_another_thread_while_casts_are_written_again_is_seen():
    """A fused optimizer leaves no version, so that nothing but its end tells of the step."""
    models = [nn.Linear(3, 5) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, fused=True) for model in models]
    open_session(models, optimizers)

    def step(index):
        models[index](X).sum().backward()
        optimizers[index].step()

    def step_elsewhere():
        thread = threading.Thread(target=optimizers[1].step)
        thread.start()
        thread.join()

    def prepare():
        for index in range(2):
            thread = threading.Thread(target=step, args=(index,))
            thread.start()
            thread.join()

    prepare()
    waiting = []  # for its backward, so that the iteration goes on
    for _ in interrupt(lambda: waiting.append(models[0](X)), step_elsewhere):
        assert_fresh(models[1])
        waiting.clear()
        prepare()
