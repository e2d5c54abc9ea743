"""`ampatch run SCRIPT` is to a script what `python SCRIPT` is: both are run, and compared."""

import os
import py_compile
import re
import signal
import subprocess
import sys
import zipfile

import pytest

from fresh import Ended

pytestmark = pytest.mark.process

# What a script finds in its own names, in sys and in the stack; addresses differ from run to run.
LOOK = """
import re, sys
for name, value in list(globals().items()):
    print(name, re.sub("0x[0-9a-f]+", "", repr(value)))
print(sys.argv, sys.path[0], getattr(sys.flags, "safe_path", None), sys.excepthook is sys.__excepthook__)
print(sys.modules["__main__"].__dict__ is globals())
"""

# Each ends in another way.
ENDINGS = {
    "well": "print('done')",
    "status": "import sys; sys.exit(3)",
    "text": "import sys; sys.exit('no data')",
    "at-once": "import os; print('x', flush=True); os._exit(7)",
    "exception": "def f():\n    raise ValueError('bad')\n\nf()",
    "chain": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('bad') from error",
    "context": "try:\n    {}['a']\nexcept KeyError:\n    1 / 0",
    "group": "raise ExceptionGroup('both', [ValueError(1), TypeError(2)])",
    "interrupt": "raise KeyboardInterrupt",
    "sigterm": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "syntax": "x = 1\ndef f(:\n    pass",
    "import": "import no_such_module",
    "import-of-syntax-error": "import broken",
    "amp-error": "import ampatch as amp, torch\namp.initialize(torch.nn.Linear(1, 1), opt_level='o1')",
    "excepthook": (
        "import sys, traceback\n"
        "def hook(kind, error, tb):\n"
        "    print(kind, error, traceback.extract_tb(tb), tb is error.__traceback__)\n"
        "    print(sys.excepthook is hook)\n"
        "sys.excepthook = hook\n"
        "raise ValueError('bad')"
    ),
    "atexit": (
        "import atexit, sys\n"
        "def last():\n"
        "    print(sys.last_value, sys.last_traceback.tb_frame.f_code.co_name, __name__)\n"
        "    print(sys.excepthook is sys.__excepthook__)\n"
        "atexit.register(last)\n"
        "raise ValueError('bad')"
    ),
    "thread": (
        "import sys, threading, time\n"
        "def late():\n"
        "    time.sleep(0.2)\n"
        "    print(__name__, sys.modules['__main__'].late is late)\n"
        "    raise ValueError('in a thread')\n"
        "threading.Thread(target=late, name='late').start()\n"
        "print('main is over')"
    ),
}


def python(*arguments, cwd, **options):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, **options)


@pytest.fixture
def run_both(processes, tmp_path):
    """Runs something with `python` and with `ampatch run`; returns how both ended.

    `first` is what the second process, which is a fork, does before.
    """

    def run(*arguments, first="", **options):
        plain = python(*arguments, cwd=tmp_path, **options)
        run = f"{first}\nsys.exit(ampatch.__main__.main({['run', *arguments]!r}))"
        return Ended(plain.returncode, plain.stdout, plain.stderr), processes.run(run, tmp_path)

    return run


@pytest.mark.process(keep=1)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_does_under_python(ending, run_both, tmp_path):
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "train.py").write_text(ENDINGS[ending] + "\n")
    plain, ours = run_both("train.py")
    assert ours == plain


@pytest.fixture
def scripts(tmp_path):
    """Writes one script in every form that `python` takes."""
    for name in ("train.py", "folder/__main__.py", "package/part.py", "package/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LOOK)
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "link.py").symlink_to(tmp_path / "folder/__main__.py")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.write(tmp_path / "train.py", "__main__.py")
    py_compile.compile(str(tmp_path / "train.py"), str(tmp_path / "done.pyc"))
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "--lr", "1", "--", "-m", "--opt-level", "O9"],
        ["./train.py"],
        ["link.py"],
        ["folder"],
        ["archive.zip", "x"],
        ["done.pyc", "x"],
        ["-m", "package.part", "-m", "--help"],
        ["-m", "package"],
    ],
    ids=" ".join,
)
def test_a_script_finds_what_it_finds_under_python(arguments, scripts, run_both):
    plain, ours = run_both(*arguments)
    assert ours == plain
    assert ours.status == 0


