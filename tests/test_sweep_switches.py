"""A script that calls `initialize` only with an option of its own is told which option that is."""

import pytest

from ampatch.__main__ import main
from ampatch.apex.script import Script
from ampatch.sweeps import campaign
from ampatch.sweeps.processes.runner import NO_STEPS
from ampatch.sweeps.rows import Ending, Run
from ampatch.sweeps.switches import find_switches

OPTIONS = {
    "switch": ('"--fp16", action="store_true"', ["--fp16"]),
    "short and long": ('"-a", "--use_amp", action="store_true"', ["--use_amp"]),
    "in the manner of timm": ('"--apex-amp", action="store_true", default=False', ["--apex-amp"]),
    "boolean": ('"--mixed-precision", action=argparse.BooleanOptionalAction', ["--mixed-precision"]),
    "level": ('"--opt_level", type=str', ["--opt_level O1"]),
    "level of fp16": ('"--fp16-opt-level", default=""', ["--fp16-opt-level O1"]),
    "with a value": ('"--fp16_backend", default="auto"', []),
    "to turn it off": ('"--no-amp", action="store_true"', []),
    "off when given": ('"--amp", action="store_false"', []),
    "other words": ('"--example", "--clamp", "--log-level", action="store_true"', []),
    "not a text": ("NAME, action='store_true'", []),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_for_mixed_precision_are_found(tmp_path, name):
    given, expected = OPTIONS[name]
    script = tmp_path / "train.py"
    script.write_text(f"parser.add_argument({given})")
    assert find_switches(Script(str(script))) == expected


def test_a_switch_comes_before_a_level_and_what_was_given_is_left_out(tmp_path):
    script = tmp_path / "train.py"
    script.write_text('p.add_argument("--level")\np.add_argument("--opt-level")')
    assert find_switches(Script(str(script))) == ["--opt-level O1"]
    assert find_switches(Script(str(script), ("--opt-level=O2",))) == []
    script.write_text(script.read_text() + '\n@click.option("--amp", is_flag=True)\ndef main(amp): ...')
    assert find_switches(Script(str(script))) == ["--amp"]


@pytest.mark.parametrize(
    ("name", "is_module"), [("pack/train.py", False), ("pack", False), ("pack.train", True), ("pack", True)]
)
def test_options_of_the_modules_that_it_imports_are_found(tmp_path, monkeypatch, name, is_module):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "options.py").write_text('add.option("--fp16", is_flag=True)')
    for script in ("train", "__main__"):
        (tmp_path / "pack" / f"{script}.py").write_text("from options import read\nimport absent, torch.nn")
    assert find_switches(Script(name, is_module=is_module)) == ["--fp16"]


def test_a_file_that_cannot_be_read_has_no_options(tmp_path):
    (tmp_path / "broken.py").write_text("def")
    assert find_switches(Script(str(tmp_path / "broken.py"))) == []
    assert find_switches(Script("absent", is_module=True)) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fp16", "--amp"], "it has the option --fp16 (or --amp): end the command with `-- --lr 1 --fp16`"),
        ([], "add the line `amp.initialize(model, optimizer)` (log: "),
    ],
    ids=["options", "none"],
)
def test_a_script_that_never_called_initialize_is_told_what_to_do(
    tmp_path, monkeypatch, capsys, options, said
):
    script = tmp_path / "train.py"
    script.write_text("\n".join(f"parser.add_argument('{it}', action='store_true')" for it in options))
    record = Run("O0", outcome=Ending.NO_STEPS, cause=NO_STEPS, log="O0.log")
    monkeypatch.setattr(campaign, "execute", lambda *given: record)
    assert main(["sweep", str(script), "--", "--lr", "1"]) == 2
    assert said in capsys.readouterr().err
