"""Random programs that train, write to weights and hold graphs: the same bits as with each use cast anew.

`python tests/test_cast_programs.py 2000` runs so many, and prints those that differ. A graph uses a weight at
most once: where it uses it twice, gradients in half are added before they are cast back.
"""

import copy
import functools
import random
import sys
import threading

import pytest
import torch
from torch import nn

import ampatch as amp
from ampatch.casts.cast import CASTS
from apex_rows import shows
from caching import HALF, backward
from test_cast_freshness import EDITS, KEEPERS, OPTIMIZERS, SWAPS, WRITES

MODELS, MOST_GRAPHS, LENGTH = 2, 3, 40
LR = 0.3  # so that casts change at a step

OFTEN = {"do_forward": 8, "do_chain": 4, "do_backward": 8, "do_step": 8, "do_freeze": 2}


class Program:
    """One run of the program of a seed; `trace` has what it computed, bit for bit."""

    def __init__(self, seed):
        self.dice, self.trace, self.graphs, self.held = random.Random(seed), [], [], []
        torch.manual_seed(seed)
        self.models = [nn.Linear(3, 5) for _ in range(MODELS)]
        self.writers = {}
        self.optimizers = [self.make_optimizer(index) for index in range(MODELS)]
        known = self.dice.randint(1, MODELS)  # the others are optimizers that ampatch does not know
        self.known, scale = self.optimizers[:known], self.dice.choice([1.0, 8.0, "dynamic"])
        self.may_go_without = scale != "dynamic"
        amp.initialize(self.models, self.known, opt_level="O4", loss_scale=scale, verbosity=0)

    def make_optimizer(self, index):
        make, options = OPTIMIZERS[self.dice.choice(list(OPTIMIZERS))]
        models = [self.models[index], self.models[0]] if self.dice.random() < 0.2 else [self.models[index]]
        params = dict.fromkeys(param for model in models for param in model.parameters())
        return make(params, lr=LR, **options)

    def run(self):
        names = [name for name in dir(self) if name.startswith("do_")]
        weights = [OFTEN.get(name, 1) for name in names]
        for name in self.dice.choices(names, weights, k=LENGTH):
            self.trace.append(name)
            try:
                getattr(self, name)()
            except RuntimeError as error:  # what torch refuses, it refuses with and without a cache
                self.trace.append(str(error)[:40])
        for model in self.models:
            self.note(*model.parameters(), *(param.grad for param in model.parameters()))
        return self.trace

    def note(self, *tensors):
        for tensor in tensors:
            bits = None if tensor is None else tensor.detach().clone().view(-1).float().tolist()
            self.trace.append(str(bits))  # so that NaN is what it is

    def pick(self):
        return self.dice.randrange(MODELS)

    def make_batch(self):
        return torch.tensor([[self.dice.uniform(-2, 2) for _ in range(3)] for _ in range(2)])

    # ---- Forwards ----

    def do_forward(self):
        if len(self.graphs) < MOST_GRAPHS:
            batch = self.make_batch().requires_grad_(self.dice.random() < 0.7)  # then weights are saved
            self.keep_graph(batch, self.pick(), (), batch)

    def do_chain(self):
        """The output of one model goes to another, as from a generator to a discriminator."""
        short = [at for at, (_, used, _) in enumerate(self.graphs) if len(used) < MODELS]
        if short:
            out, used, batch = self.graphs.pop(self.dice.choice(short))
            index = self.dice.choice([index for index in range(MODELS) if index not in used])
            self.keep_graph(out[:, :3], index, used, batch)

    def keep_graph(self, given, index, used, batch):
        out = self.models[index](given)
        self.note(out)
        if out.requires_grad:
            self.graphs.append((out, (*used, index), batch))

    def do_forward_that_hooks_hold(self):
        if len(self.graphs) < MOST_GRAPHS:
            with torch.autograd.graph.saved_tensors_hooks(lambda it: it, lambda it: it):
                self.do_forward()

    def do_evaluate(self):
        mode = self.dice.choice([torch.no_grad, torch.inference_mode])
        with mode():
            out = self.models[self.pick()](self.make_batch())
            self.note(out)

    def do_evaluate_a_copy(self):
        with torch.no_grad():
            self.note(copy.deepcopy(self.models[self.pick()])(self.make_batch()))

    def do_hold_a_cast(self):
        """Somebody keeps what a graph has saved."""
        for out, *_ in self.graphs[:1]:
            self.held = [out, out.grad_fn, getattr(out.grad_fn, "_saved_mat2", None)]

    def do_let_go(self):
        self.held = []

    def do_run_in_another_thread(self):
        model, batch = self.models[self.pick()], self.make_batch()

        def run():
            with torch.no_grad():
                self.note(model(batch))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    # ---- Backward passes and steps ----

    def do_backward(self):
        if self.graphs:
            out, _, batch = self.graphs.pop(self.dice.randrange(len(self.graphs)))
            loss = out.float().pow(2).mean()
            if self.may_go_without and self.dice.random() < 0.2:
                loss.backward()
            else:
                backward(loss, self.known, delay_unscale=self.dice.random() < 0.1)
            self.note(batch.grad)

    def do_take_gradients(self):
        if self.graphs:
            out, used, batch = self.graphs[-1]
            of = [it for it in (batch, *(self.models[index].weight for index in used)) if it.requires_grad]
            self.note(*torch.autograd.grad(out.float().sum(), of, retain_graph=True, allow_unused=True))

    def do_step(self):
        optimizer = self.dice.choice(self.optimizers)
        optimizer.step()
        self.note(*(param for group in optimizer.param_groups for param in group["params"]))

    def do_step_by_hand(self):
        with torch.no_grad():
            for param in self.models[self.pick()].parameters():
                if param.grad is not None:
                    param.sub_(param.grad, alpha=LR)

    def do_zero_grad(self):
        self.dice.choice(self.optimizers).zero_grad(set_to_none=self.dice.random() < 0.7)

    # ---- Writes ----

    def do_edit(self):
        choices = EDITS if self.graphs or self.held else {**EDITS, **SWAPS}
        with torch.no_grad():
            choices[self.dice.choice(list(choices))](self.models[self.pick()])

    def do_write_through_data(self):
        WRITES[self.dice.choice(list(WRITES))](self.models[self.pick()])

    def do_write_to_held_memory(self):
        """Through what leaves no trace: seen as soon as no graph waits for its backward."""
        index = self.pick()
        if index not in self.writers:
            self.writers[index] = KEEPERS[self.dice.choice(list(KEEPERS))](self.models[index])
        if not self.graphs:
            self.writers[index](self.dice.uniform(-1, 1))

    def do_freeze(self):
        param = self.models[self.pick()].weight
        if not self.graphs:
            param.requires_grad_(not param.requires_grad)


