"""What a fresh process has loaded after the imports that users write."""

import json
import subprocess
import sys
from importlib.metadata import requires

import pytest

from apex_rows import shows

pytestmark = pytest.mark.process

IMPORTS = ("import ampatch", "import ampatch.__main__", "import ampatch.testing", "import ampatch.apex.amp")
CODE = f"""
import json, sys
loaded = {{}}
for statement in {IMPORTS}:
    before = set(sys.modules)
    exec(statement)
    loaded[statement] = sorted(set(sys.modules) - before)
print(json.dumps(loaded))
ampatch.diagnose.watch
"""

# torch has not imported these by itself: the functions of the one, and what names masters in a checkpoint.
LATE = """
import sys
import torch
import ampatch as amp

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
amp.initialize(model, opt_level="O4")
amp.uninitialize()
amp.initialize(model, optimizer, opt_level="O5")
with amp.scale_loss(model(torch.ones(1, 2)).float().sum(), optimizer) as loss:
    loss.backward()
optimizer.step()
assert "torch.distributed.checkpoint.state_dict" not in sys.modules
from torch.distributed.checkpoint.state_dict import get_state_dict
assert list(get_state_dict(model, optimizer)[1]["state"]) == ["weight", "bias"]
"""


def test_what_torch_imports_at_its_first_use_is_patched(processes, tmp_path):
    ended = processes.run(LATE, tmp_path)
    assert (ended.stderr, ended.status) == ("", 0)


@pytest.fixture(scope="module")
def loaded():
    """Which modules each import adds, one after the other in one process."""
    return json.loads(subprocess.check_output([sys.executable, "-c", CODE], text=True))


def test_the_package_loads_tools_when_asked(loaded):
    rooms = {name.split(".")[1] for name in loaded["import ampatch"] if name.startswith("ampatch.")}
    assert not rooms & {"doctor", "sweeps", "integrations", "testing", "apex"}


def test_the_command_line_itself_does_not_import_what_is_slow(loaded):
    # ampatch's own __init__ needs torch; what the commands add must not cost anything.
    added = {name.partition(".")[0] for name in loaded["import ampatch.__main__"]}
    assert not {"rich", "torch", "matplotlib", "numpy"} & added


def test_the_helpers_need_no_pytest(loaded):
    assert not any("pytest" in names for names in loaded.values())


@shows("never-build-step")
def test_it_needs_torch_and_wrapt_and_no_compiler(loaded):
    needed = {item.split(">")[0].split("=")[0] for item in requires("ampatch") if "extra" not in item}
    assert needed == {"torch", "wrapt"}
    assert [name for names in loaded.values() for name in names if "cpp_extension" in name] == []
