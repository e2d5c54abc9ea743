"""Two optimizers as people wrote them for themselves: RAdam, and Lookahead around another one."""

import math
from collections import defaultdict

import torch


class RAdam(torch.optim.Optimizer):
    """Rectified Adam (https://arxiv.org/abs/1908.03265)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, weight, state = p.grad.data.float(), p.data.float(), self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.zeros_like(weight)
                state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                step, limit = state["step"], 2 / (1 - beta2) - 1
                length = limit - 2 * step * beta2**step / (1 - beta2**step)
                if length >= 5:
                    ratio = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
                    size = math.sqrt(ratio * (1 - beta2**step)) / (1 - beta1**step)
                    denom = state["exp_avg_sq"].sqrt().add_(group["eps"])
                    weight.addcdiv_(state["exp_avg"], denom, value=-size * group["lr"])
                else:
                    weight.add_(state["exp_avg"], alpha=-group["lr"] / (1 - beta1**step))
                p.data.copy_(weight)
        return loss


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, and every k steps pulls its weights back (https://arxiv.org/abs/1907.08610)."""

    def __init__(self, base_optimizer, alpha=0.5, k=6):
        self.base_optimizer, self.alpha, self.k = base_optimizer, alpha, k
        self.param_groups = base_optimizer.param_groups
        self.defaults = base_optimizer.defaults
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["step_counter"] = 0

    def update_slow(self, group):
        for fast_p in group["params"]:
            if fast_p.grad is None:
                continue
            state = self.state[fast_p]
            if "slow_buffer" not in state:
                state["slow_buffer"] = torch.empty_like(fast_p.data)
                state["slow_buffer"].copy_(fast_p.data)
            slow = state["slow_buffer"]
            slow.add_(fast_p.data - slow, alpha=self.alpha)
            fast_p.data.copy_(slow)

    def step(self, closure=None):
        loss = self.base_optimizer.step(closure)
        for group in self.param_groups:
            group["step_counter"] += 1
            if group["step_counter"] % self.k == 0:
                self.update_slow(group)
        return loss

    def zero_grad(self):
        self.base_optimizer.zero_grad()

    def state_dict(self):
        return self.base_optimizer.state_dict()
