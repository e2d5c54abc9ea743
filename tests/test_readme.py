"""What README and the documentation say is true: blocks run, commands exist, links lead somewhere."""

import ast
import html
import importlib.metadata
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch import nn
from torch.nn import functional as F

import ampatch as amp
import ampatch.apex
import ampatch.testing
from ampatch.__main__ import COMMANDS, build_parser, split
from ampatch.apex import amp as apex
from ampatch.sweeps.judge.advice import summarize
from ampatch.sweeps.results import read_sweep
from ampatch.sweeps.show.page import write_page
from ampatch.sweeps.show.terminal import write
from helpers import import_float8
from loggers import make_mlflow, make_wandb
from ranks import FSDP2

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BESIDE = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "examples/README.md",
    "benchmarks/README.md",
    "benchmarks/results/README.md",
]
LINKED = [*PAGES, *(ROOT / name for name in BESIDE)]
SWEEP = "pip install -c constraints.txt -e '.[tools,examples]' && ampatch sweep examples/digits.py"
TEST = "pip install -c constraints.txt -e '.[test]' && pytest -n 2 --dist loadfile"


def read(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    """Returns (number of the first line, text) of the page's fenced blocks of a language."""
    text = read(page)
    fences = re.finditer(rf"^ *```{language}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, it.start(1)), textwrap.dedent(it[1])) for it in fences]


def test_the_example_of_a_sweep_is_the_one_that_is_kept():
    folder = ROOT / "docs" / "digits-sweep"
    sweep = read_sweep(str(folder))
    assert summarize(sweep.settings, sweep.environment, sweep.records) == sweep
    assert f"`{sweep.environment.command}`" in read(ROOT / "docs" / "sweep.md")
    shown = write(sweep)
    assert shown in [code.rstrip() for _, code in blocks(ROOT / "docs" / "sweep.md", "text")]
    table, _, recommendation = shown.split("\n\n")
    assert f"{table}\n\n{recommendation}\n" in [code for _, code in blocks(README, "text")]
    assert read(folder / "sweep.html") == write_page(sweep)


def outside_blocks(page):
    return re.sub(r"^ *```.*?^ *```", "", read(page), flags=re.DOTALL | re.MULTILINE)


def run_blocks(page):
    """Runs the blocks of a page; if one fails, undoes what those after it would have undone."""
    namespace = {"__name__": page.stem}
    try:
        for line, code in blocks(page, "python"):
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
    finally:
        amp.uninitialize()
        ampatch.apex.uninstall()
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[FSDP2] * (page.name == "distributed.md"))
        for page in PAGES
        if page.name != "trainers.md"  # the scripts for packages that only CI has: see test_trainers.py
    ],
)
def test_the_python_blocks_run_one_after_the_other(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # for what they write
    for module in (make_wandb(), make_mlflow()):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    if page.name == "levels.md":  # the block of O6; a torchao that fits is not there for each torch
        import_float8()
    with mock.patch.dict(os.environ):
        run_blocks(page)


def brought(line):
    """Returns the packages that a line of pip installs, with those that ampatch asks for there."""
    asked = [Requirement(word) for word in shlex.split(line)[2:]]
    extras = ["", *(extra for it in asked for extra in it.extras)]
    needs = [Requirement(it) for it in importlib.metadata.requires("ampatch")]
    ours = {it.name for it in needs if not it.marker or any(it.marker.evaluate({"extra": e}) for e in extras)}
    return {it.name for it in asked} | ours


def imported(code):
    """Returns the packages that hold what a block imports; torch's writer wants one more."""
    modules = re.findall(r"^(?:import|from) (\S+)", code, re.MULTILINE)
    packages = importlib.metadata.packages_distributions() | {"torch.utils.tensorboard": ["tensorboard"]}
    return {packages.get(it, packages[it.partition(".")[0]])[0] for it in modules}


def test_lines_above_each_block_of_the_first_page_install_what_it_imports():
    there = set()
    page = read(ROOT / "docs" / "start.md")
    for language, code in re.findall(r"^```(console|python)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        if language == "python":
            assert imported(code) <= there, code
        for line in re.findall(r"^pip install (?!-).+", code, re.MULTILINE):
            there |= brought(line)


def test_readme_says_the_two_commands_in_a_block_each():
    assert [code.strip() for _, code in blocks(README, "bash")] == [SWEEP, TEST]


@pytest.mark.parametrize("file", [".ci/run", "CONTRIBUTING.md"])
def test_the_test_command_is_the_same_everywhere(file):
    assert TEST in read(ROOT / file)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_the_commands_exist(page):
    shell = [code for language in ("bash", "console", "sh") for _, code in blocks(page, language)]
    text = re.sub(r"^\| `.*", "", outside_blocks(page), flags=re.MULTILINE)  # rows of messages
    shell += re.findall(r"`((?:ampatch|python|pytest|pip) [^`]+)`", text)
    commands = [part.strip() for text in shell for part in re.split(r"&&|\n", text) if part.strip()]
    for command in commands:
        check_command(shlex.split(command.removeprefix("$ ").partition(" > ")[0]))


def check_command(words):
    """Fails unless a command of ours parses, and the files that it names are there."""
    for word in words:
        if word.endswith((".py", ".txt")) and word != "train.py":  # which stands for the reader's own
            assert (ROOT / word).exists(), f"{word} in {shlex.join(words)}"
    if words[0] == "ampatch" and len(words) == 2:  # a subcommand alone is but a name in the text
        assert words[1] in [command.name for command in COMMANDS], shlex.join(words)
    elif words[0] == "ampatch":
        build_parser().parse_args(split(["x.py" if it == "SCRIPT" else it for it in words[1:]])[0])
    assert words[0] in ("ampatch", "mkdocs", "pip", "pytest", "python"), shlex.join(words)


def test_every_public_name_is_explained_outside_of_the_page_of_the_api():
    text = "\n".join(read(page) for page in PAGES if page.name != "api.md")
    assert [name for name in amp.__all__ if not re.search(rf"\bamp\.{name}\b|`{name}[`(]", text)] == []


SHOWN = re.findall(r"^::: (ampatch\.\S+)$", read(ROOT / "docs" / "api.md"), re.MULTILINE)


def test_the_page_of_the_api_has_every_public_name_once():
    rooms = {"ampatch": amp, "ampatch.testing": amp.testing, "ampatch.apex": amp.apex}
    public = [f"{room}.{name}" for room, module in rooms.items() for name in module.__all__]
    for file in (ROOT / "ampatch" / "integrations").glob("*.py"):  # read, for they import trainers
        listed = re.findall(r"^__all__ = (.+)", read(file), re.MULTILINE)
        public += [
            f"ampatch.integrations.{file.stem}.{it}" for it in ast.literal_eval("".join(listed) or "[]")
        ]
    public += [f"ampatch.table.{name}" for name in ("Cast", "Row", "CastTable")]
    assert sorted(SHOWN) == sorted([*public, "ampatch.testing.plugin.amp_session"])


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="needs the extra `docs`")
def test_the_page_of_the_api_says_since_when_and_gives_arguments_a_line_each(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    page = read(tmp_path / "docs" / "api" / "index.html")
    for name in SHOWN:
        heading = page.partition(f'id="{name}"')[2].partition("</h3>")[0]
        assert re.search(r"<code>since 1\.\d+</code>", heading), name
    signatures = re.findall(r'<div class="doc-signature.*?</div>', page, re.DOTALL)
    texts = [html.unescape(re.sub("<[^>]+>", "", it)).strip().splitlines() for it in signatures]
    assert [it for lines in texts for it in lines if len(it) > 90] == []
    inside = [it for lines in texts for it in lines[1:-1] if "=" not in lines[0]]
    assert len(inside) > 100
    several = [it for it in inside if len(re.findall(r"\w+: |\*,", it)) > 1]
    assert several == [], "give it a smaller line_length in docs/api.md"


def test_readme_is_short():
    assert len(read(README).splitlines()) <= 200


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_blocks(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def anchors(page):
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", outside_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_no_path_of_a_machine_is_named(page):
    assert not re.findall(r"(?<![\w.])/(?:home|work|tmp|root|Users)/\S*", read(page))


def test_the_table_of_levels_agrees_with_the_levels():
    rows = [line.strip("| ").split(" | ") for line in read(README).splitlines() if re.match(r"\| O\d ", line)]
    assert [row[0] for row in rows] == list(amp.OPT_LEVELS)
    for level, weights, functions, _, masters, scale in rows:
        policy = amp.OPT_LEVELS[level]
        if level in ("O0", "O1", "O2", "O3"):
            cast = str(policy.cast_model_type or torch.float32).removeprefix("torch.")
            assert weights == cast
            assert ("cast" in functions) == policy.patch_torch_functions
            assert (masters == "float32") == policy.master_weights
        assert scale == ("dynamic" if str(policy.loss_scale) == "dynamic" else "1")


# What a user may do wrong that test_bad_input.py does not have, each with an error for docs/errors.md.


def start(**arguments):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, verbosity=0, **arguments)
    return model


def after(action, **arguments):
    """Calls an action in a new session."""
    start(**arguments)
    action()


def start_twice(first, second):
    amp.initialize(start(opt_level=first), opt_level=second, verbosity=0)


def patch_over(monkeypatch):
    """Patches a function over ours, so that `uninitialize` raises; its end puts torch's back."""
    start(opt_level="O4")
    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", lambda *args: None)
        amp.uninitialize()


def enter_a_block_of_before():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, verbosity=0)
    block = amp.scale_loss(model.bias.sum(), optimizer)
    amp.uninitialize()
    with block:
        pass


def load(state):
    after(lambda: amp.load_state_dict(state))


def in_place_through_apex():
    apex.initialize(torch.nn.Linear(1, 1), opt_level="O1", verbosity=0)
    torch.ones(1).half().exp_()


MISTAKES = {
    "set scale": lambda: after(lambda: amp.set_loss_scale(0)),
    "set scale to a string": lambda: after(lambda: amp.set_loss_scale("4")),
    "log to a name": lambda: amp.log_to("runs"),
    "log never": lambda: amp.log_to(print, every=0),
    "count too late": lambda: after(lambda: amp.log_to(print, casts=True), opt_level="O4"),
    "cast twice": lambda: start_twice("O2", "O1"),
    "float32 before": lambda: start_twice("O0", "O1"),
    "block of before": enter_a_block_of_before,
    "key": lambda: load({"model": {}}),
    "keys": lambda: load({"loss_scaler0": {"scale": 1.0}}),
    "loaded 0": lambda: load({"loss_scaler0": {"loss_scale": 0.0, "unskipped": 0}}),
    "no state": lambda: load([]),
    "banned": lambda: after(
        lambda: F.binary_cross_entropy(torch.ones(1).bfloat16(), torch.ones(1)), opt_level="O4"
    ),
    "in place": in_place_through_apex,
}


def explained():
    """Returns patterns of the messages in the tables of docs/errors.md."""
    text = outside_blocks(ROOT / "docs" / "errors.md")
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    return [".*".join(map(re.escape, message.split("..."))) for message in messages if message.strip(". ")]


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_message_is_explained(name):
    with pytest.raises(amp.AmpError) as caught:
        MISTAKES[name]()
    message = str(caught.value)
    assert any(re.fullmatch(pattern, message, re.DOTALL) for pattern in explained()), message


def test_the_error_about_a_patch_over_ours_is_explained(monkeypatch):
    with pytest.raises(amp.PatchConflictError) as caught:
        patch_over(monkeypatch)
    assert any(re.fullmatch(pattern, str(caught.value), re.DOTALL) for pattern in explained())
