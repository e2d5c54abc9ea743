"""Scripts for trainers: the lines before and after those that docs/trainers.md shows of each."""

DATA = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ampatch as amp

torch.manual_seed(0)
inputs = torch.randn(512, 16)
loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=16)
"""

ACCELERATE = f"""{DATA}
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
"""
ACCELERATE_LOOP = """
scheduler = accelerator.prepare(scheduler)
for batch, labels in loader:
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(batch), labels)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""

LIGHTNING = f"""{DATA}
import lightning


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))  # as DDP calls its own

    def forward(self, batch):
        return self.module(batch)

    def training_step(self, batch, batch_index):
        inputs, labels = batch
        return F.cross_entropy(self(inputs), labels)

    def validation_step(self, batch, batch_index):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.9)
        return [optimizer], [{{"scheduler": scheduler, "interval": "step"}}]


model = Classifier()
"""

TRANSFORMERS = """
import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import ampatch as amp

torch.manual_seed(0)
config = BertConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)
model = BertForSequenceClassification(config)
tokens = torch.randint(64, (512, 8))
examples = [{"input_ids": row, "labels": (row[0] > 31).long()} for row in tokens]
arguments = TrainingArguments(
    "out",
    num_train_epochs=1,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    learning_rate=1e-2,
    report_to="none",
)
"""

TIMM = """
import timm
import torch
from timm.optim import create_optimizer_v2
from torch.nn import functional as F

import ampatch as amp

torch.manual_seed(0)
images = torch.randn(256, 3, 32, 32) + torch.randn(256, 1, 1, 1)
labels = (images.mean((1, 2, 3)) > 0).long()
model = timm.create_model("test_vit", num_classes=2, img_size=32)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3)
"""
TIMM_LOOP = """
for step, part in enumerate(torch.arange(256).split(16)):
    loss = F.cross_entropy(model(images[part]), labels[part]) / 2
    given = {"clip_grad": 1.0, "parameters": model.parameters()}
    loss_scaler(loss, optimizer, **given, need_update=step % 2 == 1)
    if step % 2:
        optimizer.zero_grad()
"""

# What accumulates and clips: written into the lines of the page.
ADDED = {
    "accelerate": [('"O4"})', '"O4"}, gradient_accumulation_steps=2)')],
    "lightning": [("plugins=", "accumulate_grad_batches=2, gradient_clip_val=1.0, max_epochs=1, plugins=")],
}

# By the package: the lines before and after those of the page.
AROUND = {
    "accelerate": (ACCELERATE, ACCELERATE_LOOP),
    "lightning": (
        LIGHTNING,
        "\ntrainer.fit(model, loader)\nscheduler = trainer.lr_scheduler_configs[0].scheduler\n",
    ),
    "transformers": (TRANSFORMERS, "\ntrainer.train()\nscheduler = trainer.lr_scheduler\n"),
    "timm": (TIMM, TIMM_LOOP),
}

# Two optimizers that are toggled, by hand in Lightning and in a plain loop.
TOGGLED = f"""{DATA}
import copy

import lightning

from ampatch.integrations.lightning import AmpPrecision


class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        judge = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
        self.parts = nn.ModuleList([nn.Linear(16, 16), judge])

    def forward(self, batch, first):
        for part in self.parts[first:]:
            batch = part(batch)
        return batch

    def losses(self, batch):
        yield F.softplus(-self(batch[0], 0)).mean()
        yield F.softplus(self(batch[0], 0)).mean() + F.softplus(-self(batch[0] + 1, 1)).mean()

    def training_step(self, batch, batch_index):
        losses = self.losses(batch)
        for optimizer in self.optimizers():
            with self.toggled_optimizer(optimizer):
                self.manual_backward(next(losses))
                self.clip_gradients(optimizer, 0.1)
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in self.parts]


model = Gan()
twin = copy.deepcopy(model)
trainer = lightning.Trainer(plugins=AmpPrecision(), max_epochs=1, logger=False)
trainer.fit(model, loader)
trained = copy.deepcopy(model.state_dict())
amp.uninitialize()

optimizers = twin.configure_optimizers()
amp.initialize(twin, optimizers)
skipped = 0
for batch in loader:
    losses = twin.losses(batch)
    for turn, optimizer in enumerate(optimizers):
        twin.parts[1 - turn].requires_grad_(False)
        with amp.scale_loss(next(losses), optimizer) as scaled_loss:
            scaled_loss.backward()
        twin.parts[1 - turn].requires_grad_(True)
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        optimizer.step()
        skipped += amp.step_was_skipped(optimizer)
        optimizer.zero_grad()
"""

