"""Every kind of bad input: the error says what is wrong and what to do, and nothing was touched."""

import contextlib
import copy
import math
import re

import pytest
import torch
from torch.nn import BatchNorm1d, DataParallel, Linear, Parameter, Sequential

import ampatch as amp
from apex_rows import shows
from helpers import Dense, Scalar, Sparse, scaled_backward
from pictures import assert_same_picture, picture
from test_readme import explained

# One that patches torch and one that casts the model: no check asks for more.
BOTH_LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])


def make_pair():
    """A model and an optimizer with state, gradients and hooks of their own."""
    model = Sequential(Linear(3, 4), BatchNorm1d(4), Linear(4, 2))
    model.register_forward_hook(do_nothing)
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}], lr=0.1, eps=1e-4
    )
    optimizer.register_step_pre_hook(do_nothing)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def do_nothing(*_):
    return None


@contextlib.contextmanager
def raises(error, match):
    """Expects an error, and that docs/errors.md explains it."""
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert any(re.fullmatch(pattern, str(caught.value), re.DOTALL) for pattern in explained()), caught.value


@pytest.fixture
def untouched(check_torch):
    """Notes models and optimizers, and fails if anything of them or of torch is changed at the end."""
    noted = []

    def note(*objects):
        noted.append((objects, picture(*objects)))

    yield note
    check_torch()
    assert noted
    for objects, before in noted:
        assert_same_picture(picture(*objects), before)


@pytest.fixture
def refused(untouched):
    """Fails unless `initialize` raises an AmpError with the message, and leaves everything as it was."""

    def check(message, models, optimizers=None, *, objects=(), error=amp.AmpError, **options):
        untouched(*objects)
        with raises(error, match=message):
            amp.initialize(models, optimizers, **options)
        with pytest.raises(amp.NotInitializedError):
            amp.state_dict()

    return check


# Arguments of initialize


@pytest.mark.parametrize("level", ["02", "o1", "O7", "", 1, 2.0, True, b"O1", ("O1",)])
def test_an_unknown_level_is_refused(refused, level):
    pair = make_pair()
    message = "unknown opt_level .*: expected one of 'O0', 'O1', 'O2', 'O3', 'O4', 'O5'"
    refused(message, *pair, objects=pair, error=amp.AmpValueError, opt_level=level)


