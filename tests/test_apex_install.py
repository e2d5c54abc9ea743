"""`ampatch.apex.install()` gives programs the package apex, and leaves a real one what it has."""

import importlib
import importlib.metadata
import importlib.util
import re
import sys
from types import ModuleType

import pytest
import torch

import ampatch.apex
from ampatch.apex.drop_in import PARTS, own_name, public_names, tree
from ampatch.apex.missing import EXTENSION_NAMES, MISSING
from apex_rows import shows


@pytest.fixture
def run(processes, tmp_path):
    """Runs code in a fresh process, in a folder of the test; returns what it printed."""

    def run_code(code):
        ended = processes.run(code, tmp_path)
        assert ended.status == 0, ended.stderr
        return ended.stdout + ended.stderr

    return run_code


@pytest.fixture
def installed():
    """Installs apex for one test."""
    ampatch.apex.install()
    yield
    ampatch.apex.uninstall()


@pytest.fixture
def package(tmp_path):
    """Writes packages: file names and their text."""

    def write(files, at=tmp_path):
        for name, text in files.items():
            path = at / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


# ---- Without a real apex ----


@pytest.mark.exhaustive(keep=8)
@shows("patterns-imports")
@pytest.mark.parametrize(
    "code",
    [
        "import apex\napex.amp.initialize, apex.parallel.DistributedDataParallel, apex.optimizers.FusedAdam",
        "import apex.amp as amp\namp.initialize",
        "import apex.amp\napex.amp.initialize",
        "from apex import amp, optimizers\namp.initialize, optimizers.FusedAdam",
        "from apex.parallel import DistributedDataParallel as DDP\nDDP",
        "from apex.parallel import convert_syncbn_model, SyncBatchNorm, LARC, Reducer\nLARC(Reducer and SGD)",
        "from apex.parallel.LARC import LARC\nLARC(SGD)",
        "from apex.fp16_utils import *\nFP16_Optimizer, network_to_half",
        "import apex\napex.contrib.optimizers.FP16_Optimizer, apex.contrib.optimizers.FusedAdam",
        "from apex.amp._amp_state import _amp_state, maybe_print\n_amp_state.loss_scalers, maybe_print",
        "from apex.amp import _amp_state\n_amp_state.opt_properties",
        "import apex\nfrom apex.amp import __version__ as it\napex.amp.__version__.VERSION, it.__version__",
        "from apex.normalization.fused_layer_norm import FusedLayerNorm\nFusedLayerNorm(3)",
        "from apex.multi_tensor_apply import multi_tensor_applier\nmulti_tensor_applier.available",
        "import apex\napex.multi_tensor_apply.multi_tensor_apply.MultiTensorApply, apex.amp.opt",
        "from apex.optimizers.fused_lamb import FusedLAMB\nimport apex.optimizers.fused_sgd as sgd\nsgd",
        "from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm\nSyncBatchNorm(1)",
        "import amp_C\namp_C.multi_tensor_scale",
        "import amp_C, apex_C\nfrom amp_C import multi_tensor_l2norm\napex_C.flatten",
        "import importlib\nimportlib.import_module('apex.amp.scaler').LossScaler",
        "import apex, pickle\npickle.loads(b'capex.amp.scaler\\nLossScaler\\n.')",
    ],
)
def test_every_way_of_importing_works(code, installed):
    exec(code, {"SGD": initialize("O4")})


def initialize(opt_level):
    """A linear layer initialized by `apex.amp`; returns its optimizer."""
    from apex import amp

    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, sgd, opt_level=opt_level, verbosity=0)
    return sgd


def test_every_module_of_apex_is_the_one_of_ampatch_and_stays_it(installed):
    import apex

    state = apex.amp._amp_state
    for part in PARTS:
        for name, module in tree(f"apex.{part}"):
            assert sys.modules[name] is sys.modules[own_name(name)] is module
            assert importlib.import_module(name) is module
            assert module.__name__ == module.__spec__.name == own_name(name)
        assert getattr(apex, part) is sys.modules[f"ampatch.apex.{part}"]
    import amp_C

    assert amp_C is importlib.import_module("ampatch.apex.amp_C")
    assert amp_C.__spec__.name == "ampatch.apex.amp_C"
    assert apex.amp._amp_state is state, "an object, after the import of its module too"
    assert not isinstance(state, ModuleType)


