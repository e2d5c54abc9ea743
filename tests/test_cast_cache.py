"""The cast cache: one cast a weight and iteration, and never a stale one."""

import copy
import gc
import random
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ampatch as amp
from ampatch.casts import cast_cache
from ampatch.casts.cast import CASTS
from ampatch.casts.cast_cache import SWEEP

HALF = torch.bfloat16


# ---- How many casts ----


class CountCasts(TorchDispatchMode):
    """Counts the copies of float32 tensors of one shape to the half type."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = torch.Size(shape), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # Inference mode shows `to` whole, other modes show the copy that it makes.
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype) and result.dtype is HALF:
            self.count += args[0].shape == self.shape and args[0].dtype is torch.float32
        return result


class Tied(nn.Module):
    """Uses one weight three times in a forward, as a matrix, transposed and by an operator."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        hidden = torch.nn.functional.linear(x, self.weight)
        return hidden @ self.weight + torch.mm(hidden, self.weight)


def open_session(model, optimizer=None, opt_level="O4", **kwargs):
    amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, **kwargs)
    return model


def test_a_weight_is_cast_once_for_several_uses_and_forwards():
    model = open_session(Tied())
    with CountCasts((5, 3)) as casts:
        (model(torch.ones(2, 3)) + model(torch.ones(2, 3))).sum()
    assert casts.count == 1


def test_a_frozen_weight_is_cast_once_as_well():
    model = open_session(Tied().requires_grad_(False))
    with CountCasts((5, 3)) as casts:
        model(torch.ones(2, 3))
        model(torch.ones(2, 3))
    assert casts.count == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_weight_is_cast_once_a_forward_without_grad(mode):
    model = open_session(Tied())
    with mode(), CountCasts((5, 3)) as casts:
        model(torch.ones(2, 3))
    assert casts.count == 1


def test_a_weight_is_cast_once_an_iteration():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)
    counts = []
    for _ in range(3):
        with CountCasts((5, 3)) as casts:
            loss = model(torch.ones(2, 3)).sum() + model(torch.ones(2, 3)).sum()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(casts.count)
    assert counts == [1, 1, 1]


def test_a_weight_shared_by_two_modules_is_cast_once():
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    open_session(model)
    with CountCasts((5, 3)) as casts:
        model(torch.ones(2, 3))
    assert casts.count == 1


def test_an_input_is_not_kept_in_the_cache():
    model = open_session(Tied())
    x = torch.ones(2, 3)
    with CountCasts((2, 3)) as casts:
        model(x)
        model(x)
    assert casts.count == 2


def test_several_uses_and_forwards_add_up_to_one_gradient():
    model = open_session(Tied())
    reference = copy.deepcopy(model)
    amp.uninitialize()
    x = torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = reference(x).sum() + reference(2 * x).sum()
    loss.backward()
    open_session(model)
    (model(x).sum() + model(2 * x).sum()).backward()
    assert model.weight.grad.dtype is torch.float32
    assert torch.equal(model.weight.grad, reference.weight.grad)


def test_two_backward_passes_may_share_a_cast():
    model = open_session(Tied())
    model(torch.ones(2, 3)).sum().backward()
    first = model.weight.grad.clone()
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model.weight.grad, 2 * first)


def test_a_backward_pass_may_come_after_the_cache_was_cleared():
    model = open_session(Tied())
    losses = [model(torch.ones(2, 3)).sum(), model(torch.ones(2, 3)).sum()]
    losses[0].backward()
    amp.clear_cache()
    losses[1].backward()
    assert model.weight.grad is not None


def test_a_graph_that_is_retained_gives_the_same_gradient_again():
    model = open_session(Tied())
    loss = model(torch.ones(2, 3)).sum()
    first = torch.autograd.grad(loss, model.weight, retain_graph=True)[0]
    second = torch.autograd.grad(loss, model.weight)[0]
    assert torch.equal(first, second)