F16, DYNAMIC = torch.float16, amp.DynamicLossScale()
OVERRIDES = [
    ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True contradicts O1, where .*: leave it out"),
    ("O1", {"master_weights": True}, "master_weights=True contradicts O1, whose .*: leave it out"),
    ("O1", {"cast_model_type": F16}, "cast_model_type=torch.float16 contradicts O1.*: leave it out"),
    ("O2", {"patch_torch_functions": True}, "patch_torch_.*=True contradicts O2: only O1.*leave it out"),
    ("O0", {"master_weights": "True"}, "master_weights=True contradicts O0, whose .*or use opt_level='O2'"),
    ("O2", {"cast_model_type": torch.float64}, "cast_model_type=torch.float64: expected torch.float16"),
    ("O5", {"patch_torch_functions_type": F16}, "patch_torch_.*contradicts O5.*: use opt_level='O1'"),
    ("O2", {"dtype": torch.bfloat16, "cast_model_type": F16}, "dtype=.*contradict .*give one"),
    ("O1", {"dtype": F16, "patch_torch_functions_type": torch.bfloat16}, "dtype=.* and patch_.*contradict"),
    ("O2", {"dtype": torch.bfloat16, "cast_model_type": False}, "dtype=torch.bf.* and .*_type=False contra"),
    ("O5", {"dtype": torch.bfloat16, "cast_model_type": torch.float32}, "dtype=.* and .*_type=.*32 contra"),
    ("O0", {"patch_torch_functions_type": F16}, "patch_torch_functions_type=.* contradicts O0.*use"),
    ("O0", {"cast_model_type": F16}, "cast_model_type=torch.float16 contradicts O0.*use opt_level='O3'"),
    ("O0", {"patch_torch_functions": True}, "=True contradicts O0: only O1, O4 and O6"),
    ("O1", {"keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32=False contradicts O1"),
    ("O1", {"master_weights": False}, "master_weights=False contradicts O1"),
    ("O2", {"dtype": torch.float64}, "dtype=torch.float64: expected torch.float16 or torch.bfloat16"),
    ("O2", {"dtype": "quarter"}, "dtype='quarter': expected a floating dtype such as torch.float16"),
    ("O2", {"keep_batchnorm_fp32": "maybe"}, "keep_batchnorm_fp32='maybe': expected True, False or None"),
    ("O2", {"cast_model_outputs": "big"}, "cast_model_outputs='big': expected a floating dtype such as"),
    ("O1", {"enabled": "maybe"}, "enabled='maybe': expected True, False"),
    ("O1", {"enabled": "O2"}, "enabled='O2': expected True, False or None; .* by name, opt_level='O2'"),
    ("O1", {"loss_scale": DYNAMIC, "min_loss_scale": 1.0}, "min_loss_scale=1.0 .*beside .*give"),
    ("O1", {"loss_scale": DYNAMIC, "max_loss_scale": 1.0}, "max_loss_scale=1.0 beside .*give"),
    ("O1", {"min_loss_scale": 8.0, "max_loss_scale": 4.0}, "min_.*8.0 lies above max_.*4.0"),
    *[("O1", {"verbosity": value}, f"verbosity.*{value!r}") for value in ("loud", None)],
    *[
        ("O1", {"num_losses": count}, f"num_losses is {count!r}: expected (a whole number, )?1 or more")
        for count in (0, -1, 1.0, "2", None, True)
    ],
    ("O1", {"loss_scale": 1e-60}, "loss_scale .*1e-60"),
    ("O1", {"loss_scale": "1e60"}, r"loss_scale .*1e\+60"),
    *[
        (level, {"loss_scale": scale}, 'loss_scale.*: expected .*"dynamic" or an amp.DynamicLossScale')
        for level, scale in zip(["O1", "O2"] * 3, (0, math.nan, "-2", "fast", True, {}), strict=True)
    ],
]


@shows("initialize-contradictions")
@pytest.mark.parametrize(("level", "options", "message"), OVERRIDES)
def test_an_override_that_contradicts_the_level_or_cannot_be_read_is_refused(
    refused, level, options, message
):
    pair = make_pair()
    refused(message, *pair, objects=pair, opt_level=level, **options)


# Models and optimizers


def in_half(model, dtype):
    model[2].bias.data = model[2].bias.data.to(dtype)
    model[2].bias.grad = None
    return model


NO_MODEL = "expected a torch.nn.Module or a list of them"
NO_OPTIMIZER = "expected a torch.optim.Optimizer"
HALF = "already: expected float32; remove .half"
STRANGER = r"\(Adam\) steps parameters of no initialized model"
# What is given in the place of a model and its optimizer.
WRONG = {
    "wrapped": (
        lambda model, optimizer: ([Dense(), DataParallel(model)], optimizer),
        r"models\[1\] is wrapped in DataParallel already: call initialize on the bare model, then wrap",
    ),
    "float16": (
        lambda model, optimizer: (in_half(model, torch.float16), optimizer),
        rf"models\[0\]: parameter '2.bias' is torch.float16 {HALF}",
    ),
    "bfloat16": (
        lambda model, optimizer: (in_half(model, torch.bfloat16), optimizer),
        rf"models\[0\]: parameter '2.bias' is torch.bfloat16 {HALF}",
    ),
    **{
        f"a {type(wrong).__name__} for a model": (
            lambda model, optimizer, wrong=wrong: (wrong, optimizer),
            rf"models\[0\] is a {type(wrong).__name__}: {NO_MODEL}",
        )
        for wrong in (None, "model", Linear, torch.ones(1), 3, {"a": Linear(1, 1)}, iter([]))
    },
    "the other way round": (
        lambda model, optimizer: (optimizer, model),
        rf"models\[0\] is a Adam: {NO_MODEL}: models come first, then optimizers",
    ),
    "an optimizer among models": (
        lambda model, optimizer: ([model, optimizer], None),
        rf"models\[1\] is a Adam: {NO_MODEL}",
    ),
    **{
        f"a {type(wrong).__name__} for an optimizer": (
            lambda model, optimizer, wrong=wrong: (model, [optimizer, wrong]),
            rf"optimizers\[1\] is a {type(wrong).__name__}: {NO_OPTIMIZER}",
        )
        for wrong in (3, "adam", torch.optim.Adam, torch.ones(1), None)
    },
    "a model for an optimizer": (
        lambda model, optimizer: (model, model),
        rf"optimizers\[0\] is a Sequential: {NO_OPTIMIZER}",
    ),
    "a scheduler": (
        lambda model, optimizer: (model, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        r"optimizers\[0\] is a ConstantLR, a learning rate scheduler: pass the optimizer that it was made",
    ),
    "a dictionary of optimizers": (
        lambda model, optimizer: (model, {"a": optimizer}),
        f"optimizers.* is a dict: {NO_OPTIMIZER} or a list",
    ),
    "of another model": (
        lambda model, optimizer: (make_pair()[0], optimizer),
        rf"optimizers\[0\] {STRANGER} \(.*shape \(4, 3\)\): pass its",
    ),
    "of a model that was copied": (
        lambda model, optimizer: (copy.deepcopy(model), optimizer),
        f"{STRANGER} .*: pass its model to initialize too",
    ),
    "twice the same": (
        lambda model, optimizer: (model, [optimizer, optimizer]),
        r"optimizers\[1\] \(Adam\) is given to initialize twice: an optimizer belongs to .*uninitialize",
    ),
    "an optimizer that cannot skip": (
        lambda model, optimizer: (model, torch.optim.LBFGS(model.parameters())),
        r"optimizers\[0\] is LBFGS, which .* cannot skip one: use a static scale \(loss_scale=1.0\)",
    ),
}


@shows("initialize-half-params")
@BOTH_LEVELS
@pytest.mark.parametrize(("give", "message"), WRONG.values(), ids=WRONG)
def test_models_and_optimizers_that_cannot_be_taken_are_refused(refused, level, give, message):
    model, optimizer = make_pair()
    models, optimizers = give(model, optimizer)
    given = [*(models if isinstance(models, list) else [models]), model, optimizer]
    given = [one for one in given if isinstance(one, torch.nn.Module | torch.optim.Optimizer)]
    is_of_another_type = re.search(f"{NO_MODEL}|{NO_OPTIMIZER}", message)
    error = amp.AmpTypeError if is_of_another_type else amp.AmpError
    refused(message, models, optimizers, objects=given, error=error, opt_level=level)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"opt_lvl": "O2"}, "'opt_lvl' \\(did you mean 'opt_level'\\?\\)"), ({"b": 1, "a": 1}, "'a', 'b'")],
)
def test_an_argument_that_there_is_not_is_refused_and_the_nearest_is_named(refused, given, said):
    refused(f"^initialize has no argument {said}$", *make_pair(), error=amp.AmpTypeError, **given)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_parameter_without_values_yet_is_refused_where_the_model_is_cast(level):
    model = Sequential(torch.nn.LazyLinear(2))
    with raises(amp.AmpValueError, match=r"parameter '0.weight' is not initialized yet: run one forward"):
        amp.initialize(model, opt_level=level)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (
            "decoder.*",
            r"keep_fp32: 'decoder.\*' matches no module: expected the name.*first modules are '0', '1', '2'",
        ),
        (["0", "nowhere"], "keep_fp32: 'nowhere' matches no module"),
        ("00", "keep_fp32: '00' matches no module.*similar names are '0'"),
        (torch.nn.LSTM, "keep_fp32: <class '.*LSTM'> matches no module"),
        (Linear(1, 1), "keep_fp32: Linear.* matches no module"),
        ([3], "keep_fp32 holds 3: expected names of modules"),
        (["0", int], "keep_fp32 holds <class 'int'>: expected names of modules"),
        (5, "keep_fp32.*5.*expected names of modules"),
        ("", "keep_fp32: '' matches no module"),
    ],
    ids=str,
)
def test_a_keep_fp32_entry_that_matches_nothing_is_refused(refused, keep, message):
    pair = make_pair()
    refused(message, *pair, objects=pair, opt_level="O2", keep_fp32=keep)


