"""Every module of torch.nn at every level: those of PyTorch's test database, and those that it lacks."""

import copy
import functools
import inspect
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import ampatch as amp

pytestmark = [
    # What torch itself says of PyTorch's samples: reductions that are wanted, fast paths that are not taken.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # as torch uses it for `jvp`
]

LEVELS = {"O1": torch.float16, "O2": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
STRIDES = {"O1": 2, "O2": 1, "O4": 1, "O5": 2}
FULL = torch.float32
INFOS = {info.name: info for info in module_db}


def x(*shape):
    return torch.rand(shape, requires_grad=True)


def images(*shape):
    """A picture pooled, and where its maxima were, as MaxUnpool takes them."""
    pool = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}[len(shape)]
    return pool(2, return_indices=True)(x(1, 1, *shape))


# Modules of torch.nn that module_db lacks, or makes in one way only: how to make one, and what to call it on.
OTHERS = {
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]),
        lambda: (x(4, 8), torch.tensor([1, 6, 12, 3])),
    ),
    "AlphaDropout": (nn.AlphaDropout, lambda: (x(3, 4),)),
    "ChannelShuffle": (lambda: nn.ChannelShuffle(2), lambda: (x(1, 4, 2, 2),)),
    "CosineSimilarity": (nn.CosineSimilarity, lambda: (x(3, 4), x(3, 4))),
    "CrossMapLRN2d": (lambda: nn.CrossMapLRN2d(3), lambda: (x(1, 4, 3, 3),)),
    "Dropout": (nn.Dropout, lambda: (x(3, 4),)),
    "EmbeddingBag": (
        lambda: nn.EmbeddingBag(5, 4, mode="sum"),
        lambda: (torch.tensor([[1, 2], [3, 4]]), None, x(2, 2)),
    ),
    "Flatten": (nn.Flatten, lambda: (x(2, 3, 4),)),
    "Fold": (lambda: nn.Fold((4, 4), (2, 2)), lambda: (x(1, 8, 9),)),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(2, 2), lambda: (x(1, 2, 4, 4),)),
    "FractionalMaxPool3d": (lambda: nn.FractionalMaxPool3d(2, 2), lambda: (x(1, 2, 4, 4, 4),)),
    "Hardsigmoid": (nn.Hardsigmoid, lambda: (x(3),)),
    "Identity": (nn.Identity, lambda: (x(3),)),
    "LazyBatchNorm1d": (nn.LazyBatchNorm1d, lambda: (x(3, 4),)),
    "LazyInstanceNorm1d": (lambda: nn.LazyInstanceNorm1d(affine=True), lambda: (x(3, 4, 5),)),
    "LazyLinear": (lambda: nn.LazyLinear(3), lambda: (x(3, 4),)),
    "MaxUnpool1d": (lambda: nn.MaxUnpool1d(2), lambda: images(4)),
    "MaxUnpool2d": (lambda: nn.MaxUnpool2d(2), lambda: images(4, 4)),
    "PairwiseDistance": (nn.PairwiseDistance, lambda: (x(3, 4), x(3, 4))),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), lambda: (x(1, 4, 2, 2),)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), lambda: (x(1, 1, 4, 4),)),
    "RReLU": (nn.RReLU, lambda: (x(3, 4) - 0.5,)),
    "TransformerDecoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0), 2),
        lambda: (x(3, 2, 4), x(3, 2, 4)),
    ),
    "TripletMarginLoss": (nn.TripletMarginLoss, lambda: (x(3, 4), x(3, 4), x(3, 4))),
    "TripletMarginWithDistanceLoss": (
        nn.TripletMarginWithDistanceLoss,
        lambda: (x(3, 4), x(3, 4), x(3, 4)),
    ),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 2)), lambda: (x(3, 4),)),
    "Unfold": (lambda: nn.Unfold((2, 2)), lambda: (x(1, 2, 4, 4),)),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), lambda: (x(1, 1, 4, 4),)),
}
NO_LAYERS = {
    **dict.fromkeys(("Dropout1d", "Dropout2d", "Dropout3d", "FeatureAlphaDropout"), "as Dropout"),
    **dict.fromkeys((f"Lazy{kind}Norm{n}d" for kind in ("Batch", "Instance") for n in (2, 3)), "as 1d"),
    **dict.fromkeys(("UpsamplingBilinear2d", "UpsamplingNearest2d"), "Upsample by older names"),
    "MaxUnpool3d": "as MaxUnpool2d",
    **dict.fromkeys(("Module", "RNNBase", "RNNCellBase"), "a base class"),
    **dict.fromkeys(("ModuleDict", "ModuleList"), "holds modules, is not called"),
    **dict.fromkeys(("ParameterDict", "ParameterList"), "holds parameters, is not called"),
    "Container": "an empty base class, deprecated",
    "NLLLoss2d": "NLLLoss by an older name, deprecated",
    "Sequential": "calls what it holds; a container in most tests of this suite",
    "DataParallel": "initialize refuses it: it is to be wrapped around what initialize returns",
    "SyncBatchNorm": "takes GPU tensors alone, and a process group",
}


