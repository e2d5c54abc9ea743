"""`ampatch check` reads a script and says which of the names of apex that it uses are provided."""

import re
import textwrap

import pytest

import ampatch as amp
from ampatch.__main__ import main
from ampatch.apex.checking import check_file


@pytest.fixture
def check(tmp_path):
    """Checks a text; returns the lines of each name that is provided, and of each that is not."""

    def check_text(text):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        names = check_file(path).names
        provided = {name.name: name.lines for name in names if name.fault is None}
        return provided, {name.name: name.lines for name in names if name.fault is not None}

    return check_text


INITIALIZE = "apex.amp.initialize"
DDP = "apex.parallel.DistributedDataParallel"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import apex; apex.amp.initialize()", INITIALIZE),
        ("import apex.amp; apex.amp.initialize()", INITIALIZE),
        ("import apex as a; a.amp.initialize()", INITIALIZE),
        ("import apex.amp as amp; amp.initialize()", INITIALIZE),
        ("from apex import amp; amp.initialize()", INITIALIZE),
        ("from apex import amp as mixed; mixed.initialize()", INITIALIZE),
        ("from apex.amp import initialize; initialize()", INITIALIZE),
        ("from apex.amp.frontend import initialize as i; i()", "apex.amp.frontend.initialize"),
        ("from apex.fp16_utils import *; network_to_half(1)", "apex.fp16_utils.network_to_half"),
        ("import amp_C; amp_C.multi_tensor_scale(1)", "amp_C.multi_tensor_scale"),
        ("from apex.amp._amp_state import maybe_print; maybe_print(1)", "apex.amp._amp_state.maybe_print"),
        ("import apex; Wrapper = apex.parallel.DistributedDataParallel; Wrapper(1)", DDP),
        ("import apex; parallel = apex.parallel; parallel.DistributedDataParallel(1)", DDP),
        ("from importlib import import_module; import_module('apex.amp').initialize()", INITIALIZE),
        ("import importlib; amp = importlib.import_module('apex.amp'); amp.initialize()", INITIALIZE),
        ("from apex import amp\ndef f(x=amp.initialize): pass", INITIALIZE),
        ("from apex import amp\n@amp.half_function\ndef f(x): pass", "apex.amp.half_function"),
        ("def f():\n    amp.initialize()\nfrom apex import amp", INITIALIZE),
        ("def f():\n    from apex import amp\n    amp.initialize()", INITIALIZE),
        ("from apex import amp\nclass A:\n    amp = 3\n    def f(self): amp.initialize()", INITIALIZE),
        ("amp = None\ntry: from apex import amp\nexcept ImportError: pass\namp.initialize()", INITIALIZE),
        ("if True:\n    import apex\nwith apex.amp.initialize() as x: pass", INITIALIZE),
        ("from apex import amp\nmatch 1:\n    case 1: amp.initialize()", INITIALIZE),
        ("from apex import amp\namp._amp_state.loss_scalers[0]._loss_scale = 1", "apex.amp._amp_state"),
    ],
)
def test_every_way_of_using_a_name_is_seen(text, name, check):
    provided, missing = check(text)
    assert name in provided
    assert missing == {}


@pytest.mark.parametrize(
    "text",
    [
        "import torch; torch.amp.initialize",
        "import apexlib; apexlib.amp.no_such",
        "from .apex import no_such",
        "from . import apex; apex.no_such",
        "def f(amp): amp.no_such",
        "amp = object(); amp.no_such",
        "self.amp.no_such",
        "import importlib.util; importlib.util.find_spec('apex')",
        "x = 'apex.amp.no_such'",
        "amp = amp; amp.no_such",
    ],
)
def test_what_is_not_apex_is_not_listed(text, check):
    assert check(text) == ({}, {})


@pytest.mark.parametrize(
    "text",
    [
        "from apex import amp\ndef f(amp): amp.no_such\nfor amp in []: pass",
        "try: from apex import amp\nexcept ImportError: from torch.cuda import amp\namp.autocast",
    ],
)
def test_a_name_that_may_be_of_another_module_is_not_held_against_the_script(text, check):
    provided, missing = check(f"{text}\namp.initialize")
    assert INITIALIZE in provided
    assert missing == {}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from apex.contrib.sparsity import ASP", "apex.contrib.sparsity.ASP"),
        ("import apex.contrib.xentropy as x", "apex.contrib.xentropy"),
        ("import apex; apex.mlp.MLP([1])", "apex.mlp.MLP"),
        ("import fused_layer_norm_cuda", "fused_layer_norm_cuda"),
        ("try: import xentropy_cuda\nexcept ImportError: pass", "xentropy_cuda"),
        ("from apex import amp; amp.initialise()", "apex.amp.initialise"),
        ("from apex.parallel import no_such", "apex.parallel.no_such"),
        ("import apex.amp.no_such", "apex.amp.no_such"),
        ("import amp_C; amp_C.no_such", "amp_C.no_such"),
        ("import apex; apex.parallel.LARC.no_such", "apex.parallel.LARC.no_such"),
        ("import apex; apex.finder", "apex.finder"),
        ("import importlib; importlib.import_module('apex.RNN')", "apex.RNN"),
    ],
)
def test_what_is_not_provided_is_told(text, name, check):
    assert list(check(text)[1]) == [name]


