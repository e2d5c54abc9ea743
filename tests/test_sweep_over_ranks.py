"""`ampatch sweep --nproc-per-node N`: each run on N ranks, one table, and a rank that fails by its name."""

import json

import pytest

from ampatch.__main__ import main
from ampatch.sweeps.rows import Run
from ampatch.sweeps.runner import slowest

TRAIN = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ampatch as amp

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O0")
ddp = DistributedDataParallel(model)
for step in range(8):
    if step == 7 and rank == 1 and model.weight.dtype is torch.bfloat16:
        raise ValueError("a batch of rank 1 is empty")
    loss = ddp(torch.randn(2 + rank, 4)).float().pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
print(f"end of rank {rank}")  # in one write, as both ranks have one file
"""


@pytest.mark.process
def test_each_run_has_its_ranks_and_one_that_fails_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    options = ["--nproc-per-node", "2", "--levels", "O0,O5", "--out", "out"]
    assert main(["sweep", *options, "train.py"]) == 1
    assert "train.py on 2 ranks: 1 seed" in capsys.readouterr().out
    good, bad = json.loads((tmp_path / "out/sweep.json").read_text())["records"]
    assert (good["outcome"], good["steps"]) == ("finished", 8)
    assert (bad["outcome"], bad["cause"]) == ("crashed", "rank 1: ValueError: a batch of rank 1 is empty")
    log = (tmp_path / "out/logs/O0-seed0-repeat0.log").read_text()
    assert log.count("Selected optimization level") == 1
    assert "end of rank 0" in log
    assert "end of rank 1" in log


def test_the_times_of_a_run_are_those_of_its_slowest_rank():
    first = Run("O0", step_ms=2.0, step_ms_low=1.0, peak_mib=7.0, final_loss=0.5)
    second = Run("O0", step_ms=5.0, step_ms_low=4.0, peak_mib=6.0, final_loss=0.7)
    assert slowest([first, second]) == Run("O0", step_ms=5.0, step_ms_low=4.0, peak_mib=7.0, final_loss=0.5)
    assert slowest([first, None]) is None


@pytest.mark.parametrize("rank", ["0", "1"])
def test_on_a_rank_no_sweep_starts_and_rank_0_says_what_to_do(rank, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["sweep", "train.py"]) == 2
    said = capsys.readouterr().err
    assert ("ampatch sweep --nproc-per-node 4 SCRIPT" in said) == (rank == "0")