@dataclass
class Case:
    """One way to make a module and to call it."""

    name: str
    training: bool
    model: nn.Module
    args: tuple
    kwargs: dict

    def inputs(self, dtype):
        def prepare(value):
            if not isinstance(value, torch.Tensor) or value.dtype is not FULL:
                return value
            return value.detach().to(dtype, copy=True).requires_grad_(value.requires_grad)

        return tree_map(prepare, self.args), tree_map(prepare, self.kwargs)


def cases_of(name):
    """The samples of a module, in training and in evaluation."""
    found = []
    for training in (True, False):
        torch.manual_seed(0)
        if name in OTHERS:
            make, call = OTHERS[name]
            found.append(Case(name, training, make(), call(), {}))
            continue
        samples = INFOS[name].module_inputs_func(
            INFOS[name], device="cpu", dtype=FULL, requires_grad=True, training=training
        )
        # LinearCrossEntropyLoss has 857, Transformer 64, most have fewer than 10: 8 evenly spread will do.
        for sample in samples[:: math.ceil(len(samples) / 8)]:
            torch.manual_seed(0)
            made, called = sample.constructor_input, sample.forward_input
            model = INFOS[name].module_cls(*made.args, **made.kwargs).to(FULL)
            label = f"{'train' if training else 'eval'} {sample.desc}"
            found.append(Case(label, training, model, called.args, called.kwargs))
    for case in found:
        case.model.train(case.training)
        if any(is_lazy(param) for param in case.model.parameters()):
            case.model(*case.inputs(FULL)[0])  # the dry run that torch asks for
    return found


NAMES = (*INFOS, *OTHERS)
# To patch torch takes 0.1 s. So a dozen modules share a session, which is closed before a test looks. One
# that patches nothing is soon made, and slower with each model in it.
DOZENS = [NAMES[first : first + 12] for first in range(0, len(NAMES), 12)]
each_dozen = pytest.mark.parametrize("names", DOZENS, ids=lambda names: names[0])
# PyTorch's samples pass _random_samples, a private argument that must have the input's type. OTHERS has these
# modules without it.
NO_HALF_INPUT = ("nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d")


@dataclass
class Outcome:
    """What came of a forward, a backward and a step; `error` where one of them raised."""

    name: str
    error: str | None = None
    loss: float = math.nan
    size: float = math.nan  # the mean of the outputs' absolute values
    types: frozenset = frozenset()  # of the gradients that are stepped
    is_finite: bool = True  # whether all gradients are, those of inputs too
    unmoved: int = 0  # how many parameters with a gradient stayed where they were


def call(case, model, dtype):
    args, kwargs = case.inputs(dtype)
    torch.manual_seed(1)  # dropout draws the same numbers at every level
    leaves = tree_leaves(model(*args, **kwargs))
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return outputs, [leaf for leaf in inputs if leaf.requires_grad]


def loss_of(outputs):
    """A mean with a weight of its own for each number: a plain sum of a softmax has no gradient."""
    weights = [torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape) for output in outputs]
    return sum((output.float() * weight).mean() for output, weight in zip(outputs, weights, strict=True))


def step(optimizer):
    """Counts the parameters with a gradient that an optimizer's step leaves where they were."""
    params = [param for param in amp.master_params(optimizer) if param.grad is not None and param.grad.any()]
    before = [param.detach().clone() for param in params]
    optimizer.step()
    unmoved = sum(torch.equal(old, new) for old, new in zip(before, params, strict=True))
    optimizer.zero_grad()
    return unmoved


def train(case, model, dtype, optimizer):
    outputs, inputs = call(case, model, dtype)
    loss = loss_of(outputs)
    if optimizer is None:
        loss.backward()
        params = list(model.parameters())
    else:
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        params = list(amp.master_params(optimizer))
    grads = [tensor.grad for tensor in (*params, *inputs) if tensor.grad is not None]
    return Outcome(
        case.name,
        loss=loss.item(),
        size=sum(output.detach().float().abs().mean().item() for output in outputs),
        types=frozenset(param.grad.dtype for param in params if param.grad is not None),
        is_finite=all(bool(grad.isfinite().all()) for grad in grads),
        unmoved=0 if optimizer is None else step(optimizer),
    )


