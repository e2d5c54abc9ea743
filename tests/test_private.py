"""A torch that ampatch does not know: newer than any it was tested on, or without a private name."""

import ast
import logging
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.levels import private

PACKAGE = Path(amp.__file__).parent
# `hasattr` is how ampatch finds out whether a name is there.
WITHOUT = """
import builtins, logging, sys, torch, torch._dynamo, torch.jit._recursive, torch.utils.checkpoint
from torch._dynamo.variables.builtin import BuiltinVariable
hidden, has = HIDDEN, hasattr
def is_asking(): return sys._getframe(2).f_globals["__name__"] == "ampatch.levels.private"
builtins.hasattr = lambda parent, name: not (name in hidden and is_asking()) and has(parent, name)
if "CheckpointFunction" in hidden: del torch.utils.checkpoint.CheckpointFunction
for name in [name for name in sys.modules if name.partition(".")[0] == "ampatch"]:
    del sys.modules[name]  # what it finds at its import, it is to look for once more
import ampatch as amp
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
logging.basicConfig(format="%(message)s")
x = torch.randn(8, 4)
for level, dtype in (("O4", torch.bfloat16), ("O5", torch.bfloat16), ("O4", torch.bfloat16)):
    amp.initialize(model, optimizer, opt_level=level)
    for _ in range(3):
        loss = model(x).float().pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    amp.uninitialize()
amp.initialize(nn.Linear(1, 1), opt_level="O4")
with amp.disable_casts():
    print(torch.compile(lambda a: torch.mm(a, a), backend="eager")(x[:4]).dtype)
amp.uninitialize()
print(loss.isfinite().item(), next(model.parameters()).dtype)
"""


@pytest.fixture
def run_without(processes, tmp_path):
    """Trains in a process that lacks names; returns what is said of them."""

    def run(*names):
        hidden = {name.path.rpartition(".")[2] for name in names}
        done = processes.run(WITHOUT.replace("HIDDEN", repr(hidden)), tmp_path)
        assert done.status == 0, done.stderr
        assert done.stdout.splitlines()[-2:] == ["torch.float32", "True torch.float32"]
        return [line for line in done.stderr.splitlines() if line.startswith("torch ")]

    return run


def test_each_private_name_is_there_in_the_releases_that_were_tested():
    assert private.is_tested()
    assert private.explain_missing([*private.EAGER, *private.DYNAMO, *private.CHECKPOINTS]) == []


@pytest.mark.process
def test_torch_without_any_private_name_trains_and_one_line_tells_each_loss(run_without):
    scale = [private.CHECK_AND_UNSCALE, private.UPDATE_SCALE, private.GROUP]
    names = [name for name in private.EAGER if name not in scale]
    lines = run_without(*names)
    lost = {name.lost for name in names}
    assert sorted(line.rpartition(": ")[2] for line in lines) == sorted(lost)
    assert all(line.startswith(f"torch {torch.__version__} has no torch.") for line in lines)


@pytest.mark.process
@pytest.mark.parametrize("names", [private.DYNAMO, private.DYNAMO[-1:]], ids=["any", "one"])
def test_without_a_name_of_dynamo_compiled_functions_run_as_plain_python(run_without, names):
    (line, *_) = lines = run_without(*names)
    assert len(lines) == 3, "once for each time that torch is patched"
    assert line.startswith(f"torch {torch.__version__}: torch.compile runs functions as plain Python until")
    assert [name for name in names if f"no torch.{name.path}" not in line] == []


def test_what_a_thread_keeps_is_held_once_while_it_runs_and_no_more_afterwards():
    """Torch 2.11 and before forget to hold it, and let go of it nevertheless: memory in use is freed."""
    kept, held = object(), []
    before = sys.getrefcount(kept)

    def run():
        private.keep_in_thread("ampatch.trial", kept)
        held.append(sys.getrefcount(kept) - before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert held == [1]
    deadline = time.monotonic() + 20  # who joins a thread does not wait for what it keeps to be dropped
    while sys.getrefcount(kept) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sys.getrefcount(kept) == before


@pytest.mark.parametrize("newest", [private.NEWEST, "2.5"])
def test_a_torch_that_was_never_tested_is_named_once(newest, caplog, monkeypatch):
    monkeypatch.setattr(private, "NEWEST", newest)
    monkeypatch.setattr("ampatch.session.session.NEWEST", newest)
    monkeypatch.setattr(amp.session.frontend.SESSION, "_said_torch", False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            amp.initialize(nn.Linear(1, 1), opt_level="O4")
            amp.uninitialize()
    said = [record.getMessage() for record in caplog.records if record.name == "ampatch"]
    assert len(said) == (newest == "2.5")
    assert all(f"torch {torch.__version__}: ampatch was tested on torch 2.6 to 2.5" in line for line in said)


@pytest.mark.parametrize("fault", ["trace_methods", "call_uncast"])
def test_a_torch_whose_compiler_casts_wrongly_runs_plain_python(fault, caplog, monkeypatch):
    """What is taken away is what has this torch's compiler cast rightly."""
    monkeypatch.setattr(private, "NEWEST", "2.5")
    if fault == "trace_methods":
        monkeypatch.setattr("ampatch.patching.compiling.trace_methods", lambda *_: None)
    else:
        monkeypatch.setattr("ampatch.casts.wrapper.call_uncast", lambda *_, **__: 1 / 0)
    with caplog.at_level(logging.WARNING):
        amp.initialize(nn.Linear(1, 1), opt_level="O4")
    assert "torch.compile runs functions as plain Python until ampatch.uninitialize()" in caplog.text
    x = torch.ones(2, 2)
    compiled = torch.compile(lambda x: x.bfloat16() ** 2, backend="eager")
    with amp.disable_casts():
        assert compiled(x).dtype is torch.bfloat16
    assert compiled(x).dtype is torch.float32
    amp.uninitialize()
    assert torch._dynamo.eval_frame._stance.stance == "default"


# Names with an underscore that people import from torch, that apex's own names are, or that ops are in.
KNOWN_TO_USERS = {
    *("_BatchNorm", "_Loss", "_check_input_dim", "_check_non_zero_input_channels"),
    *("_flatten_dense_tensors", "_unflatten_dense_tensors", "_utils", "_pytree"),
    *("_C", "_VariableFunctions", "_tensor", "_BaseDataLoaderIter"),
}


def private_names(tree):
    """The parts with an underscore of what a module reads from torch, or imports from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            yield node.attr
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [name.name for name in node.names]
            path = ".".join([getattr(node, "module", None) or "", *names]).lstrip(".")
            yield from path.split(".") if path.startswith("torch") else ()


def test_private_names_stand_in_one_place():
    """But for the functions of lists of tensors, which optimizers outside of torch use as well."""
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "private.py"]
    found = {name for path in paths for name in private_names(ast.parse(path.read_text()))}
    private = {name for name in found if name.startswith("_") and not name.startswith(("__", "_foreach"))}
    assert private == KNOWN_TO_USERS
