"""The cast cache is never stale: whatever writes to a weight, the next forward sees it."""

import numpy as np
import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.casts.cast import CASTS
from caching import HALF, X, assert_fresh, by_hand, open_session


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


# These take no tensor that a graph holds.
WITH_A_GRAPH = [edit for edit in EDITS if edit not in (swap_tensors, convert_by_swapping)]


@pytest.mark.parametrize("edit", WITH_A_GRAPH)
def test_an_edit_is_seen_while_a_graph_from_before_it_waits_for_its_backward(linear, edit):
    """The iteration goes on meanwhile, and its casts are used without a second look."""
    waiting = linear(X)
    edit(linear)
    assert_fresh(linear)
    assert waiting.requires_grad


class WritesMidway(nn.Linear):
    """Writes its weight between two uses of it, as codebooks do that follow their inputs."""

    def forward(self, x):
        super().forward(x)
        edit_in_place(self)
        return super().forward(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_edit_between_two_uses_in_one_forward_is_seen(mode):
    model = open_session(WritesMidway(3, 5))
    with mode():
        found = model(X).detach()
    assert torch.equal(found, by_hand(model))


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