def try_to_train(case, model, dtype, optimizer=None):
    try:
        return train(case, model, dtype, optimizer)
    except Exception as error:
        return Outcome(case.name, error=f"{type(error).__name__}: {error}")


def sgd(model):
    params = list(model.parameters())
    return torch.optim.SGD(params, lr=0.1) if params else None


@functools.cache
def run_in_float32(name):
    return [try_to_train(case, case.model, FULL) for case in cases_of(name)]


@functools.cache
def run_group(names, opt_level):
    """Trains cases of some modules, on float32 and on half inputs; gives pairs with the float32 run.

    All cases at O2 and O4, and each second one in the other type.
    """
    if opt_level in ("O2", "O5") and len(names) > 1:
        return {name: run_group((name,), opt_level)[name] for name in names}
    runs = [
        (name, case, sgd(case.model), plain)
        for name in names
        for case, plain in list(zip(cases_of(name), run_in_float32(name), strict=True))[:: STRIDES[opt_level]]
    ]
    half = LEVELS[opt_level]
    amp.initialize(
        [case.model for _, case, _, _ in runs],
        [optimizer for _, _, optimizer, _ in runs if optimizer],
        opt_level=opt_level,
        verbosity=0,
        # Keeps float16 gradients of a mean in range, where the dynamic scale would skip its first steps.
        loss_scale=128.0 if half is torch.float16 else None,
        allow_banned=True,  # for BCELoss
    )
    pairs = {name: [] for name in names}
    for name, case, optimizer, plain in runs:
        for given in (FULL,) if name in NO_HALF_INPUT else (FULL, half):
            pairs[name].append((given, try_to_train(case, case.model, given, optimizer), plain))
    amp.uninitialize()
    assert all(param.dtype is FULL for _, case, _, _ in runs for param in case.model.parameters())
    return pairs


def run_all(opt_level):
    """Every case that trains in float32: the module's name, the type of its input, and two outcomes."""
    for names in DOZENS:
        for name, runs in run_group(names, opt_level).items():
            yield from ((name, *run) for run in runs if run[2].error is None)


# ---- Every module ----


def test_every_module_of_torch_nn_is_run_or_has_a_reason_not_to_be():
    known = {cls for cls in vars(nn).values() if inspect.isclass(cls) and issubclass(cls, nn.Module)}
    named = {info.module_cls for info in module_db} | {getattr(nn, name) for name in (*OTHERS, *NO_LAYERS)}
    assert {cls.__name__ for cls in known ^ named} == set()


@pytest.mark.exhaustive(keep=2)
@each_dozen
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_module_trains_at_every_level_and_in_float32(opt_level, names):
    runs = [(name, *run) for name, group in run_group(names, opt_level).items() for run in group]
    assert [run for run in runs if run[2].error or run[3].error] == []


@pytest.mark.exhaustive(keep=0)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_gradients_are_float32_and_finite_and_a_step_moves_every_parameter_that_has_one(opt_level):
    for name, given, found, plain in run_all(opt_level):
        assert found.types == plain.types, (name, given, found)
        assert found.is_finite or not plain.is_finite, (name, given, found)
        assert not found.unmoved, (name, given, found)


# Outputs are of order 1. bfloat16 rounds by up to 0.4 %: at O4 weights and activations of matrix products,
# up to ten in a row in a transformer; at O5 every result on the way, in losses those of differences too.
TOLERANCES = {"O4": 0.02, "O5": 0.05}


@pytest.mark.exhaustive(keep=0)
@pytest.mark.parametrize("opt_level", TOLERANCES)
def test_the_loss_is_close_to_that_of_float32(opt_level):
    for name, given, found, plain in run_all(opt_level):
        if given is FULL and math.isfinite(plain.loss):  # the half inputs came after a step
            assert abs(found.loss - plain.loss) <= TOLERANCES[opt_level] * plain.size + 1e-3, (name, found)


@pytest.mark.exhaustive(keep=2)
@each_dozen
def test_a_module_that_was_not_stepped_is_as_it_was(names):
    cases = [(name, case) for name in names for case in cases_of(name) if not case.training]
    before = [copy.deepcopy(case.model.state_dict()) for _, case in cases]
    amp.initialize([case.model for _, case in cases], opt_level="O2", verbosity=0)
    for _, case in cases:
        call(case, case.model, FULL)
    amp.uninitialize()
    for (name, case), state in zip(cases, before, strict=True):
        for key, value in case.model.state_dict().items():
            assert value.dtype is state[key].dtype
            assert torch.equal(value, state[key]), (name, case.name, key)


