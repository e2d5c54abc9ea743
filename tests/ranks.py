"""Two processes that run functions side by side, connected by gloo on the CPU."""

import multiprocessing
import traceback
import warnings
from multiprocessing import connection

import pytest
import torch
import torch.distributed as dist

import ampatch as amp
from helpers import needs_torch

FSDP2 = needs_torch("2.7", "FSDP2 on a CPU, whose streams recorded no events")
TIMEOUT = 60  # seconds until ranks count as waiting for each other for ever


class Ranks:
    """Two processes, started once; each call runs a function of a test file on both."""

    def __init__(self, folder, count=2):
        self._folder, self._count = folder, count
        self._starts = 0
        self._processes = {}

    def _start(self):
        context = multiprocessing.get_context("fork")  # it has torch already
        self._starts += 1
        address = f"file://{self._folder / f'store{self._starts}'}"
        for rank in range(self._count):
            own, pipe = context.Pipe()
            process = context.Process(target=serve, args=(pipe, address, rank, self._count), daemon=True)
            process.start()
            self._processes[own] = process

    def __call__(self, function, *args, **kwargs):
        """Returns what the function returned on each rank; fails if it raised on any."""
        if not self._processes:
            self._start()
        for pipe in self._processes:
            pipe.send((function, args, kwargs))
        answers, waiting = {}, set(self._processes)
        while waiting:
            # One that raised leaves the other waiting for it.
            has_failed = any(text is not None for text, _ in answers.values())
            ready = connection.wait(waiting, 1 if has_failed else TIMEOUT)
            if not ready:
                break
            for pipe in ready:
                answers[pipe] = pipe.recv()
                waiting.remove(pipe)
        errors = [text for text, _ in answers.values() if text is not None]
        if errors or waiting:
            self.close()  # they may be in the midst of different collectives
            raise AssertionError("\n".join(errors) or f"no answer in {TIMEOUT} s")
        return [answers[pipe][1] for pipe in self._processes]

    def close(self):
        """Ends the processes; the next call starts new ones."""
        for process in self._processes.values():
            process.terminate()
            process.join()
        self._processes = {}


def fixture(count=2):
    """Returns a fixture: so many processes for the tests of a file."""

    @pytest.fixture(scope="module")
    def ranks(tmp_path_factory):
        ranks = Ranks(tmp_path_factory.mktemp("ranks"), count)
        yield ranks
        ranks.close()

    return ranks


def serve(pipe, address, rank, count):
    """What each process runs."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # as in setup.cfg
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")  # torch 2.6
    torch.set_num_threads(1)
    dist.init_process_group("gloo", address, rank=rank, world_size=count)
    while True:
        function, args, kwargs = pipe.recv()
        torch.manual_seed(0)
        try:
            pipe.send((None, function(*args, **kwargs)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
        finally:
            amp.uninitialize()


def gather(value):
    """What every rank has, in their order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_equal_on_ranks(tensors):
    first, *others = gather([tensor.detach() for tensor in tensors])
    return all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