@BOTH_LEVELS
def test_the_same_optimizer_in_a_second_call_is_refused_and_the_first_call_stays(untouched, level):
    model, optimizer = make_pair()
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = picture(model, optimizer)
    extra = Dense()
    untouched(extra)
    with raises(RuntimeError, match=r"optimizers\[0\] \(Adam\) is given to initialize twice: .*uninitialize"):
        amp.initialize(extra, optimizer, opt_level=level, verbosity=0)
    assert_same_picture(picture(model, optimizer), before)
    assert len(amp.state_dict()) == 1
    scaled_backward(model(torch.randn(5, 3)).float().sum(), optimizer)
    optimizer.step()
    amp.uninitialize()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_optimizer_of_the_masters_of_another_one_is_refused(level):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level=level, keep_fp32=["1"], verbosity=0)
    other = torch.optim.Adam(amp.master_params(optimizer))  # and two parameters of the model
    with raises(amp.AmpValueError, match=r"optimizers\[0\] \(Adam\) steps masters of an earlier optimizer"):
        amp.initialize(model, other, opt_level=level, verbosity=0)


def test_two_half_types_of_patched_functions_are_refused_and_the_first_stays():
    first, second = Scalar(), Dense()
    amp.initialize(first, opt_level="O1", verbosity=0)
    before = picture(second)
    with raises(amp.AmpValueError, match=r"O4 in torch.bfloat16, but .*torch.float16: use one half type"):
        amp.initialize(second, opt_level="O4", verbosity=0)
    assert picture(second) == before
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.float16


