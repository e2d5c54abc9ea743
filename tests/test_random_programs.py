"""Random programs against GradScaler and a float32 optimizer."""

import contextlib

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.nn import Parameter
from torch.nn.functional import linear

import ampatch as amp
from helpers import Dense, Variant, assert_same_bits, scaled_backward, snapshot
from stepping import ADAM, FUSED_ADAM, FUSED_MOMENTUM, HALF, INF, MOMENTUM


class Programs(RuleBasedStateMachine):
    """Whatever the order of blocks, overflows and steps, bits are those of a float32 optimizer by hand."""

    @initialize(
        level=st.sampled_from(["O1", "O4"]),
        variant=st.sampled_from([ADAM, FUSED_ADAM, MOMENTUM, FUSED_MOMENTUM, Variant(torch.optim.RMSprop)]),
        interval=st.integers(1, 3),
        seed=st.integers(0, 9),
    )
    def open(self, level, variant, interval, seed):
        torch.manual_seed(seed)
        self.half, self.variant = HALF[level], variant
        self.model = Dense()
        self.optimizer = variant(self.model.parameters())
        self.oracles = [Parameter(param.detach().clone()) for param in self.model.parameters()]
        self.oracle_optimizer = variant(self.oracles)
        scale = amp.DynamicLossScale(2.0**6, growth_interval=interval, max_scale=None)
        amp.initialize(self.model, self.optimizer, opt_level=level, loss_scale=scale, verbosity=0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=interval)
        self.scaler.scale(torch.ones(()))
        self.overflowed, self.was_skipped = False, False

    def teardown(self):
        amp.uninitialize()

    def forward_by_hand(self, batch):
        first, second = [oracle.to(self.half) for oracle in self.oracles]
        return linear(torch.relu(linear(batch.to(self.half), first)), second)

    @rule(overflow=st.booleans(), rows=st.integers(1, 3))
    def run_block(self, overflow, rows):
        batch, factor = torch.randn(rows, 4), INF if overflow else 1.0
        loss = self.model(batch).float().square().sum() * factor
        scaled_backward(loss, self.optimizer)
        expected = self.forward_by_hand(batch).float().square().sum() * factor
        assert snapshot(loss) == snapshot(expected)
        grads = torch.autograd.grad(self.scaler.scale(expected), self.oracles)
        fresh = [Parameter(torch.zeros_like(oracle)) for oracle in self.oracles]
        for param, grad in zip(fresh, grads, strict=True):
            param.grad = grad.clone()
        self.scaler.unscale_(torch.optim.SGD(fresh, lr=1.0))
        before = self.scaler.get_scale()
        self.scaler.update()
        self.overflowed |= self.scaler.get_scale() < before
        for oracle, param in zip(self.oracles, fresh, strict=True):
            oracle.grad = param.grad if oracle.grad is None else oracle.grad + param.grad

    @rule()
    def raise_inside_a_block(self):
        loss = self.model(torch.randn(2, 4)).float().sum()
        with contextlib.suppress(ValueError), amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
            raise ValueError

    @rule()
    def step(self):
        self.optimizer.step()
        if not self.overflowed:
            self.oracle_optimizer.step()
        assert amp.step_was_skipped(self.optimizer) == self.overflowed
        self.overflowed = False

    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none):
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.oracle_optimizer.zero_grad(set_to_none=set_to_none)

    @precondition(lambda self: not self.overflowed)
    @rule()
    def clip(self):
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), 0.1)
        assert snapshot(norm) == snapshot(torch.nn.utils.clip_grad_norm_(self.oracles, 0.1))

    @rule()
    def write_weights(self):
        with torch.no_grad():
            for param, oracle in zip(self.model.parameters(), self.oracles, strict=True):
                new = torch.randn_like(param)
                param.copy_(new)
                oracle.copy_(new)

    @rule()
    def evaluate(self):
        batch = torch.randn(2, 4)
        with torch.no_grad():
            assert snapshot(self.model(batch)) == snapshot(self.forward_by_hand(batch))

    @rule()
    def save_and_load(self):
        amp.load_state_dict(amp.state_dict())
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.model.load_state_dict(self.model.state_dict())

    @invariant()
    def bits_are_those_of_the_oracle(self):
        if not hasattr(self, "scaler"):
            return
        state, expected = amp.state_dict()["loss_scaler0"], self.scaler.state_dict()
        assert state == {"loss_scale": expected["scale"], "unskipped": expected["_growth_tracker"]}
        assert_same_bits(self.model.parameters(), self.oracles)
        if not self.overflowed:
            for param, oracle in zip(self.model.parameters(), self.oracles, strict=True):
                assert (param.grad is None) == (oracle.grad is None)
                assert param.grad is None or snapshot(param.grad) == snapshot(oracle.grad)


Programs.TestCase.settings = settings(max_examples=20, stateful_step_count=25)
TestRandomPrograms = Programs.TestCase