# ---- Every module in the transforms of torch.func ----


class Function:
    """What a module gives for parameters and floating inputs: its floating outputs, or a mean of them."""

    def __init__(self, case, given):
        self._case, self._given = case, given
        self._leaves, self._spec = tree_flatten(case.inputs(FULL))
        self._places = [place for place, leaf in enumerate(self._leaves) if is_floating(leaf)]
        self._buffers = {name: buffer.detach().clone() for name, buffer in case.model.named_buffers()}
        params = {name: param.detach() for name, param in case.model.named_parameters()}
        # Values of which every type has the same, so that maxima and bends are at the same places.
        inputs = [self._leaves[place].detach().bfloat16().float() for place in self._places]
        self.args = (params, *inputs)
        self.inputs = tuple(range(1, len(self.args)))

    def __call__(self, params, *inputs):
        leaves = self._leaves.copy()
        for place, value in zip(self._places, inputs, strict=True):
            leaves[place] = value.to(self._given)
        torch.manual_seed(1)
        args, kwargs = tree_unflatten(leaves, self._spec)
        outputs = functional_call(self._case.model, (params, self._buffers), args, kwargs)
        return tuple(filter(is_floating, tree_leaves(outputs)))

    def count_derivatives(self):
        """About as many as a Jacobian has: outputs are about as many as inputs."""
        return sum(self._leaves[place].numel() for place in self._places) ** 2

    def loss(self, *args):
        return loss_of(self(*args))

    def map(self, function):
        params, *inputs = self.args
        samples = [torch.stack((value, 0.75 * value)) for value in inputs]
        return vmap(function, (None, *[0] * len(samples)), randomness="same")(params, *samples)


def is_floating(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def push_forward(function):
    outputs, tangents = jvp(function, function.args, tree_map(torch.ones_like, function.args))
    assert [out.dtype for out in outputs] == [tangent.dtype for tangent in tangents]
    return outputs, tangents


TRANSFORMS = {
    "functional_call": lambda function: function(*function.args),
    "grad": lambda function: grad(function.loss, (0, *function.inputs))(*function.args),
    "vmap": lambda function: function.map(function),
    "vmap(grad)": lambda function: function.map(grad(function.loss, (0, *function.inputs))),
    "jacrev": lambda function: jacrev(function, function.inputs)(*function.args),
    "jacfwd": lambda function: jacfwd(function, function.inputs, randomness="same")(*function.args),
    "jvp": push_forward,
}


# Numbers of a Jacobian from which one is not computed: a few samples would take longer than all others.
LARGE = 2**18


def transform(case, given):
    found = {}
    for name, run in TRANSFORMS.items():
        function = Function(case, given)
        if name.startswith("jac") and function.count_derivatives() > LARGE:
            continue
        try:
            found[name] = tree_leaves(run(function))
        except Exception as error:
            found[name] = error
    return found


@functools.cache
def transform_in_float32(name):
    return [transform(case, FULL) for case in cases_of(name)]


def are_close(found, expected):
    """Whether numbers differ by some roundings to bfloat16, which are 0.4 % of the largest at most."""
    size = max([1.0, *(number.abs().max().item() for number in expected if number.numel())])
    pairs = list(zip(found, expected, strict=True))
    return all(torch.allclose(new.float(), old, atol=0.1 * size, equal_nan=True) for new, old in pairs)


@pytest.mark.exhaustive
@each_dozen
@pytest.mark.parametrize("opt_level", LEVELS)
def test_a_transform_of_a_module_gives_what_it_gives_in_float32(opt_level, names):
    runs = [
        (name, case, expected)
        for name in names
        if name not in NO_HALF_INPUT
        for case, expected in zip(cases_of(name), transform_in_float32(name), strict=True)
    ][:: STRIDES[opt_level]]
    amp.initialize([case.model for _, case, _ in runs], opt_level=opt_level, verbosity=0, allow_banned=True)
    # Half where casts are, as from a layer before it; elsewhere the model casts its inputs.
    given = LEVELS[opt_level] if opt_level in ("O1", "O4") else FULL
    faults = []
    for name, case, expected in runs:
        for key, found in transform(case, given).items():
            if isinstance(expected[key], Exception):
                continue
            # A sum of squares may be more than a float16 model holds.
            if isinstance(found, Exception) or not (opt_level == "O2" or are_close(found, expected[key])):
                faults.append((name, case.name, key, found))
    assert faults == []
