"""What type checkers and completion show of the package, and what names of torch.amp answer."""

import importlib.util
import shutil
import subprocess
import sys

import pytest

import ampatch as amp
from test_readme import ROOT, blocks, read

TYPED = """
import torch
from typing_extensions import assert_type

import ampatch as amp

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
assert_type(amp.initialize(model, opt_level="O2"), torch.nn.Linear)
assert_type(amp.initialize([model], loss_scale="dynamic"), list[torch.nn.Linear])
assert_type(amp.initialize(model, optimizer, True, "O2"), tuple[torch.nn.Linear, torch.optim.SGD])
assert_type(amp.initialize([model], [optimizer]), tuple[list[torch.nn.Linear], list[torch.optim.SGD]])
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
with amp.scale_loss(torch.ones(1), optimizer) as scaled_loss:
    assert_type(scaled_loss, torch.Tensor)


@amp.half_function
def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor


class Net(torch.nn.Module):
    @amp.float_function
    def square(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


assert_type(scale(scaled_loss, factor=3.0), torch.Tensor)
assert_type(Net().square(scaled_loss), torch.Tensor)
amp.initialize(model, opt_lvl="O2")  # wrong
amp.initialize(3)  # wrong
amp.initialize(model, optimizer, opt_level=2)  # wrong
amp.scale_loss(torch.ones(1), optimizer).backward()  # wrong
scale("x")  # wrong
Net().square()  # wrong
amp.autocast  # wrong
"""

# As in setup.cfg, so that what `mypy` has kept of torch counts here as well; but for what users leave out.
MYPY = """
[mypy-{files}]
allow_redefinition = True
disallow_untyped_calls = False
disallow_untyped_defs = False
[mypy-sklearn.*]
ignore_missing_imports = True
[mypy]"""
CHECKERS = {"mypy": ["--config-file"], "pyright": ["--pythonpath", sys.executable]}


@pytest.mark.process
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_type_checker_knows_what_is_returned_and_finds_no_fault_in_the_first_page_and_the_examples(
    checker, tmp_path
):
    if importlib.util.find_spec(checker) is None or (checker == "pyright" and shutil.which("node") is None):
        pytest.skip("the extra `checks` has mypy and pyright, which needs node")
    page = ROOT / "docs" / "start.md"
    lines = [""] * len(read(page).splitlines())
    for first, code in blocks(page, "python"):
        lines[first : first + code.count("\n")] = code.splitlines()
    assert any(lines)
    (tmp_path / "start.py").write_text("\n".join(lines))  # whose lines are those of the page
    (tmp_path / "typed.py").write_text(TYPED)
    files = [*tmp_path.glob("*.py"), *(ROOT / "examples").glob("*.py")]
    command = [sys.executable, "-m", checker, *CHECKERS[checker], *files]
    if checker == "mypy":
        own = MYPY.format(files=",".join(file.stem for file in files))
        (tmp_path / "mypy.ini").write_text(read(ROOT / "setup.cfg").replace("[mypy]", own))
        command.insert(4, tmp_path / "mypy.ini")
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    errors = [line.strip() for line in said.splitlines() if "error:" in line]
    wrong = {f"typed.py:{n}:" for n, line in enumerate(TYPED.splitlines(), 1) if line.endswith("# wrong")}
    assert [line for line in errors if not any(place in line for place in wrong)] == [], said
    assert {place for place in wrong if place in said} == wrong, said


def test_completion_shows_the_public_names():
    assert dir(amp) == sorted(amp.__all__)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("autocast", "amp.initialize"), ("GradScaler", "amp.scale_loss"), ("unscale_", "amp.master_params")],
)
def test_a_name_of_torch_amp_says_what_to_write_instead(name, instead):
    with pytest.raises(AttributeError, match=rf"^module 'ampatch' has no attribute '{name}': .*{instead}"):
        getattr(amp, name)
    with pytest.raises(ImportError, match=instead):
        exec(f"from ampatch import {name}")
    assert not hasattr(amp, "scale_los")
