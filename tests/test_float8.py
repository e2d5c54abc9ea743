"""O6: large linear layers in float8 by torchao, emulated here; what is asked of it beside O4."""

import contextlib
import copy
import functools
import importlib.util
import io
import random
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import linear
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import ampatch as amp
from ampatch.apex.script import level_overrides
from helpers import import_float8, scaled_backward
from ranks import FSDP2, fixture

float8 = import_float8()

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
LARGE = 1040  # features of a layer that gains: more than 1024, and a multiple of 16

two = fixture()


pytestmark = pytest.mark.usefixtures("emulated")


def make_mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, LARGE), nn.GELU(), nn.Linear(LARGE, 1056), nn.GELU(), nn.Linear(1056, 16)
    )


class Transformer(nn.Module):
    """Tokens in, tokens out, with the output layer tied to the embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(48, 16)
        layer = nn.TransformerEncoderLayer(16, 2, LARGE, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding(x)))


def batch_of(model, step):
    generator = torch.Generator().manual_seed(step)
    if isinstance(model, Transformer):
        return torch.randint(48, (3, 7), generator=generator)
    return torch.randn(5, 16, generator=generator)


def loss_of(output):
    return output.float().square().mean()


def open_model(model, level="O6", optimizer=torch.optim.SGD, **options):
    options.setdefault("verbosity", 0)
    made = optimizer(model.parameters(), lr=0.05)
    return amp.initialize(model, made, opt_level=level, **options)


def train(model, optimizer, steps=range(4), forward=None, around_backward=contextlib.nullcontext):
    losses = []
    for step in steps:
        loss = loss_of((forward or model)(batch_of(model, step)))
        optimizer.zero_grad()
        with around_backward():
            scaled_backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


def names_in_float8(model):
    kind = float8.float8_linear.Float8Linear
    return [name for name, part in model.named_modules() if isinstance(part, kind)]


# ---- Beside torchao alone ----


def train_by_torchao(model, recipe, names):
    """What torchao computes by itself: the layers are its own, and only the rest is cast, by O4."""
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True, pad_inner_dim=True)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)
    for name in names:
        layer = model.get_submodule(name)
        # It leaves the input's type to autocast, which on a CPU it does not ask, and its emulated product
        # calls torch.mm, which O4 would cast.
        layer.forward = amp.disable_casts()(lambda x, run=layer.forward: run(x.to(torch.bfloat16)))
    return train(*open_model(model, "O4"), around_backward=amp.disable_casts)


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("build", "names"),
    [(make_mlp, ["0", "2"]), (Transformer, ["body.layers.0.linear1", "body.layers.1.linear1"])],
)
def test_trains_to_the_bits_of_torchao_alone(build, names, recipe):
    model, optimizer = open_model(build(), float8_recipe=recipe, float8_layers=names)
    assert names_in_float8(model) == names
    losses, weights = train(model, optimizer), copy.deepcopy(model.state_dict())
    amp.uninitialize()
    other = build()
    assert train_by_torchao(other, recipe, names) == losses
    assert list(other.state_dict()) == list(weights)
    assert all(map(torch.equal, other.state_dict().values(), weights.values()))


# ---- Which layers ----


class Own(nn.Linear):
    """A class of a script's own."""


def with_forward(layer):
    layer.forward = lambda x: linear(x, layer.weight)
    return layer


