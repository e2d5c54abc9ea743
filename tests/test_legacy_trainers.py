"""More scripts written for apex run unchanged: a language model, segmentation, trainers, adversarial training.

The rest of examples/legacy is in test_legacy_examples.py.
"""

import re

import pytest
import torch
from helpers import snapshot
from legacy import ampatch_run, numbers, selected_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the scripts of this file run and leave their checkpoints."""
    return tmp_path_factory.mktemp("legacy")


# ---- language_model ----

# A model that knows how often each character occurs, and nothing of the text before it, has the
# unigram loss. LM_MEASURED
CONTEXT_IS_WORTH = 0.3
LOSS_MARGIN = 0.05


def language_model_loss(printed):
    unigram, loss = numbers(r"unigram loss ([\d.]+)", printed)[0], numbers(r"eval loss ([\d.]+)", printed)[0]
    assert loss < unigram - CONTEXT_IS_WORTH
    return loss


@pytest.fixture(scope="module")
def float32_loss(folder):
    """The loss without apex: `ampatch run` must leave such a script alone."""
    printed = ampatch_run("language_model", folder=folder)
    assert "Selected optimization level" not in printed
    return language_model_loss(printed)


@pytest.mark.parametrize(
    ("level", "override", "expected"),
    [(None, None, "O1"), ("O0", None, "O0"), ("O2", None, "O2"), ("O4", None, "O4"), ("O1", "O5", "O5")],
    ids=str,
)
def test_a_language_model_with_accumulation_learns_as_in_float32(
    level, override, expected, float32_loss, folder
):
    arguments = ["--fp16_opt_level", level] if level else []
    printed = ampatch_run("language_model", "--fp16", *arguments, folder=folder, level=override)
    assert selected_level(printed) == expected
    assert abs(language_model_loss(printed) - float32_loss) < LOSS_MARGIN


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_language_model_learns_with_fused_lamb(level, folder):
    arguments = ["--fp16", "--fp16_opt_level", level, "--optimizer", "lamb"]
    language_model_loss(ampatch_run("language_model", *arguments, folder=folder))


# ---- segment ----

# To find the ink, but not whose, gets a third of 0.95 (background) + 0.5 (all ink is of one kind) + 0.
# SEGMENT_MEASURED
INK_ALONE = 0.49


def mean_iou(printed):
    return numbers(r"epoch \d+ mIoU ([\d.]+)", printed)[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fp16", "--dynamic-loss-scale"],
        ["--fp16", "--static-loss-scale", "128"],
        ["--opt-level", "O4"],
        [],
    ],
    ids=["dynamic", "static", "O4", "float32"],
)
def test_a_segmentation_net_tells_digits_apart(arguments, folder):
    printed = ampatch_run("segment", *arguments, folder=folder)
    assert mean_iou(printed) > INK_ALONE + 0.15


def test_a_segmentation_net_at_the_level_of_the_command_line(folder):
    printed = ampatch_run("segment", "--opt-level", "O1", folder=folder, level="O5")
    assert selected_level(printed) == "O5"
    assert mean_iou(printed) > INK_ALONE + 0.15


def test_a_resumed_fp16_optimizer_ends_with_the_same_bits(folder):
    half = ["--fp16", "--dynamic-loss-scale", "--save-dir", "."]
    whole = ampatch_run("segment", *half, folder=folder)
    expected = torch.load(folder / "epoch_5.pth")
    (folder / "epoch_5.pth").unlink()
    resumed = ampatch_run("segment", *half, "--resume", "epoch_3.pth", folder=folder)
    assert whole.endswith(resumed[resumed.index("epoch 3") :])
    assert snapshot(torch.load(folder / "epoch_5.pth")) == snapshot(expected)


# ---- trainer ----

# TRAINER_MEASURED
TRAINER_LEARNED = 90.0


@pytest.mark.parametrize(
    ("arguments", "override", "expected"),
    [
        ([], None, "O1"),
        (["--opt-level", "O2", "--loss-scale", "dynamic"], None, "O2"),
        (["--opt-level", "O4"], None, "O4"),
        (["--opt-level", "O1", "--loss-scale", "dynamic"], "O5", "O5"),
        (["--opt-level", "O2", "--opt", "radam"], None, "O2"),
    ],
    ids=["default", "O2-dynamic", "O4", "O5-dynamic", "O2-radam"],
)
def test_a_trainer_with_lookahead_and_averaged_weights_learns(arguments, override, expected, folder):
    printed = ampatch_run("trainer", "--apex-amp", *arguments, folder=folder, level=override)
    assert selected_level(printed) == expected
    majority, accuracy, averaged = (
        *numbers(r"majority ([\d.]+)", printed),
        *numbers(r"accuracy ([\d.]+) averaged ([\d.]+)", printed),
    )
    assert majority < TRAINER_LEARNED < min(accuracy, averaged)
    # The script writes 2**20 into the scaler; it is used, and halved by what overflows.
    scales = re.findall(r"loss scale ([\d.]+)", printed)
    print(scales)


def test_a_trainer_saves_the_scaler_that_it_used(folder):
    arguments = ["--apex-amp", "--opt-level", "O4", "--loss-scale", "dynamic", "--output", "last.pth"]
    printed = ampatch_run("trainer", *arguments, folder=folder)
    scaler = torch.load(folder / "last.pth")["amp"]["loss_scaler0"]
    assert scaler["loss_scale"] == numbers(r"loss scale ([\d.]+)", printed)[0] == 2.0**20


# ---- adversarial ----

# ADVERSARIAL_MEASURED
ROBUST = 55.0


@pytest.mark.parametrize(
    ("arguments", "override", "expected"),
    [
        ([], None, "O2"),
        (["--loss-scale", "dynamic", "--master-weights"], None, "O2"),
        (["--opt-level", "O4"], None, "O4"),
        (["--opt-level", "O1"], "O5", "O5"),
    ],
    ids=["default", "masters", "O4", "O5"],
)
def test_adversarial_training_makes_a_classifier_robust(arguments, override, expected, folder):
    printed = ampatch_run("adversarial", *arguments, folder=folder, level=override)
    assert selected_level(printed) == expected
    clean, robust = numbers(r"Test Acc ([\d.]+) PGD Acc ([\d.]+)", printed)
    assert clean > 93
    assert robust > ROBUST


def test_without_adversarial_training_the_attack_succeeds(folder):
    """Were it not for this, the test above could not tell a robust classifier from a broken attack."""
    printed = ampatch_run("adversarial", "--attack", "none", "--opt-level", "O4", folder=folder)
    clean, robust = numbers(r"Test Acc ([\d.]+) PGD Acc ([\d.]+)", printed)
    assert clean > 93
    assert robust < ROBUST - 10
