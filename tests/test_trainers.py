"""The recipes of docs/trainers.md train, with the real packages, as a plain loop does: bit for bit."""

import copy
import importlib
import importlib.util
import json
import logging
import runpy
import warnings
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampatch as amp
from ampatch import apex
from helpers import assert_same_bits, import_torchvision, scaled_backward, snapshot
from legacy import print_in_forks
from test_readme import ROOT, read

PACKAGES = {"plain": "torch", "accelerate": "accelerate", "lightning": "lightning"}
PACKAGES |= {"transformers": "transformers", "timm": "timm"}


def recipe(name):
    """Returns the script of a section, by a word of its heading."""
    sections = read(ROOT / "docs" / "trainers.md").split("\n## ")[1:]
    (found,) = [text for text in sections if name in text.partition("\n")[0].lower()]
    return found.partition("```python\n")[2].partition("```")[0]


def changed(name, replacements):
    """Returns the script of a section with other words in it."""
    text = recipe(name)
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new)
    return text


def each(names):
    """Runs a test for each of these recipes whose package is installed."""
    reason = "{} is not installed: pip install -c constraints.txt -e '.[trainers]'"
    marks = {
        name: pytest.mark.skipif(
            importlib.util.find_spec(PACKAGES[name]) is None, reason=reason.format(PACKAGES[name])
        )
        for name in names
    }
    return pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])


class Record:
    """What a recipe gives to `initialize`, and each batch that its model and its loss then get."""

    def __init__(self, monkeypatch):
        self.batches, self.targets = [], []
        initialize, cross_entropy = amp.initialize, F.cross_entropy

        def recording_initialize(model, given, **arguments):
            (self.optimizer,) = given if isinstance(given, list) else [given]
            self.model, self.twins = model, copy.deepcopy((model, self.optimizer))
            model.register_forward_pre_hook(self.keep_batch, with_kwargs=True, prepend=True)
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
                nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
                optimizer.step()
                skipped += amp.step_was_skipped(optimizer)
                optimizer.zero_grad()
        return losses, skipped


class Raise(logging.Handler):
    def emit(self, record):
        raise AssertionError(record.getMessage())


def run_recipe(script, options):
    """Runs a recipe at some level, then a plain loop on the same batches; the weights are equal."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")  # the trainers' own; those of ampatch are logged, too
    logging.getLogger("ampatch").addHandler(Raise(logging.WARNING))
    import_torchvision()
    with pytest.MonkeyPatch.context() as monkeypatch, amp.override(verbosity=0, **options):
        record = Record(monkeypatch)
        runpy.run_path(script, run_name="__main__")
        trained = {name: value.clone() for name, value in record.model.state_dict().items()}
        amp.uninitialize()
        monkeypatch.undo()
        losses, skipped = record.train_again()
        assert_same_bits(trained.values(), record.twins[0].state_dict().values())
        state = amp.state_dict()
        amp.uninitialize()
    assert losses[-1] < 0.6 * losses[0] or skipped
    assert (0 < skipped < len(losses) / 2) == ("loss_scale" in options), skipped
    return [snapshot(trained), state]


LEVELS = {
    "overflows": {
        "opt_level": "O2",
        "loss_scale": amp.DynamicLossScale(init_scale=2.0**30, max_scale=2.0**30),
    },
    "as written": {},
}


MANUAL = """
        loss = F.cross_entropy(self(inputs), labels)
        optimizer = self.optimizers()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            self.manual_backward(scaled_loss)
        optimizer.step()
"""

# What to write into a recipe so that the trainer's own mixed precision is on as well.
TWO_PRECISIONS = {
    "accelerate": [('"no"', '"bf16"')],
    "lightning": [
        ('plugins=AmpPrecision(opt_level="O4")', "precision='bf16-mixed', accelerator='cpu'"),
        ("    accumulate_grad_batches=2,", ""),
        ("    gradient_clip_val=1.0,", ""),
        (
            "__init__()\n        self.net",
            "__init__()\n        self.automatic_optimization = False\n        self.net",
        ),
        (
            "return torch.optim.AdamW(self.parameters(), lr=1e-2)",
            "return amp.initialize(self, torch.optim.AdamW(self.parameters(), lr=1e-2))[1]",
        ),
        ("\n        loss = F.cross_entropy(self(inputs), labels)\n", MANUAL),
    ],
    "transformers": [("report_to", "bf16=True, use_cpu=True, report_to")],
}


def run_with_two_precisions(script):
    """Runs it at O0, where the trainer's is the only one, then at a level that makes it two."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    logging.getLogger("ampatch").addHandler(Raise(logging.WARNING))
    import_torchvision()
    with amp.override(verbosity=1, opt_level="O0"):
        runpy.run_path(script, run_name="__main__")
        amp.uninitialize()
    with (
        amp.override(verbosity=1, opt_level="O4"),
        pytest.raises(
            AssertionError, match=r"two mixed precisions meet: .* 'bf16(-mixed)?', beside .* write"
        ),
    ):
        runpy.run_path(script, run_name="__main__")