@pytest.mark.process
def test_a_program_can_ask_for_apex_without_importing_it(run):
    said = run(
        """
        import importlib.metadata as metadata, importlib.util
        assert importlib.util.find_spec("apex") is None
        ampatch.apex.install()
        assert importlib.util.find_spec("apex") is not None
        assert importlib.util.find_spec("amp_C") is not None
        assert metadata.version("apex") and metadata.metadata("apex")["Name"] == "apex"
        assert metadata.packages_distributions()["apex"] == ["apex"]
        print([name for name in sys.modules if "apex" in name.split(".")[0] or name == "ampatch.apex.amp"])
        """
    )
    assert said == "[]\n"


def test_what_is_not_there_is_not_found_and_does_not_raise(installed):
    import apex

    for name in ("apex.transformer", "apex.RNN", "apex.amp.no_such", "fused_layer_norm_cuda", "syncbn"):
        assert importlib.util.find_spec(name) is None
    assert not hasattr(apex, "transformer")
    assert not hasattr(apex.amp, "no_such")
    assert list(apex.__path__) == []  # a package without files of ours
    assert apex.__spec__.name == apex.__name__ == "apex"
    with pytest.raises(ModuleNotFoundError, match=r"apex\.finder"):
        importlib.import_module("apex.finder")


def test_installing_twice_is_installing_once(installed):
    before = list(sys.meta_path)
    ampatch.apex.install()
    assert sys.meta_path == before


def test_uninstall_leaves_no_trace():
    from multiprocessing import spawn

    meta_path, prepare = list(sys.meta_path), spawn.get_preparation_data
    ampatch.apex.install(opt_level="O2")
    import amp_C
    import apex

    assert type(apex.amp) is not ModuleType
    ampatch.apex.uninstall()
    ampatch.apex.uninstall()
    assert [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C", "apex_C")] == []
    assert sys.meta_path == meta_path
    assert spawn.get_preparation_data is prepare
    assert type(apex.amp) is type(amp_C) is ModuleType
    with pytest.raises(ModuleNotFoundError, match="No module named 'apex'"):
        importlib.import_module("apex")


def test_overrides_hold_until_uninstall():
    for overrides, level in (({"opt_level": "O4"}, "O4"), ({}, "O0")):
        ampatch.apex.install(**overrides)
        initialize("O0")
        assert ampatch.apex.amp._amp_state.opt_properties.opt_level == level
        ampatch.uninitialize()
        ampatch.apex.uninstall()


def test_an_unknown_override_is_refused():
    try:
        with pytest.raises(ampatch.AmpTypeError, match="initialize has no argument 'level'"):
            ampatch.apex.install(level="O1")
    finally:
        ampatch.apex.uninstall()


# ---- Names that apex had ----


@shows("patterns-imports")
@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("import apex.transformer", ModuleNotFoundError, "apex.transformer was"),
        ("from apex import transformer", ImportError, "apex.transformer was"),
        ("from apex.transformer.layers import x", ModuleNotFoundError, "apex.transformer was"),
        ("from apex.contrib.sparsity import ASP", ModuleNotFoundError, "apex.contrib.sparsity was ASP"),
        ("from apex.contrib import sparsity", ImportError, "apex.contrib.sparsity was ASP"),
        ("import apex.contrib.optimizers.fused_adam", ModuleNotFoundError, "use apex.optimizers.FusedAdam"),
        ("import apex.RNN", ModuleNotFoundError, "apex.RNN was .*: use torch.nn.LSTM"),
        ("from apex import RNN", ImportError, "apex.RNN was .*: use torch.nn.LSTM"),
        ("import apex\napex.RNN.LSTM", AttributeError, "apex.RNN was .*: use torch.nn.LSTM"),
        ("import fused_layer_norm_cuda", ModuleNotFoundError, "fused_layer_norm_cuda was the kernels of"),
        ("from apex.amp import compat", ImportError, "apex.amp.compat was"),
        ("from amp_C import multi_tensor_lars", ImportError, "amp_C.multi_tensor_lars was LARS"),
        ("from amp_C import no_such", ImportError, "cannot import name 'no_such'"),
        ("from apex.parallel import no_such", ImportError, "cannot import name 'no_such'"),
        ("import apex\napex.no_such", AttributeError, "module 'apex' has no attribute 'no_such'"),
        ("import apex\napex.amp.no_such", AttributeError, "module 'apex.amp' has no attribute 'no_such'"),
        ("import amp_C\namp_C.no_such", AttributeError, "module 'amp_C' has no attribute 'no_such'"),
        ("import apex.amp.no_such", ModuleNotFoundError, "No module named 'apex.amp.no_such'"),
    ],
)
def test_a_name_that_is_not_there_says_what_to_use(code, error, message, installed):
    with pytest.raises(error, match=message):
        exec(code, {})


