"""torch.compile of initialized models and of functions while torch is patched."""

import contextlib
import copy
import functools
import operator
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ampatch as amp
from helpers import assert_same_bits, needs_torch
from nets import sgd
from patched import FULL, HALF, LEVELS, open_session

pytestmark = pytest.mark.exhaustive  # one case of each test in the short suite

optimizer_module = sys.modules["torch.optim.optimizer"]
THREAD = amp.session.session.SESSION.casts.thread


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    # Dynamo leaves names of its own in the modules whose code it compiles.
    for name in [name for name in vars(optimizer_module) if name.startswith("__builtins_dict__")]:
        delattr(optimizer_module, name)


def compiled(function, backend="eager", **kwargs):
    return torch.compile(function, backend=backend, fullgraph=True, **kwargs)


def full(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


def dtypes_of(tensors):
    return [tensor.dtype for tensor in tensors]


# ---- Models that train ----


class Mlp(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x):
        return self.second(self.first(x).relu())


class Tied(Mlp):
    def __init__(self):
        super().__init__(4)
        self.first.weight = self.second.weight


class Attention(nn.Module):
    """Written by hand: with operators and methods."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2) / 2).softmax(dim=-1)
        return scores @ v + F.layer_norm(x, [4])


class Checkpointed(Attention):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def conv():
    layers = nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 4)
    return nn.Sequential(nn.Unflatten(1, (1, 4)), *layers)


def transformer():
    return nn.TransformerEncoderLayer(4, 2, dim_feedforward=4, dropout=0.0)


def recurrent():
    return nn.Sequential(nn.GRUCell(4, 4), nn.Linear(4, 4))


def open_training(level, make=Mlp, **kwargs):
    torch.manual_seed(0)
    model = make()
    optimizer = sgd(model)
    open_session(model, level, optimizers=optimizer, **kwargs)
    return model, optimizer


def train(make, level, compile=None, *, compile_step=None, compile_all=None, steps=3):
    """Trains a model, compiled by `compile`, and returns its weights and its last output."""
    (model, optimizer), x = open_training(level, make), full(6, 4)
    called = compile(model) if compile else model
    step = compile_step(optimizer.step) if compile_step else optimizer.step

    def iterate():
        optimizer.zero_grad()
        output = called(x)
        with amp.scale_loss(output.float().square().mean(), optimizer) as scaled:
            scaled.backward()
        step()
        return output.detach()

    iterate = compile_all(iterate) if compile_all else iterate
    outputs = [iterate() for _ in range(steps)]
    assert (THREAD.off, THREAD.forwards) == (0, ())
    state = [*(param.detach().clone() for param in amp.master_params(optimizer)), outputs[-1]]
    amp.uninitialize()
    return state


def with_loss(model):
    return lambda x: F.cross_entropy(model(x), torch.tensor([0, 1, 2, 3, 0, 1]))


def compile_in_place(model):
    model.compile(backend="eager", fullgraph=True)
    return model


WAYS = {
    "eager": (compiled, None),
    "aot_eager": (lambda model: compiled(model, "aot_eager"), None),
    "in place": (compile_in_place, None),
    "with its loss": (lambda model: compiled(with_loss(model)), with_loss),
}


@pytest.mark.parametrize(
    ("level", "way"),
    [
        *(("O0", "eager"), ("O1", "with its loss"), ("O2", "aot_eager"), ("O3", "in place")),
        *(("O4", "aot_eager"), ("O4", "in place"), ("O5", "eager"), ("O5", "with its loss")),
    ],
)
def test_a_compiled_model_trains_to_the_same_bits(level, way):
    compile, plain = WAYS[way]
    assert_same_bits(train(Mlp, level, compile), train(Mlp, level, plain))


@pytest.mark.parametrize("level", ["O2", "O4"])
@pytest.mark.parametrize("make", [conv, Attention, transformer, recurrent, Checkpointed])
def test_models_of_every_kind_train_to_the_same_bits(make, level):
    assert_same_bits(train(make, level, compiled), train(Attention if make is Checkpointed else make, level))


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_of_two_layers_is_cast_for_each_in_a_graph(level):
    # So its gradient is summed in float32, where the uncompiled model sums halves: they differ by a rounding.
    found, expected = train(Tied, level, compiled, steps=1), train(Tied, level, steps=1)
    assert dtypes_of(found) == dtypes_of(expected)
    assert all(torch.allclose(a.float(), b.float(), atol=1e-3) for a, b in zip(found, expected, strict=True))


@pytest.mark.process
def test_inductor_compiles_casts():
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("inductor needs a C++ compiler: there is no g++ and no clang++ in PATH")
    model = open_session(nn.Linear(3, 2))
    with torch.no_grad():
        found, expected = compiled(model, "inductor")(A), model(A)
    assert found.dtype is expected.dtype is HALF
    # Products and sums of 3 numbers below 1, rounded to 8 bits.
    assert torch.allclose(found.float(), expected.float(), atol=0.01)


@pytest.mark.parametrize("level", ["O1", "O2", "O4"])
def test_ten_training_steps_compile_a_model_once(level):
    counter = CompileCounter()
    model, optimizer = open_training(level)
    called = compiled(model, counter)
    for step in range(10):
        with amp.scale_loss(called(full(6, 4)).float().square().mean(), optimizer) as scaled:
            (scaled * (float("inf") if step == 3 else 1)).backward()
        optimizer.step()
        if step == 5:
            amp.set_loss_scale(8.0)
        amp.clear_cache()
    assert counter.frame_count == 1


# What torch 2.13 itself warns of while it compiles these: the names of ours and of its own that it does not
# trace, torch.jit in modules that it imports, and gradients of the tensors that it looks at.
@pytest.mark.filterwarnings(
    "ignore:Dynamo does not know how to trace the builtin:UserWarning",
    # Of torch 2.6.
    "ignore:Graph break due to unsupported builtin (sys._getframe|_thread.get_ident|None.Disab):UserWarning",
    "ignore:.*torch.jit.script.* is deprecated",
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning",
)
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("part", ["compile_step", "compile_all"])
def test_a_compiled_step_breaks_the_graph_and_is_right(part, level):
    compile = functools.partial(torch.compile, backend="eager")
    assert_same_bits(train(Mlp, level, **{part: compile}), train(Mlp, level))


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="Dynamo traces no backward in this torch"
)
@pytest.mark.parametrize("level", LEVELS)
def test_forward_backward_and_scale_loss_are_one_graph_that_is_compiled_once(level):
    def iterate(model, optimizer):
        loss = model(full(6, 4)).float().square().mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss.detach()

    def train(iterate):
        model, optimizer = open_training(level, loss_scale=1.0)
        losses = []
        for _ in range(5):
            losses.append(iterate(model, optimizer))
            optimizer.step()
            optimizer.zero_grad()
        amp.uninitialize()
        return [*losses, *(param.detach() for param in model.parameters())]

    counter = CompileCounter()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        found = train(compiled(iterate, counter))
    assert_same_bits(found, train(iterate))
    assert counter.frame_count == 1


# ---- Beside torch.autocast ----


def test_the_graphs_of_forward_and_backward_have_the_operations_of_autocasts():
    def list_operations(model, *, autocast):
        found = []

        def note(graph, inputs):
            found.append(Counter(str(node.target) for node in graph.graph.nodes if node.op[:4] == "call"))
            return make_boxed_func(graph.forward)

        called = compiled(model, aot_autograd(fw_compiler=note, bw_compiler=note))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = called(full(6, 4))
        output.float().sum().backward()
        return found

    expected = list_operations(Mlp(), autocast=True)
    assert len(expected) == 2
    assert list_operations(open_training("O4")[0], autocast=False) == expected


# ---- Casts in the graph ----


def use_functions(a, b):
    product = torch.matmul(a, b)
    linear = F.linear(a, b.t())
    soft = F.softmax(product, dim=-1)
    norm = F.layer_norm(linear, linear.shape[1:])
    return product, linear, soft, norm, torch.einsum("ij,jk->ik", a, b), F.mse_loss(product, linear)


def use_methods(a, b):
    product = a @ b
    power, filled = product**2, product.clone()
    filled[0] = b[0]
    of_one = 2**product, product.softmax(-1), product.sum(), product.norm(), product.unflatten(1, (2, 2))
    return filled, product, power, a.matmul(b), *of_one


def use_mixed(a, b):
    filled = a.clone()
    filled[filled > 0] = b[0, 0].to(HALF)
    filled @= b[:, :3]
    dot = torch.dot(a[0], a[1].to(HALF))
    put = torch.index_put(a, (torch.tensor([0]), torch.tensor([1])), b[0, 0].to(HALF))
    return filled, dot, put


FUNCTIONS = [use_functions, use_methods, use_mixed]
A, B = full(2, 3), full(3, 4)


BOTH_BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
IN_TURN = pytest.mark.parametrize(
    ("function", "backend"), [(use_functions, "eager"), (use_methods, "aot_eager")]
)


@BOTH_BACKENDS
@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_functions_cast_as_uncompiled_ones_do(function, backend):
    open_session()
    assert_same_bits(compiled(function, backend)(A, B), function(A, B))
    if backend == "eager":
        dynamic = compiled(function, dynamic=True)
        for rows in (3, 5):
            assert_same_bits(dynamic(full(rows, 3), B), function(full(rows, 3), B))


def test_functions_of_users_cast():
    @amp.float_function
    def add(items, *, more):
        return items["x"] + more[0][0]

    def function(a):
        low = a.to(HALF)
        return add({"x": low}, more=((low,),)), add({"x": a}, more=[[low]])

    open_session()
    assert_same_bits(compiled(function)(A), function(A))


# ---- When it is compiled anew ----


def off(function):
    def run(*args):
        with amp.disable_casts():
            return function(*args)

    return run


@IN_TURN
def test_disable_casts_around_a_compiled_function_turns_its_casts_off(function, backend):
    open_session()
    called = compiled(function, backend)
    for expected in (function, off(function), function):
        with contextlib.nullcontext() if expected is function else amp.disable_casts():
            found = called(A, B)
        assert_same_bits(found, expected(A, B))


@IN_TURN
def test_disable_casts_inside_a_compiled_function_turns_its_casts_off(function, backend):
    def both(a, b):
        with amp.disable_casts():
            with amp.disable_casts():
                inner = function(a, b)
            again = function(a, b)
        return *inner, *again, *function(a, b)

    open_session()
    assert_same_bits(compiled(both, backend)(A, B), both(A, B))


def test_half_tensors_stay_half_where_casts_are_off_inside_a_graph():
    def function(a):
        with amp.disable_casts():
            filled = a.clone().exp_()
            filled **= 2
            return F.softmax(a, -1), a.softmax(-1), a**2, 2**a, F.layer_norm(a, [3]), filled, a.norm()

    open_session()
    found = compiled(function)(A.to(HALF))
    assert set(dtypes_of(found)) == {HALF}
    assert_same_bits(found, function(A.to(HALF)))


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=str)
@BOTH_BACKENDS
def test_what_is_written_in_place_in_a_graph_is_what_is_written_outside(backend, dtype):
    def exp(x, y):
        return torch.exp(x, out=x)

    def root(x, y):
        return torch.rsqrt_(x).cumsum_(0)

    def function(a, b):
        results = []
        for operate in (operator.ipow, operator.iadd, operator.ifloordiv, exp, root):
            alias = given = a.clone()
            given = operate(given, b)
            results += [given, alias]
        return results

    open_session()
    a, b = full(3, 3).add(3).to(dtype), full(3, 3).add(2).to(FULL if dtype is HALF else HALF)
    assert_same_bits(compiled(function, backend)(a, b), function(a, b))
    assert set(dtypes_of(function(a, b))) == {dtype}


@IN_TURN
def test_a_function_compiled_before_initialize_casts_after_it_and_not_after_uninitialize(function, backend):
    called = compiled(function, backend)
    uncast = called(A, B)
    assert set(dtypes_of(uncast)) == {FULL}
    for level in ("O4", "O1"):
        open_session(opt_level=level)
        found = called(A, B)
        assert LEVELS[level] in dtypes_of(found)
        assert_same_bits(found, function(A, B))
        amp.uninitialize()
        assert_same_bits(called(A, B), uncast)


def test_dynamo_may_make_its_tables_again_while_torch_is_patched():
    """As it does where `torch.distributed.init_process_group` is called."""

    def function(a):
        return torch.mm(a, a.T), torch.exp(a), a.exp(), a @ a.T, F.layer_norm(a, [3])

    called = compiled(function)
    uncast = called(A.to(HALF))
    open_session()
    torch._dynamo.trace_rules.clear_lru_cache()
    assert_same_bits(called(A.to(HALF)), function(A.to(HALF)))
    amp.uninitialize()
    assert_same_bits(called(A.to(HALF)), uncast)


@pytest.mark.parametrize("level", ["O1", "O3", "O5"])
@pytest.mark.parametrize("is_given", [False, True], ids=["compiled", "compiled and given"])
def test_a_model_compiled_before_initialize_casts_after_it_and_not_after_uninitialize(level, is_given):
    model = Mlp()
    called = compiled(model)
    uncast = called(full(2, 4))
    open_session(called if is_given else model, level)
    found = called(full(2, 4))
    assert not torch.equal(found.float(), uncast)
    if not is_given:
        assert_same_bits([found], [model(full(2, 4))])
    amp.uninitialize()
    assert_same_bits([called(full(2, 4))], [model(full(2, 4))])
    assert called(full(2, 4)).dtype is FULL


FRESH = """
import torch, ampatch as amp
assert "torch._dynamo" not in __import__("sys").modules
def function(a):
    return torch.matmul(a, a), torch.nn.functional.softmax(a, -1), a.softmax(-1)
call = lambda: [t.dtype for t in torch.compile(function, backend="eager", fullgraph=True)(a)]
a = torch.ones(2, 2, dtype=torch.bfloat16)
amp.initialize(torch.nn.Linear(1, 1), opt_level="O4", verbosity=0)
assert call() == [torch.bfloat16, torch.float32, torch.float32], call()
amp.uninitialize()
assert call() == [torch.bfloat16] * 3, call()
"""


@pytest.mark.process
def test_a_process_whose_first_compilation_is_while_patched_compiles_after_uninitialize():
    # Dynamo makes its tables of functions when it is first needed.
    subprocess.run([sys.executable, "-c", FRESH], check=True)


# ---- Parts that stay float32 ----


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.linear = nn.Parameter(full(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        y = torch.matmul(x @ self.weight, self.weight)
        return self.linear(y + F.softmax(y, -1) + y.softmax(0))


class WithKept(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.before, self.kept, self.after = nn.Linear(4, 4), Kept(), nn.Linear(4, 4)
        self.call = call

    def forward(self, x):
        x = self.before(x)
        y = self.call(self.kept, x)
        return x, y, self.after(y)


def call_plainly(module, x):
    return module(x)


def call_checkpointed(module, x):
    return checkpoint(module, x, use_reentrant=False)


CHECKPOINTS = needs_torch("2.7", "changes of Python's state in a checkpoint that is part of a graph")


@pytest.mark.parametrize("call", [call_plainly, pytest.param(call_checkpointed, marks=CHECKPOINTS)])
@pytest.mark.parametrize(("level", "backend"), [("O2", "aot_eager"), ("O4", "aot_eager"), ("O5", "eager")])
def test_a_kept_part_of_a_compiled_model_computes_and_returns_what_it_does_uncompiled(level, call, backend):
    model = WithKept(call)
    open_session(model, level, keep_fp32="kept", cast_model_outputs=None)
    expected = model(full(3, 4))
    sum(output.float().sum() for output in expected).backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    found = compiled(model, backend)(full(3, 4))
    sum(output.float().sum() for output in found).backward()
    assert_same_bits(found, expected)
    assert_same_bits([param.grad for param in model.parameters()], grads)
    assert (THREAD.off, THREAD.forwards) == (0, ())


def test_a_compiled_function_in_a_kept_part_of_a_model_is_one_graph():
    part = nn.Identity()
    part.forward = compiled(lambda x: torch.mm(x, x.T))
    model = nn.Sequential(part, nn.Linear(2, 2))
    open_session(model, keep_fp32="0")
    assert dtypes_of([part(A), model(A)]) == [FULL, HALF]


# ---- Checkpoints ----


@CHECKPOINTS
def test_a_checkpoint_inside_a_graph_casts_or_does_not_as_it_does_without():
    def function(a, b):
        uncast = checkpoint(off(use_methods), a, b, use_reentrant=False)
        cast = checkpoint(use_methods, a, b, use_reentrant=False)
        return *uncast, *cast, call_checkpointed(model, a)

    model = open_session(nn.Linear(3, 2))
    assert_same_bits(compiled(function)(A, B), function(A, B))


def test_what_is_compiled_while_patched_is_apart_in_shared_caches_for_every_thread():
    def read_tag():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: torch.compiler.config.cache_key_tag).result()

    before, tags = read_tag(), set()
    for level in LEVELS:
        open_session(opt_level=level)
        tags.add(read_tag())
        assert read_tag() == torch.compiler.config.cache_key_tag
        with ThreadPoolExecutor(1) as pool:
            pool.submit(amp.uninitialize).result()
        assert read_tag() == torch.compiler.config.cache_key_tag == before
    assert len(tags - {before}) == 2


@pytest.mark.parametrize("level", ["O3", "O5"])
def test_a_model_whose_weights_are_loaded_between_calls_compiles_as_a_whole(level):
    """More parameters than Dynamo would compile one function for."""
    sizes = range(2, 12)
    model, _ = open_training(level, lambda: nn.Sequential(*[nn.Linear(size, size + 1) for size in sizes]))
    called, x = compiled(model), torch.ones(1, 2)
    weights = copy.deepcopy(model.state_dict())
    for call in (model, called):
        model.load_state_dict(weights)
        found = call(x)
    assert torch.equal(found, model(x))


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
@pytest.mark.parametrize("place", ["masters", "state_dict"])
def test_what_is_written_shows_in_the_next_call_of_a_compiled_model(place, level):
    """As SAM and Lookahead write into the parameters that they step."""
    model, optimizer = open_training(level, lambda: nn.Linear(2, 2))
    called, x = compiled(model, "aot_eager"), torch.ones(1, 2)
    called(x)
    for value in (3.0, 5.0):
        written = amp.master_params(optimizer) if place == "masters" else model.state_dict().values()
        with torch.no_grad():
            for tensor in written:
                tensor.fill_(value)
        assert torch.equal(called(x).float(), torch.full((1, 2), 3 * value))
