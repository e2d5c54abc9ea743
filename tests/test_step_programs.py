"""Random programs of blocks, gradients and steps, at every level: the bits of masters that are kept by hand.

`python tests/test_step_programs.py 500` runs so many, and prints those that differ. By hand, each weight is a
float32 tensor with one float32 gradient; a forward rounds it to the half type, and nothing else is half.
To look at masters brings them up to date, so a program looks only where it says so, and after a step.
"""

import contextlib
import functools
import itertools
import random
import sys

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.functional import linear

import ampatch as amp
from apex_rows import shows
from mastering import saved
from stepping import INF

HALF = {"O0": None, "O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.25),
    "momentum": functools.partial(torch.optim.SGD, lr=0.25, momentum=0.5),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.05, foreach=True),
    "fused Adam": functools.partial(torch.optim.Adam, lr=0.05, fused=True),
}
MODELS, LOSSES, LENGTH, GROWTH, LATE = 2, 2, 40, 3, 3
CLEARS = ["model", "optimizer", "data", "params", "some", "deleted"]
OFTEN = {"do_block": 8, "do_step": 6, "do_clear": 3, "do_edit_gradients": 6, "do_plain_backward": 3}


def make_model():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3, bias=False))


class Scale:
    """A loss scale that follows overflows, or stays."""

    def __init__(self, number, is_dynamic):
        self.number, self.is_dynamic, self.clean, self.updates = number, is_dynamic, 0, 0
        self.carried = False  # an overflow of a block that left the scale alone

    @property
    def now(self):
        """The scale as it is until it is updated."""
        return self, self.updates, self.number

    def set(self, number):
        self.number, self.updates = number, self.updates + 1

    def update(self, found_inf, *, counts, waits=False):
        found_inf |= self.carried
        self.carried = self.is_dynamic and waits and bool(found_inf)
        if not self.is_dynamic or waits:
            return
        self.updates += 1
        self.clean = 0 if found_inf else self.clean + counts
        if found_inf:
            self.number /= 2
        elif self.clean == GROWTH:
            self.number, self.clean = self.number * 2, 0


