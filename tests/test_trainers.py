"""The plugins of docs/trainers.md train, with the real packages, as a plain loop does: bit for bit."""

import copy
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import runpy
import sys
import warnings
from configparser import ConfigParser
from contextlib import suppress
from functools import cache, partial

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn
from torch.nn import functional as F

import ampatch as amp
from helpers import assert_same_bits, import_torchvision, scaled_backward, snapshot
from legacy import print_in_forks
from test_architecture import NAMES, room, undocumented
from test_readme import ROOT, read
from trainers import ADDED, AROUND, AVERAGES, COUNTS, INTERVALS, LIFE, NAMED, OUTPUTS, TOGGLED


def changed(text, *replacements):
    """Returns a script with other words in it."""
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return text


def recipe(name, *replacements):
    """Returns the script of a package, with what its section of the page shows."""
    sections = read(ROOT / "docs" / "trainers.md").split("\n## ")[1:]
    (found,) = [text for text in sections if name in text.partition("\n")[0].lower()]
    before, after = AROUND[name]
    shown = found.partition("```python\n")[2].partition("```")[0]
    return changed(before + shown + after, *ADDED.get(name, ()), *replacements)


def each(names):
    """Runs a test for each of these packages that is installed."""
    reason = "{} is not installed: pip install -c constraints.txt -e '.[trainers,timm]'"
    missing = {name for name in names if importlib.util.find_spec(name) is None}
    marks = {name: pytest.mark.skipif(name in missing, reason=reason.format(name)) for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


class Record:
    """What a recipe gives to `initialize`, and each batch that its model and its loss then get."""

    def __init__(self, monkeypatch):
        self.batches, self.targets = [], []
        initialize, cross_entropy = amp.initialize, F.cross_entropy

        def recording_initialize(model, given, **arguments):
            (self.model,) = model if isinstance(model, list) else [model]
            (self.optimizer,) = given if isinstance(given, list) else [given]
            self.twins = copy.deepcopy((self.model, self.optimizer))
            self.model.register_forward_pre_hook(self.keep_batch, with_kwargs=True, prepend=True)
            return initialize(model, given, **arguments)

        def recording_cross_entropy(scores, target, *args, **kwargs):
            self.targets.append(target)
            return cross_entropy(scores, target, *args, **kwargs)

        monkeypatch.setattr(amp, "initialize", recording_initialize)
        monkeypatch.setattr(F, "cross_entropy", recording_cross_entropy)

    def keep_batch(self, model, args, kwargs):
        rate = self.optimizer.param_groups[0]["lr"]  # by the trainer's scheduler
        self.batches.append((args, kwargs, torch.get_rng_state(), rate))

    def train_again(self):
        """Trains the twins on the same batches, by hand; returns losses and skipped steps."""
        model, optimizer = self.twins
        amp.initialize(model, optimizer, opt_level="O4")
        losses, skipped = [], 0
        for step, (batch, target) in enumerate(zip(self.batches, self.targets, strict=True)):
            args, kwargs, random, rate = batch
            torch.set_rng_state(random)
            for group in optimizer.param_groups:
                group["lr"] = rate
            output = model(*args, **kwargs)
            # The Trainer leaves the division by the number of batches to a model that takes any argument.
            loss = output.loss if "labels" in kwargs else F.cross_entropy(output, target) / 2
            losses.append(loss.item())
            scaled_backward(loss, optimizer)
            if step % 2:
                masters = dict(amp.master_pairs(optimizer))
                nn.utils.clip_grad_norm_([masters.get(it, it) for it in model.parameters()], 1.0)
                optimizer.step()
                skipped += amp.step_was_skipped(optimizer)
                optimizer.zero_grad()
        return losses, skipped


class Raise(logging.Handler):
    def emit(self, record):
        raise AssertionError(record.getMessage())


def quietly(function):
    """Calls a function with warnings of the trainers silenced, and those of ampatch raised."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    logging.getLogger("ampatch").addHandler(Raise(logging.WARNING))
    import_torchvision()
    function()


def run(script, **options):
    with amp.override(**{"verbosity": 0, **options}):
        return runpy.run_path(script, run_name="__main__")


def run_recipe(script, **options):
    """Runs a recipe at some level, then a plain loop on the same batches; the weights are equal."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        record = Record(monkeypatch)
        names = run(script, **options)
        trained = {name: value.clone() for name, value in record.model.state_dict().items()}
        amp.uninitialize()
    with amp.override(verbosity=0, **options):
        losses, skipped = record.train_again()
    assert_same_bits(trained.values(), record.twins[0].state_dict().values())
    state = amp.state_dict()
    amp.uninitialize()
    assert losses[-1] < 0.6 * losses[0] or skipped
    assert (0 < skipped < len(losses) / 2) == ("loss_scale" in options), skipped
    if "scheduler" in names:
        assert names["scheduler"].state_dict()["last_epoch"] == len(losses) // 2 - skipped
    return [snapshot(trained), state]


OVERFLOWS = {"opt_level": "O2", "loss_scale": amp.DynamicLossScale(init_scale=2.0**30, max_scale=2.0**30)}


def run_halves(scripts):
    """Runs the three; the first trains as a plain loop does, and the last ends as the first."""
    whole = run_recipe(scripts[0], **OVERFLOWS)
    for script in scripts[1:]:
        names = run(script, **OVERFLOWS)
        resumed = [snapshot(dict(names["model"].state_dict())), amp.state_dict()]
        amp.uninitialize()
    assert resumed == whole
    assert whole[1]["loss_scaler0"]["loss_scale"] < 2.0**30


LOOP = "for batch, labels in loader:"
PARTS = "torch.arange(256).split(16)"
NEW_MODEL = ("\nmodel = ", "\ntorch.manual_seed(1)\nmodel = ")
# The Trainer draws the order of batches from the random numbers that are left.
OTHER_WEIGHTS = ("tokens = ", "[param.data.zero_() for param in model.parameters()]\ntokens = ")
SAVE_TIMM = "\ntimm.utils.CheckpointSaver(model, optimizer, amp_scaler=loss_scaler).save_checkpoint(0)\n"
LOAD_TIMM = "\ntimm.models.resume_checkpoint(model, 'checkpoint-0.pth.tar', optimizer, loss_scaler)\n"
SAVE_ACCELERATE, SAVE_LIGHTNING = "\naccelerator.save_state('half')\n", "\ntrainer.save_checkpoint('half')\n"

# What to write into a recipe so that it runs to its end, stops halfway, and resumes with a new model.
HALVES = {
    "accelerate": (
        recipe("accelerate"),
        recipe("accelerate", (LOOP, "for batch, labels in list(loader)[:16]:")) + SAVE_ACCELERATE,
        recipe(
            "accelerate",
            (LOOP, "accelerator.load_state('half')\nfor batch, labels in list(loader)[16:]:"),
            NEW_MODEL,
        ),
    ),
    "lightning": (
        recipe("lightning", ("max_epochs=1", "max_epochs=2")),
        recipe("lightning") + SAVE_LIGHTNING,
        recipe(
            "lightning",
            ("max_epochs=1", "max_epochs=2"),
            ("loader)\n", "loader, ckpt_path='half')\n"),
            NEW_MODEL,
        ),
    ),
    "transformers": (
        recipe("transformers"),
        recipe("transformers", ("report_to", "save_steps=8, report_to")),
        recipe(
            "transformers",
            ("trainer.train()", "trainer.train(resume_from_checkpoint='out/checkpoint-8')"),
            OTHER_WEIGHTS,
        ),
    ),
    "timm": (
        recipe("timm"),
        recipe("timm", (PARTS, f"{PARTS}[:8]")) + SAVE_TIMM,
        recipe("timm", (PARTS, f"{PARTS}[8:]"), ("\nfor step", f"{LOAD_TIMM}for step"), NEW_MODEL),
    ),
}


# Scripts whose trainer has a mixed precision of its own, with what is said of it.
REFUSED = {
    "accelerate": (
        recipe("accelerate", ("AmpAccelerator(", "AmpAccelerator(mixed_precision='bf16', ")),
        "two mixed precisions meet: .*'bf16'.* write mixed_precision='no'",
    ),
    "lightning": (recipe("lightning", ("Trainer(", "Trainer(precision='bf16-mixed', ")), "Choose one"),
    "transformers": (
        recipe("transformers", ("report_to", "bf16=True, use_cpu=True, report_to")),
        "two mixed precisions meet: .*'bf16'.* write neither fp16=True nor bf16=True",
    ),
}

SCALED = "with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
MANUAL = f"""
        optimizer = self.optimizers()
        loss = F.cross_entropy(self(inputs), labels)
        {SCALED}            self.manual_backward(scaled_loss)
        optimizer.step()
"""

# Loops of one's own beside a trainer whose mixed precision is on.
WARNED = {
    "accelerate": recipe(
        "accelerate",
        ("from ampatch.integrations.accelerate import AmpAccelerator", "from accelerate import Accelerator"),
        ('AmpAccelerator(amp_options={"opt_level": "O4"}', "Accelerator(mixed_precision='bf16'"),
        ("prepare(model, optimizer", "prepare(*amp.initialize(model, optimizer)"),
        ("accelerator.backward(loss)", f"{SCALED}            accelerator.backward(scaled_loss)"),
    ),
    "lightning": recipe(
        "lightning",
        ('plugins=AmpPrecision(opt_level="O4")', "precision='bf16-mixed'"),
        ("accumulate_grad_batches=2, gradient_clip_val=1.0, ", ""),
        ("Trainer(", "Trainer(accelerator='cpu', "),
        ("__init__()\n", "__init__()\n        self.automatic_optimization = False\n"),
        ("return [optimizer]", "return [amp.initialize(self, optimizer)[1]]"),
        ("\n        return F.cross_entropy(self(inputs), labels)\n", MANUAL),
    ),
}


def run_warned(script):
    """Runs it at O0, where the trainer's is the only one, then at a level that makes it two."""
    run(script, opt_level="O0", verbosity=1)
    amp.uninitialize()
    expected = r"two mixed precisions meet: .* 'bf16(-mixed)?', beside .* write"
    with pytest.raises(AssertionError, match=expected):
        run(script, opt_level="O4", verbosity=1)


def run_refused(script, expected):
    with pytest.raises(ValueError, match=expected):
        run(script)
    with pytest.raises(amp.NotInitializedError):
        amp.state_dict()


def run_toggled(script):
    """Trains two optimizers that Lightning toggles; weights and skipped steps are those of a plain loop."""
    for options in ({"opt_level": "O4"}, OVERFLOWS):
        names = run(script, **options)
        assert_same_bits(names["trained"].values(), names["twin"].state_dict().values())
        assert bool(names["skipped"]) == ("loss_scale" in options)
        amp.uninitialize()


OLDER = [("import lightning", "import pytorch_lightning as lightning")]
OLDER += [
    ("integrations.lightning", "integrations.pytorch_lightning"),
    ("AmpPrecision", "AmpPrecisionPlugin"),
]
TWICE = """
trainer.train()
assert amp.state_dict()["loss_scaler0"]["unskipped"] == 64
trainer.evaluate(examples[:16])
amp.uninitialize()
trainer.train()
assert amp.state_dict()["loss_scaler0"]["unskipped"] == 32
"""
SCORES = """
scores = model(input_ids=tokens[:2]).logits
assert (amp.get_loss_scale(), scores.dtype) == (1.0, torch.float32)
"""
ALL_SKIPPED = {
    "opt_level": "O2",
    "loss_scale": amp.DynamicLossScale(init_scale=2.0**30, max_scale=2.0**30, min_scale=2.0**30),
}
SEVERAL = {"opt_level": "O2", "loss_scale": amp.DynamicLossScale(init_scale=2.0**10)}
OTHERS = {
    "accelerate": {"named": (partial(run, **SEVERAL), NAMED), "outputs": (run, OUTPUTS)},
    "lightning": {
        "older name": (run_recipe, recipe("lightning", *OLDER)),
        "toggled": (run_toggled, TOGGLED),
        "intervals": (partial(run, **ALL_SKIPPED), recipe("lightning", INTERVALS) + COUNTS),
        "life": (partial(run, **SEVERAL), recipe("lightning") + LIFE),
    },
    "transformers": {
        "twice": (partial(run, **SEVERAL), recipe("transformers") + TWICE),
        "outputs": (run, recipe("transformers") + SCORES),
    },
    "timm": {"averages": (partial(run, opt_level="O5"), AVERAGES)},
}


def run_all(name, folder):
    """Does all that is done with a package, each in a fork of this process, which imports it once."""
    warnings.simplefilter("ignore")
    import_torchvision()
    module = importlib.import_module(f"ampatch.integrations.{name}")
    tasks = {"documented": (lambda _: check_documented(module), "")}
    tasks |= {"as written": (run_recipe, recipe(name)), "halves": (run_halves, HALVES[name])}
    if name in REFUSED:
        tasks["refused"] = (partial(run_refused, expected=REFUSED[name][1]), REFUSED[name][0])
    if name in WARNED:
        tasks["warned"] = (run_warned, WARNED[name])
    tasks |= OTHERS.get(name, {})
    found = {}
    for task, (function, text) in tasks.items():
        (folder / task).mkdir()
        texts = [text] if isinstance(text, str) else text
        scripts = [write(folder / task / f"train{index}.py", text) for index, text in enumerate(texts)]
        given = scripts[0] if isinstance(text, str) else scripts
        try:
            call = partial(quietly, partial(function, given))
            print_in_forks(call, ["train.py"], folder / task)
            found[task] = "done"
        except AssertionError as error:
            found[task] = str(error)
    (folder / "found.json").write_text(json.dumps(found))


def check_documented(module):
    assert list(undocumented(module)) == []


def write(path, text):
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What came of all that is done with a package."""

    @cache
    def find(name):
        folder = tmp_path_factory.mktemp(name)
        print_in_forks(lambda: run_all(name, folder), ["train.py"], folder)
        return json.loads((folder / "found.json").read_text())

    return find


@pytest.mark.process
@each(AROUND)
def test_a_plugin_trains_as_a_plain_loop_does(name, outcomes):
    assert outcomes(name)["as written"] == "done"
    assert outcomes(name)["documented"] == "done"


@pytest.mark.process
@each(AROUND)
def test_a_plugin_skips_steps_as_a_plain_loop_does_and_resumes_bit_equal_with_its_loss_scale(name, outcomes):
    assert outcomes(name)["halves"] == "done"


@pytest.mark.process
@each(REFUSED)
def test_a_plugin_refuses_the_mixed_precision_of_its_trainer(name, outcomes):
    assert outcomes(name)["refused"] == "done"


@pytest.mark.process
@each(WARNED)
def test_a_loop_is_warned_of_the_mixed_precision_of_a_trainer(name, outcomes):
    assert outcomes(name)["warned"] == "done"


@pytest.mark.process
@each(OTHERS)
def test_a_plugin_names_optimizers_toggles_them_and_trains_again(name, outcomes):
    assert {task: outcomes(name)[task] for task in OTHERS[name]} == dict.fromkeys(OTHERS[name], "done")


@each({"lightning"})
def test_the_plugins_but_that_of_timm_bring_no_torchvision(name):
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    found, waiting = set(), settings["options.extras_require"]["trainers"].split()
    while waiting:
        needed = Requirement(waiting.pop())
        if needed.name in found or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        found.add(needed.name)
        with suppress(importlib.metadata.PackageNotFoundError):
            waiting += importlib.metadata.requires(needed.name) or ()
    assert {name, "torch"} <= found
    assert "torchvision" not in found


PLUGINS = [name for name in NAMES if room(name) == "integrations" and name.count(".") == 2]


@pytest.mark.parametrize("name", [name for name in PLUGINS if "with needs(" in NAMES[name].read_text()])
def test_a_plugin_without_its_package_says_what_installs_it(name, monkeypatch):
    for loaded in [it for it in sys.modules if it.startswith("ampatch.integrations")]:
        monkeypatch.delitem(sys.modules, loaded)
    package = name.rpartition(".")[2]
    monkeypatch.setitem(sys.modules, package, None)
    extra = "timm" if package == "timm" else "trainers"
    with pytest.raises(ImportError, match=rf"{package} is not installed: pip install 'ampatch\[{extra}\]'"):
        importlib.import_module(name)
