"""What runs in float32 on a CPU, where torch has no half kernel for it: as the tables say, nowhere else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ampatch as amp
from ampatch import lists
from ampatch.lists.on_cpu import FUNCTIONS_ON_CPU
from helpers import scaled_backward, torch_is_before
from patched import FULL, HALF, LEVELS, half, open_session

CASTING = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
VOLUME = (1, 2, 4, 4, 4)


# A call of each, on an input of a given type.
FUNCTIONS = {
    "torch.nn.functional.avg_pool3d": (lambda x: F.avg_pool3d(x, 2), VOLUME),
    "torch.nn.functional.rrelu": (lambda x: F.rrelu(x, training=True), (2, 3)),
    "torch.rrelu": (lambda x: torch.rrelu(x, training=True), (2, 3)),
    "torch.special.i1": (lambda x: torch.special.i1(x), (2, 3)),
    "torch.special.i1e": (lambda x: torch.special.i1e(x), (2, 3)),
}
MODULES = {
    "AvgPool3d": (lambda: nn.AvgPool3d(2), VOLUME, ()),
    "LPPool3d": (lambda: nn.LPPool3d(2, 2), VOLUME, ()),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), (1, 4, 3, 3), ()),
    "RReLU": (nn.RReLU, (2, 3), ()),
    "CTCLoss": (
        nn.CTCLoss,
        (4, 2, 3),
        (torch.tensor([[1, 2], [2, 1]]), torch.tensor([4, 4]), torch.tensor([2, 2])),
    ),
    "MultiMarginLoss": (
        lambda: nn.MultiMarginLoss(weight=torch.tensor([0.1, 0.3])),
        (2, 2),
        (torch.tensor([1, 0]),),
    ),
    "SmoothL1Loss": (nn.SmoothL1Loss, (2, 2), (torch.tensor([[0.5, 1.0], [0.0, 2.0]]).half(),)),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss, (2, 2), (torch.tensor([[1, -1], [0, -1]]),)),
}


MODULES_HERE = [row.name for row in lists.MODULES_ON_CPU.select(torch.__version__).rows]


class AfterLinear(nn.Module):
    """A module in the middle of a model, where inputs are half."""

    def __init__(self, module, size):
        super().__init__()
        self.linear, self.module, self.targets = nn.Linear(size, size), module, ()

    def forward(self, x):
        y = self.module(self.linear(x), *self.targets)
        self.seen = y.dtype
        return y


def build(name):
    make, shape, targets = MODULES[name]
    model = AfterLinear(make(), shape[-1])
    model.targets = targets
    return model, torch.rand(shape)


def test_every_row_for_a_cpu_has_a_test():
    rows = {f"{table.target}.{row.name}" for table in FUNCTIONS_ON_CPU for row in table.rows}
    assert rows == {
        *FUNCTIONS,
        *(f"{place}.matrix_exp" for place in ("torch", "torch.linalg", "torch.Tensor")),
    }
    assert {row.name for row in lists.MODULES_ON_CPU.rows} == set(MODULES)


# ---- The reason: a torch that gets the kernel makes the row superfluous ----


REFUSAL = RuntimeError if torch_is_before("2.7") else NotImplementedError
HERE = {
    f"{table.target}.{row.name}" for table in FUNCTIONS_ON_CPU for row in table.select(torch.__version__).rows
}


@pytest.mark.parametrize("name", sorted(HERE & set(FUNCTIONS)))
def test_torch_has_no_float16_kernel_of_the_function(name):
    function, shape = FUNCTIONS[name]
    with pytest.raises(REFUSAL, match="not implemented for 'Half'"):
        function(torch.rand(shape).half().requires_grad_()).sum().backward()


@pytest.mark.parametrize("name", MODULES_HERE)
def test_torch_has_no_float16_kernel_of_the_module(name):
    make, shape, targets = MODULES[name]
    with pytest.raises(REFUSAL, match="not implemented for 'Half'"):
        make().half()(torch.rand(shape).half().requires_grad_(), *targets).sum().backward()


# ---- Functions ----


@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_op_in_place_writes_its_half_input(opt_level):
    open_session(opt_level=opt_level)
    x = -torch.ones(4, dtype=LEVELS[opt_level])
    y = F.rrelu(x, 0.25, 0.25, inplace=True)
    assert y is x
    assert torch.equal(x, torch.full_like(x, -0.25))


def test_the_input_may_be_a_keyword():
    open_session()
    assert F.avg_pool3d(input=half(*VOLUME), kernel_size=2).dtype is FULL


def test_a_function_of_a_tensor_elsewhere_is_not_cast():
    open_session(nn.Linear(1, 1, device="meta"))
    x = torch.rand(VOLUME, dtype=HALF, device="meta")
    assert F.softmax(x, dim=1).dtype is FULL
    assert F.avg_pool3d(x, 2).dtype is HALF


# ---- Modules ----


@pytest.mark.parametrize("name", MODULES_HERE)
@pytest.mark.parametrize("opt_level", CASTING)
def test_a_module_runs_in_float32_amid_a_half_model(opt_level, name):
    model, x = build(name)
    dtype = CASTING[opt_level]
    hidden, module = copy.deepcopy(model.linear).to(dtype), copy.deepcopy(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    open_session(model, opt_level, optimizers=optimizer, loss_scale=1.0)
    torch.manual_seed(1)
    found = model(x)
    torch.manual_seed(1)
    # A loss is not rounded to half, which would keep three digits of it, or nothing.
    returned = FULL if name.endswith("Loss") else dtype
    # Nor is what a module without parameters returns last: the model hands it on as it was.
    shown = returned if list(module.parameters()) else FULL
    expected = module(hidden(x.to(dtype)).float(), *model.targets).to(shown).float()
    assert model.seen is returned
    assert torch.equal(found, expected)
    scaled_backward(found.sum(), optimizer)
    assert model.linear.weight.grad.dtype is (dtype if opt_level == "O3" else FULL)
    assert all(param.grad.isfinite().all() for param in amp.master_params(optimizer))


@pytest.mark.parametrize("name", MODULES_HERE)
@pytest.mark.parametrize("opt_level", CASTING)
def test_a_module_that_is_the_model_takes_any_type_and_returns_float32(opt_level, name):
    make, shape, targets = MODULES[name]
    plain, module = make(), open_session(make(), opt_level)
    for given in (torch.float16, torch.bfloat16, FULL):
        x = torch.rand(shape).to(given)
        torch.manual_seed(1)
        expected = plain(x.float(), *targets)
        torch.manual_seed(1)
        assert torch.equal(module(x, *targets), expected)


@pytest.mark.parametrize("opt_level", CASTING)
def test_a_module_returns_float32_where_it_is_given_some_as_on_a_gpu(opt_level):
    model = nn.Sequential(nn.Linear(3, 3), nn.RReLU(), nn.Linear(3, 3)).eval()
    seen = []
    open_session(model, opt_level, keep_fp32=["0"])
    model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype), prepend=True)
    model(torch.rand(2, 3))
    assert seen == [FULL]


class TakesLengths(nn.Module):
    """A part without a half kernel, which is given whole numbers first."""

    class Norm(nn.LocalResponseNorm):
        def forward(self, lengths, x):
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 1), self.Norm(2)

    def forward(self, x):
        return self.norm(torch.ones(2, dtype=torch.long), self.conv(x)).mul(1)


@pytest.mark.parametrize("opt_level", CASTING)
def test_a_module_returns_the_type_of_the_first_numbers_that_it_is_given(opt_level):
    model, x = TakesLengths(), torch.rand(1, 4, 3)
    hidden = copy.deepcopy(model.conv).to(CASTING[opt_level])(x.to(CASTING[opt_level]))
    expected = F.local_response_norm(hidden.float(), 2).to(CASTING[opt_level]).float()
    open_session(model, opt_level)
    assert torch.equal(model(x), expected)


def test_class_weights_of_a_loss_stay_float32():
    model, _ = build("MultiMarginLoss")
    weight = model.module.weight
    open_session(model, "O5")
    assert model.module.weight is weight
    assert model.module.weight.dtype is FULL


def test_a_model_elsewhere_keeps_its_modules_half():
    model = nn.Sequential(nn.Conv3d(1, 1, 1), nn.AvgPool3d(2)).to("meta")
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    open_session(model, "O5")
    model(torch.rand(1, 1, 2, 2, 2, device="meta"))
    assert seen == [HALF]


def test_at_levels_that_patch_the_module_has_no_hooks():
    model = nn.Sequential(nn.Conv3d(1, 1, 1), nn.AvgPool3d(2))
    open_session(model, "O4")
    assert not model[1]._forward_pre_hooks
    assert model(torch.rand(1, 1, 2, 2, 2)).dtype is FULL