class ByHand:
    """What a loss scale and an overflow do, on float32 parameters with float32 gradients.

    `delayed` says of each model by which scale, at which of its updates, its gradients are still multiplied,
    and `doubts` the scale of a block that did not name its optimizer, and left it gradients.
    """

    def __init__(self, models, make, half, scales):
        self.half, self.scales, self.delayed = half, scales, [None] * len(models)
        self.doubts = [None] * len(models)
        self.models = [
            [Parameter(param.detach().clone()) for param in model.parameters()] for model in models
        ]
        self.optimizers = [make(params) for params in self.models]
        self.overflowed = [False] * len(models)
        self.late = [None] * len(models)  # the type of a parameter that has joined

    def forward(self, index, batch):
        self.used = []
        for at, param in enumerate(self.models[index]):
            half = None if at == LATE and self.late[index] is torch.float32 else self.half
            self.used.append(param.detach().to(half or param.dtype).requires_grad_(param.requires_grad))
        first, bias, second, *late = self.used
        hidden = linear(batch.to(first.dtype), first, bias)
        output = linear(torch.relu(hidden), second).float()
        return output * late[0].float() if late else output

    def backward(self, chain, batch, factor, scale):
        """Adds the gradients of a loss, times a scale, to those that there are."""
        used = []
        for index in chain:
            batch = self.forward(index, batch)
            used += zip(self.models[index], self.used, strict=True)
        loss = batch.square().mean() * factor
        wanted = [(param, one) for param, one in used if one.requires_grad]
        for (param, _), grad in zip(
            wanted, torch.autograd.grad(loss * scale, [one for _, one in wanted]), strict=True
        ):
            param.grad = grad.float() if param.grad is None else param.grad + grad.float()

    def params(self, chain):
        return [param for index in chain for param in self.models[index]]

    def set_aside(self, chain):
        params = self.params(chain)
        aside = [param.grad for param in params]
        for param in params:
            param.grad = None
        return aside

    def put_back(self, chain, aside):
        for param, earlier in zip(self.params(chain), aside, strict=True):
            if earlier is not None:
                param.grad = earlier if param.grad is None else earlier + param.grad

    def begin(self, chain, now, unnamed):
        """Settles what another scale has left, where the block names it; returns what was there."""
        for index in chain:
            if index not in unnamed and self.delayed[index] not in (None, now):
                self.settle(index)
        for index, params in enumerate(self.models):  # whatever it reaches
            adds = index not in chain and self.delayed[index] == now
            if not adds and all(param.grad is None for param in params):
                self.doubts[index] = None
        return self.set_aside(chain)

    def delay(self, chain, now, aside):
        for index in chain:
            is_scaled = self.delayed[index] is not None
            self.delayed[index] = now
            for param in self.models[index]:
                earlier = aside.pop(0)
                if earlier is not None:
                    # Of an overflow that is known nothing is left, or it would count again.
                    clean = torch.zeros_like(earlier) if self.overflowed[index] else earlier * now[2]
                    earlier = earlier if is_scaled else clean
                    param.grad = earlier if param.grad is None else earlier + param.grad

    def end_unnamed(self, index, now, aside):
        """Unscales what a block has made that does not name the optimizer; an overflow counts at its step."""
        held = self.delayed[index]
        if held is None and any(param.grad is not None for param in self.models[index]):
            self.doubts[index] = now[0]
        for param in self.models[index]:
            if param.grad is not None:
                param.grad = param.grad / now[2] * (1.0 if held is None else held[2])
        self.put_back([index], aside)

    def end(self, chain, now, aside, *, waits_for_check=False):
        waits = [index for index in chain if self.delayed[index] is not None]
        for index in chain:
            earlier = [aside.pop(0) for _ in self.models[index]]
            if index in waits:
                self.put_back([index], earlier)
                earlier = [None] * len(earlier)
                self.delayed[index] = None
            aside += earlier
        self.unscale(chain, now[0], now[2], waits=waits_for_check)
        self.put_back(chain, aside)

    def settle(self, index):
        (scale, _, number), self.delayed[index] = self.delayed[index], None
        self.unscale([index], scale, number, counts=False)

    def unscale(self, chain, scale, number, *, counts=True, waits=False):
        """Divides the gradients that there are, and updates the scale."""
        found_inf = False
        for param in self.params(chain):
            if param.grad is not None:
                param.grad = param.grad / number
                found_inf |= not param.grad.isfinite().all()
        for index in chain:
            self.overflowed[index] |= bool(found_inf and scale.is_dynamic)
        scale.update(found_inf, counts=counts, waits=waits)

    def step(self, index):
        if self.delayed[index] is not None:
            self.settle(index)
        scale, self.doubts[index] = self.doubts[index], None
        if scale is not None:
            grads = [param.grad for param in self.models[index] if param.grad is not None]
            is_new = not self.overflowed[index]  # one that is known does not count again
            found_inf = is_new and not all(grad.isfinite().all() for grad in grads)
            self.overflowed[index] |= found_inf and scale.is_dynamic
            scale.update(found_inf, counts=False)
        was_skipped, self.overflowed[index] = self.overflowed[index], False
        if not was_skipped:
            self.optimizers[index].step()
        return was_skipped


