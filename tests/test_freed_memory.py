"""`initialize` has glibc keep what steps free: without it, each takes its memory from the system anew."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
import ampatch as amp

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [torch.ones(1 << 20) for _ in range(10)]  # 40 of 64 MiB: imports free some as well
        del blocks
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10

count_faults()
print(count_faults())
amp.initialize(torch.nn.Linear(4, 4), opt_level="O0", verbosity=0)
count_faults()
print(count_faults())
"""
TRIES = 8  # imports may free a large block themselves, in about half of all processes


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory their own way")
def test_after_initialize_freed_memory_is_used_again(tmp_path, monkeypatch):
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    path = tmp_path / "rounds.py"
    path.write_text(SCRIPT)
    for _ in range(TRIES):
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
        before, after = map(int, done.stdout.split())
        assert after < 100
        if before > 7_000:  # of 10 blocks of 1,024 pages
            return