OWN = "not a plain torch.nn.Linear"
REASONS = [
    (lambda: nn.Linear(16, LARGE), "tensorwise", {}, ""),
    (lambda: nn.Linear(16, 1024), "tensorwise", {}, "too small to gain: more than 1024 out or 4096 in"),
    (lambda: nn.Linear(4112, 16), "tensorwise", {}, ""),
    (lambda: nn.Linear(16, LARGE), "rowwise", {}, "too small to gain: more than 2048 out and 1024 in"),
    (lambda: nn.Linear(1040, 4112), "rowwise", {}, ""),
    (lambda: nn.Linear(1040, 4096), "rowwise_with_gw_hp", {}, "too small to gain"),
    (lambda: nn.Linear(17, LARGE), "tensorwise", {}, "not multiples of 16"),
    (lambda: nn.Linear(17, LARGE), "tensorwise", {"float8_layers": "0"}, "not multiples of 16"),
    (lambda: nn.Linear(16, 32), "tensorwise", {"float8_layers": "0"}, ""),
    (lambda: nn.Linear(16, LARGE), "tensorwise", {"keep_fp32": "0"}, "keep_fp32 names it"),
    (lambda: nn.Linear(16, LARGE).double(), "tensorwise", {}, "its weight is torch.float64"),
    (lambda: Own(16, LARGE), "tensorwise", {}, OWN),
    (lambda: with_forward(nn.Linear(16, LARGE)), "tensorwise", {}, OWN),
    (lambda: parametrizations.weight_norm(nn.Linear(16, LARGE)), "tensorwise", {}, OWN),
]


@pytest.mark.parametrize(("build", "recipe", "options", "reason"), REASONS)
def test_a_layer_is_in_float8_if_it_gains_and_explain_says_why_not(build, recipe, options, reason):
    model = nn.Sequential(build(), nn.ReLU(), nn.Linear(16, 2))
    if not options:
        assert reason in str(amp.explain(model, recipe)).splitlines()[0]
    open_model(model, float8_recipe=recipe, **options)
    assert names_in_float8(model) == ([] if reason else ["0"])
    first = str(amp.explain(model)).splitlines()[0]
    assert first.startswith("0 (")
    assert reason in first
    assert first.endswith(": float8") is not bool(reason)


def test_the_last_layer_and_one_tied_to_an_embedding_stay_unless_they_are_asked_for():
    model = make_mlp()[:3]
    assert "2 (1040 -> 1056): not in float8: it is the last one, before the loss" in str(amp.explain(model))
    open_model(model, float8_layers=["2"])
    assert names_in_float8(model) == ["0", "2"]
    amp.uninitialize()
    tied = nn.ModuleDict(
        {"head": nn.Linear(16, LARGE), "tokens": nn.Embedding(LARGE, 16), "end": nn.Linear(16, 16)}
    )
    tied.head.weight = tied.tokens.weight
    assert "head (16 -> 1040): not in float8: it is the last one" in str(amp.explain(tied))
    decoder = nn.Sequential(tied.head, nn.Linear(LARGE, 16))
    amp.initialize([nn.Sequential(tied.tokens), decoder], opt_level="O6", verbosity=0)
    assert names_in_float8(decoder) == []


def test_attention_that_reads_a_weight_without_calling_its_layer_stays_and_a_layer_is_named_once():
    shared = nn.Linear(16, 16)
    model = nn.Sequential(nn.MultiheadAttention(LARGE, 2), shared, nn.ModuleList([shared]))
    assert "0.out_proj (1040 -> 1040): not in float8" in str(amp.explain(model))
    assert len(amp.explain(model).layers) == 2


def test_what_explain_says_is_true_of_layers_that_initialize_did_not_choose():
    model, _ = open_model(make_mlp(), keep_fp32=["2"])
    model.insert(0, nn.Linear(16, LARGE))
    for one in (model, copy.deepcopy(model)):
        reasons = {layer.name: layer.because for layer in amp.explain(one).layers}
        assert "added after initialize" in reasons["0"]
        assert reasons["1"] == ""
        assert reasons["3"]


def test_a_later_call_leaves_layers_in_float8_as_they_are():
    model, _ = open_model(make_mlp())
    before = [vars(part).copy() for part in model]
    odd = make_mlp()
    odd[2].config = {"mine": 1}
    untouched = shape_of(odd)
    with pytest.raises(amp.AmpValueError, match=r"attribute 'config' of its own.*keep_fp32"):
        amp.initialize([model, odd], opt_level="O6", verbosity=0)
    assert shape_of(odd) == untouched
    with pytest.raises(amp.AmpValueError, match="another float8_recipe from an earlier initialize"):
        open_model(model, float8_recipe="rowwise")
    assert names_in_float8(model) == ["0", "2"]
    assert list(map(vars, model)) == before
    amp.initialize(model, opt_level="O6", keep_fp32=["0"], verbosity=0)
    assert model[0](batch_of(model, 0)).dtype is torch.float32
    assert "0 (16 -> 1040): not in float8: keep_fp32" in str(amp.explain(model))