def count_casts(run, shape=(5, 3), times=2):
    """How often a weight is cast in each of several iterations."""
    counts = []
    for _ in range(times):
        with CountCasts(shape) as casts:
            run()
        counts.append(casts.count)
    return counts


def test_accumulated_gradients_share_one_cast_of_a_weight():
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)

    def iterate():
        for _ in range(3):
            with amp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert count_casts(iterate) == [1, 1]


def test_a_generator_is_cast_once_and_its_discriminator_once_for_each_of_its_two_losses():
    generator, discriminator = Tied(), nn.Linear(3, 7, bias=False)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, discriminator)]
    open_session([generator, discriminator], optimizers, num_losses=2)

    def iterate():
        fake = generator(torch.ones(2, 3))
        loss = discriminator(fake.detach()).sum() + discriminator(torch.ones(2, 3)).sum()
        with amp.scale_loss(loss, optimizers[1], loss_id=0) as scaled:
            scaled.backward()
        optimizers[1].step()
        with amp.scale_loss(discriminator(fake).sum(), optimizers[0], loss_id=1) as scaled:
            scaled.backward()
        optimizers[0].step()

    assert count_casts(iterate) == [1, 1]
    assert count_casts(iterate, (7, 3)) == [2, 2]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_casts_a_weight_once(reentrant):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)
    x = torch.ones(2, 3, requires_grad=True)

    def iterate():
        loss = checkpoint(model, x, use_reentrant=reentrant).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    assert count_casts(iterate) == [1, 1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_between_two_forwards_of_an_iteration_costs_no_cast(mode):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)

    def iterate():
        loss = model(torch.ones(2, 3)).sum()
        with mode():
            model(torch.ones(2, 3))
        loss = loss + model(torch.ones(2, 3)).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    assert count_casts(iterate) == [1, 1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_of_many_batches_costs_one_cast_which_the_next_iteration_uses(mode):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)

    def iterate():
        for _ in range(3):
            with mode():
                model(torch.ones(2, 3))
        with amp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert count_casts(iterate) == [1, 1]
    assert model.weight.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_frozen_backbone_is_cast_once_a_forward_before_a_head_that_trains(mode):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = Tied().requires_grad_(False), nn.Linear(3, 2)

        def forward(self, x):
            with mode():
                features = self.backbone(x) + self.backbone(2 * x)
            return self.head(features.clone())

    model = Frozen()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    open_session(model, optimizer)

    def iterate():
        with amp.scale_loss(model(torch.ones(2, 3)).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    assert count_casts(iterate) == [1, 1]


# ---- Never stale ----

X = torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]])


def by_hand(model):
    """What a linear layer gives in bfloat16, by an op that no patch sees."""
    with torch.no_grad():
        weight, bias = (param.detach().to(HALF) for param in (model.weight, model.bias))
        return torch.ops.aten.linear(X.to(HALF), weight, bias)


def assert_fresh(model):
    assert torch.equal(model(X).detach(), by_hand(model))


@pytest.fixture
def linear():
    return open_session(nn.Linear(3, 5))


def edit_in_place(model):
    with torch.no_grad():
        model.weight.mul_(-3)


def edit_a_view(model):
    with torch.no_grad():
        model.weight[0].fill_(7)


def load(model):
    model.load_state_dict({name: value - 2 for name, value in model.state_dict().items()})


def load_by_assignment(model):
    state = {name: value - 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def assign_data(model):
    model.weight.data = model.weight.data - 2


def assign_parameter(model):
    model.weight = nn.Parameter(model.weight.detach() - 2)


def initialize_anew(model):
    torch.nn.init.constant_(model.weight, 3.0)


def swap_tensors(model):
    torch.utils.swap_tensors(model.weight, nn.Parameter(model.weight.detach() - 2))


def flatten_and_back(model):
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector - 2, model.parameters())


def foreach_edit(model):
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), 2.0)


def move_memory_and_edit(model):
    model.weight.data = model.weight.data.clone()
    model.weight.data.sub_(2)


def move_there_and_back(model):
    model.double()
    with torch.no_grad():
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