# Two losses with an optimizer each, of which the first overflows.
NAMED = f"""{DATA}
from ampatch.integrations.accelerate import AmpAccelerator

accelerator = AmpAccelerator(amp_options={{"num_losses": 2}})
models = [nn.Linear(16, 2), nn.Linear(16, 2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
try:
    accelerator.prepare(*optimizers)
except ValueError as error:
    assert "prepare got SGD without its model" in str(error)
prepared = accelerator.prepare(*models, *optimizers)[2:]
accelerator.backward(models[0](inputs).sum() * 1e30, optimizers=prepared[0], loss_id=1)
accelerator.backward(models[1](inputs).mean(), optimizers=prepared[1:])
accelerator.clip_grad_value_(models[1].parameters(), 0.125)
assert max(param.grad.abs().max() for param in amp.master_params(prepared[1])) == 0.125
for optimizer in prepared:
    optimizer.step()
assert [optimizer.step_was_skipped for optimizer in prepared] == [True, False]
assert [amp.get_loss_scale(loss) for loss in (0, 1)] == [2.0**10, 2.0**9]
"""

# Averages of weights, beside those of the float32 weights by hand; the start of a copy is rounded.
AVERAGES = f"""{TIMM}
from timm.utils import ModelEmaV2, ModelEmaV3

model, optimizer = amp.initialize(model, optimizer)
expected = {{name: value.clone() for name, value in model.state_dict().items()}}
averages = [kind(model, decay=0.25) for kind in (ModelEmaV2, ModelEmaV3)]
averages.append(ModelEmaV3(model, decay=0.25, foreach=False))
for part in torch.arange(256).split(32):
    with amp.scale_loss(F.cross_entropy(model(images[part]), labels[part]), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    for average in averages:
        average.update(model)
    expected = {{name: value.lerp(model.state_dict()[name], 0.75) for name, value in expected.items()}}
for average in averages:
    torch.testing.assert_close(dict(average.module.state_dict()), expected, rtol=1e-6, atol=1e-7)
    assert average(images[:8]).dtype == torch.float32
"""

# What an evaluation hands to NumPy, which has no bfloat16.
OUTPUTS = f"""{DATA}
from accelerate.state import AcceleratorState

from ampatch.integrations.accelerate import AmpAccelerator

named = {{"cast_model_outputs": torch.bfloat16}}
for options in ({{}}, *({{"opt_level": level}} for level in ("O0", "O1", "O2", "O3", "O4", "O5")), named):
    accelerator = AmpAccelerator(cpu=True, amp_options=options)
    model = nn.Linear(16, 2)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    outputs = accelerator.gather_for_metrics({{"scores": [model(inputs)]}})["scores"][0]
    assert outputs.dtype == options.get("cast_model_outputs", torch.float32), options
    amp.uninitialize()
    AcceleratorState._reset_state(True)
"""

# Two schedules, of which one follows the steps.
INTERVALS = (
    '[{"scheduler": scheduler, "interval": "step"}]',
    '[{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4), "interval": it} '
    'for it in ("step", "epoch")]',
)
COUNTS = """
assert [it.scheduler.last_epoch for it in trainer.lr_scheduler_configs] == [0, 1]
"""

# What comes after `fit`, and without one.
LIFE = """
scale = amp.state_dict()
assert scale["loss_scaler0"]["unskipped"] > 0
trainer.validate(model, loader)
assert amp.state_dict() == scale
trainer.save_checkpoint("after.ckpt")
assert torch.load("after.ckpt", weights_only=False)["AmpPrecision"] == scale
trainer.fit_loop.max_epochs = 2
trainer.fit(model, loader)
assert amp.state_dict() == scale  # of a session of its own, with as many steps
amp.uninitialize()
assert trainer.precision_plugin.state_dict() == {}
model = Classifier()
trainer.validate(model, loader, ckpt_path="after.ckpt")
assert all(type(param) is nn.Parameter and param.dtype == torch.float32 for param in model.parameters())
"""
