"""A sweep's plan: its rows, and the runs that they make."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

import ampatch as amp
from ampatch import AmpValueError
from ampatch.apex.script import Script
from ampatch.sweeps.plan import LEVELS, OPTIONS, PlannedRun, make_plan, parse_rows, parse_variant, slug

# What a script passes beside its own level would contradict another one.
PURE = dict.fromkeys(
    [
        *("cast_model_type", "patch_torch_functions", "patch_torch_functions_type", "keep_batchnorm_fp32"),
        *("float8_recipe", "float8_layers"),
        *("master_weights", "loss_scale", "cast_model_outputs"),
    ]
)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.touch()
    return Script(str(path), ("--epochs", "3"))


# ---- Rows ----


def test_a_level_overrides_what_the_script_passes_beside_its_own():
    (row,) = parse_rows(["O4"])
    assert row.overrides == PURE | {"opt_level": "O4"}
    assert not row.autocast


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("O2 loss_scale=128", {"loss_scale": "128"}),
        ("O2  keep_batchnorm_fp32=False", {"keep_batchnorm_fp32": "False"}),
        ("O1 dtype=bfloat16 loss_scale=dynamic", {"dtype": "bfloat16", "loss_scale": "dynamic"}),
        ("O5 keep_fp32=head,norm*", {"keep_fp32": ["head", "norm*"]}),
        ("O5 'keep_fp32=head, norm*'", {"keep_fp32": ["head", "norm*"]}),
        ("O1 min_loss_scale=1 max_loss_scale=65536", {"min_loss_scale": 1.0, "max_loss_scale": 65536.0}),
        ("O1 max_loss_scale=None", {"max_loss_scale": None}),
        ("O1 allow_banned=True", {"allow_banned": "True"}),
    ],
)
def test_a_variant_adds_options_that_initialize_takes_from_json(text, options):
    row = parse_variant(text)
    assert row.overrides == PURE | {"opt_level": text[:2]} | options
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(1, 1), "norm1": torch.nn.LayerNorm(1)})
    amp.initialize(
        model, torch.optim.SGD(model.parameters()), verbosity=0, **json.loads(json.dumps(row.overrides))
    )
    amp.uninitialize()


def test_a_variant_names_layers_of_float8():
    row = parse_variant("O6 float8_recipe=rowwise float8_layers=a,b")
    assert row.options == {"float8_recipe": "rowwise", "float8_layers": ["a", "b"]}
    row.validate()  # without the model that they are names of


def test_every_option_but_those_of_the_script_itself_can_vary():
    assert set(OPTIONS) == {
        *("dtype", "allow_banned", "allow_half_params", "keep_fp32", "min_loss_scale", "max_loss_scale"),
        *PURE,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown opt_level '': expected one of O0, O1, O2, O3, O4, O5, O6, autocast"),
        ("02 loss_scale=1", r"unknown opt_level '02' \(did you mean 'O2'\?\)"),
        ("Autocast", r"unknown opt_level 'Autocast' \(did you mean 'autocast'\?\)"),
        ("O2 lossscale=1", "O2 has no option 'lossscale': expected cast_model_type, .*, loss_scale, "),
        ("O2 enabled=False", "O2 has no option 'enabled'"),
        ("O2 loss_scale", "'loss_scale' has no value: expected loss_scale=VALUE"),
        ("O2 loss_scale=", "'loss_scale=' has no value"),
        ("O1 min_loss_scale=low", "'min_loss_scale=low': expected a number"),
        ("O2 loss_scale=1 loss_scale=2", "loss_scale is given twice"),
        ("O2 'loss_scale=1", "No closing quotation"),
        ("autocast keep_batchnorm_fp32=True", "autocast has no option .*: expected loss_scale, .*, dtype"),
        ("autocast dtype=float64", "dtype 'float64': expected float16 or bfloat16"),
    ],
)
def test_a_variant_that_cannot_be_read_says_what_was_expected(text, message):
    with pytest.raises(AmpValueError, match=message):
        parse_variant(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("O2 patch_torch_functions=True", "patch_torch_functions=True contradicts O2"),
        ("O2 loss_scale=-1", "loss_scale -1.0 is not"),
        ("O5 dtype=float64", "dtype='float64': expected"),
        ("O1 min_loss_scale=9e9", "min_scale=9000000000.0 lies above"),
        ("O1 allow_banned=maybe", "allow_banned='maybe': expected"),
        ("autocast loss_scale=big", "loss_scale"),
    ],
)
def test_a_plan_refuses_what_initialize_would(script, text, message):
    before = torch.mm
    with pytest.raises(AmpValueError, match=f"variant '{text}': .*{message}"):
        make_plan(script, parse_rows(["O0"], [text]))
    assert torch.mm is before


def test_a_plan_leaves_an_initialize_alone_that_is_in_use(script):
    amp.initialize(torch.nn.Linear(1, 1), verbosity=0, loss_scale=8)
    make_plan(script, parse_rows([], ["O1 loss_scale=4"]))
    assert amp.get_loss_scale() == 8
    amp.uninitialize()


SAME_TWICE = ["O2 loss_scale=1 dtype=float16", "O2 dtype=float16 loss_scale=1"]


@pytest.mark.parametrize(
    ("levels", "variants", "twice"),
    [(["O1", "O0", "O1"], [], "O1"), (["O1"], ["O1"], "O1"), ([], SAME_TWICE, SAME_TWICE[1])],
    ids=["level", "variant", "order"],
)
def test_a_row_that_is_there_twice_is_refused(levels, variants, twice):
    with pytest.raises(AmpValueError, match=f"'{twice}' is given twice"):
        parse_rows(levels, variants)


@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "gpu"])
def test_the_yardstick_is_float32_to_us_and_has_torchs_half_type_and_its_scaler(monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    (row,) = parse_rows(["autocast"])
    assert row.autocast
    assert row.autocast_dtype == ("float16" if has_gpu else "bfloat16")
    level = "O1" if has_gpu else "O4"
    assert row.overrides == PURE | {"opt_level": level, "patch_torch_functions": "False"}


@pytest.mark.parametrize(
    ("text", "half", "scale"),
    [
        ("autocast dtype=float16", "float16", None),  # O1's own, which is dynamic
        ("autocast dtype=torch.float16", "float16", None),
        ("autocast dtype=bfloat16", "bfloat16", None),
        ("autocast dtype=float16 loss_scale=128", "float16", "128"),
    ],
)
def test_the_yardstick_takes_a_half_type_and_a_scale(text, half, scale):
    row = parse_variant(text)
    assert (row.autocast_dtype, row.overrides["loss_scale"]) == (half, scale)
    assert "dtype" not in row.overrides  # the level of the half type is taken


# ---- Runs ----


def test_every_round_has_every_row_and_every_other_one_goes_backwards(script):
    plan = make_plan(script, parse_rows(["O0", "O1", "O4"]), seeds=2, repeat=2)
    order = [(run.repeat, run.seed, run.row) for run in plan.runs()]
    forth, back = ["O0", "O1", "O4"], ["O4", "O1", "O0"]
    rounds = [(0, 0, forth), (0, 1, back), (1, 0, forth), (1, 1, back)]
    assert order == [(repeat, seed, row) for repeat, seed, rows in rounds for row in rows]
    assert plan.settings.runs == len(order)


def test_no_two_runs_share_a_file(script):
    variants = ["O2 keep_fp32=a,b", "O2 keep_fp32=a-b", "O2 keep_fp32=a", "O2 loss_scale=1"]
    plan = make_plan(script, parse_rows(LEVELS, variants), seeds=2, repeat=2)
    runs = list(plan.runs())
    files = Counter(path for run in runs for path in (run.file("log"), run.file("raised"), run.file("json")))
    assert len(files) == 3 * plan.settings.runs


@pytest.mark.parametrize("value", ["a/b", "ä", "*" * 300, "..", "x y"])
def test_a_row_can_stand_in_the_name_of_a_file(value, tmp_path):
    name = slug(f"O2 keep_fp32={value}")
    (tmp_path / f"{name}-seed0-repeat0.log").touch()
    assert name.isascii()


def test_a_script_that_takes_the_seed_gets_that_of_the_run_and_keeps_its_own_seeds(script):
    given = replace(script, arguments=("--seed", "{seed}", "--out=run-{seed}", "{other}"))
    runs = list(make_plan(given, parse_rows(["O0"]), seeds=2).runs())
    assert [run.script.arguments for run in runs] == [
        ("--seed", "0", "--out=run-0", "{other}"),
        ("--seed", "1", "--out=run-1", "{other}"),
    ]
    assert [run.shift_seeds for run in runs] == [False, False]


def test_a_run_is_told_what_the_plan_says_and_survives_json(script):
    rows = parse_rows(["autocast"], ["O2 keep_fp32=head,norm* max_loss_scale=None"])
    plan = make_plan(script, rows, seeds=2, steps=100)
    runs = list(plan.runs())
    assert [PlannedRun.from_json(run.to_json()) for run in runs] == runs
    assert (runs[1].script, runs[1].steps, runs[1].shift_seeds) == (script, 100, True)
    assert (runs[1].autocast_dtype, runs[1].overrides) == (
        plan.rows[1].autocast_dtype,
        plan.rows[1].overrides,
    )


BAD = {"seeds": 0, "repeat": -1, "steps": 1, "timeout": float("nan")}


def test_a_plan_refuses_all_numbers_that_cannot_work_at_once(script):
    with pytest.raises(AmpValueError) as caught:
        make_plan(script, parse_rows(["O0"]), **BAD)
    assert str(caught.value) == (
        "seeds 0: expected 1 or more; repeat -1: expected 1 or more; steps 1: expected 2 or more: times are "
        "from step to step; timeout nan: expected seconds, more than 0"
    )
    for name, value, said in [
        ("timeout", 0, "timeout 0: "),
        ("seeds", 10**20, f"{10**20} runs: expected at most"),
    ]:
        with pytest.raises(AmpValueError, match=said):
            make_plan(script, parse_rows(["O0"]), **{name: value})
