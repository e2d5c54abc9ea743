"""The recipes of docs/trainers.md train, with the real packages, as a plain loop does: bit for bit."""

import copy
import importlib
import importlib.util
import logging
import runpy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampatch as amp
from helpers import assert_same_bits, scaled_backward
from legacy import print_in_forks
from test_readme import ROOT, read

PACKAGES = {"plain": "torch", "accelerate": "accelerate", "lightning": "lightning"}
PACKAGES |= {"transformers": "transformers", "timm": "timm"}


def recipe(name):
    """Returns the script of a section, by a word of its heading."""
    sections = read(ROOT / "docs" / "trainers.md").split("\n## ")[1:]
    (found,) = [text for text in sections if name in text.partition("\n")[0].lower()]
    return found.partition("```python\n")[2].partition("```")[0]


each_recipe = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                importlib.util.find_spec(package) is None,
                reason=f"{package} is not installed: pip install -c constraints.txt -e '.[trainers]'",
            ),
        )
        for name, package in PACKAGES.items()
    ],
)


def import_torchvision():
    """Imports torchvision, which timm needs, and others take if it is there.

    The wheel on PyPI is for CUDA. Beside a torch for the CPU its own ops are not there, and its import
    fails at the first two that it adds to; declared by name, they are enough.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for op in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{op}", schema)
        importlib.import_module("torchvision")


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
    assert losses[-1] < 0.6 * losses[0] or skipped
    assert (0 < skipped < len(losses) / 2) == ("loss_scale" in options), skipped
    return 0


LEVELS = {
    "overflows": {
        "opt_level": "O2",
        "loss_scale": amp.DynamicLossScale(init_scale=2.0**30, max_scale=2.0**30),
    },
    "as written": {},
}


@pytest.mark.process
@each_recipe
@pytest.mark.parametrize("options", LEVELS.values(), ids=LEVELS)
def test_a_recipe_trains_as_a_plain_loop_does(name, options, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(recipe(name))
    print_in_forks(lambda: run_recipe(str(script), options), [script], tmp_path)