# Calls before initialize


CALLS = {
    "scale_loss": lambda optimizer: amp.scale_loss(torch.ones(()), optimizer),
    "state_dict": lambda optimizer: amp.state_dict(),
    "load_state_dict": lambda optimizer: amp.load_state_dict({}),
    "step_was_skipped": lambda optimizer: amp.step_was_skipped(optimizer),
    "get_loss_scale": lambda optimizer: amp.get_loss_scale(),
    "set_loss_scale": lambda optimizer: amp.set_loss_scale(2.0),
}


@shows("scale-before-initialize")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("closed_before", [False, True], ids=["never", "closed"])
def test_a_call_before_initialize_says_so(untouched, call, closed_before):
    model, optimizer = make_pair()
    if closed_before:
        amp.initialize(Dense(), opt_level="O2", verbosity=0)
        amp.uninitialize()
    untouched(model, optimizer)
    with raises(
        amp.NotInitializedError, match=r"not initialized: call amp.initialize\(model, optimizer\)"
    ) as e:
        call(optimizer)
    assert isinstance(e.value, AttributeError)
    assert isinstance(e.value, RuntimeError)


# Arguments of scale_loss


@pytest.fixture
def opened():
    model, optimizer = make_pair()
    amp.initialize(model, optimizer, opt_level="O2", num_losses=2, loss_scale="dynamic", verbosity=0)
    before = picture(model, optimizer), amp.state_dict()
    yield model, optimizer
    assert (picture(model, optimizer), amp.state_dict()) == before


@pytest.mark.parametrize("loss_id", [2, 100, -1, "0", 0.0, None, True])
def test_a_loss_id_that_is_no_whole_number_in_the_range_is_refused(opened, loss_id):
    if type(loss_id) is int:
        error, message = amp.AmpValueError, "is out of range: expected 0 to 1; .*num_losses"
    else:
        error, message = amp.AmpTypeError, "expected a whole number from 0 to 1"
    for call in [
        lambda: amp.scale_loss(torch.ones(()), opened[1], loss_id=loss_id),
        lambda: amp.get_loss_scale(loss_id),
        lambda: amp.set_loss_scale(2.0, loss_id),
    ]:
        with raises(error, match=f"loss_id (is )?{loss_id!r}:? {message}"):
            call()


