"""When gradients of cast weights come in a backward: as under autocast, also where casts are kept."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import ampatch as amp
import ranks
from helpers import scaled_backward

two = ranks.fixture()


def plain_backward(loss, optimizer):
    loss.backward()


def layers(width=32, count=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(count)])


def under_autocast(level):
    return torch.autocast("cpu", torch.bfloat16, enabled=level == "autocast")


def record(model, optimizer, level, backward, log):
    """Returns what `log` receives in each of three iterations."""
    if level != "autocast":
        amp.initialize(model, optimizer, opt_level=level, loss_scale=1.0, verbosity=0)
    batch, logs = torch.randn(4, model[0].in_features, requires_grad=True), []
    net = DistributedDataParallel(model, bucket_cap_mb=0.3) if dist.is_initialized() else model
    if net is not model:
        net.register_comm_hook(log, note_bucket)
    for _ in range(3):
        with under_autocast(level):
            loss = net(batch).float().sum()
        backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        logs.append(log.copy())
        log.clear()
    amp.uninitialize()
    return logs


def note_bucket(log, bucket):
    log.append("bucket")
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


@pytest.mark.parametrize("backward", [plain_backward, scaled_backward], ids=["plain", "block"])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_each_layer_has_its_gradients_before_the_next_one_runs(level, backward):
    def run(level, backward):
        model, log = layers(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, layer in enumerate(model):
            layer.register_full_backward_hook(lambda *_, number=number: log.append(number))
            note = f"weight of {number}"
            layer.weight.register_post_accumulate_grad_hook(lambda _, note=note: log.append(note))
        return record(model, optimizer, level, backward, log)

    assert run(level, backward) == run("autocast", plain_backward)


def run_beside_buckets(level, backward):
    model, log = layers(256, 6), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, number=number: log.append(number))
    return record(model, optimizer, level, backward, log)


@pytest.mark.process(keep=4)  # so that the ranks are forked before autograd has threads
@pytest.mark.parametrize("backward", [plain_backward, scaled_backward], ids=["plain", "block"])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_ranks_average_gradients_while_the_backward_runs(level, backward, two):
    for logs in two(run_beside_buckets, level, backward):
        for log in logs[1:]:  # the buckets are those of the first backward from then on
            assert log.count("bucket") == 3
            assert log.index("bucket") < 2, "the first bucket is full after the last layer"
            assert log[-1] != "bucket"


def peak(profiler):
    """The most bytes that were taken at a time."""
    events = [one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"]
    sizes = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]
    return max(itertools.accumulate(sizes))


def test_a_second_micro_batch_holds_no_more_than_under_autocast():
    def run(level):
        model = layers(128, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if level != "autocast":
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        batch = torch.randn(4, 128)

        def forward():
            with under_autocast(level):
                return model(batch).float().sum()

        forward().backward()
        optimizer.step()  # casts that are written again from here on
        loss = forward()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss.backward()
        amp.uninitialize()
        return peak(profiler)

    assert run("O4") <= run("autocast")
