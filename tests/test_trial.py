"""What the doctor tries: advice that it follows to the letter, and which comes first then."""

import ast
import dis
import json
import linecache
import math
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import CodeType

import pytest
import torch
from torch import nn

from ampatch import AmpError
from ampatch.__main__ import main
from ampatch.apex.script import Script
from ampatch.doctor.campaign import FAULT, Campaign
from ampatch.doctor.child import edited
from ampatch.doctor.fixes import (
    Bfloat16,
    Both,
    Dynamic,
    Float32,
    Keep,
    OtherLevel,
    Paste,
    Rank,
    Rate,
    StartScale,
    Tried,
    Words,
    join,
)
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.precision import LoweredRates
from ampatch.doctor.instruments.region import cast_back
from ampatch.doctor.instruments.tape import is_cured_by_scale
from ampatch.doctor.instruments.trace import Trace
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.rules.remedies import bound_exponent, own_type, subtract_maximum, written
from ampatch.doctor.run import ScriptRun
from ampatch.doctor.runs import Seen
from ampatch.doctor.silent.looks import Looks
from ampatch.doctor.suspects import is_flat, learns_less
from ampatch.doctor.text.mend import (
    Mend,
    constructed,
    log_source,
    mended,
    normalized_source,
    target_source,
)
from ampatch.doctor.text.source import Change, changed_texts, line_before, read, statement_of
from ampatch.doctor.trial import Trial, find_break, find_what_learns
from ampatch.doctor.words import describe_finding
from doctor_samples import sample_finding
from faults import report_on

TEXT = """\
class Part:
    def forward(self, x):
        y = x.exp(
        )
        return y / 1e-8 - 1e-8
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(TEXT)
    return str(tmp_path / "net.py")


def statement(text, line, last=None):
    """Text in the place of lines of net.py."""
    return Paste("that", (Change("net.py", line, last or line, tuple(text.split("\n"))),))


@pytest.mark.parametrize(
    ("fix", "first", "last", "text"),
    [
        (statement("y = x.float().exp()", 3, 4), 2, 4, "        y = x.float().exp()"),
        (statement("@half\ndef forward(self, x):", 2), 1, 2, "    @half\n    def forward(self, x):"),
    ],
)
def test_text_stands_in_the_place_of_what_it_replaces(file, fix, first, last, text):
    lines = TEXT.split("\n")
    expected = "\n".join([*lines[:first], text, *lines[last:]])
    changes = fix.change(ScriptRun("train.py")).changes
    assert changed_texts(changes) == {file: expected}
    assert ScriptRun.from_json(ScriptRun("train.py", changes=changes).to_json()).changes == changes


def test_a_number_is_written_in_the_place_of_another_of_the_same_sign(file):
    assert written("net.py:5", "-1e-8", "-1e-4").lines == ("return y / 1e-4 - 1e-4",)


@pytest.mark.parametrize(
    ("fix", "changed"),
    [
        (Keep(("a[0]", "it's"), "net"), {"keep_fp32": ("a[0]", "it's")}),
        (Keep(("a",), "net", "cpu"), {"keep_fp32": ("a",)}),
        (OtherLevel("O4"), {"level": "O4"}),
        (Bfloat16("cpu"), {"bfloat16": True}),
        (Rate(" and rest"), {"rate": 0.1}),
        (Rate("").next(), {"rate": 0.01}),
        (StartScale(24), {"init_scale": 2.0**24}),
        (Dynamic(128.0), {"init_scale": 2.0**16}),
        (Float32(None), {"level": "O0", "float32": True}),
    ],
)
def test_a_fix_applies_itself_to_a_run(fix, changed):
    assert fix.change(ScriptRun("train.py")) == ScriptRun("train.py", **changed)
    assert str(fix)


def test_words_are_left_to_a_reader_and_no_line_is_changed_twice(file):
    assert Words("lower the learning rate, and take opt_level O4").change(ScriptRun("train.py")) is None
    first = statement("y = x.float().exp()", 3, 4)
    run = first.change(ScriptRun("train.py"))
    assert statement("y = 1", 4).change(run) is None
    assert (
        Both((("net.py:3", first), ("net.py:4", statement("y = 1", 4)))).change(ScriptRun("train.py")) is None
    )
    below = statement("return y", 5)
    assert changed_texts(below.change(run).changes)[file].split("\n")[2:4] == [
        "        y = x.float().exp()",
        "        return y",
    ]


@pytest.mark.parametrize(("line", "before"), [(2, 2), (3, 3), (5, 3), (6, 4), (7, 6), (8, 7)])
def test_a_line_of_a_changed_file_is_known_on_the_disk(line, before):
    changes = [Change("net.py", 3, 3, ("a", "b", "c")), Change("net.py", 5, 6, ("d",))]
    assert line_before(changes, f"net.py:{line}") == f"net.py:{before if before != 6 else 5}"
    assert line_before(changes, "other.py:9") == "other.py:9"


ONE_LINE = """\
class Part:
    def forward(self, x): a = x * 2; y = x.exp(); return y + a