def set_memory(model):
    with torch.no_grad():
        model.weight.set_(model.weight.detach() - 2)


def copy_values(model):
    with torch.no_grad():
        model.weight.copy_(torch.full((5, 3), 3.0))


def load_average(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    for param in average.parameters():
        param.data.mul_(-2)
    model.load_state_dict(average.module.state_dict())


EDITS = [
    edit_in_place,
    move_there_and_back,
    convert_by_swapping,
    set_memory,
    copy_values,
    load_average,
    edit_a_view,
    load,
    load_by_assignment,
    assign_data,
    assign_parameter,
    initialize_anew,
    swap_tensors,
    flatten_and_back,
    foreach_edit,
    move_memory_and_edit,
]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_an_edit_between_two_forwards_is_seen(linear, edit, frozen):
    linear.requires_grad_(not frozen)
    assert_fresh(linear)
    edit(linear)
    assert_fresh(linear)


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_edit_between_two_evaluations_is_seen(linear, edit, mode):
    with mode():
        assert_fresh(linear)
    edit(linear)
    with mode():
        assert_fresh(linear)


@pytest.mark.parametrize("edit", [edit_in_place, assign_data])
def test_an_edit_by_a_hook_in_the_middle_of_a_forward_is_seen(edit):
    model = nn.Sequential(nn.Linear(3, 5), nn.Identity())
    open_session(model)
    results = []
    model[1].register_forward_hook(lambda module, args, output: edit(model[0]))
    for _ in range(2):
        results.append((by_hand(model[0]), model(X).detach()))
    for expected, found in results:
        assert torch.equal(found, expected)


def write_data(model):
    for param in model.parameters():
        param.data.mul_(-3)  # the same memory, and no new version


def test_a_write_through_data_after_a_block_is_seen():
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)
    for _ in range(2):
        with amp.scale_loss(model(X).sum(), optimizer) as scaled:
            scaled.backward()
        write_data(model)
        assert_fresh(model)


def test_a_write_through_data_after_a_step_is_seen():
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)
    model(X).sum().backward()
    optimizer.step()
    write_data(model)  # as weight clipping does
    assert_fresh(model)


def test_a_step_written_by_hand_through_data_is_seen_after_a_plain_backward():
    model = open_session(nn.Linear(3, 5))
    model(X).sum().backward()
    for param in model.parameters():
        param.data.sub_(param.grad)
    assert_fresh(model)


def test_a_step_written_by_hand_is_seen_while_the_output_is_still_held():
    model = open_session(nn.Linear(3, 5))
    output = model(X)
    output.sum().backward()
    write_data(model)
    assert_fresh(model)
    assert output.grad_fn is not None


def test_a_weight_that_functions_use_outside_of_any_model_is_seen_after_a_step_by_hand(linear):
    def assert_fresh_outside():
        found = torch.nn.functional.linear(X, linear.weight, linear.bias)
        assert torch.equal(found.detach(), by_hand(linear))
        return found

    for _ in range(2):
        assert_fresh_outside().sum().backward()
        write_data(linear)
    assert_fresh_outside()


def test_an_attack_on_the_weights_between_two_forwards_is_seen(linear):
    """As sharpness-aware minimization does: up along the gradient, and back again, through `.data`."""
    for _ in range(2):
        linear(X).sum().backward()
        for param in linear.parameters():
            param.data.add_(param.grad)
        loss = linear(X)
        assert torch.equal(loss.detach(), by_hand(linear))
        loss.sum().backward()
        for param in linear.parameters():
            param.data.sub_(param.grad)
        assert_fresh(linear)


def optimizers():
    yield "sgd", lambda params: torch.optim.SGD(params, lr=1.0)
    yield "sgd loop", lambda params: torch.optim.SGD(params, lr=1.0, foreach=False)
    yield "sgd foreach", lambda params: torch.optim.SGD(params, lr=1.0, foreach=True)
    yield "sgd fused", lambda params: torch.optim.SGD(params, lr=1.0, fused=True)
    yield "adam fused", lambda params: torch.optim.Adam(params, lr=1.0, fused=True)
    yield "adamw fused", lambda params: torch.optim.AdamW(params, lr=1.0, fused=True)
    yield "adagrad fused", lambda params: torch.optim.Adagrad(params, lr=1.0, fused=True)


