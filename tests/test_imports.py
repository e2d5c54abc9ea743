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


@pytest.fixture(scope="module")
def loaded():
    """Which modules each import adds, one after the other in one process."""
    return json.loads(subprocess.check_output([sys.executable, "-c", CODE], text=True))


@pytest.mark.parametrize("room", ["doctor", "sweeps", "integrations", "testing", "apex"])
def test_the_package_loads_tools_when_asked(loaded, room):
    assert [name for name in loaded["import ampatch"] if name.startswith(f"ampatch.{room}")] == []


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