LOOP = "for batch, labels in loader:"
PARTS = "torch.arange(256).split(16)"
NEW_MODEL = ("\nmodel = ", "\ntorch.manual_seed(1)\nmodel = ")
# The Trainer draws the order of batches from the random numbers that are left.
OTHER_WEIGHTS = ("tokens = ", "[param.data.zero_() for param in model.parameters()]\ntokens = ")
SAVE_TIMM = "timm.utils.CheckpointSaver(model, optimizer, amp_scaler=loss_scaler).save_checkpoint(0)"
LOAD_TIMM = "timm.models.resume_checkpoint(model, 'checkpoint-0.pth.tar', optimizer, loss_scaler)"

# What to write into a recipe so that it runs to its end, stops halfway, and resumes with a new model.
HALVES = {
    "accelerate": (
        [],
        [
            (LOOP, "for batch, labels in list(loader)[:16]:"),
            ("print(", "accelerator.save_state('half')\nprint("),
        ],
        [(LOOP, "accelerator.load_state('half')\nfor batch, labels in list(loader)[16:]:"), NEW_MODEL],
    ),
    "lightning": (
        [("max_epochs=1", "max_epochs=2")],
        [("print(", "trainer.save_checkpoint('half.ckpt')\nprint(")],
        [
            ("max_epochs=1", "max_epochs=2"),
            ("Classifier(), loader", "Classifier(), loader, ckpt_path='half.ckpt'"),
            ("\ntrainer = ", "\ntorch.manual_seed(1)\ntrainer = "),
        ],
    ),
    "transformers": (
        [],
        [("report_to", "save_steps=8, report_to")],
        [("trainer.train()", "trainer.train(resume_from_checkpoint='out/checkpoint-8')"), OTHER_WEIGHTS],
    ),
    "timm": (
        [],
        [(PARTS, f"{PARTS}[:8]"), ("print(", f"{SAVE_TIMM}\nprint(")],
        [
            (PARTS, f"{PARTS}[8:]"),
            ("loss_scaler = ApexScaler()", f"loss_scaler = ApexScaler()\n{LOAD_TIMM}"),
            NEW_MODEL,
        ],
    ),
}


def run_halves(scripts):
    """Runs the three; the first trains as a plain loop does, and the last ends as the first."""
    whole = run_recipe(scripts[0], LEVELS["overflows"])
    for script in scripts[1:]:
        with amp.override(verbosity=0, **LEVELS["overflows"]):
            names = runpy.run_path(script, run_name="__main__")
        model = names.get("model") or names["trainer"].lightning_module
        resumed = [snapshot(dict(model.state_dict())), amp.state_dict()]
        amp.uninitialize()
    assert resumed == whole
    assert whole[1]["loss_scaler0"]["loss_scale"] < 2.0**30


def write(path, text):
    path.write_text(text)
    return str(path)


def call(function):
    function()  # whose result is no exit status


def run_all(name, folder):
    """Does all that is done with a package, each in a fork of this process, which imports it once."""
    warnings.simplefilter("ignore")
    import_torchvision()
    if name == "timm":
        apex.install()  # timm looks for it when it is imported
    importlib.import_module({"transformers": "transformers.trainer"}.get(name, PACKAGES[name]))
    script = write(folder / "train.py", recipe(name))
    tasks = {level: partial(run_recipe, script, options) for level, options in LEVELS.items()}
    if name in HALVES:
        del tasks["overflows"]  # which is the first of its three
    if name in TWO_PRECISIONS:
        script = write(folder / "two.py", changed(name, TWO_PRECISIONS[name]))
        tasks["two precisions"] = partial(run_with_two_precisions, script)
    if name in HALVES:
        parts = zip(("whole", "half", "resumed"), HALVES[name], strict=True)
        scripts = [write(folder / f"{part}.py", changed(name, words)) for part, words in parts]
        tasks["halves"] = partial(run_halves, scripts)
    found = {}
    for task, function in tasks.items():
        (folder / task).mkdir()
        try:
            print_in_forks(partial(call, function), ["train.py"], folder / task)
            found[task] = "done"
        except AssertionError as error:
            found[task] = str(error)
    (folder / "found.json").write_text(json.dumps(found))


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
@each(PACKAGES)
def test_a_recipe_trains_as_a_plain_loop_does(name, outcomes):
    assert outcomes(name)["as written"] == "done"
    assert name in HALVES or outcomes(name)["overflows"] == "done"


@pytest.mark.process
@each(TWO_PRECISIONS)
def test_a_trainer_whose_own_mixed_precision_is_on_is_warned_of(name, outcomes):
    assert outcomes(name)["two precisions"] == "done"


@pytest.mark.process
@each(HALVES)
def test_a_recipe_whose_steps_overflow_does_so_too_and_resumes_bit_equal_with_its_loss_scale(name, outcomes):
    assert outcomes(name)["halves"] == "done"
