"""Threads and processes beside the one that called initialize."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import ampatch as amp
from apex_rows import shows
from nets import open_session

LEVELS = pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
HALF = {"O1": torch.float16, "O4": torch.bfloat16}
X = torch.tensor([[1.0, -0.5, 0.25], [0.5, 0.75, -1.0]])


def make_net():
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


# ---- Threads ----


@LEVELS
def test_threads_that_call_one_model_at_once_get_what_one_gets(level):
    model = open_session(make_net().eval(), opt_level=level)
    expected = model(X)

    def call(index):
        with (torch.no_grad, torch.enable_grad, torch.inference_mode)[index % 3]():
            return all(torch.equal(model(X).detach(), expected) for _ in range(10))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(call, range(12)))


@LEVELS
def test_threads_that_run_backward_at_once_add_up_their_gradients(level):
    model = open_session(make_net(), opt_level=level)
    # Half gradients are added in any order: of powers of two every sum is exact.
    nn.init.ones_(model[3].weight)
    bias = model[3].bias

    def run(_):
        for _ in range(4):
            model(X).float().sum().backward()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    assert torch.equal(bias.grad.float(), torch.full((2,), 4.0 * 4 * len(X)))


@pytest.mark.parametrize("level", HALF)
def test_a_thread_that_is_started_where_casts_are_off_begins_with_casts(level):
    open_session(make_net(), opt_level=level)
    seen = []
    with amp.disable_casts():
        thread = threading.Thread(target=lambda: seen.append((X @ X.T).dtype))
        thread.start()
        thread.join()
        assert (X @ X.T).dtype is torch.float32
    assert seen == [HALF[level]]


@pytest.mark.parametrize("level", HALF)
def test_one_thread_may_be_inside_a_model_while_another_works_outside(level):
    """As DataParallel and servers do: what a forward turns off is off for its own thread."""
    inside, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            inside.set()
            assert done.wait(10)
            return x @ x.T

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.waits = nn.Linear(3, 3), Waits()

        def forward(self, x):
            return self.waits(self.linear(x))

    model = open_session(Net(), opt_level=level, keep_fp32=["waits"])
    with ThreadPoolExecutor(1) as threads:
        output = threads.submit(model, X)
        assert inside.wait(10)
        outside = X @ X.T
        done.set()
        assert output.result().dtype is torch.float32
    assert outside.dtype is HALF[level]


@LEVELS
def test_backward_may_run_in_a_thread_of_its_own(level):
    model = open_session(make_net(), opt_level=level)
    loss = model(X).float().pow(2).sum()
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, grad)


@shows("never-data-parallel")
@LEVELS
def test_data_parallel_without_a_gpu_calls_the_model_itself(level):
    model = open_session(make_net(), opt_level=level)
    parallel = nn.DataParallel(model)
    assert torch.equal(parallel(X), model(X))
    assert parallel.state_dict()["module.0.weight"].dtype is torch.float32


# ---- Processes ----


class Products(Dataset):
    """Calls functions that are patched: by their names, and as they were when it was made."""

    def __init__(self):
        self.softmax, self.matmul = torch.nn.functional.softmax, torch.matmul

    def __len__(self):
        return 4

    def __getitem__(self, index):
        x = torch.full((2, 2), float(index))
        return {"by name": x @ x, "kept": self.softmax(self.matmul(x, x), -1)}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(2, 2) @ torch.ones(2, 2)] * 2)


class Outputs(Dataset):
    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 2

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(X + index)


def collate(samples):
    batch = default_collate(samples)
    batch["collated"] = batch["by name"].float() @ batch["by name"].float()
    return batch


def load(dataset, context, **kwargs):
    return DataLoader(dataset, 2, num_workers=1, multiprocessing_context=context, **kwargs)


@pytest.mark.process(keep=1)
@pytest.mark.parametrize("level", HALF)
def test_forked_workers_cast_as_the_process_that_forked_them(level):
    open_session(make_net(), opt_level=level)
    loader = load(Products(), "fork", collate_fn=collate, persistent_workers=True)
    for _ in range(2):
        for batch in loader:
            assert batch["by name"].dtype is batch["collated"].dtype is HALF[level]
            assert batch["kept"].dtype is torch.float32
    assert next(iter(load(Stream(), "fork"))).dtype is HALF[level]


@pytest.mark.process
def test_spawned_workers_run_plain_torch():
    """They import torch anew, and what they are sent pickles as what it stands for."""
    open_session(make_net(), opt_level="O4")
    loader = load(Products(), "spawn", collate_fn=collate, persistent_workers=True)
    for _ in range(2):
        for batch in loader:
            assert {value.dtype for value in batch.values()} == {torch.float32}


@pytest.mark.process
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_a_model_in_a_forked_worker_gives_what_it_gives_here(level):
    model = open_session(make_net(), opt_level=level)
    with torch.no_grad():
        expected = torch.stack([model(X), model(X + 1)])
    assert torch.equal(next(iter(load(Outputs(model), "fork"))), expected)


@pytest.mark.process
def test_a_half_model_in_a_spawned_worker_casts_its_inputs_and_outputs():
    model = open_session(make_net(), opt_level="O5")
    with torch.no_grad():
        expected = torch.stack([model(X), model(X + 1)])
    assert torch.equal(next(iter(load(Outputs(model), "spawn"))), expected)