class Program:
    """One run of the program of a seed, and beside it the same by hand."""

    def __init__(self, seed):
        self.dice = dice = random.Random(seed)
        torch.manual_seed(seed)
        self.level, self.kind = dice.choice(list(HALF)), dice.choice(list(OPTIMIZERS))
        self.scale = dice.choice([1.0, 8.0, "dynamic"])
        self.models = [make_model() for _ in range(MODELS)]
        make = OPTIMIZERS[self.kind]
        self.optimizers = [make(model.parameters()) for model in self.models]
        is_dynamic = self.scale == "dynamic"
        number = 16.0 if is_dynamic else self.scale
        scales = [Scale(number, is_dynamic) for _ in range(LOSSES)]
        self.by_hand = ByHand(self.models, make, HALF[self.level], scales)
        self.late = [[] for _ in self.models]  # parameters that have joined
        self.open()
        self.done = []

    def open(self):
        scale = self.scale
        if scale == "dynamic":
            scale = amp.DynamicLossScale(16.0, growth_interval=GROWTH, max_scale=None)
        options = {"loss_scale": scale, "num_losses": LOSSES, "verbosity": 0}
        amp.initialize(self.models, self.optimizers, opt_level=self.level, **options)

    def run(self):
        """Returns what differs first, None if nothing does."""
        names = [name for name in dir(self) if name.startswith("do_")]
        for name in self.dice.choices(names, [OFTEN.get(name, 1) for name in names], k=LENGTH):
            self.done.append(name)
            if (difference := getattr(self, name)()) is not None:
                return f"{self.level} {self.kind} {self.scale}: {difference} after {self.done[-8:]}"
        return self.do_look()

    def do_look(self):
        for optimizer in self.optimizers:
            list(amp.master_params(optimizer))
        return self.compare(range(MODELS))

    def compare(self, models, kind=""):
        """Says what differs first; of that kind alone, if one is given."""
        for index in models:
            sides = self.halves(index), self.masters(index), self.by_hand.models[index]
            for at, (half, master, expected) in enumerate(zip(*sides, strict=True)):
                rounded = expected.detach().to(half.dtype)
                pairs = {
                    "master": (master.detach(), expected.detach()),
                    "weight": (half.detach(), rounded),
                    "gradient of the master": (master.grad, expected.grad),
                    "gradient of the model": (half.grad, expected.grad),
                }
                for what, (one, other) in pairs.items():
                    if what.startswith(kind) and not is_same(one, other):
                        return f"{what} {at} of model {index}: {one} for {other}"
        scales = [amp.get_loss_scale(loss_id) for loss_id in range(LOSSES)]
        expected = [scale.number for scale in self.by_hand.scales]
        return None if scales == expected else f"scales {scales} for {expected}"

    # ---- Choices ----

    def pick_chain(self):
        first = self.dice.randrange(MODELS)
        return [first, 1 - first] if self.dice.random() < 0.3 else [first]

    def make_batch(self):
        return torch.tensor([[self.dice.uniform(-2, 2) for _ in range(3)] for _ in range(2)])

    def pick_factor(self):
        return self.dice.choice([INF if self.scale == "dynamic" else 2.0, 1.0, 1.0, 1.0])

    def pick_way(self):
        """How a weight is written: in place, or through `.data`, which leaves no trace on it."""
        return self.dice.choice([lambda param: param, lambda param: param.data])

    def loss(self, chain, batch, factor):
        for index in chain:
            batch = self.models[index](batch).float()
            for param in self.late[index]:
                batch = batch * param.float()
        return batch.square().mean() * factor

    def halves(self, index):
        return [*self.models[index].parameters(), *self.late[index]]

    def masters(self, index):
        return [param for group in self.optimizers[index].param_groups for param in group["params"]]

    def sides(self, models):
        """The parameters of either side of models, and those by hand."""
        ours = [self.dice.choice((self.halves, self.masters))(index) for index in models]
        return [param for params in ours for param in params], self.by_hand.params(models)

    # ---- Gradients ----

    def do_block(
        self,
        chain=(),
        *,
        raises=False,
        edits=False,
        delays=False,
        waits=False,
        names_one=False,
        closes=False,
    ):
        chain, hand = chain or self.pick_chain(), self.by_hand
        unnamed = chain[1:] if names_one and self.scale != 1.0 else []
        loss_id = self.dice.randrange(LOSSES) if self.dice.random() < 0.3 else 0
        now = hand.scales[loss_id].now
        is_plain = self.scale == 1.0  # then gradients accumulate where they are
        aside = [None] * len(hand.params(chain)) if is_plain else hand.begin(chain, now, unnamed)
        options = {"loss_id": loss_id, "delay_unscale": delays, "delay_overflow_check": waits}
        count = 1 if unnamed else self.dice.choice([1, 1, 2])
        losses = [(self.make_batch(), self.pick_factor()) for _ in range(count)]
        named = [index for index in chain if index not in unnamed]
        try:
            first = self.loss(chain, *losses[0])
            kind = self.dice.choice((list, tuple))
            repeated = named[:1] if self.dice.random() < 0.1 else []
            optimizers = kind(self.optimizers[index] for index in [*named, *repeated])
            for _ in range(1):
                with amp.scale_loss(first, optimizers, **options) as scaled:
                    for at, (batch, factor) in enumerate(losses):
                        (self.loss(chain, batch, factor) * now[2] if at else scaled).backward()
                        hand.backward(chain, batch, factor, now[2])
                    if edits:
                        self.edit(chain[:1])
                        self.write_group(chain[0])
                    if raises:
                        raise KeyError
                    if closes:
                        amp.uninitialize()
                    if self.dice.random() < 0.2:
                        break
        except KeyError:
            if not is_plain:  # else it is as in plain torch
                hand.set_aside(chain)
            hand.put_back(chain, aside)
        else:
            count = len(hand.params(named))
            for index in unnamed:
                hand.end_unnamed(index, now, aside[count:])
            if delays and not is_plain:
                hand.delay(named, now, aside[:count])
            else:
                hand.end(named, now, aside[:count], waits_for_check=waits)

    def do_block_that_names_one(self):
        self.do_block([first := self.dice.randrange(MODELS), 1 - first], names_one=True)

    def do_block_that_raises(self):
        self.do_block(raises=True)

    def do_block_with_edits(self):
        self.do_block(edits=True)

    def do_delayed_block(self):
        self.do_block(delays=True)

    def do_block_that_leaves_the_scale(self):
        self.do_block(waits=True)

    def do_plain_backward(self):
        chain, batch = self.pick_chain(), self.make_batch()
        if self.scale == "dynamic":  # which warns
            return
        for index in range(MODELS):
            if self.by_hand.delayed[index] is not None:
                self.by_hand.settle(index)
        self.loss(chain, batch, 1.0).backward()
        self.by_hand.backward(chain, batch, 1.0, 1.0)

    def do_edit_gradients(self):
        self.edit([self.dice.randrange(MODELS)])

    def do_edit_gradients_of_all(self):
        self.edit(range(MODELS))

    def edit(self, models):
        edit = self.dice.choice(
            [halve, halve_data, replace_data, replace, add_noise, clip_norm, clip_values, give]
        )
        for params in self.sides(models):
            edit(params)
        if edit is replace_data and not hasattr(torch.Tensor, "grad_dtype"):  # docs/torch-versions.md
            for index in models:
                list(amp.master_params(self.optimizers[index]))

    def do_clear(self):
        index, way = self.dice.randrange(MODELS), self.dice.choice(CLEARS)
        to_none = self.dice.random() < 0.6
        if way in ("model", "optimizer"):
            owner = self.models[index] if way == "model" else self.optimizers[index]
            owner.zero_grad(set_to_none=to_none)
            for param in self.by_hand.models[index][: LATE if way == "model" else None]:
                if param.grad is not None:
                    param.grad = None if to_none else torch.zeros_like(param)
            return self.compare([index], "gradient")
        for params in self.sides([index]):
            for param in params[:1] if way == "some" else params:
                if way == "deleted":
                    del param.grad
                elif way != "data":
                    param.grad = None
                elif param.grad is not None:
                    param.grad.data.zero_()
        return self.compare([index], "gradient")

    # ---- Steps ----

    def do_step(self):
        index = self.dice.randrange(MODELS)
        self.optimizers[index].step()
        return self.look_after_step(index)

    def look_after_step(self, index):
        assert amp.step_was_skipped(self.optimizers[index]) == self.by_hand.step(index)
        return self.compare([index])

    def do_step_with_a_closure(self):
        index, raises = self.dice.randrange(MODELS), self.dice.random() < 0.2

        def closure():
            self.optimizers[index].zero_grad()
            self.by_hand.optimizers[index].zero_grad()
            self.do_block([index])
            if raises:
                raise KeyError

        if self.by_hand.delayed[index] is not None:
            self.by_hand.settle(index)
        with contextlib.suppress(KeyError):
            self.optimizers[index].step(closure)
            return self.look_after_step(index)
        return self.compare([index])

    def do_iteration(self):
        for index, optimizer in enumerate(self.optimizers):
            optimizer.zero_grad()
            self.by_hand.optimizers[index].zero_grad()
        self.do_block()
        return self.do_step()

    def do_set_scale(self):
        if self.scale != 1.0:  # or blocks are no longer plain
            loss_id, number = self.dice.randrange(LOSSES), self.dice.choice([4.0, 32.0])
            amp.set_loss_scale(number, loss_id)
            self.by_hand.scales[loss_id].set(number)

    # ---- Weights ----

    def do_write_to_the_model(self):
        index = self.dice.randrange(MODELS)
        param, by_hand = next(self.models[index].parameters()), self.by_hand.models[index][0]
        with torch.no_grad():
            self.pick_way()(param)[0] = 0.5  # which every half type holds
            is_edit = by_hand[0].to(param.dtype) != 0.5  # what puts the bits there that there are is none
            by_hand[0] = torch.where(is_edit, torch.full_like(by_hand[0], 0.5), by_hand[0])

    def do_write_to_masters(self):
        index = self.dice.randrange(MODELS)
        with torch.no_grad():
            way = self.pick_way()
            for params in (amp.master_params(self.optimizers[index]), self.by_hand.models[index]):
                way(next(iter(params))).mul_(0.75)
        if self.dice.random() < 0.5:  # a forward shows it, and so does `.data`
            self.models[index](self.make_batch())
        for param in self.halves(index):
            param.data.norm()

    def do_read_data(self):
        params, _ = self.sides([self.dice.randrange(MODELS)])
        for param in params:
            param.data.norm()

    def do_freeze(self):
        index = self.dice.randrange(MODELS)
        params = list(self.models[index].parameters()), list(amp.master_params(self.optimizers[index]))
        for one in (params[0][0], params[1][0], self.by_hand.models[index][0]):
            one.requires_grad_(not one.requires_grad if one is params[0][0] else params[0][0].requires_grad)

    def do_join(self):
        """A parameter joins an optimizer: in float32, or half where it will have a master."""
        index, hand = self.dice.randrange(MODELS), self.by_hand
        if self.late[index]:
            return
        joins_half = self.level in ("O2", "O5") and self.dice.random() < 0.5
        hand.late[index] = HALF[self.level] if joins_half else torch.float32
        self.late[index] = [Parameter(torch.tensor([1.0, 0.5, -1.0]).to(hand.late[index]))]
        hand.models[index].append(Parameter(torch.tensor([1.0, 0.5, -1.0])))
        self.optimizers[index].add_param_group({"params": list(self.late[index])})
        hand.optimizers[index].add_param_group({"params": hand.models[index][LATE:]})

    def do_write_group(self):
        self.write_group(self.dice.randrange(MODELS))

    def write_group(self, index):
        """A script writes its model's parameters into a group, where masters may be."""
        self.optimizers[index].param_groups[0]["params"] = list(self.models[index].parameters())

    def leave(self, index):
        """A parameter that has joined leaves again."""
        if self.late[index]:
            for optimizer in (self.optimizers[index], self.by_hand.optimizers[index]):
                for param in optimizer.param_groups.pop()["params"]:
                    optimizer.state.pop(param, None)
            self.late[index], self.by_hand.models[index][LATE:] = [], []

    def do_resume(self):
        """A checkpoint of all is saved, and loaded again."""
        for index, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            model.load_state_dict(saved(model.state_dict()))
            self.write_group(index)
            state = saved(optimizer.state_dict())
            self.write_group(index)
            optimizer.load_state_dict(state)
        amp.load_state_dict(saved(amp.state_dict()))
        for scale in self.by_hand.scales:
            scale.updates += scale.is_dynamic  # what waits for an earlier one is settled apart

    def do_change_level(self, *, in_block=False):
        """Another session; gradients may stay, for a step of plain torch between the two or for later."""
        hand, both = self.by_hand, list(zip(self.optimizers, self.by_hand.optimizers, strict=True))
        if in_block:
            self.do_block(delays=self.dice.random() < 0.5, closes=True)
        for index in range(MODELS):
            if hand.delayed[index] is not None:
                hand.settle(index)
            if hand.overflowed[index]:  # the step that these were made for would be skipped
                hand.optimizers[index].zero_grad()
        amp.uninitialize()
        for index, pair in enumerate(both):
            self.leave(index)
            for optimizer in pair if self.dice.random() < 0.5 else ():
                optimizer.zero_grad()
        for optimizer in itertools.chain(*both) if self.dice.random() < 0.5 else ():
            optimizer.step()
        self.level = self.dice.choice(list(HALF))
        hand.half, hand.overflowed = HALF[self.level], [False] * MODELS
        hand.delayed, hand.doubts = [None] * MODELS, [None] * MODELS
        number = 16.0 if self.scale == "dynamic" else self.scale
        hand.scales = [Scale(number, self.scale == "dynamic") for _ in range(LOSSES)]
        self.open()
        return self.compare(range(MODELS))

    def do_change_level_in_a_block(self):
        return self.do_change_level(in_block=True)