SAID = [
    ((16, LARGE, 16), {}, "1 of 2 linear layers compute in float8; emulated (AMPATCH_FLOAT8_EMULATE), which"),
    ((16, LARGE, 16), {"float8_recipe": "rowwise"}, ", float8_recipe=rowwise (default: tensorwise); "),
    ((16, 16, 16), {}, "no linear layer computes in float8, so this is O4 (0 (16 -> 16): not in float8: too"),
    ((16, 17, 16), {"float8_layers": ["0"]}, "cannot be in float8: 0 (16 -> 17): not in float8: its sizes"),
]


@pytest.mark.parametrize(("sizes", "options", "said"), SAID, ids=["some", "recipe", "none", "asked for"])
def test_initialize_says_how_many_layers_are_in_float8_and_why_others_are_not(
    sizes, options, said, capsys, caplog
):
    open_model(nn.Sequential(*map(nn.Linear, sizes, sizes[1:])), verbosity=1, **options)
    assert said in capsys.readouterr().out + caplog.text


# ---- The way back ----


def shape_of(model):
    """Everything that undo must restore, but for the values of weights."""
    parts = [
        (name, type(part), sorted(set(vars(part)) - {"training"}), len(part._forward_hooks))
        for name, part in model.named_modules()
    ]
    return parts, [(name, id(param)) for name, param in model.named_parameters()]


def make_random(rng):
    """A model of random layers, sizes, ties and wrappers around them; the input has 16 features."""
    layers, width = [], 16
    for _ in range(rng.randint(1, 4)):
        out = rng.choice([16, 24, 48, LARGE])
        layer = rng.choice([nn.Linear, Own])(width, out, bias=rng.random() < 0.7)
        if rng.random() < 0.15:
            layer = parametrizations.weight_norm(layer)
        if rng.random() < 0.15:
            layer.register_forward_hook(lambda module, args, output: output * 1.0)
        layers += [layer, rng.choice([nn.ReLU, nn.GELU, functools.partial(nn.LayerNorm, out)])()]
        width = out
        if rng.random() < 0.2 and width <= 48:
            same = nn.Linear(width, width)
            layers += [same, same]
    layers.append(nn.Linear(width, 16))
    model = nn.Sequential(*layers)
    return nn.Sequential(model, nn.ReLU(), nn.Linear(16, 4)) if rng.random() < 0.5 else model