def test_an_optimizer_that_initialize_did_not_return_is_refused(opened):
    model, optimizer = make_pair()
    before = picture(model, optimizer)
    message = (
        r"optimizers\[{}\] \(Adam\) is not one that initialize\(\) returned: pass it to initialize first"
    )
    with raises(amp.AmpValueError, match=message.format(0)):
        amp.scale_loss(torch.ones(()), optimizer)
    with raises(amp.AmpValueError, match=message.format(1)):
        amp.scale_loss(torch.ones(()), [opened[1], optimizer])
    with raises(amp.AmpValueError, match=message.format(0)):
        amp.step_was_skipped(optimizer)
    assert_same_picture(picture(model, optimizer), before)


def test_an_optimizer_of_a_session_that_was_closed_is_refused():
    model, optimizer = make_pair()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    amp.uninitialize()
    amp.initialize(Dense(), opt_level="O1", verbosity=0)
    with raises(amp.AmpValueError, match="is not one that initialize"):
        amp.scale_loss(torch.ones(()), optimizer)


@pytest.mark.parametrize("wrong", [None, "adam", 3, {}], ids=repr)
def test_what_is_no_optimizer_is_refused_by_scale_loss(opened, wrong):
    message = rf"optimizers\[0\] \({type(wrong).__name__}\) is not one that initialize\(\) returned"
    with raises(amp.AmpValueError, match=message):
        amp.scale_loss(torch.ones(()), wrong)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_backward_on_what_scale_loss_returns_is_told_to_write_with(enabled):
    model, optimizer = make_pair()
    amp.initialize(model, optimizer, enabled=enabled, verbosity=0)
    with raises(amp.AmpTypeError, match=r"^scale_loss\(...\).backward\(\): .*`with amp.scale_loss"):
        amp.scale_loss(torch.ones(()), optimizer).backward()


@pytest.mark.parametrize("wrong", [1.0, None, [torch.ones(())], "loss"], ids=repr)
def test_a_loss_that_is_no_tensor_is_refused(opened, wrong):
    message = f"loss is a {type(wrong).__name__}: expected a tensor, the output of the loss function"
    with raises(amp.AmpTypeError, match=message):
        amp.scale_loss(wrong, opened[1])


# Registrations


REGISTER = [
    amp.register_half_function,
    amp.register_bfloat16_function,
    amp.register_float_function,
    amp.register_promote_function,
]


@shows("o1-register-missing")
@pytest.mark.parametrize("register", REGISTER, ids=lambda function: function.__name__)
@pytest.mark.parametrize("level", [None, "O1"])
def test_a_registration_of_a_missing_name_is_refused(register, level):
    if level:
        amp.initialize(Sparse(), opt_level=level, verbosity=0)
    names = set(vars(torch))
    with raises(ValueError, match="no function named 'softmaxx' in torch: check the name and the module"):
        register(torch, "softmaxx")
    with raises(ValueError, match=r"torch.pi is a float: expected a function"):
        register(torch, "pi")
    with raises(TypeError, match=r"name is .*: expected a string"):
        register(torch, torch.softmax)
    assert set(vars(torch)) == names
    amp.uninitialize()
    amp.initialize(Dense(), opt_level="O1", verbosity=0)


@pytest.mark.parametrize(
    "decorate", [amp.half_function, amp.bfloat16_function, amp.float_function, amp.promote_function]
)
def test_a_decorator_of_what_is_no_function_is_refused(decorate):
    with raises(amp.AmpTypeError, match="3 is a int: expected a function to decorate"):
        decorate(3)


# Many things at once


def test_a_parameter_of_no_model_beside_known_ones_is_accepted():
    model, extra = Dense(), Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=1.0)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert list(amp.master_params(optimizer))[-1] is extra


def test_no_message_of_an_error_is_longer_than_a_screen():
    model = Sequential(*(Linear(1, 1) for _ in range(200)))
    with pytest.raises(amp.AmpError) as error:
        amp.initialize(model, keep_fp32=model.__class__(Linear(1, 1)), verbosity=0)
    assert len(str(error.value)) < 500