def test_a_script_from_the_standard_input_finds_what_it_finds_under_python(scripts, run_both):
    first = "os.dup2(os.open('train.py', os.O_RDONLY), 0)"
    plain, ours = run_both("-", "--lr", "1", first=first, input=LOOK)
    assert ours == plain


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 brought -P")
@pytest.mark.parametrize("script", ["train.py", "folder"])
def test_a_safe_path_stays_without_the_folder_of_the_script(script, scripts):
    # With -P there is no first entry that either of them could replace.
    ends = [python("-P", *before, script, cwd=scripts) for before in ((), ("-m", "ampatch", "run"))]
    assert ends[0].stdout == ends[1].stdout
    assert ends[0].returncode == ends[1].returncode == 0


def test_the_traceback_of_a_module_has_the_frames_of_the_module_alone(tmp_path, run_both):
    (tmp_path / "train.py").write_text("raise ValueError('bad')\n")
    plain, ours = run_both("-m", "train")
    assert ours.status == plain.status == 1
    # From Python 3.11 on without lines of its source.
    assert ours.stderr == re.sub(r'  File "[^"]*runpy(\.py|>)".*\n(?:    .*\n)*', "", plain.stderr)


def test_an_error_in_the_package_around_a_module_has_frames_of_the_package_alone(tmp_path, run_both):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("raise ValueError('bad')\n")
    (tmp_path / "package/train.py").write_text("")
    _, ours = run_both("-m", "package.train")
    place = f'  File "{tmp_path}/package/__init__.py", line 1, in <module>'
    assert ours.status == 1
    assert ours.stderr.splitlines()[:2] == ["Traceback (most recent call last):", place]


def test_a_source_can_be_read_and_a_class_pickled(tmp_path, run_both):
    (tmp_path / "train.py").write_text(
        "import inspect, pickle\n"
        "class Config:\n"
        "    lr = 1\n"
        "print(inspect.getsource(Config), pickle.loads(pickle.dumps(Config())).lr)\n"
    )
    plain, ours = run_both("train.py")
    assert ours == plain
    assert "lr = 1" in ours.stdout


def test_a_script_is_not_compiled_with_our_future_imports(tmp_path, run_both):
    (tmp_path / "train.py").write_text("def f(x: 1 + 1): pass\nprint(f.__annotations__)\n")
    assert run_both("train.py")[1].stdout == "{'x': 2}\n"


def test_a_signal_from_outside_ends_a_script_as_under_python(tmp_path):
    # Another thread says so while the script sleeps: a signal during `print` has another traceback.
    ready = "threading.Timer(0.3, print, ['ready'], {'flush': True}).start()"
    (tmp_path / "train.py").write_text(f"import threading, time\n{ready}\ntime.sleep(60)\n")
    pipes, ends = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}, []
    for before in ([], ["-m", "ampatch", "run"]):
        with subprocess.Popen([sys.executable, *before, "train.py"], cwd=tmp_path, **pipes) as process:
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            ends.append((process.stderr.read(), process.wait()))
    assert ends[0] == ends[1]
    assert ends[1][1] == -signal.SIGINT


def test_the_installed_command_runs_a_script_as_python_does_until_its_reader_is_gone(tmp_path):
    command = os.path.join(os.path.dirname(sys.executable), "ampatch")
    if not os.path.exists(command):
        pytest.skip("ampatch is not installed beside this Python")
    (tmp_path / "train.py").write_text(LOOK + "while True: print('line')\n")
    ends = []
    for before in (sys.executable, f"{command} run"):
        shell = f"{before} train.py x | head -n 40"
        done = subprocess.run(shell, shell=True, cwd=tmp_path, capture_output=True, text=True)
        ends.append((done.stdout, done.stderr))
    assert ends[0] == ends[1]
    assert "BrokenPipeError" in ends[1][1]
    assert "['train.py', 'x']" in ends[1][0]
