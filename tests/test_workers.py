"""Threads and processes beside the one that called initialize."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import ampatch as amp
from ampatch.steps.gradients import MasterGrads
from ampatch.steps.optimizer import AmpOptimizer
from apex_rows import shows
from nets import open_session

LEVELS = pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
HALF = {"O1": torch.float16, "O4": torch.bfloat16}
X = torch.tensor([[1.0, -0.5, 0.25], [0.5, 0.75, -1.0]])


def make_net():
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


# ---- Threads ----


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


@shows("never-data-parallel")
@LEVELS
def test_data_parallel_without_a_gpu_calls_the_model_itself(level, without_gpu):
    model = open_session(make_net(), opt_level=level)
    parallel = nn.DataParallel(model)
    assert torch.equal(parallel(X), model(X))
    assert parallel.state_dict()["module.0.weight"].dtype is torch.float32


# ---- Threads that look while another one trains ----


MASTERS = pytest.mark.parametrize("level", ["O2", "O5"])
WEIGHT = torch.linspace(-1.0, 1.0, 64).view(1, 64)  # of which most have no exact half
LOOKS = {
    "state_dict": lambda model, optimizer: model.state_dict(),
    "master_params": lambda model, optimizer: list(amp.master_params(optimizer)),
    ".data of masters": lambda model, optimizer: [one.data for one in optimizer.param_groups[0]["params"]],
    "forward": lambda model, optimizer: model(torch.ones(1, 64)),
}


def in_a_thread(run, *args, timeout=None):
    thread = threading.Thread(target=run, args=args)
    thread.start()
    thread.join(timeout)
    return thread


def open_row(level, kind=torch.optim.SGD):
    """A model of one row, whose gradient is always 2**-6, and each step of which takes 2**-7 off."""
    model = nn.Linear(64, 1, bias=False)
    model.weight.data.copy_(WEIGHT)
    optimizer = kind(model.parameters(), lr=0.5)
    open_session(model, optimizer, opt_level=level, loss_scale=1024.0)
    return model, optimizer


def backward_row(model, optimizer):
    with amp.scale_loss(model(torch.full((1, 64), 2.0**-6)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()


@MASTERS
@pytest.mark.parametrize("is_touched", [False, True], ids=["", "asked for .data"])
def test_a_state_dict_takes_nothing_back_that_another_thread_steps_meanwhile(level, is_touched, monkeypatch):
    """Between reading float32 values and writing them Python may switch to the thread that trains."""
    model, optimizer = open_row(level)
    backward_row(model, optimizer)
    steps, where = [], torch.where

    def step_before_it_returns(*args):
        chosen = where(*args)
        if not steps:
            steps.append(in_a_thread(optimizer.step, timeout=0.2))  # it may wait for this thread
        return chosen

    monkeypatch.setattr(torch, "where", step_before_it_returns)
    if is_touched:
        model.weight.data
    model.state_dict()
    steps[0].join() if steps else optimizer.step()
    assert torch.equal(next(amp.master_params(optimizer)).detach(), WEIGHT - 2.0**-7)


@MASTERS
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_who_looks_in_the_middle_of_a_step_changes_nothing(level, look):
    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            in_a_thread(lambda: model.weight.data)
            super().step(closure)
            in_a_thread(look, model, self)

    model, optimizer = open_row(level, Slow)
    for _ in range(2):
        optimizer.zero_grad()
        backward_row(model, optimizer)
        optimizer.step()
    assert torch.equal(next(amp.master_params(optimizer)).detach(), WEIGHT - 2.0**-6)


@MASTERS
def test_masters_are_asked_for_while_a_block_ends_in_another_thread(level, monkeypatch):
    model, optimizer = open_row(level)
    unscale = AmpOptimizer.unscale

    def look_first(*args):
        in_a_thread(LOOKS["master_params"], model, optimizer)
        unscale(*args)

    monkeypatch.setattr(AmpOptimizer, "unscale", look_first)
    backward_row(model, optimizer)
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad, torch.full((1, 64), 2.0**-6))


@MASTERS
def test_masters_are_asked_for_while_a_block_begins_in_another_thread(level, monkeypatch):
    model, optimizer = open_row(level)
    share, inside, looked = MasterGrads.share, threading.Event(), threading.Event()

    def train():
        with amp.scale_loss(model(torch.full((1, 64), 2.0**-6)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
            inside.set()
            assert looked.wait(10)

    def share_later(*args, **kwargs):
        monkeypatch.setattr(MasterGrads, "share", share)
        thread = threading.Thread(target=train)
        thread.start()
        inside.wait(0.2)  # it may wait for this thread
        share(*args, **kwargs)
        threads.append(thread)

    threads = []
    monkeypatch.setattr(MasterGrads, "share", share_later)
    list(amp.master_params(optimizer))
    looked.set()
    threads[0].join()
    (master,) = amp.master_params(optimizer)
    assert torch.equal(master.grad, torch.full((1, 64), 2.0**-6))


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
def test_a_half_model_in_a_spawned_worker_casts_its_inputs_and_outputs():
    model = open_session(make_net(), opt_level="O5")
    with torch.no_grad():
        expected = torch.stack([model(X), model(X + 1)])
    assert torch.equal(next(iter(load(Outputs(model), "spawn"))), expected)
