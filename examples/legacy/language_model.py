"""Trains a small transformer on the text of Python's own help pages, character by character.

ampatch run examples/legacy/language_model.py --fp16 --fp16_opt_level O2 --optimizer lamb
"""

import argparse
import math
import random
from pydoc_data.topics import topics

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

BLOCK = 32


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x, mask):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale + mask
        probs = F.softmax(scores, dim=-1)
        return self.proj(torch.einsum("bhij,bjhd->bihd", probs, v).reshape(b, t, c))


class Layer(nn.Module):
    def __init__(self, width, heads, norm):
        super().__init__()
        self.LayerNorm1, self.attention = norm(width), Attention(width, heads)
        self.LayerNorm2 = norm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        x = x + self.attention(self.LayerNorm1(x), mask)
        return x + self.mlp(self.LayerNorm2(x))


class LanguageModel(nn.Module):
    def __init__(self, vocab_size, norm, width=32, heads=2, depth=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, width), nn.Embedding(BLOCK, width)
        self.layers = nn.ModuleList([Layer(width, heads, norm) for _ in range(depth)])
        self.LayerNorm = norm(width)
        self.lm_head = nn.Linear(width, vocab_size, bias=False)
        self.apply(self._init_weights)
        self.lm_head.weight = self.wte.weight  # tied

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.1)

    def forward(self, ids, labels=None):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        mask = torch.ones(ids.size(1), ids.size(1), device=ids.device).triu(1)
        mask = mask.to(dtype=next(self.parameters()).dtype) * -10000.0  # fits fp16
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.lm_head(self.LayerNorm(x))
        if labels is None:
            return (logits,)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1)), logits


def linear_schedule(optimizer, warmup, total):
    """Rises to the full learning rate in `warmup` steps, then falls to 0."""

    def lr_lambda(step):
        return step / warmup if step < warmup else (total - step) / (total - warmup)

    return LambdaLR(optimizer, lr_lambda)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", default=300, type=int, help="optimizer steps")
    parser.add_argument("--train_batch_size", default=4, type=int)
    parser.add_argument("--gradient_accumulation_steps", default=2, type=int)
    parser.add_argument("--learning_rate", default=None, type=float)
    parser.add_argument("--warmup_steps", default=30, type=int)
    parser.add_argument("--weight_decay", default=0.01, type=float)
    parser.add_argument("--max_grad_norm", default=1.0, type=float)
    parser.add_argument("--optimizer", default="adam", choices=["adam", "lamb"])
    parser.add_argument("--seed", default=42, type=int)
    parser.add_argument("--fp16", action="store_true", help="mixed precision by apex")
    parser.add_argument("--fp16_opt_level", type=str, default="O1")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    norm = nn.LayerNorm
    if args.fp16:
        try:
            from apex import amp
            from apex.normalization.fused_layer_norm import FusedLayerNorm as norm

            amp.register_half_function(torch, "einsum")
        except ImportError:
            raise ImportError("--fp16 needs apex: https://www.github.com/nvidia/apex") from None

    text = "\n".join(topics[name] for name in sorted(topics))[:150000].encode("ascii", "replace")
    data = torch.tensor(list(text))
    vocab, data = data.unique(return_inverse=True)
    train_data, eval_data = data[:-15000].to(device), data[-15000:].to(device)
    model = LanguageModel(len(vocab), norm).to(device)

    no_decay = ["bias", "LayerNorm"]
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)]},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    lr = args.learning_rate or {"adam": 1e-2, "lamb": 2e-2}[args.optimizer]
    if args.fp16:
        from apex.optimizers import FusedAdam, FusedLAMB

        if args.optimizer == "lamb":
            optimizer = FusedLAMB(groups, lr=lr, weight_decay=args.weight_decay, max_grad_norm=1.0)
        else:
            optimizer = FusedAdam(groups, lr=lr, weight_decay=args.weight_decay, bias_correction=True)
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
    else:
        optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=args.weight_decay)
    scheduler = linear_schedule(optimizer, args.warmup_steps, args.max_steps)

    unigram = -torch.bincount(train_data).div(len(train_data)).log()[eval_data]
    print(f"unigram loss {unigram[unigram.isfinite()].mean():.4f}")
    print(f"untrained loss {evaluate(model, eval_data):.4f}")
    model.zero_grad()
    global_step, step, tr_loss = 0, 0, 0.0
    while global_step < args.max_steps:
        model.train()
        starts = torch.randint(len(train_data) - BLOCK - 1, (args.train_batch_size, 1))
        batch = train_data[(starts + torch.arange(BLOCK + 1)).to(device)]
        loss = model(batch[:, :-1], labels=batch[:, 1:])[0] / args.gradient_accumulation_steps
        step += 1
        is_last = step % args.gradient_accumulation_steps == 0
        if args.fp16:
            with amp.scale_loss(loss, optimizer, delay_unscale=not is_last) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        tr_loss += loss.item()
        if is_last:
            params = amp.master_params(optimizer) if args.fp16 else model.parameters()
            torch.nn.utils.clip_grad_norm_(params, args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            global_step += 1
            if global_step % 50 == 0:
                print(f"step {global_step} lr {scheduler.get_last_lr()[0]:.2e} loss {tr_loss / 50:.4f}")
                tr_loss = 0.0
    loss = evaluate(model, eval_data)
    print(f"eval loss {loss:.4f} perplexity {math.exp(loss):.3f}")


def evaluate(model, data):
    model.eval()
    batch = data[: len(data) // (BLOCK + 1) * (BLOCK + 1)].view(-1, BLOCK + 1)
    with torch.no_grad():
        return model(batch[:, :-1], labels=batch[:, 1:])[0].item()


if __name__ == "__main__":
    main()