"""


def test_of_several_statements_on_a_line_one_is_put_into_float32(tmp_path):
    (tmp_path / "net.py").write_text(ONE_LINE)
    source = read(str(tmp_path / "net.py"))
    first, second, _ = source.statements_at(2)
    change = source.replaced(second, ("with off:", "    y = x.float().exp()"))
    assert change.lines == (
        "def forward(self, x):",
        "    a = x * 2",
        "    with off:",
        "        y = x.float().exp()",
        "    return y + a",
    )
    code = compile(ONE_LINE, "net.py", "exec")
    while inner := [each for each in code.co_consts if isinstance(each, CodeType)]:
        (code,) = inner
    at = next(it.offset for it in dis.get_instructions(code) if it.argval == "exp")
    assert source.statement_of(code, at, 2) is (second if sys.version_info >= (3, 11) else first)
    assert mended(f"{tmp_path}/net.py:2", "exp", Mend(suffix=".clamp(max=10)")).lines == (
        "def forward(self, x): a = x * 2; y = x.clamp(max=10).exp(); return y + a",
    )


@pytest.mark.parametrize(
    ("line", "mended"),
    [
        ("-torch.log(torch.sigmoid(a - b)).mean()", "-torch.nn.functional.logsigmoid(a - b).mean()"),
        ("(x.sigmoid() + 1e-8).log()", "torch.nn.functional.logsigmoid(x)"),
        ("torch.log(1 - torch.sigmoid(x) + EPS)", "torch.nn.functional.logsigmoid(-(x))"),
        ("F.softmax(z / t, dim=-1).log()", "torch.nn.functional.log_softmax(z / t, dim=-1)"),
        ("p * (q.softmax(-1) + 1e-9).log()", "p * torch.nn.functional.log_softmax(q, -1)"),
        ("torch.exp(x - y).sum(1, keepdim=True).log()", "torch.logsumexp(x - y, 1, keepdim=True)"),
        ("torch.log(torch.sum(x.exp(), dim=-1) + 1e-8)", "torch.logsumexp(x, dim=-1)"),
        ("torch.log1p(torch.exp(-x))", "torch.nn.functional.softplus(-x)"),
        ("torch.log(1 + x.exp())", "torch.nn.functional.softplus(x)"),
        ("torch.log(x.exp().sum(1) + y)", None),
        ("(y, torch.log(y))", None),
        ("torch.log(x.exp().sum())", None),
        ("torch.log(p)", None),
        ("torch.log(1 - torch.softmax(x, -1))", None),
    ],
)
def test_the_logarithm_of_a_sigmoid_or_a_softmax_becomes_one_function(tmp_path, line, mended):
    (tmp_path / "net.py").write_text(f"y = {line}\n")
    change = log_source(f"{tmp_path}/net.py:1")
    assert (change and change.lines) == (mended and (f"y = {mended}",))


def test_exponentials_that_have_a_name_are_mended_with_their_logarithm(tmp_path):
    lines = ["e = torch.exp(self.a(x))", "h = torch.log(1 + e)"]
    (tmp_path / "net.py").write_text("\n".join(lines))
    change = log_source(f"{tmp_path}/net.py:1")
    assert change.lines == ("e = self.a(x)", "h = torch.nn.functional.softplus(e)")
    (tmp_path / "net.py").write_text("\n".join([*lines, "y = e"]))
    linecache.checkcache()
    assert log_source(f"{tmp_path}/net.py:1") is None  # something else reads it


@pytest.mark.parametrize(
    ("between", "line", "mended"),
    [
        ("", "p.log()", "torch.nn.functional.log_softmax(z * 8, dim=-1)"),
        ("", "torch.log(p + 1e-8)", "torch.nn.functional.log_softmax(z * 8, dim=-1)"),
        ("p = self.drop(z).softmax(-1)", "p.log()", None),
        ("", "torch.log(1 - gate)", "torch.nn.functional.logsigmoid(-(z))"),
        ("q = p", "q.log()", "torch.nn.functional.log_softmax(z * 8, dim=-1)"),
        ("other = 2 * p", "p.log()", "torch.nn.functional.log_softmax(z * 8, dim=-1)"),
        *((it, "p.log()", None) for it in ("z = z + 1", "p = p / 2", "p /= 2", "p[0] = 1", "p.mul_(2)")),
        *((it, "p.log()", None) for it in ("if a:\n    z = 1", "p[0] += 1", "for p in z:\n    pass")),
    ],
)
def test_what_a_name_holds_is_seen_by_the_logarithm_of_it(tmp_path, between, line, mended):
    lines = ["p = (z * 8).softmax(dim=-1)", "gate = torch.sigmoid(z)", *between.split("\n"), f"y = {line}"]
    (tmp_path / "net.py").write_text("\n".join(lines) + "\n")
    change = log_source(f"{tmp_path}/net.py:{len(lines)}")
    assert (change and change.lines) == (mended and (f"y = {mended}",))


def test_a_loss_that_is_an_object_is_mended_where_it_is_made(tmp_path):
    (tmp_path / "net.py").write_text("part, loss = 1, nn.CTCLoss()\n\n\ny = loss(a, b)\n")
    change = constructed(f"{tmp_path}/net.py:4", "CTCLoss", "zero_infinity=True")
    assert change == Change(f"{tmp_path}/net.py", 1, 1, ("part, loss = 1, nn.CTCLoss(zero_infinity=True)",))
    assert constructed(f"{tmp_path}/net.py:4", "BCELoss", "") is None


@pytest.mark.parametrize(
    ("line", "mended"),
    [
        ("self.edge(torch.cat([a, b], -1))", "self.edge({}(torch.cat([a, b], -1), dim=1))"),
        ("self.act(self.edge(x))", "self.act(self.edge({}(x, dim=1)))"),
        ("layer(x) + x", "layer({}(x, dim=1)) + x"),
        ("self.parts[0](x, 2)", "self.parts[0]({}(x, dim=1), 2)"),
        ("torch.exp(x.view(3)) + len(x)", None),
    ],
)
def test_what_a_layer_takes_is_normalized(tmp_path, line, mended):
    (tmp_path / "net.py").write_text(f"y = {line}\n")
    expected = mended and (f"y = {mended.format('torch.nn.functional.normalize')}",)
    change = normalized_source(f"{tmp_path}/net.py:1", "layers.0.edge.1", 1)
    assert (change and change.lines) == expected


def test_an_exponent_that_float32_cannot_hold_is_bounded(tmp_path):
    (tmp_path / "net.py").write_text("y = torch.exp(a - b) * c\n")
    finding = sample_finding(op="exp", where=f"{tmp_path}/net.py:1", float32_survives=False)
    assert str(bound_exponent(finding)).endswith("y = torch.exp((2 * torch.tanh((a - b) / 2))) * c")
    assert bound_exponent(replace(finding, float32_survives=True)) is None


@pytest.mark.parametrize(
    ("line", "back"),
    [
        ("y = a * b + 1", "y = (a.float() * b.float() + 1).to(a.dtype)"),
        ("y = (a /\n     b)", "y = ((a.float() /\n     b.float()).to(a.dtype))"),
        ("y = a, b", None),
        ("y[0] = a", None),
        ("y = 1", None),
    ],
)
def test_what_a_part_of_a_half_model_computes_is_cast_back(tmp_path, line, back):
    (tmp_path / "net.py").write_text(line)
    source, statement = statement_of(f"{tmp_path}/net.py:1")
    taken = [it for it in ast.walk(statement) if isinstance(it, ast.Name) and it.id in "ab"]
    edits = cast_back(source, statement, [(source.end(it), ".float()", 0) for it in taken], taken)
    assert (source.edited(statement, edits).lines if edits else None) == (back and tuple(back.split("\n")))


def test_another_type_is_said_as_it_is_written(tmp_path):
    path = tmp_path / "net.py"
    path.write_text("model = Net().half()\nx = x.to(torch.half)\n")
    said = (
        f"write .float() in the place of .half(), at {path}:1, and write torch.float32 in the place of half"
    )
    assert str(own_type([f"{path}:1"], "float32", "")) == f"{said}, at {path}:2"


def test_a_gradient_is_asked_whether_it_fits_where_the_scale_has_fallen_to_0():
    x = torch.ones(2, requires_grad=True)
    node = (x * 3).grad_fn
    assert is_cured_by_scale(node, (torch.tensor([torch.finfo(torch.float32).max / 2, 1.0]),), 0.0)


@pytest.mark.parametrize(
    ("made", "written", "mended"),
    [
        ("out = torch.zeros_like(v)", "out[0] = v", "out = torch.zeros_like(v, dtype=torch.float32)"),
        ("out = v.new_empty(3, 4)", "out[0] += v", "out = v.new_empty(3, 4, dtype=torch.float32)"),
        ("out = torch.empty(3, dtype=v.dtype)", "out.copy_(v)", "out = torch.empty(3, dtype=torch.float32)"),
        ("out = torch.zeros(3)", "out[0] = v", None),  # which is float32
        ("out = net(v)", "out[0] = v", None),
    ],
)
def test_what_is_written_into_is_made_float32(tmp_path, made, written, mended):
    (tmp_path / "net.py").write_text(f"out = v\n{made}\n{written}\n")
    change = target_source(f"{tmp_path}/net.py:3")
    assert (change and (change.first, change.lines)) == (mended and (2, (mended,)))


@pytest.mark.parametrize(
    ("line", "is_apt"),
    [
        ("w = torch.exp(scores)", True),
        ("p = s.exp() / s.exp().sum(-1)", True),
        ("kl = (m**2 + s.exp() - s).sum()", False),
    ],
)
def test_a_maximum_is_subtracted_where_a_quotient_takes_the_exponential(tmp_path, line, is_apt):
    (tmp_path / "net.py").write_text(line)
    finding = sample_finding(op="exp", where=f"{tmp_path}/net.py:1")
    assert (subtract_maximum(finding) is not None) == is_apt


class Rated(torch.optim.Optimizer):
    def step(self, closure=None):
        """Notes its rates."""
        self.rates = [it.get("lr") for it in self.param_groups]


def test_a_rate_is_lowered_whoever_sets_it_unless_an_optimizer_finds_it():
    layer = nn.Linear(2, 1)
    with ExitStack() as undo:
        LoweredRates(clock := Clock(undo), 0.1)
        clock.follow_run()
        groups = [{"params": [layer.weight], "lr": None}, {"params": [layer.bias]}]
        optimizer, without = Rated(groups, {"lr": 2.0}), Rated([layer.weight], {})
        found = []
        for rate in (2.0, 4.0, 4.0):
            optimizer.param_groups[1]["lr"] = rate  # as a schedule by hand does
            optimizer.step()
            found.append((optimizer.rates, optimizer.param_groups[1]["lr"]))
        without.step()
    assert found == [([None, 0.2], 2.0), ([None, 0.4], 4.0), ([None, 0.4], 4.0)]
    assert without.rates == [None]
    optimizer.step()
    assert optimizer.rates == [None, 4.0]  # undone


@pytest.mark.parametrize("is_module", [False, True])
def test_a_run_reads_texts_that_are_not_on_the_disk(tmp_path, monkeypatch, is_module):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    (tmp_path / "tried_main.py").write_text("import tried_part\ntried_part.seen.append('main')\n")
    (tmp_path / "tried_part.py").write_text("seen = []\n")
    new = {str(tmp_path / "tried_main.py"): "import tried_part\n0 / 0\n"}
    new |= {str(tmp_path / "tried_part.py"): "seen = ['new']\n"}
    script = Script("tried_main" if is_module else "tried_main.py", is_module=is_module)
    for texts, error in ((new, ZeroDivisionError), ({}, None)):
        sys.modules.pop("tried_part", None)
        with edited(texts):
            if error is None:
                script.run()
            else:
                with pytest.raises(error):
                    script.run()
        assert sys.modules["tried_part"].seen == (["new"] if error else ["main"])


# ---- Which comes first ----


def seen(*losses):
    """Makes what a run leaves with these losses; None stands for a step whose gradients were not finite."""
    attempts = [
        Attempt(step, gradients=it is not None, loss=it is None or math.isfinite(it), value=it or 0.0)
        for step, it in enumerate(losses)
    ]
    return Seen(tuple(attempts), False, False, ())


RISES = seen(*[4.0] * 6, 5.0, 6.0)
GOOD, FLAT, LESS, SHORT = seen(*range(8, 0, -1)), seen(*[4.0] * 8), seen(*[8.0] * 5, 7, 7, 7), seen(8.0, 7.0)
BAD, LATE = seen(8.0, math.nan, *[1.0] * 6), seen(*range(8, 1, -1), None)
ALMOST = seen(*[8.0] * 2, 6, 4, 4, 3, 2, 2)
LEVELS = ("O1", "O2", "O3", "O4", "O5")


def order_of(came, first="", again=GOOD):
    """Tries a level for each run that came of one; returns the order of the advice, and what was said."""
    came = dict(zip(LEVELS, came, strict=False))
    remedies = [*([Words(first)] if first else []), *map(OtherLevel, came), Words("mend the data")]

    def start(name, run):
        if came[run.level] is None:
            raise AmpError("it left no report")
        return came[run.level]

    finding = sample_finding(step=1, remedies=tuple(remedies))
    found = Trial(start, lambda *_: (), ScriptRun("train.py"), BAD, again).order(finding)
    return [str(it).removeprefix("opt_level ") for it in found.remedies], tuple(map(str, found.tried))


LAST = "O0: float32 throughout; nothing less that was tried was enough"
TRAINS = "the script trains, its loss falls by 80%, in float32 it falls by 80%"
BREAKS = "it breaks again, at step 1"


@pytest.mark.parametrize(
    ("came", "order", "said"),
    [
        ([GOOD, GOOD], ["O1", "O2", "mend the data"], (TRAINS, "", "")),
        ([BAD, GOOD], ["O2", "mend the data", "O1"], (TRAINS, "", BREAKS)),
        ([LATE, GOOD], ["O2", "mend the data", "O1"], (TRAINS, "", "it breaks again, at step 7")),
        ([SHORT, GOOD], ["O2", "mend the data", "O1"], (TRAINS, "", "it ends after 2 steps")),
        ([None, GOOD], ["O2", "mend the data", "O1"], (TRAINS, "", "it ends without a report")),
        (
            [BAD, LESS, FLAT],
            [LAST, "O2", "O3", "mend the data", "O1"],
            (
                *(TRAINS, "all stays finite, but the loss falls by 12%, in float32 it falls by 80%"),
                *("all stays finite, but the loss does not fall, in float32 it falls by 80%", "", BREAKS),
            ),
        ),
        (
            [BAD] * 4 + [GOOD],
            ["O5", LAST, "mend the data", *LEVELS[:4]],
            ("", TRAINS, "", *[BREAKS] * 4),
        ),
    ],
)
def test_what_trains_comes_first_and_what_breaks_last(came, order, said):
    assert order_of(came) == (order, said)


@pytest.mark.parametrize(
    ("came", "again", "order"),
    [
        ([GOOD], GOOD, ["O1", "divide", "mend the data"]),
        ([BAD], GOOD, ["divide", LAST, "mend the data", "O1"]),
        ([LESS], GOOD, ["divide", LAST, "O1", "mend the data"]),
        ([ALMOST, GOOD], GOOD, ["O2", "O1", "divide", "mend the data"]),  # nearer to float32
        ([BAD], BAD, ["divide", "mend the data", "O1"]),
        ([BAD], FLAT, ["divide", "mend the data", "O1"]),
        ([BAD], replace(GOOD, is_half=True), ["divide", "mend the data", "O1"]),
    ],
)
def test_what_takes_a_reader_comes_behind_what_trains(came, again, order):
    assert order_of(came, first="divide", again=again)[0] == order


def test_a_run_that_begins_late_for_its_scale_is_measured_where_it_ends():
    searching = [Attempt(step, 2.0**-step, True, gradients=False, value=4.0) for step in range(4)]
    trained = [Attempt(step, 2.0**-4, True, value=it) for step, it in enumerate((2.0, 1.5, 1.0, 1.0), 4)]
    late = Seen((*searching, *trained), False, False, ())
    there = seen(3.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.5, 0.5)
    order, said = order_of([late, GOOD], again=there)
    assert order[0] == "O2"
    steps = "4 of 8 steps are skipped, and its loss ends at 1, in float32 at 0.5"
    assert said[order.index("O1")] == f"all stays finite, but {steps}"
    soon = Seen((*searching[:2], *trained, *trained[-2:]), False, False, ())  # as the search of any script
    assert order_of([soon], again=there)[1][0] == TRAINS.replace("80%", "75%")


@pytest.mark.parametrize(
    ("broken", "first"), [([], None), ([8], None), ([8, 9], 8), ([8, 14], None), ([13, 14], 13)]
)
def test_one_step_that_is_skipped_is_not_the_fault_that_lasts(broken, first):
    attempts = scaled(GOOD_SCALE, broken)
    assert find_break(attempts, scaled(GOOD_SCALE[:8], []), lasts=True) == first


def test_what_changes_what_half_holds_as_well_does_not_end_the_search():
    fixes = Paste("clamp", (Change("a.py", 1, 1, ("x",)),), is_exact=False), OtherLevel("O4")
    finding = sample_finding(step=1, remedies=fixes)
    found = Trial(lambda *_: GOOD, lambda *_: (), ScriptRun("train.py"), BAD, GOOD).order(finding)
    assert [str(it) for it in found.tried] == [TRAINS, TRAINS]
    assert found.remedies == fixes[::-1]


def test_what_computes_the_same_may_learn_more_than_float32():
    more = seen(*[2.0] * 4, *[0.1] * 12)
    exact, clamp = OtherLevel("O4"), Paste("clamp", (Change("a.py", 1, 1, ("x",)),), is_exact=False)
    start = lambda _, run: more if run.level or run.changes else GOOD
    for first, second in ((exact, clamp), (clamp, exact)):
        trial = Trial(start, lambda *_: (), ScriptRun("train.py"), BAD, GOOD)
        assert trial.order(sample_finding(step=1, remedies=(first, second))).remedies[0] == exact


def scaled(scales, broken):
    return [Attempt(step, float(it), True, gradients=step not in broken) for step, it in enumerate(scales)]


GOOD_SCALE = [4] * 16


@pytest.mark.parametrize(
    ("scales", "broken", "before", "first"),
    [
        ([8, 4, 2, *[2] * 13], [0, 1], [], None),  # a search
        ([8, 4, 4, 4, 4, *[2] * 11], [0, 4], [], None),  # and once more
        ([*[4] * 14, 4, 2], [14], [], 14),  # in the last quarter, at a scale that was good
        ([*[4] * 14, 8, 4], [14], [], None),  # one that has just grown
        (GOOD_SCALE, [14], scaled(GOOD_SCALE[:12], []), 14),
        (GOOD_SCALE, [14], scaled(GOOD_SCALE[:12], [9]), None),  # as the script does without the fault
        (GOOD_SCALE, [14, 15], scaled(GOOD_SCALE[:12], [9]), 14),
        (GOOD_SCALE, [8], scaled(GOOD_SCALE[:8], [3]), 8),  # at the fault
        ([8, *GOOD_SCALE[1:]], [14], scaled([8, *GOOD_SCALE[:11]], [0]), 14),  # its search is no measure
    ],
)
def test_skipped_steps_are_a_search_or_count_against_the_script_before_its_fault(
    scales, broken, before, first
):
    assert find_break(scaled(scales, broken), before) == first


@pytest.mark.parametrize(
    ("least", "ranks", "said"),
    [
        (0.5, [0.1], "at a tenth of the rate the script trains, its loss falls by 80%"),
        (0.05, [0.1, 0.01], "at a hundredth of the rate the script trains, its loss falls by 80%"),
        (0.0, [0.1, 0.01], "at a tenth of the rate it breaks again, at step 1"),
    ],
)
def test_a_rate_is_a_tenth_or_a_hundredth(least, ranks, said):
    rates = []

    def start(name, run):
        rates.append(run.rate)
        return GOOD if run.rate < least else BAD

    finding = sample_finding(step=1, remedies=(Rate(""),), float32_survives=False)
    found = Trial(start, lambda *_: (), ScriptRun("train.py"), BAD, BAD).order(finding)
    assert (str(found.tried[0]), rates[:2]) == (said, pytest.approx(ranks))


@pytest.mark.parametrize(
    ("again", "came", "rank"),
    [(BAD, LESS, True), (BAD, FLAT, False), (FLAT, FLAT, True), (FLAT, RISES, False)],
)
def test_a_loss_need_not_fall_where_it_does_not_in_float32(again, came, rank):
    assert order_of([came], again=again)[1][0].startswith("the script trains") == rank


@pytest.mark.parametrize(("broken", "most"), [(1, 201), (300, 500), (699, 899), (710, 900)])
def test_what_is_tried_makes_as_many_steps_as_show_the_fault(broken, most):
    losses, runs = [float(900 - it) for it in range(900)], []
    once = seen(*losses[:broken], math.nan, *losses[broken + 1 :])

    def start(name, run):
        runs.append(run.most)
        return seen(*losses[: run.most])

    found = Trial(start, lambda *_: (), ScriptRun("train.py"), once, seen(*losses)).order(
        sample_finding(step=broken, remedies=(OtherLevel("O4"),))
    )
    assert runs == [most]
    assert (f"trains for {most} steps" in str(found.tried[0])) == (most < 900)


TWO_LINES = statement("with off:\n    y = x.exp()", 3, 4)
ROOT = statement("return y.clamp(min=0).sqrt()", 5)


def test_where_no_fix_is_enough_that_of_what_breaks_next_is_made_as_well(file):
    runs = []

    def start(name, run):
        runs.append(run)
        return GOOD if "sqrt" in changed_texts(run.changes)[file] else BAD

    def explain(seen, run):
        assert run.changes == TWO_LINES.changes
        return [sample_finding(where="net.py:5", remedies=(ROOT,))]

    finding = sample_finding(step=1, where="net.py:4", remedies=(TWO_LINES,))
    found = Trial(start, explain, ScriptRun("train.py"), BAD, GOOD).order(finding)
    assert found.remedies == (Both((("net.py:4", TWO_LINES), ("net.py:5", ROOT))), TWO_LINES)
    assert str(found.remedies[0]) == f"{TWO_LINES}\n  and at net.py:5: {ROOT}"
    assert tuple(map(str, found.tried)) == (TRAINS, BREAKS)
    margin, lines = " " * 8, TEXT.split("\n")
    pasted = ["with off:", "    y = x.exp()", "return y.clamp(min=0).sqrt()"]
    assert changed_texts(runs[-1].changes) == {
        file: "\n".join([*lines[:2], *(margin + it for it in pasted), ""])
    }
    assert [it.traces for it in runs] == [False, True, False]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_modules_that_break_one_after_the_other_are_one_list(device):
    one, two = Keep(("a",), "net", device), Keep(("b", "a"), "net", device)
    assert join((("net.py:1", one), ("net.py:2", two))) == Keep(("a", "b"), "net", device)


# ---- A loss that does not fall ----

STILL, FALLS = seen(*[4.0] * 16), seen(*range(32, 0, -2))
NOISE = seen(*[9.0, 1.0] * 4, *[9.0] * 4, *[1.0] * 4)


@pytest.mark.parametrize(
    ("again", "level", "half", "first"),
    [
        (FALLS, FALLS, "float16", "opt_level O4 (bfloat16), whose range is that of float32"),
        (FALLS, STILL, "float16", f"opt_level {LAST}"),
        (FALLS, FALLS, "bfloat16", "opt_level O1 (float16), which rounds eight times as finely"),
        (FALLS, STILL, "bfloat16", f"opt_level {LAST}"),
        (STILL, FALLS, "float16", None),  # no matter of precision
        (NOISE, NOISE, "float16", None),
    ],
)
def test_what_learns_in_float32_alone_is_said(again, level, half, first):
    trial = Trial(lambda name, run: level, lambda *_: (), ScriptRun("train.py"), STILL, again)
    found = find_what_learns(trial, [], half, None)
    assert [str(it.remedies[0]) for it in found] == [first] * (first is not None)
    assert [is_flat(it.attempts) for it in (STILL, FALLS, FLAT)] == [True, False, False]


SLOW = seen(*[16 - step / 2 for step in range(16)])


def test_a_loss_that_falls_less_has_to_end_near_that_of_float32():
    again = seen(*range(16, 0, -1))
    assert learns_less(SLOW.attempts, again.attempts)
    assert not learns_less(again.attempts, SLOW.attempts)
    assert not learns_less(STILL.attempts, STILL.attempts)  # float32 learns nothing
    low = [seen(*[4.0] * 4, *[end] * 12) for end in (0.02, 0.1, 0.3)]
    said = [learns_less(it.attempts, low[0].attempts) for it in low]
    assert said == [False, False, True]  # 0.1 of 4 is next to nothing
    trial = Trial(lambda name, run: low[2], lambda *_: (), ScriptRun("train.py"), SLOW, low[0])
    ranks = []
    for is_strict in (False, True):
        one = replace(trial, is_strict=is_strict, tried={})
        one.order(sample_finding(remedies=(ROOT,)))
        ranks.append(one.outcome(ROOT).rank)
    assert ranks == [Rank.TRAINS, Rank.UNTRIED]


@pytest.mark.process
@pytest.mark.parametrize(("offset", "kind"), [(30.0, ["rounding"]), (0.0, [])])
def test_what_learns_less_is_found_where_large_terms_cancel(tmp_path, offset, kind):
    report = report_on(CANCEL.format(offset=offset), tmp_path, tries=True)
    assert [(it["kind"], it["op"]) for it in report["silent"]] == [(it, "sub") for it in kind]
    assert report["findings"] == []
    for fault in report["silent"]:
        assert fault["tried"][0].startswith("the script trains")
        assert fault["remedies"][0].startswith("that function in float32")
        assert "in float32 it falls" in fault["facts"]["less"]


@pytest.mark.process
@pytest.mark.usefixtures("doctor_in_forks")
@pytest.mark.parametrize("owner", [Looks, Trace])
def test_a_fault_of_ours_costs_what_it_looks_for_and_not_the_report(tmp_path, monkeypatch, owner):
    monkeypatch.setattr(owner, "after", lambda *_: {}["none"])
    (tmp_path / "train.py").write_text(RATE)
    report = Campaign(ScriptRun(str(tmp_path / "train.py"))).report()
    assert [it for it in report.unknown if FAULT in it] == [f"{owner.about}: KeyError: 'none' ({FAULT})"]
    assert bool(report.findings) == (owner is Looks)
    assert bool(report.untraced) == (owner is Trace)


CANCEL = """
import torch
import ampatch as amp
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O4", verbosity=0)
centres = torch.randn(5, 4) + {offset}
def distances(a, b):
    return a * a + b * b - 2 * a * b