def test_a_check_leaves_no_session_and_runs_nothing(check):
    check("from apex import amp\nraise SystemExit('ran')")
    with pytest.raises(amp.NotInitializedError):
        amp.state_dict()


# ---- The command ----


def status_of(*arguments):
    return main(["check", *map(str, arguments)])


def test_the_command_lists_names_and_what_to_use_instead(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("from apex import amp\nfrom apex.contrib.sparsity import ASP\namp.initialise()\n")
    assert status_of(path) == 1
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.splitlines() == [
        str(path),
        "  apex.amp                   provided      line 1",
        "  apex.amp.initialise        NOT PROVIDED  line 3",
        "    apex.amp has no 'initialise'; close: initialize",
        "  apex.contrib.sparsity.ASP  NOT PROVIDED  line 2",
        "    apex.contrib.sparsity was ASP, 2:4 sparsity, which ampatch does not provide: "
        "use torch.sparse.to_sparse_semi_structured",
        "1 script, 3 names of apex, 2 not provided",
    ]


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (
            "from apex import amp\namp.initialize()\namp.initialize()\n",
            "provided      lines 2, 3\n1 script, 2 names of apex, 0 not provided\n",
        ),
        ("import torch\n", "1 script, 0 names of apex, 0 not provided\n"),
    ],
)
def test_the_status_is_0_if_all_is_provided(text, end, tmp_path, capsys):
    (tmp_path / "train.py").write_text(text)
    assert status_of(tmp_path / "train.py") == 0
    assert capsys.readouterr().out.endswith(end)


def test_a_folder_is_searched_and_what_is_hidden_is_not(tmp_path, capsys):
    for name in ("a.py", "deep/er/b.py", ".venv/c.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import apex.RNN")
    assert status_of(tmp_path) == 1
    said = capsys.readouterr().out
    assert [name for name in ("a.py", "b.py", "c.py", "notes.txt") if name in said] == ["a.py", "b.py"]
    assert said.endswith("2 scripts, 1 name of apex, 1 not provided\n")


PROJECT = {
    "train.py": "from common import *\nfrom lib import model\nimport random, aside\n"
    "amp.initialise()\nnp.int\nrandom.sample(set(x), 3)\n",
    "common.py": "import numpy as np\nfrom apex import amp\nimport train\n",  # which imports it
    "random.py": "def sample(*_): pass\n",  # in the place of Python's
    "lib/__init__.py": "from . import plugins\n",
    "lib/model.py": "from .deep.layers import Layer\nimport importlib\nimportlib.import_module('late')\n",
    "lib/deep/layers.py": "from ...common import np as n, amp as mixed\nmixed.initialize()\nn.float\n",
    "lib/plugins/__init__.py": "try: import apex.RNN\nexcept ImportError: pass\n",
    "late.py": "def f():\n    import apex.parallel\n",
    "apex/__init__.py": "import apex.no_such\n",  # a clone of it, say
    "aside/unused.py": "import apex.mlp\n",
}


@pytest.mark.parametrize("folder", ["", "package"])
def test_a_script_is_checked_with_what_it_imports_of_its_folder(folder, tmp_path, monkeypatch, capsys):
    for name, text in PROJECT.items():
        (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert status_of(f"{folder}/train.py".lstrip("/")) == 1
    said = [line.rstrip() for line in capsys.readouterr().out.replace("package/", "").splitlines()]
    assert [line for line in said if not line.startswith("    ")] == [
        "train.py",
        "  apex.amp.initialise  NOT PROVIDED  line 4",
        "  numpy.int            BREAKS        line 5",
        "common.py",
        "  apex.amp  provided      line 2",
        "lib/plugins/__init__.py",
        "  apex.RNN  NOT PROVIDED  line 1",
        "lib/deep/layers.py",
        "  apex.amp.initialize  provided      line 2",
        "  numpy.float          BREAKS        line 3",
        "late.py",
        "  apex.parallel  provided      line 2",
        "8 scripts, 5 names of apex, 2 not provided, 2 broken today",
    ]


@pytest.mark.parametrize(
    "source",
    [
        b"\xef\xbb\xbffrom apex import amp\n",
        "# coding: latin-1\nname = 'é'\nfrom apex import amp\n".encode("latin-1"),
        b"from apex import amp\r\nx = 1\r\n",
    ],
    ids=["bom", "latin-1", "crlf"],
)
def test_a_script_is_read_as_python_reads_it(source, tmp_path):
    (tmp_path / "train.py").write_bytes(source)
    assert [name.name for name in check_file(tmp_path / "train.py").names] == ["apex.amp"]


PYTHON_2 = "this is Python 2: convert it by 2to3"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (b"x = 1\nprint 'a'", f"', line 2: Missing parentheses in call to 'print'. Did .*; {PYTHON_2}"),
        (b"raise ValueError, 'a'", PYTHON_2),
        (b"x = 10L", PYTHON_2),
        (b"if 1:\n\tx = 1\n        y = 1", "no Python 3 takes tabs and spaces mixed like this"),
        (
            b"<<<<<<< HEAD\nx = 1",
            "expected a script that Python .* can parse: mend the line, or leave the file",
        ),
        (b"name = '\xff'\n", "train.py'"),
        (b"x = '\0'\n", "train.py'"),
        (b"# coding: no-such\n", "train.py'"),
    ],
    ids=["print", "raise", "long", "tabs", "conflict", "no-utf-8", "null", "coding"],
)
def test_what_python_cannot_read_is_one_line_that_says_what_it_is_and_status_2(
    source, told, tmp_path, capsys
):
    (tmp_path / "train.py").write_bytes(source)
    (tmp_path / "good.py").write_text("from apex import amp\n")
    assert status_of(tmp_path) == 2
    said = capsys.readouterr()
    assert re.search(told, said.err)
    assert said.err.count("\n") == 1
    assert ("Python 2:" in said.err) == ("Python 2:" in told)
    assert "apex.amp  provided" in said.out