def run_random(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = make_random(rng)
    before, untouched = shape_of(model), copy.deepcopy(model)
    options = {"float8_recipe": rng.choice(RECIPES)}
    if rng.random() < 0.5:
        options["float8_layers"] = [nn.Linear]
    kind = rng.choice([torch.optim.SGD, torch.optim.AdamW])
    model, optimizer = open_model(model, optimizer=kind, **options)
    others = []
    for action in rng.choices(["train", "copy", "save", "off", "again", "evaluate"], k=rng.randint(0, 5)):
        if action == "train":
            train(model, optimizer, range(rng.randint(1, 2)))
        elif action == "copy":
            others.append(copy.deepcopy(model))
        elif action == "save":
            model.load_state_dict(model.state_dict())
        elif action == "off":
            with amp.disable_casts():
                assert model(batch_of(model, 0)).dtype is torch.float32
        elif action == "again":
            amp.initialize(nn.Linear(16, LARGE), opt_level="O6", verbosity=0)
        else:
            with torch.no_grad():
                assert model.eval()(batch_of(model, 1)).dtype is torch.bfloat16
    amp.uninitialize()
    assert shape_of(model) == before
    untouched.load_state_dict(model.state_dict())
    for other in others:  # computes as its weights say, in float32
        untouched_too = copy.deepcopy(untouched)
        untouched_too.load_state_dict(other.state_dict())
        assert torch.equal(other(batch_of(model, 2)), untouched_too(batch_of(model, 2)))
    assert torch.equal(model(batch_of(model, 2)), untouched(batch_of(model, 2)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_undo_is_exact_over_random_programs(first):
    for seed in range(first, first + 20):
        run_random(seed)


def test_what_is_put_on_top_of_a_layer_stays_when_it_is_a_linear_layer_again():
    model, _ = open_model(make_mlp())
    parametrizations.orthogonal(model[2])
    amp.uninitialize()
    assert names_in_float8(model) == []
    assert torch.nn.utils.parametrize.is_parametrized(model[2], "weight")
    torch.nn.utils.parametrize.remove_parametrizations(model[2], "weight")
    assert type(model[2]) is nn.Linear


# ---- Checkpoints, copies, compilers, ranks ----


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_goes_on_to_the_same_bits_and_checkpoints_are_those_of_O4(recipe):
    whole = train(*open_model(make_mlp(), optimizer=torch.optim.AdamW, float8_recipe=recipe), steps=range(6))
    amp.uninitialize()
    model, optimizer = open_model(make_mlp(), optimizer=torch.optim.AdamW, float8_recipe=recipe)
    train(model, optimizer, steps=range(3))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), amp.state_dict()], file)
    amp.uninitialize()
    saved = torch.load(io.BytesIO(file.getvalue()))
    plain = make_mlp()
    types = [[(name, it.dtype) for name, it in one.items()] for one in (saved[0], plain.state_dict())]
    assert types[0] == types[1]
    plain.load_state_dict(saved[0])
    model, optimizer = open_model(plain, optimizer=torch.optim.AdamW, float8_recipe=recipe)
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    assert train(model, optimizer, steps=range(3, 6)) == whole[3:]


def test_a_model_that_was_pickled_as_a_whole_computes_the_same():
    model, _ = open_model(make_mlp())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    x = batch_of(model, 0)
    assert torch.equal(other(x), model(x))
    with pytest.raises(amp.AmpValueError, match="module '0' computes in float8 since an earlier initialize"):
        amp.initialize(model, opt_level="O4")
    assert names_in_float8(model) == ["0", "2"]
    amp.uninitialize()
    other, _ = open_model(other, "O4")  # nothing else makes a copy one of linear layers again
    open_model(model, "O4")
    assert torch.equal(other(x), model(x))


def test_checkpointed_layers_have_the_same_gradients():
    grads = []
    for forward in (lambda model, x: model(x), lambda model, x: checkpoint(model, x, use_reentrant=False)):
        model, optimizer = open_model(make_mlp())
        scaled_backward(loss_of(forward(model, batch_of(model, 0))), optimizer)
        grads.append([param.grad for param in model.parameters()])
        amp.uninitialize()
    assert all(map(torch.equal, *grads))


def test_a_compiled_model_is_one_graph_and_trains_alike():
    model, optimizer = open_model(make_mlp())
    expected = train(model, optimizer)
    amp.uninitialize()
    model, optimizer = open_model(make_mlp())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert train(model, optimizer, forward=compiled) == pytest.approx(expected, rel=1e-6)
    amp.uninitialize()
    with torch.no_grad():
        assert torch.equal(compiled(batch_of(model, 0)), model(batch_of(model, 0)))


def penalize(model):
    x = batch_of(model, 0).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    grad.float().square().sum().backward()
    return model[2].weight.grad


def grads_of_samples(model):
    def loss_of_sample(params, x):
        return loss_of(torch.func.functional_call(model, params, (x,)))

    params = dict(model.named_parameters())
    return torch.func.vmap(torch.func.grad(loss_of_sample), (None, 0))(params, batch_of(model, 0))["2.weight"]


def without_bias(layer):
    layer.bias = None
    return layer


def export(model, x):
    return torch.export.export(model, (x,), strict=False).module()  # as is the default since torch 2.7


def backward_from(output):
    output.float().sum().backward()
    return output