OPTIMIZERS = [pytest.param(make, id=name) for name, make in optimizers()]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_is_seen_by_the_next_forward(make):
    model = nn.Linear(3, 5)
    optimizer = make(model.parameters())
    open_session(model, optimizer)
    for _ in range(3):
        with amp.scale_loss(model(X).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert_fresh(model)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_after_a_plain_backward_is_seen(make):
    model = nn.Linear(3, 5)
    optimizer = make(model.parameters())
    open_session(model, optimizer)
    for _ in range(3):
        model(X).sum().backward()
        optimizer.step()
        assert_fresh(model)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_of_an_optimizer_that_initialize_never_saw_is_seen(make):
    model = nn.Linear(3, 5)
    optimizer = make(model.parameters())
    open_session(model)
    model(X).sum().backward()
    optimizer.step()
    assert_fresh(model)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_second_forward_before_the_step_does_not_outlive_it(make):
    model = nn.Linear(3, 5)
    optimizer = make(model.parameters())
    open_session(model, optimizer)
    with amp.scale_loss(model(X).sum(), optimizer) as scaled:
        scaled.backward()
    model(X)  # fills the cache again
    optimizer.step()
    assert_fresh(model)


@pytest.mark.parametrize("known", [True, False], ids=["given to initialize", "not given"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_is_seen_while_a_graph_from_before_it_still_waits_for_its_backward(make, known):
    model = nn.Linear(3, 5)
    optimizer = make(model.parameters())
    open_session(model, optimizer if known else None)
    waiting = model(X)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert_fresh(model)
    assert waiting.requires_grad


def swap(model, other):
    """Swaps the values of two models through `.data`, in the memory that they have."""
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        value = mine.data.clone()
        mine.data.copy_(theirs.data)
        theirs.data.copy_(value)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_average_swapped_in_for_an_evaluation_and_out_again_is_seen(mode):
    model, average = nn.Linear(3, 5), nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)
    for _ in range(2):
        with amp.scale_loss(model(X).sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        with mode():
            assert_fresh(model)
            swap(model, average)
            assert_fresh(model)
            swap(model, average)
            assert_fresh(model)
        assert_fresh(model)


def keep_data(model):
    return model.weight.data


def keep_array(model):
    return model.weight.detach().numpy()


def keep_a_row_of_data(model):
    return model.weight.data[1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("keep", [keep_data, keep_array, keep_a_row_of_data])
def test_a_write_through_what_was_kept_from_earlier_is_seen_by_the_next_evaluation(linear, keep, mode):
    kept = keep(linear)
    for value in (1.0, -2.0, 3.0):
        with mode():
            assert_fresh(linear)
        kept[:] = value
        with mode():
            assert_fresh(linear)
            found = torch.nn.functional.linear(X, linear.weight, linear.bias)
        assert torch.equal(found, by_hand(linear))


def test_a_write_through_what_was_kept_from_earlier_is_seen_after_a_block():
    model = nn.Linear(3, 5)
    kept = model.weight.data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)
    for value in (1.0, -2.0, 3.0):
        with amp.scale_loss(model(X).sum(), optimizer) as scaled:
            scaled.backward()
        kept[:] = value
        assert_fresh(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_write_to_the_flat_memory_of_all_weights_is_seen(mode):
    model = nn.Linear(3, 5)
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    model.weight.data, model.bias.data = flat[:15].view(5, 3), flat[15:]
    open_session(model)
    for value in (1.0, -2.0, 3.0):
        with mode():
            loss = model(X).float().sum()
        if loss.requires_grad:
            loss.backward()
        flat.fill_(value)
        with mode():
            assert_fresh(model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_write_by_another_process_is_seen_by_the_next_evaluation(when):
    """As of a process that evaluates what others train, in memory that they share."""
    model = nn.Linear(3, 5)
    if when == "before":
        model.share_memory()
    open_session(model)
    with torch.no_grad():
        assert_fresh(model)
        if when == "after":
            model.share_memory()
        assert_fresh(model)
        handle = model.weight.untyped_storage()._share_fd_cpu_()
        there = torch.UntypedStorage._new_shared_fd_cpu(*handle)  # what another process would open
        for value in (1.0, -2.0):
            torch.tensor([], dtype=torch.float32).set_(there, 0, (5, 3)).fill_(value)
            assert model.weight[0, 0] == value
            assert_fresh(model)


def write_state_dict(model):
    for value in model.state_dict().values():
        value.data.mul_(-3)


def write_a_row(model):
    model.weight[1].data.fill_(2.0)


def write_a_slice_of_the_bias(model):
    model.bias[1:3].data.fill_(2.0)  # as the bias of a forget gate is set


def write_a_view(model):
    model.weight.view(-1).data.mul_(-3)
    model.weight.t().data.add_(1)


def write_a_chunk(model):
    model.weight.chunk(2)[0].data.zero_()


def write_what_is_detached(model):
    model.weight.detach().data.mul_(-3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(
    "write",
    [
        write_data,
        write_state_dict,
        write_a_row,
        write_a_slice_of_the_bias,
        write_a_view,
        write_a_chunk,
        write_what_is_detached,
    ],
)
def test_a_write_through_data_between_two_evaluations_is_seen(linear, write, mode):
    for _ in range(3):
        with mode():
            assert_fresh(linear)
        write(linear)
        with mode():
            assert_fresh(linear)


class Decorated(nn.Linear):
    """Turns gradients off by itself, as teachers and feature extractors do."""

    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("make", [Decorated, lambda *sizes: nn.Linear(*sizes).requires_grad_(False)])
def test_a_write_to_flat_memory_is_seen_where_a_forward_leaves_no_graph(make):
    model = make(3, 5)
    flat = torch.cat([param.detach().flatten() for param in model.parameters()])
    model.weight.data, model.bias.data = flat[:15].view(5, 3), flat[15:]
    open_session(model)
    for value in (1.0, -2.0, 3.0):
        assert_fresh(model)
        flat.fill_(value)
        assert_fresh(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("owner", ["numpy", "bytearray", "dlpack"])
def test_a_write_to_memory_that_others_own_is_seen(owner, mode):
    array = np.zeros(15, np.float32) if owner != "bytearray" else np.frombuffer(bytearray(60), np.float32)
    give = {"numpy": torch.from_numpy, "dlpack": torch.from_dlpack}.get(owner, torch.frombuffer)
    model = nn.Linear(3, 5)
    model.weight.data = (give(array) if owner != "bytearray" else give(array.data, dtype=torch.float32)).view(
        5, 3
    )
    open_session(model)
    for value in (1.0, -2.0, 3.0):
        with mode():
            assert_fresh(model)
            result = model(X).float().sum()
        if result.requires_grad:
            result.backward()
        array[:] = value
        with mode():
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


def test_weights_may_be_swapped_there_and_back():
    model, average = nn.Linear(3, 5), nn.Linear(3, 5)
    open_session(model)

    def swap_all():
        for mine, theirs in zip(model.parameters(), average.parameters(), strict=True):
            torch.utils.swap_tensors(mine, theirs)

    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert_fresh(model)
        swap_all()
        swap_all()
        model(X).sum().backward()
        assert_fresh(model)


def test_a_write_to_flat_memory_is_seen_after_an_evaluation_that_was_interrupted():
    class Interrupted(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if self.is_interrupted:
                raise KeyboardInterrupt
            return y

    model = Interrupted(3, 5)
    flat = torch.zeros(15)
    model.weight.data = flat.view(5, 3)
    open_session(model)
    for value in (1.0, -2.0):
        with torch.no_grad():
            model.is_interrupted = True
            with pytest.raises(KeyboardInterrupt):
                model(X)
            flat.fill_(value)
            model.is_interrupted = False
            assert_fresh(model)


def test_a_part_that_is_called_without_grad_after_a_training_step_sees_a_write_to_flat_memory():
    model = nn.Sequential(nn.Linear(3, 5))
    flat = torch.zeros(15)
    model[0].weight.data = flat.view(5, 3)
    open_session(model)
    for value in (1.0, -2.0):
        model(X).sum().backward()
        flat.fill_(value)
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


def test_functions_called_outside_of_any_model_under_no_grad_see_a_write_through_data(linear):
    with torch.no_grad():
        torch.nn.functional.linear(X, linear.weight, linear.bias)
        write_data(linear)
        found = torch.nn.functional.linear(X, linear.weight, linear.bias)
    assert torch.equal(found, by_hand(linear))


def test_an_exception_in_a_block_leaves_no_cast_behind():
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)
    with pytest.raises(KeyError), amp.scale_loss(model(X).sum(), optimizer):
        raise KeyError
    write_data(model)
    assert_fresh(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_exception_in_an_evaluation_leaves_no_cast_behind(mode):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.fails = nn.Linear(3, 5), True

        def forward(self, x):
            y = self.linear(x)
            if self.fails:
                raise KeyError
            return y

    model = open_session(Fails())
    with mode(), pytest.raises(KeyError):
        model(X)
    write_data(model.linear)
    model.fails = False
    with mode():
        assert torch.equal(model(X), by_hand(model.linear))


def test_uninitialize_forgets_the_casts():
    model = open_session(nn.Linear(3, 5))
    model(X)
    amp.uninitialize()
    write_data(model)
    open_session(model)
    assert_fresh(model)


# ---- Grad modes ----

MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_a_result_is_of_the_mode_that_it_was_computed_in(linear, first, second):
    with MODES[first]():
        linear(X)
    with MODES[second]():
        result = linear(X)
    assert result.requires_grad == (second == "grad")
    assert result.is_inference() == (second == "inference")
    assert torch.equal(result, by_hand(linear))
    linear(X).sum().backward()
    assert linear.weight.grad is not None


def test_no_grad_inside_a_forward_and_grad_again_in_the_same_forward_gives_a_gradient():
    class Reversible(nn.Module):
        """Runs under no_grad first, and again with grad."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 5)

        def forward(self, x):
            with torch.no_grad():
                first = self.linear(x)
            return self.linear(x) + first

    model = open_session(Reversible())
    model(X).sum().backward()
    assert model.linear.weight.grad is not None


@pytest.mark.parametrize("before", [False, True], ids=["frozen first", "trained first"])
def test_requires_grad_toggled_between_two_uses_counts_at_once(linear, before):
    linear.requires_grad_(before)
    assert linear(X).requires_grad == before
    linear.requires_grad_(not before)
    assert linear(X).requires_grad == (not before)
    linear.requires_grad_(True)
    linear(X).sum().backward()
    assert linear.weight.grad is not None


def test_a_discriminator_frozen_for_the_generators_turn_gets_no_gradient():
    generator, discriminator = nn.Linear(3, 3), nn.Linear(3, 5)
    open_session([generator, discriminator])
    discriminator(generator(X).detach()).sum().backward()
    expected = discriminator.weight.grad.clone()
    discriminator.requires_grad_(False)
    discriminator(generator(X)).sum().backward()
    assert torch.equal(discriminator.weight.grad, expected)
    assert generator.weight.grad is not None


def test_parameters_made_in_inference_mode_are_cast():
    with torch.inference_mode():
        model = nn.Linear(3, 5)
        open_session(model)
        assert_fresh(model)
        model.weight.mul_(-3)
        assert_fresh(model)


def test_a_sparse_parameter_is_cast():
    weight = nn.Parameter(torch.eye(3).to_sparse())
    open_session(nn.Linear(3, 5))
    for _ in range(2):
        result = torch.sparse.mm(weight, torch.ones(3, 2))
        assert torch.equal(result.float(), torch.ones(3, 2))


def test_weights_swapped_by_functional_call_are_cast_themselves(linear):
    other = {name: nn.Parameter(param.detach() - 2) for name, param in linear.named_parameters()}
    linear(X)
    result = torch.func.functional_call(linear, other, (X,))
    expected = torch.ops.aten.linear(X.to(HALF), other["weight"].to(HALF), other["bias"].to(HALF))
    assert torch.equal(result, expected)
    result.sum().backward()
    assert other["weight"].grad is not None
    assert linear.weight.grad is None


def test_a_transform_of_torch_func_leaves_no_dead_cast_behind(linear):
    params = dict(linear.named_parameters())
    grads = torch.func.grad(lambda p: torch.func.functional_call(linear, p, (X,)).float().sum())(params)
    torch.func.vmap(linear)(X)
    linear(X).float().sum().backward()
    assert torch.equal(grads["weight"], linear.weight.grad)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.jacfwd])
def test_a_transform_over_the_input_leaves_no_dead_cast_behind(linear, transform):
    transform(lambda x: linear(x).float().sum())(X)
    linear(X).float().sum().backward()
    assert torch.equal(linear.weight.grad, X.to(HALF).float().sum(0).expand(5, 3))
    with torch.no_grad():
        transform(lambda x: linear(x).float().sum())(X)
        assert_fresh(linear)


def test_a_transform_inside_of_a_forward_leaves_no_dead_cast_behind():
    class Energy(nn.Module):
        """As models of forces are: the derivative of one layer, and then the layer itself."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 5)

        def forward(self, x):
            forces = torch.func.grad(lambda y: self.linear(y).float().sum())(x)
            return self.linear(x).float().sum() + forces.sum()

    model = open_session(Energy())
    model(X).backward()
    expected = X.to(HALF).float().sum(0).expand(5, 3) + float(len(X))
    assert torch.equal(model.linear.weight.grad, expected)


@amp.half_function
def show_half(tensor):
    return tensor


@pytest.mark.parametrize("first", MODES)
def test_a_users_function_that_returns_the_cast_of_a_weight_returns_one_of_its_mode(linear, first):
    with MODES[first]():
        linear(X)
        assert show_half(linear.weight).requires_grad == (first == "grad")
    with torch.no_grad():
        assert not show_half(linear.weight).requires_grad
    show_half(linear.weight).sum().backward()
    assert torch.equal(linear.weight.grad, torch.ones(5, 3))


# ---- Memory and threads ----


def count_half_tensors():
    gc.collect()
    return sum(type(item) is Tensor and item.dtype is HALF for item in gc.get_objects())


@pytest.mark.parametrize("known", [True, False], ids=["given to initialize", "not given"])
def test_the_casts_are_freed_before_the_step(known):
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer if known else None)
    before, inside = count_half_tensors(), []
    loss = model(X).sum()
    assert count_half_tensors() > before
    loss.backward()
    del loss
    optimizer.register_step_pre_hook(lambda *_: inside.append(count_half_tensors()))
    optimizer.step()
    assert inside == [before]
    assert count_half_tensors() == before


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


class OwnSGD:
    """An optimizer of no class of torch's, whose kernel leaves no trace."""

    def __init__(self, params):
        self.params = list(params)

    def step(self):
        torch._fused_sgd_(
            [param.detach() for param in self.params],
            [param.grad for param in self.params],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=0.5,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


@pytest.mark.parametrize("zero_late", [False, True], ids=["zeroed after", "zeroed before backward"])
def test_a_step_of_no_optimizer_of_torch_is_seen_after_a_plain_backward(zero_late):
    model = open_session(nn.Linear(3, 5))
    optimizer = OwnSGD(model.parameters())
    for _ in range(3):
        loss = model(X).sum()
        if zero_late:
            model.zero_grad()
        loss.backward()
        optimizer.step()
        if not zero_late:
            model.zero_grad()
        assert_fresh(model)
        with torch.no_grad():
            assert_fresh(model)
    for _ in range(2):
        loss = model(X).sum()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            assert_fresh(model)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
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


def test_the_casts_are_freed_by_clear_cache(linear):
    before = count_half_tensors()
    linear(X)
    assert count_half_tensors() > before
    amp.clear_cache()
    assert count_half_tensors() == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_keeps_one_cast_of_each_weight(linear, mode):
    before = count_half_tensors()
    for _ in range(3):
        with mode():
            linear(X)
        assert count_half_tensors() == before + 2


def test_many_iterations_leave_no_growth():
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)

    def iterate():
        for _ in range(20):
            with amp.scale_loss(model(X).sum(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            with torch.no_grad():
                model(X)

    def count():
        gc.collect()
        return len(gc.get_objects())

    iterate()
    before = count()
    iterate()
    assert count() - before <= 2


def test_a_model_that_returns_what_it_is_given_leaves_no_growth():
    model = open_session(nn.Identity())
    x = torch.ones(2, requires_grad=True) * 2

    def count():
        gc.collect()
        return len(gc.get_objects())

    model(x)
    before = count()
    for _ in range(50):
        model(x)
    assert count() - before <= 2


def test_weights_replaced_again_and_again_do_not_pile_up_their_casts():
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, optimizer)

    def replace():
        for _ in range(10):
            model.weight = nn.Parameter(torch.randn(5, 3))
            model(X).sum().backward()
        optimizer.step()

    replace()
    before = count_half_tensors()
    replace()
    assert count_half_tensors() <= before


@pytest.fixture
def streams(monkeypatch):
    """Has the CPU pass for a CUDA device; returns a function that changes its current stream."""
    current = [0]
    monkeypatch.setattr(cast_cache, "_find_device", lambda parameter: 1)
    monkeypatch.setattr(cast_cache, "find_stream", lambda device: current[device - 1])
    return lambda stream: current.__setitem__(0, stream)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_cast_that_one_stream_made_is_not_read_by_another(streams, mode):
    """Which waits for the weight, and not for a cast of it, nor is the memory kept until it is done."""
    model, outputs, counts = open_session(nn.Linear(3, 5)), [], []
    for stream in (1, 1, 2, 2, 1):
        streams(stream)
        with CountCasts((5, 3)) as casts, mode():
            outputs.append(model(torch.ones(2, 3)))
        counts.append(casts.count)
    assert counts == [1, 0, 1, 0, 1]


def test_a_forward_that_changes_streams_midway_casts_a_weight_on_each(streams):
    class Changes(Tied):
        def forward(self, x):
            streams(1)
            hidden = torch.nn.functional.linear(x, self.weight)
            streams(2)
            return hidden @ self.weight + torch.mm(hidden, self.weight)

    model = open_session(Changes())
    with CountCasts((5, 3)) as casts:
        model(torch.ones(2, 3))
    assert casts.count == 2


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
                with amp.scale_loss(model(x).float().sum() * factor.cuda(), optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()
        weights = [param.detach().clone() for param in model.parameters()]
        amp.uninitialize()
        return weights

    default, side = train(torch.cuda.current_stream()), train(torch.cuda.Stream())
    assert all(map(torch.equal, default, side))


def run_in_threads(work, count=4):
    """Runs `work(index)` in several threads; raises what any of them raised."""
    errors = []

    def run(index):
        try:
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


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


def test_threads_that_train_their_own_models_do_not_disturb_each_other():
    models = [nn.Linear(3, 5) for _ in range(4)]
    sgds = [torch.optim.SGD(model.parameters(), lr=0.01, fused=True) for model in models]
    open_session(models, sgds)

    def work(index):
        for _ in range(10):
            with amp.scale_loss(models[index](X).sum(), sgds[index]) as scaled:
                scaled.backward()
            sgds[index].step()
            sgds[index].zero_grad()
            assert_fresh(models[index])

    run_in_threads(work)