def test_a_folder_without_init_that_its_own_script_names_as_a_package_is_followed(tmp_path, capsys):
    (tmp_path / "rank").mkdir()
    (tmp_path / "rank" / "main.py").write_text("from rank.td3 import TD3")
    (tmp_path / "rank" / "td3.py").write_text("from apex import amp\namp.initialize(1)")
    (tmp_path / "numpy").mkdir()  # beside the folder, as clones of other packages are
    (tmp_path / "numpy" / "__init__.py").write_text("import apex.amp.nothing")
    (tmp_path / "rank" / "other.py").write_text("import numpy")
    main(["check", str(tmp_path / "rank" / "main.py")])
    assert "apex.amp.initialize" in capsys.readouterr().out
    main(["check", str(tmp_path / "rank" / "other.py")])
    assert "apex" not in capsys.readouterr().out.replace("names of apex", "")


def test_what_is_beside_the_folder_of_a_script_is_followed_from_the_current_one(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("import apex.amp.nothing")  # a clone of it, say
    (tmp_path / "net.py").write_text("import apex.mlp")
    (tmp_path / "tools" / "more").mkdir(parents=True)
    script = tmp_path / "tools" / "more" / "train.py"
    script.write_text("import sys\nsys.path.append('.')\nimport net, numpy")
    for path in ("tools/more/train.py", script):
        monkeypatch.chdir(tmp_path)
        assert status_of(path) == 1
        assert "net.py\n  apex.mlp  NOT PROVIDED" in capsys.readouterr().out
        monkeypatch.chdir(tmp_path / "numpy")
        assert status_of(script) == 0


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nif sys.version_info[0] == 2:\n    import old\n",
        "try:\n    import old\nexcept (ImportError, SyntaxError):\n    pass\n",
    ],
)
def test_what_a_script_imports_may_be_for_another_python(text, tmp_path, capsys):
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "old.py").write_text("print 'python 2'\n")
    assert status_of(tmp_path / "train.py") == 0
    note, total = capsys.readouterr().out.splitlines()[::-1][:2]
    assert note.startswith(f"not checked: '{tmp_path / 'old.py'}', line 1: Missing parentheses")
    assert total == "1 script, 0 names of apex, 0 not provided"
    assert status_of(tmp_path / "train.py", tmp_path / "old.py") == 2


@pytest.mark.parametrize("name", ["LOCAL_RANK", "RANK"])
def test_a_script_may_read_its_rank_in_another_file_than_its_option(name, tmp_path, capsys):
    (tmp_path / "train.py").write_text("import opts, dist")
    (tmp_path / "opts.py").write_text("parser.add_argument('--local_rank', type=int)")
    (tmp_path / "dist.py").write_text(f"import os\nos.environ['{name}']")
    assert status_of(tmp_path / "train.py") == (name == "RANK")
    assert ("--local_rank" in capsys.readouterr().out) == (name == "RANK")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent.py", "absent.py' does not exist: expected a Python script or a folder"),
        ("train.ipynb", "is a notebook: expected a Python script"),
    ],
)
def test_what_is_no_script_is_bad_input(name, told, tmp_path, capsys):
    (tmp_path / "train.ipynb").write_text('{"cells": []}')
    assert status_of(tmp_path / name) == 2
    assert told in capsys.readouterr().err


def test_masks_that_another_file_makes_of_bytes_may_break(tmp_path, capsys):
    (tmp_path / "model.py").write_text("def hide(x, mask): return x.masked_fill(mask, 0)")
    (tmp_path / "train.py").write_text("import model\nmodel.hide(x, pad.byte())")
    assert status_of(tmp_path / "train.py") == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "model.py") in said
    assert "may break     line 1" in said


def test_a_name_that_is_set_of_itself_in_many_lines_is_followed_once(tmp_path, capsys):
    lines = [f"x = x.view({i}) + y.t()\ny = y.view({i}) + x.t()" for i in range(50)]
    (tmp_path / "train.py").write_text("\n".join([*lines, "z.masked_fill(x, 0)", "z.byte()"]))
    assert status_of(tmp_path / "train.py") == 0
    assert "masked_fill" not in capsys.readouterr().out