# What runs at O4 with these layers, and that torchao alone cannot do.
USES = {
    "checkpointed": lambda model: backward_from(checkpoint(model, torch.ones(2, 16), use_reentrant=False)),
    "a gradient of a gradient": penalize,
    "gradients of samples": grads_of_samples,
    "forward-mode": lambda model: torch.func.jvp(model, (torch.ones(2, 16),), (torch.ones(2, 16),))[1],
    "no rows": lambda model: backward_from(model[0](torch.ones(0, 16))),
    "a hessian of one row": lambda model: torch.autograd.functional.hessian(
        lambda x: model(x).float().sum(), torch.ones(16)
    ),
    "sparse": lambda model: model(torch.eye(16).to_sparse()),
    "written into": lambda model: backward_from(
        nn.Sequential(without_bias(model[0]), nn.ReLU(True))(torch.ones(2, 16))
    ),
    "one row": lambda model: backward_from(model(torch.ones(16))),
    "nested": lambda model: model(
        torch.nested.as_nested_tensor([torch.ones(2, 16)], layout=torch.jagged)
    ).values(),
    "fx": lambda model: torch.fx.symbolic_trace(model)(torch.ones(2, 16)),
    "script": lambda model: torch.jit.script(model)(torch.ones(2, 16)),
    "export": lambda model: export(model[0], torch.ones(2, 16))(torch.ones(2, 16)),
    "vmap": lambda model: torch.func.vmap(model[0])(torch.ones(2, 2, 16)),
    "inference": torch.inference_mode()(lambda model: model(torch.ones(2, 16))),
}


@pytest.mark.exhaustive(keep=4)
@pytest.mark.parametrize("use", USES)
def test_a_use_that_O4_knows_works_at_O6_and_is_near(use):
    results = []
    for level in ("O4", "O6"):
        model, _ = open_model(make_mlp(), level)
        results.append(USES[use](model))
        amp.uninitialize()
    torch.testing.assert_close(results[1], results[0], rtol=0.1, atol=0.1)  # of the same type


def train_on_ranks(wrapper):
    model = make_mlp()
    if wrapper == "FSDP2":
        for part in (model[2], model):  # a layer by itself, and within a larger unit
            fully_shard(part)
    if wrapper == "tensor parallel":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    kinds = list(map(type, model))
    model, optimizer = open_model(model)
    found = names_in_float8(model)
    forward = nn.parallel.DistributedDataParallel(model) if wrapper == "DDP" else model
    losses = train(model, optimizer, forward=forward)
    amp.uninitialize()
    return found, losses, list(map(type, model)) == kinds


@pytest.mark.process
@pytest.mark.parametrize("wrapper", ["DDP", pytest.param("FSDP2", marks=FSDP2), "tensor parallel"])
def test_trains_on_ranks_as_in_one_process(two, wrapper):
    expected = train(*open_model(make_mlp()))
    for found, losses, is_restored in two(train_on_ranks, wrapper):
        assert found == ["0", "2"]
        assert losses == pytest.approx(expected, rel=1e-3)
        assert is_restored


# ---- What is refused ----


def test_a_device_without_float8_is_refused_unless_products_are_emulated(monkeypatch, without_gpu):
    monkeypatch.delenv("AMPATCH_FLOAT8_EMULATE")
    model = make_mlp()
    before = shape_of(model)
    message = r"a cpu has no float8 products.*O4.*AMPATCH_FLOAT8_EMULATE=1"
    with pytest.raises(amp.AmpValueError, match=message):
        open_model(model)
    assert shape_of(model) == before
    assert "a cpu has no float8" in amp.OPT_LEVELS["O6"].find_lack()
    assert amp.OPT_LEVELS["O5"].find_lack() == ""