def is_same(one, other):
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(
        one.detach().nan_to_num(7.0, 8.0, 9.0), other.detach().nan_to_num(7.0, 8.0, 9.0)
    )


def edit_each(edit):
    """An edit of each gradient that there is."""

    def run(params):
        for param in params:
            if param.grad is not None:
                edit(param)

    return run


halve = edit_each(lambda param: param.grad.mul_(0.5))
halve_data = edit_each(lambda param: param.grad.data.mul_(0.5))
replace_data = edit_each(lambda param: setattr(param.grad, "data", param.grad.data * 0.5))
replace = edit_each(lambda param: setattr(param, "grad", param.grad * 0.5))
add_noise = edit_each(
    lambda param: setattr(param, "grad", param.grad.add_(torch.linspace(-1, 1, param.numel()).view_as(param)))
)


def give(params):
    """As gradient surgery does: a new tensor, whether there was one or not."""
    params[0].grad = torch.linspace(-1, 1, params[0].numel()).view(params[0].shape)


def clip_norm(params):
    torch.nn.utils.clip_grad_norm_(params, 0.5)


def clip_values(params):
    if any(param.grad is not None for param in params):  # else torch raises
        torch.nn.utils.clip_grad_value_(params, 0.25)


def find_difference(seed):
    """Says where a program differs from the one by hand, None if it does not."""
    try:
        difference = Program(seed).run()
    finally:
        amp.uninitialize()
    return difference and f"seed {seed}: {difference}"


@shows(
    "never-set-to-none",  # do_clear
    "optimizers-zero-grad",
    "patterns-model-grads",
    "initialize-num-losses",  # do_block
    "patterns-several-losses",
    "patterns-backward-outside",  # do_plain_backward
    "patterns-delay-unscale",  # do_delayed_block
    "scale-delay-unscale",
    "optimizers-master-params",  # do_edit_gradients
    "patterns-edited-grads",
    "scale-masters",  # compare
    "patterns-step-clears",
    "scale-exit",
    "scale-defect-tuple",
    "scale-delay-check",
    "patterns-leave-early",
    "patterns-step-before-backward",
    "optimizers-add-group",  # do_join
)
@pytest.mark.filterwarnings(
    "ignore:gradients are clipped", "ignore:backward.. in a block of scale_loss began"
)
@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("first", range(0, 80, 10))
def test_a_random_program_has_the_bits_of_masters_by_hand(first):
    assert not [line for seed in range(first, first + 10) if (line := find_difference(seed))]


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = [line for seed in range(int(sys.argv[1])) if (line := find_difference(seed))]
    print(*found, f"{len(found)} of {sys.argv[1]} programs differ", sep="\n")