for step in range(100):
    y = torch.randint(0, 5, (64,))
    x = torch.eye(8)[y] + 0.1 * torch.randn(64, 8)
    out = model(x) + {offset}
    logits = -distances(out[:, None], centres.to(out.dtype)).sum(-1)
    loss = torch.nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""


WEIGHED = """x = torch.randn(16, 4)
    share = x[:, 1].relu()
    loss = (model(x) - x[:, :1]).square().mean() / ({power}).max()"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("power", "rate", "found"),
    [
        ("share ** -0.5", 300.0, [("pow", "the script trains,")]),
        ("torch.where(share > 0, share ** -0.5, 0.0)", 0.0, []),
    ],
)
def test_an_infinity_that_keeps_a_loss_from_falling_is_found(tmp_path, power, rate, found):
    script = TRAIN.format(width=4, rate=rate, steps=40, loss=WEIGHED.format(power=power))
    report = report_on(script, tmp_path, tries=True)
    assert [(it["op"], it["tried"][0][:18]) for it in report["findings"]] == found
    assert [it["op"] for it in report["harmless"]] == ["pow"], "nothing else tells of it"


TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear({width}, 1)
optimizer = torch.optim.SGD(model.parameters(), lr={rate})
for step in range({steps}):
    {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MASKED = TRAIN.format(  # two lines break
    width=8,
    rate=0.1,
    steps=40,
    loss="""x = torch.randn(64, 8)
    y = x[:, :1] * 2 + 1
    x[:, 6], x[:, 7] = 0.1, 0.0
    mean = x.mean(0)
    std = torch.sqrt(x.square().mean(0) - mean.square() - 1e-6 * (x[0] == 0.1))
    loss = (model((x - mean) / (std * (step != 3))) - y).square().mean()""",
)
RATE = TRAIN.format(
    width=4,
    rate=3.0,
    steps=60,
    loss="""x = torch.randn(16, 4)
    loss = (model(x) - x[:, :1]).square().mean()""",
)
RUNS = ["run 1: watched", "run 2: traced", "run 3: float32"]


@pytest.mark.process
def test_what_trains_at_a_lower_rate_is_said_to_train(tmp_path):
    report = report_on(RATE, tmp_path, tries=True)
    assert report["runs"] == 4
    assert report["findings"][0]["tried"][0].startswith("at a tenth of the rate the script trains")


@pytest.mark.process
def test_the_command_tries_nothing_where_it_may_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    Path("train.py").write_text(RATE)
    assert main(["doctor", "train.py", "--no-tries", "--json", "out.json"]) == 1
    said, shown = capsys.readouterr()
    assert "(tried: " not in said
    assert [it.partition(",")[0] for it in shown.split("\r\x1b[K")[1:]] == [*RUNS, ""]
    assert json.loads(Path("out.json").read_text())["runs"] == 3


@pytest.mark.process
def test_what_breaks_next_is_mended_with_it(tmp_path):
    finding = report_on(MASKED, tmp_path, tries=True)["findings"][0]
    first, second = finding["remedies"][0].split("\n  and at ")
    assert first.startswith("clamp what is under the root:")
    assert ": keep the divisor from being 0:" in second
    assert finding["tried"][0].startswith("the script trains")


def test_what_was_tried_is_said_below_the_advice_and_what_was_not_beside_it():
    remedies, tried = (Words("a"), Words("b")), (Tried(Rank.TRAINS, "it trains"), Tried())
    said = list(describe_finding(sample_finding(remedies=remedies, tried=tried)))
    assert said[2:5] == ["  -> a", "     (tried: it trains)", "  -> b (not tried)"]