@pytest.mark.parametrize(
    ("recipe", "capability", "message"),
    [
        ("tensorwise", (8, 9), ""),
        ("tensorwise", (8, 6), "Card has compute capability 8.6, and float8 products need 8.9"),
        ("rowwise", (9, 0), ""),
        ("rowwise_with_gw_hp", (8, 9), "Card has compute capability 8.9, and float8 products need 9.0"),
    ],
)
def test_a_gpu_is_asked_for_its_capability(monkeypatch, recipe, capability, message):
    monkeypatch.delenv("AMPATCH_FLOAT8_EMULATE")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    policy = replace(amp.OPT_LEVELS["O6"], float8_recipe=recipe)
    assert policy.find_lack() == message


REFUSED = [
    ("O4", {"float8_recipe": "rowwise"}, "float8_recipe='rowwise' contradicts O4: use opt_level='O6'"),
    ("O5", {"float8_layers": ["0"]}, "float8_layers contradicts O5: use opt_level='O6'"),
    ("O6", {"float8_recipe": "delayed"}, "float8_recipe='delayed': expected one of 'tensorwise', 'rowwise'"),
    ("O6", {"float8_layers": ["9"]}, "float8_layers: '9' matches no module"),
    ("O6", {"patch_torch_functions": False}, "patch_torch_functions=False contradicts O6"),
    ("O6", {"master_weights": True}, "master_weights=True contradicts O6"),
]


@pytest.mark.parametrize(("level", "options", "message"), REFUSED)
def test_arguments_that_contradict_the_level_are_refused(level, options, message):
    with pytest.raises(amp.AmpValueError, match=message):
        open_model(make_mlp(), level, **options)


@pytest.mark.parametrize("level", ["O0", "O4", "O5", "O6"])
def test_another_level_on_the_command_line_takes_no_options_of_float8_from_the_script(level):
    model = make_mlp()
    with amp.override(**level_overrides(level)):
        open_model(model, float8_recipe="rowwise", float8_layers=["0"])
    assert names_in_float8(model) == (["0", "2"] if level == "O6" else [])


def test_a_missing_torchao_and_one_that_does_not_fit_are_told(monkeypatch):
    monkeypatch.delitem(sys.modules, "ampatch.models.float8_linear", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    message = r"cannot use torchao 0.* with torch .*: expected torchao 0.18 with torch 2.11"
    with pytest.raises(amp.AmpError, match=message):
        open_model(make_mlp())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = r"needs torchao, which is not installed: pip install 'ampatch\[float8\]'"
    with pytest.raises(amp.AmpError, match=message):
        open_model(make_mlp())


@pytest.mark.parametrize("shape", [(2, 17), (17,), ()])
def test_an_input_that_does_not_fit_raises_what_it_raises_at_O4(shape):
    errors = []
    for level in ("O4", "O6"):
        model, _ = open_model(make_mlp(), level)
        with pytest.raises(RuntimeError) as raised:
            model(torch.ones(shape))
        errors.append(str(raised.value))
        amp.uninitialize()
    assert errors[1] == errors[0]


def test_a_loss_of_float16_takes_a_dynamic_scale():
    model, optimizer = open_model(make_mlp(), dtype=torch.float16)
    assert amp.get_loss_scale() == 2.0**16
    assert model[0](batch_of(model, 0)).dtype is torch.float16
    first, *_, last = train(model, optimizer, steps=[0] * 8)
    assert last < first


# ---- On a GPU that has float8 ----


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # of inductor, which compiles what is emulated
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compiles", [False, True])
def test_trains_on_a_gpu_near_what_is_emulated(monkeypatch, recipe, compiles):
    losses = {}
    for emulate in "10":
        monkeypatch.setenv("AMPATCH_FLOAT8_EMULATE", emulate)
        if amp.OPT_LEVELS["O6"].find_lack():
            pytest.skip(amp.OPT_LEVELS["O6"].find_lack())
        with torch.device("cuda"):
            model, optimizer = open_model(make_mlp(), float8_recipe=recipe, float8_layers=["0", "2"])
        forward = torch.compile(model) if compiles else model
        losses[emulate] = train(model, optimizer, forward=lambda x, run=forward: run(x.cuda()))
        amp.uninitialize()
    assert losses["0"] == pytest.approx(losses["1"], rel=0.02)