def run(seed, *, caches=True):
    """Returns the trace of a program; without a cache every use of a weight casts it."""
    cache = CASTS.get_cache(HALF)
    kept = cache.cast_plain
    if not caches:
        cache.cast_plain = functools.partial(cast_afresh, cache)
    try:
        return Program(seed).run()
    finally:
        cache.cast_plain = kept
        amp.uninitialize()


def cast_afresh(cache, param):
    return param.to(HALF) if cache._is_eligible(param) else param


def find_difference(seed):
    """Returns where two traces of a program part, None if they do not."""
    with_cache, without = run(seed), run(seed, caches=False)
    pairs = enumerate(zip(with_cache, without, strict=False))
    parted = next((at for at, (one, other) in pairs if one != other), None)
    if parted is None and len(with_cache) == len(without):
        return None
    names = [line for line in without[:parted] if line.startswith("do_")]
    return f"seed {seed} after {names[-8:]}: {with_cache[parted]} for {without[parted]}"


@shows("patterns-plain-backward")
@pytest.mark.exhaustive(keep=2)
@pytest.mark.filterwarnings("ignore:.*initialize never saw it")  # as some of them do on purpose
@pytest.mark.parametrize("first", range(0, 24, 6))
def test_a_random_program_has_the_bits_of_one_that_casts_each_use_anew(first):
    assert not [line for seed in range(first, first + 6) if (line := find_difference(seed))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = [line for seed in range(int(sys.argv[1])) if (line := find_difference(seed))]
    print(*found, f"{len(found)} of {sys.argv[1]} programs differ", sep="\n")