@pytest.mark.parametrize("name", EXTENSION_NAMES)
def test_a_script_may_try_an_extension_and_go_on_without(name, installed):
    with pytest.raises(ImportError, match=re.escape(f"{name} was")) as raised:
        importlib.import_module(name)
    assert raised.value.name == name


def test_every_name_is_there_once():
    names = [row.name for row in MISSING]
    assert sorted(set(names)) == sorted(names)


def is_there(name):
    """Whether a dotted name can be imported and looked up."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part, None)
        return value is not None
    return False


# torch.distributed.optim scripts functions and interfaces when it is imported, and torch warns about that.
@pytest.mark.filterwarnings(r"ignore:.torch\.jit\.:DeprecationWarning")
@pytest.mark.parametrize("row", MISSING, ids=lambda row: row.name)
def test_a_row_is_of_a_name_that_is_missing_and_names_ones_that_are_there(row, installed):
    assert not is_there(row.name)
    suggested = re.findall(r"(?:torch|apex)\.[\w.]*\w", row.instead)
    assert [name for name in suggested if not is_there(name)] == []


# ---- With a real apex: packages on disk that are like the ones there are ----

MODERN = {
    "apex/__init__.py": "from . import optimizers\nREAL = True\n",
    "apex/contrib/__init__.py": "REAL = True\n",
    "apex/optimizers/__init__.py": "class FusedAdam: REAL = True\n",
    "apex/normalization/__init__.py": "REAL = True\n",
}


@pytest.mark.process(keep=1)
def test_what_a_real_apex_has_stays_its_own_and_the_rest_is_filled_in(run, package):
    package(MODERN | {"apex-0.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: apex\nVersion: 0.9\n"})
    said = run(
        """
        ampatch.apex.install()
        def show(*values):
            print(*("real" if getattr(value, "REAL", False) else "ours" for value in values))
        import apex, apex.contrib
        show(apex, apex.contrib, apex.optimizers.FusedAdam)
        show(apex.amp, apex.parallel, apex.optimizers.FusedSGD)
        assert apex.amp is ampatch.apex.amp and apex.parallel is sys.modules["apex.parallel"]
        import apex.normalization
        show(apex.normalization, apex.normalization.FusedLayerNorm)
        from apex.fp16_utils import FP16_Optimizer
        from apex.optimizers.fused_sgd import FusedSGD
        assert FusedSGD is apex.optimizers.FusedSGD
        assert type(apex) is type(sys) and type(apex.__loader__).__name__ == "SourceFileLoader"
        assert apex.__loader__ is apex.__spec__.loader
        import importlib.metadata
        assert importlib.metadata.version("apex") == "0.9"
        """
    )
    assert said.split() == ["real"] * 3 + ["ours"] * 3 + ["real", "ours"]


@pytest.mark.process
def test_a_real_apex_that_was_imported_before_is_filled_in(run, package):
    package(MODERN)
    said = run(
        """
        import apex
        assert not hasattr(apex, "amp") and not hasattr(apex.optimizers, "FusedSGD")
        ampatch.apex.install()
        from apex import amp
        FusedAdam = apex.optimizers.FusedAdam
        print(amp is ampatch.apex.amp, apex.optimizers.FusedSGD.__module__, FusedAdam.__module__)
        ampatch.apex.uninstall()
        print(hasattr(apex, "amp"), hasattr(apex.optimizers, "FusedSGD"), FusedAdam.__module__)
        print(sorted(name for name in sys.modules if name.startswith("apex")))
        """
    )
    assert said.splitlines() == [
        "True ampatch.apex.optimizers.fused apex.optimizers",
        "False False apex.optimizers",
        "['apex', 'apex.optimizers']",
    ]


@pytest.mark.process
def test_an_apex_that_was_made_by_hand_is_filled_in(run):
    said = run(
        """
        import types
        apex = sys.modules["apex"] = types.ModuleType("apex")
        apex.parallel = "their own"
        ampatch.apex.install()
        import apex.amp
        from apex.optimizers import FusedAdam
        print(apex.parallel, apex.amp is ampatch.apex.amp)
        ampatch.apex.uninstall()
        print([name for name in vars(apex) if not name.startswith("__")])
        """
    )
    assert said == "their own True\n['parallel']\n"


@pytest.mark.process
def test_a_missing_part_can_be_imported_from_inside_a_real_apex(run, package):
    package(MODERN | {"apex/__init__.py": "from apex import amp\nfrom apex.parallel import SyncBatchNorm\n"})
    assert run("ampatch.apex.install(); import apex; print(apex.amp is ampatch.apex.amp)") == "True\n"


@pytest.mark.process
def test_a_whole_real_amp_gets_nothing_of_ours(run, package):
    package({"apex/__init__.py": "", "apex/amp/__init__.py": "REAL = True\n"})
    said = run(
        """
        ampatch.apex.install()
        from apex import amp
        print(amp.REAL, [name for name in vars(amp) if not name.startswith("__")])
        """
    )
    assert said == "True ['REAL']\n"


@pytest.mark.process
@pytest.mark.parametrize(
    "fault",
    ["import no_such_extension", "from torch._six import container_abcs", "import torch; torch.no_such"],
)
def test_a_part_that_cannot_be_imported_is_replaced_and_says_why(fault, run, package):
    package(
        {
            "apex/__init__.py": "from . import amp, parallel\n",
            "apex/amp/__init__.py": f"from . import scaler\n{fault}\n",
            "apex/amp/scaler.py": "REAL = True\n",
            "apex/parallel/__init__.py": "REAL = True\n",
        }
    )
    said = run(
        """
        ampatch.apex.install()
        from apex import amp
        import apex.amp.scaler, apex
        print(amp is ampatch.apex.amp, hasattr(apex.amp.scaler, "REAL"), apex.parallel.REAL)
        """
    )
    assert said.startswith("True False True\n")
    assert said.count("apex.amp cannot be imported: ") == 1
    assert "ampatch's takes its place" in said


SITE = "site/lib/site-packages"
BROKEN = {
    "an extension that was built for another torch": (
        {"amp_C.py": "raise ImportError('undefined symbol: _ZN3c10')\n"},
        "undefined symbol: _ZN3c10",
    ),
    "the other apex of PyPI": (
        {
            f"{SITE}/apex/__init__.py": "from pyramid.session import Unencrypted\n",
            f"{SITE}/apex/lib/__init__.py": "",
        },
        "is another project of that name on PyPI, not NVIDIA's apex; ampatch's apex takes",
    ),
    "a clone of apex's repository in the working directory": (
        {"apex/setup.py": "", "apex/apex/__init__.py": "", "apex/apex/contrib/__init__.py": ""},
        "is not a package: it has no __init__.py; ampatch's apex takes its place",
    ),
    "a real apex that fails as a whole": (
        MODERN | {"apex/__init__.py": "from . import optimizers\nraise ImportError('built for CUDA 9')\n"},
        "built for CUDA 9",
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_apex_that_works_is_replaced_and_says_why(name, run, package):
    files, told = BROKEN[name]
    package(files)
    said = run(
        f"""
        sys.path.insert(1, {SITE!r})
        ampatch.apex.install()
        import importlib.util
        importlib.util.find_spec("apex")
        from apex import amp
        import amp_C, apex
        print(amp is ampatch.apex.amp, amp_C is ampatch.apex.amp_C)
        print(apex.optimizers is ampatch.apex.optimizers, apex.parallel.__name__)
        """
    )
    assert said.startswith("True True\nTrue ampatch.apex.parallel\n")
    assert said.count(told) == 1


@pytest.mark.process
def test_a_package_of_the_users_own_called_apex_keeps_its_errors(run, package):
    package({"apex/__init__.py": "raise ValueError('my own')\n", "apex/config.py": ""})
    said = run(
        """
        ampatch.apex.install()
        try:
            import apex
        except ValueError as error:
            print(error)
        """
    )
    assert said == "my own\n"


def test_what_fills_in_a_real_apex_is_no_module_and_no_private_name():
    for part in PARTS:
        for name, value in public_names(f"ampatch.apex.{part}"):
            assert not isinstance(value, ModuleType)
            assert not name.startswith("__")
