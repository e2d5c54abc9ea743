"""Tells tumours apart: a trainer class with a scaler object, Lookahead around RAdam, and averaged weights.

ampatch run examples/legacy/trainer.py --apex-amp --opt-level O2
"""

import argparse
import copy

import torch
import torch.nn as nn
from lookahead import Lookahead, RAdam
from sklearn.datasets import load_breast_cancer

try:
    from apex import amp

    has_apex = True
except ImportError:
    amp, has_apex = None, False


class ModelEma:
    """Keeps a moving average of everything in the model's state."""

    def __init__(self, model, decay=0.9):
        self.ema, self.decay = copy.deepcopy(model).eval(), decay
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        with torch.no_grad():
            state = model.state_dict()
            for key, value in self.ema.state_dict().items():
                value.copy_(value * self.decay + (1.0 - self.decay) * state[key].detach())


class ApexScaler:
    state_dict_key = "amp"

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), clip_grad)
        optimizer.step()

    def state_dict(self):
        if "state_dict" in amp.__dict__:
            return amp.state_dict()

    def load_state_dict(self, state_dict):
        if "load_state_dict" in amp.__dict__:
            amp.load_state_dict(state_dict)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.use_amp = "apex" if args.apex_amp and has_apex else None
        torch.manual_seed(args.seed)
        inputs, labels = load_breast_cancer(return_X_y=True)
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        inputs, self.labels = torch.from_numpy(inputs).float()[order], torch.from_numpy(labels)[order]
        self.inputs = ((inputs - inputs[:400].mean(0)) / inputs[:400].std(0)).to(self.device)
        self.labels = self.labels.to(self.device)
        self.model = self.build_model().to(self.device)
        self.optimizer = RAdam(self.model.parameters(), lr=args.lr)
        if args.opt.startswith("lookahead_"):
            self.optimizer = Lookahead(self.optimizer)
        self.criterion, self.loss_scaler = nn.CrossEntropyLoss(), None
        if self.use_amp == "apex":
            self.setup_apex()
        self.model_ema = ModelEma(self.model)

    def build_model(self):
        layers = [nn.Linear(30, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)]
        return nn.Sequential(*layers, nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 2))

    def setup_apex(self):
        options = {"opt_level": self.args.opt_level}
        if self.args.loss_scale == "dynamic":
            options["loss_scale"] = "dynamic"
        self.model, self.optimizer = amp.initialize(self.model, self.optimizer, **options)
        if self.args.loss_scale == "dynamic":
            amp._amp_state.loss_scalers[0]._loss_scale = 2**20
        self.loss_scaler = ApexScaler()
        print(f"AMP: apex, {self.args.opt_level}")

    def train_epoch(self):
        self.model.train()
        for index in torch.randperm(400).split(self.args.batch_size):
            loss = self.criterion(self.model(self.inputs[index]), self.labels[index])
            self.optimizer.zero_grad()
            if self.loss_scaler is not None:
                self.loss_scaler(loss, self.optimizer, self.args.clip_grad, self.model.parameters())
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_grad)
                self.optimizer.step()
            self.model_ema.update(self.model)
        return loss.item()

    def evaluate(self, model):
        model.eval()
        with torch.no_grad():
            hits = model(self.inputs[400:]).argmax(1) == self.labels[400:]
        return hits.float().mean().item() * 100

    def checkpoint(self):
        state = {"state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.loss_scaler is not None:
            state[self.loss_scaler.state_dict_key] = self.loss_scaler.state_dict()
        return state

    def fit(self):
        print(f"untrained accuracy {self.evaluate(self.model):.2f}")
        for epoch in range(self.args.epochs):
            loss = self.train_epoch()
            scale = amp._amp_state.loss_scalers[0].loss_scale() if self.loss_scaler else 1
            print(f"epoch {epoch} loss {loss:.4f} loss scale {scale}")
        majority = max((self.labels[400:] == label).float().mean().item() for label in (0, 1)) * 100
        print(f"majority {majority:.2f}")
        print(f"accuracy {self.evaluate(self.model):.2f} averaged {self.evaluate(self.model_ema.ema):.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--opt", default="lookahead_radam", choices=["radam", "lookahead_radam"])
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--apex-amp", action="store_true", help="mixed precision by apex")
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--loss-scale", default=None, choices=[None, "dynamic"])
    parser.add_argument("--output", default="")
    trainer = Trainer(parser.parse_args())
    trainer.fit()
    if trainer.args.output:
        torch.save(trainer.checkpoint(), trainer.args.output)


if __name__ == "__main__":
    main()
