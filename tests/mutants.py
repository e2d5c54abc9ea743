"""Plants faults in the engine, one at a time, and says which test catches each: `nox -s mutants`.

The faults are drawn at random from all that `Faults` knows how to make. Each meets the tests that reach its
line: those of the short suite without sweeps and the drop-in for apex, or all tests with `--all`. Which those
are, one run under coverage says (`--trace` keeps it). That sees neither what Dynamo traces nor what other
processes run, so that `--all` asks the tests of these of each fault. The tests are collected once and run in
forks: a fault in a function is a new `__code__`; what runs at import is run in a new process.
"""

import argparse
import ast
import gc
import inspect
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (so that the forks that run tests have it already)

ROOT = Path(__file__).parents[1]
ROOMS = ("casts", "patching", "models", "steps", "watching", "session", "levels")
CASES = 4  # of a test that are asked first
UNSEEN = ("test_compile", "test_imports", "test_over_ranks", "test_ranks")  # see above
QUIET = ("--all", "-p", "no:cacheprovider")
# Faults that change nothing anybody can see: file, first characters of what stands and is written there, why.
EQUIVALENT = """
casts/cast.py | self.devices.add(tensor.device | pass | asks more: slower
casts/cast.py | is_known and not torch.compile | (False) | asks more: slower
casts/cast.py | tensor.device in devices or is | (is_on_device(tensor)) | slower
casts/cast.py | thread.forwards and thread.for | (thread.forwards) | rechecks more: slower
casts/cast.py | ended.keys() <= changed | (False) | sorts where there is nothing to sort: slower
casts/cast.py | is_whole | (False) | sorts again: slower
casts/cast.py | self._by_memory = by_memory if | pass | sorts again: slower
casts/cast.py | is_grad_enabled() | (False) | enters a mode that is on: slower
casts/cast.py | self._is_checked | (False) | looks through all again: slower
casts/cast_tree.py | CONVERT.get(dtype) or (lambda | ((lambda tensor: tensor.to(dty | slower
casts/cast_tree.py | return False | return None | asked for its truth alone
casts/kept_cast.py | torch.ones(1, dtype=torch.floa | (torch.ones(1, dtype=torch.flo | a graph as well
casts/kernels.py | thread.off and thread.is_off() | (thread.off or thread.is_off() | slower
casts/kernels.py | not is_compiling() and len(arg | (not is_compiling() and (not k | wrong
casts/kernels.py | return False | return None | asked for its truth alone
casts/thread.py | self._asks > 0 and self._is_ca | (self._is_caller_off()) | the same
casts/thread.py | self._asks > 0 | (self._asks >= 0) | a thread asks itself, and says the same
casts/wrapper.py | kind is Parameter | (False) | the path for any argument: slower
casts/wrapper.py | place[1] == "einsum" | (True) | no other function is given a string first: slower
casts/wrapper.py | kwargs | (True) | looks through keywords where there are none: slower
casts/wrapper.py | is_grad_enabled() or thread.fo | (thread.forwards) | the path for any call: slower
casts/cast_tree.py | first is not None | (True) | looks closer: slower
casts/cast_tree.py | type(arg) not in SIMPLE and (n | (type(arg) not in SIMPLE) | looks closer: slower
casts/wrapper.py | thread.off and thread.is_off() | (thread.is_off()) | asks more: slower
casts/cast_tree.py | type(arg) not in SIMPLE and (n | (type(arg) not in SIMPLE or (n | slower
casts/wrapper.py | is_grad_enabled() or thread.fo | (is_grad_enabled() and thread. | slower
casts/wrapper.py | kwargs and has_torch_function( | (kwargs) | hands over to itself: slower
levels/float8.py | 1024 | (1025) | sizes are multiples of 16
models/hooks.py | not self.off and CASTS.half is | (not self.off) | knows more devices: asks more
models/hooks.py | is_usual or dtype is None | (is_usual) | Tensor.to(None) returns the tensor
session/session.py | 32 | (33) | another size of a block that is freed at once: slower
models/model.py | half is not None and id(module | (half is not None or id(module | the same: slower
models/model.py | half is not None and id(module | (True) | adds hooks that do nothing: slower
models/model.py | half is not None and id(module | (id(module) not in served) | the same: slower
models/model.py | policy.cast_model_type is not | (True) | adds a hook that does nothing: slower
patching/bound_names.py | 2 | (3) | looks for names in deeper dictionaries: slower
patching/compiling.py | any(id(node.target) in self._n | (True) | generates the same code again: slower
patching/bound_names.py | path.startswith(_SEARCHED_IN_T | (False) | finds nothing there: slower
patching/torch_features.py | casts and {input.dtype, weight | (casts and {input.dtype, weigh | slower
patching/torch_features.py | thread.off and thread.is_off() | (thread.is_off()) | asks more: slower
patching/torch_features.py | casts and {input.dtype, weight | (casts and input.dtype != weig | refused later
patching/torch_features.py | len(args) > 1 | (len(args) >= 1) | torch 2.13 gives it by place
patching/torch_features.py | len(args) > 1 and callable(arg | (True) | torch 2.13 gives it by place
patching/torch_features.py | not torch.compiler.is_dynamo_c | (True) | Dynamo 2.13 traces what is inside
steps/gradients.py | ddp is not None and self._ddp | (ddp is not None) | asks again: slower
steps/gradients.py | type(earlier) is type(grad) is | (False) | adds one by one: slower
steps/gradients.py | True | (False) | strict=, of lists that one loop has made
steps/masters.py | tensor.is_contiguous() or torc | (torch.empty_like(tensor).stri | slower
steps/scaler.py | type(grad) is Tensor or not ha | (not hasattr(grad, 'to_local') | slower
steps/masters.py | True | (False) | strict=, of two pairs
steps/masters.py | touched and id(half) in touche | (touched) | refines what was not written: slower
steps/scaler.py | found_inf.is_cpu and dist.get_ | (dist.get_backend(group) == 'n | slower
steps/optimizer.py | not self.earlier.pairs | (False) | puts nothing back: slower
steps/scaler.py | self._current is None | (True) | copies a number: slower
steps/scaler.py | 31 | (32) | a number that no tracker reaches either
watching/alarms/watch.py | self.judge is None or self.jud | (self.judge is None) | judges more: slower
watching/observers.py | return kind in self._warned | return None | it is said once all the same: slower
"""
PAIRS = (
    *((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div)),
)
SWAPS = dict(PAIRS) | {new: old for old, new in PAIRS}


@dataclass(frozen=True)
class Mutant:
    """One fault: what stands in a file from `begin` to `end`, and what to write there."""

    path: str
    line: int
    begin: int
    end: int
    before: str
    after: str

    def plant(self, source):
        """Returns the file's source with the fault, whose lines keep their numbers."""
        lines = b"\n" * self.before.count("\n")
        after = self.after.encode()
        after = after[:-1] + lines + after[-1:] if after.startswith(b"(") else after + lines
        return source[: self.begin] + after + source[self.end :]

    def cut(self, most):
        """Returns the first characters of what stands there and of what to write, in one line each."""
        return [" ".join(text.split())[:most].strip() for text in (self.before, self.after)]

    def is_equivalent(self):
        row = " | ".join([self.path.removeprefix("ampatch/"), *self.cut(30)])
        return f"\n{row} | " in EQUIVALENT

    def __str__(self):
        return "{}:{}: `{}` -> `{}`".format(self.path, self.line, *self.cut(60))


class Faults(ast.NodeVisitor):
    """Finds every fault that can be planted in a file."""

    def __init__(self, path):
        self.path, self.text, self.found = path, (ROOT / path).read_text(), []
        lines = self.text.encode().splitlines(keepends=True)
        self.starts = [sum(map(len, lines[:index])) for index in range(len(lines))]
        self.visit(ast.parse(self.text))

    def add(self, node, new):
        """Notes that a node may become another one."""
        begin = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        before = self.text.encode()[begin:end].decode()
        after = ast.unparse(ast.fix_missing_locations(new))
        after = f"({after})" if isinstance(node, ast.expr) else after
        self.found.append(Mutant(self.path, node.lineno, begin, end, before, after))

    def swap(self, node, change):
        new = deepcopy(node)
        change(new)
        self.add(node, new)

    def visit_children(self, node, skipped=("annotation", "returns", "decorator_list")):
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in skipped:
                    self.visit(child)

    generic_visit = visit_children

    def visit_JoinedStr(self, node):
        """Leaves messages alone."""

    def visit_Raise(self, node):
        self.add(node, ast.Pass())

    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.add(node, ast.Pass())
            self.visit_children(node)

    def visit_Assign(self, node):
        if not isinstance(node.targets[0], ast.Name):
            self.add(node, ast.Pass())
        self.visit_children(node)

    def visit_Return(self, node):
        if node.value is not None and ast.unparse(node.value) != "None":
            self.add(node, ast.Return(ast.Constant(None)))
            self.visit_children(node)

    def visit_If(self, node):
        if ast.unparse(node.test) != "TYPE_CHECKING":
            for value in (True, False):
                self.add(node.test, ast.Constant(value))
            self.visit_children(node)

    visit_IfExp = visit_If

    def visit_Compare(self, node):
        self.swap(node, lambda new: new.ops.__setitem__(0, SWAPS[type(node.ops[0])]()))
        self.visit_children(node)

    def visit_BoolOp(self, node):
        self.swap(node, lambda new: setattr(new, "op", SWAPS[type(node.op)]()))
        for index in range(len(node.values)):
            self.swap(node, lambda new, index=index: new.values.pop(index))
        self.visit_children(node)

    def visit_BinOp(self, node):
        if type(node.op) in SWAPS:
            self.swap(node, lambda new: setattr(new, "op", SWAPS[type(node.op)]()))
        self.visit_children(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            self.add(node, node.operand)
        self.visit_children(node)

    def visit_Constant(self, node):
        if isinstance(node.value, (bool, int, float)):
            self.add(node, ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1))

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)


class Campaign:
    """A plugin of pytest: once the tests are collected, each fault meets those that reach its line."""

    def __init__(self, options, copy, drawn):
        self.options, self.copy, self.drawn, self.results = options, copy, drawn, []
        self.killers, self.seconds = Counter(), {}  # of a fault's file and a test; of a test
        self.sound: dict[str, bool] = {}  # whether tests that failed pass without a fault
        kept = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        for path in kept:
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy / path)
        self.tests = [path for path in kept if path.startswith("tests/test_")]
        if not options.all:
            self.tests = [path for path in self.tests if "sweep" not in path and "apex" not in path]
        self.reached = self.trace()

    def trace(self):
        """Runs the tests once, and returns which of them reach which line: {(path, line): names of tests}."""
        import coverage  # which the other tests do without

        data = Path(self.options.trace or self.copy / "coverage")
        if not data.exists():
            more = ["-n", "2", "--dist", "loadfile", "--cov=ampatch", "--cov-context=test", "--cov-report="]
            subprocess.run(
                [sys.executable, "-m", "pytest", "-q", *more, *["--all"] * self.options.all, *self.tests],
                cwd=self.copy,
                env={**os.environ, "PYTHONPATH": str(self.copy), "COVERAGE_FILE": str(data.absolute())},
            )
        found = coverage.CoverageData(data)
        found.read()
        reached = defaultdict(set)
        for path in found.measured_files():
            name = path[path.rindex("/ampatch/") + 1 :]
            for line, contexts in found.contexts_by_lineno(path).items():
                reached[name, line].update(each.partition("|")[0] for each in contexts if each)
        return reached

    def run(self):
        """Returns each fault with the test that caught it, or None."""
        os.chdir(self.copy)
        os.environ |= {"PYTHONPATH": str(self.copy), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path[:0] = [str(self.copy), str(self.copy / "tests")]
        files = {test.partition("::")[0] for tests in self.reached.values() for test in tests}
        files |= {f"tests/{name}.py" for name in UNSEEN if self.options.all}
        self.out = os.fdopen(os.dup(1), "w")  # pytest keeps the other
        status = pytest.main([*QUIET, "-p", "no:terminal", *sorted(files)], [self])
        assert status == pytest.ExitCode.OK, f"the tests were not collected: {status!r}"
        return self.results

    def pytest_runtestloop(self, session):
        self.items = {item.nodeid: item for item in session.items}
        gc.unfreeze()
        functions = [each for each in gc.get_objects() if type(each) is types.FunctionType]
        self.functions = [each for each in functions if str(self.copy) in each.__code__.co_filename]
        gc.freeze()
        for mutant in self.drawn:
            begun = time.monotonic()
            killer = self.find_killer(mutant)
            self.killers[mutant.path, (killer or "").partition("[")[0]] += 1
            self.results.append((mutant, killer))
            told = f"{'killed  ' if killer else 'SURVIVED'} {time.monotonic() - begun:5.1f} s"
            print(told, mutant, killer or "", file=self.out, flush=True)
        return True

    def order(self, mutant, tests):
        """Sorts tests: one case of each first, what caught faults in this file, bears its name, is fast."""
        cases = defaultdict(list)
        for test in sorted(tests):
            cases[test.partition("[")[0]].append(test)
        turns = {}  # when a test's turn comes: some cases, evenly spread, then the rest
        for each in cases.values():
            turns |= dict.fromkeys(each, CASES)
            turns |= {test: turn for turn, test in enumerate(each[:: -(-len(each) // CASES)])}
        stem = Path(mutant.path).stem

        def rank(test):
            name = test.partition("[")[0]
            known = self.killers[mutant.path, name]
            return turns[test], -known, stem not in test.partition("::")[0], self.seconds.get(name, 0.1)

        return sorted(tests, key=rank)

    def find_killer(self, mutant):
        """Returns a test that fails with the fault and passes without it."""
        changes = find_changes(mutant, self.functions)
        reached = self.reached[mutant.path, mutant.line]
        if not reached:  # at import, in other processes, or in a line that coverage counts to another one
            places = [place for place in self.reached if place[0] == mutant.path]
            own = {test for test in self.items if Path(mutant.path).stem in test.partition("::")[0]}
            changes, reached = None, own.union(*map(self.reached.get, places))
        tests = self.order(mutant, reached.intersection(self.items))[: self.options.most]
        unseen = [each for each in self.items if Path(each.partition("::")[0]).stem in UNSEEN]
        tests += [each for each in unseen if self.options.all and each not in tests]
        while tests := [test for test in tests if self.sound.get(test, True)]:
            with self.planted(mutant):
                killer = self.fail_in_copy(tests) if changes is None else self.fail_in_fork(tests, changes)
            if killer is None or "::" not in killer:
                return killer
            if killer not in self.sound:
                self.sound[killer] = self.fail_in_fork([killer]) is None
            if self.sound[killer]:
                return killer
        return None

    @contextmanager
    def planted(self, mutant):
        """Has a fault in the copy, for the processes that tests start."""
        target = self.copy / mutant.path
        source = target.read_bytes()
        target.write_bytes(mutant.plant(source))
        try:
            yield
        finally:
            target.write_bytes(source)

    def fail_in_copy(self, tests):
        """Returns the first test that fails in a new process, or None."""
        command = [sys.executable, "-m", "pytest", "-x", "-rfE", *QUIET, *tests]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=10 * self.options.limit)
        except subprocess.TimeoutExpired:
            return "it ran too long"
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", ran.stdout, re.MULTILINE)
        return failed[1] if failed else None if ran.returncode in (0, 5) else "the start of pytest"

    def fail_in_fork(self, tests, changes=()):
        """Returns the first test that fails, or None; tests that run too long have noticed as well."""
        reader, writer = multiprocessing.Pipe(duplex=False)
        args = (tests, changes, writer)
        child = multiprocessing.get_context("fork").Process(target=self.run_tests, args=args)
        child.start()
        writer.close()
        try:
            while reader.poll(self.options.limit):
                test, seconds, failed = reader.recv()
                self.seconds[test.partition("[")[0]] = seconds
                if failed or test == tests[-1]:
                    return test if failed else None
            return "it ran too long"
        except EOFError:
            return "the process died"
        finally:
            child.kill()
            child.join()

    def run_tests(self, tests, changes, writer):
        """Runs tests in this fork until one fails."""
        with open(os.devnull, "w") as nothing:
            for stream in (1, 2):
                os.dup2(nothing.fileno(), stream)
        for function, code in changes:
            function.__code__ = code
        items = [self.items[test] for test in tests]
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.took, self.failed = 0.0, False
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            writer.send((item.nodeid, self.took, self.failed))
            if self.failed:
                break
        os._exit(0)

    def pytest_runtest_logreport(self, report):
        self.took += report.duration
        self.failed |= report.failed


def find_changes(mutant, functions):
    """Returns which functions get which code from a fault, or None if it changes what runs at import."""
    path = str(Path(mutant.path).absolute())
    source = Path(path).read_bytes()
    old, new = (compile(text, path, "exec", dont_inherit=True) for text in (source, mutant.plant(source)))
    pairs = dict(pair_codes(old, new))
    body = [pair for pair in pairs.items() if not pair[0].co_flags & inspect.CO_OPTIMIZED]  # of a class
    changed = [(each, pairs.get(each.__code__, each.__code__)) for each in functions]
    changed = [(function, code) for function, code in changed if function.__code__ != code]
    closures = any(function.__code__.co_freevars != code.co_freevars for function, code in changed)
    return None if any(is_changed(*pair) for pair in body) or closures or not changed else changed


def pair_codes(old, new):
    """Yields each code object in a file, with what it is with a fault."""
    yield old, new
    inner = [[each for each in code.co_consts if isinstance(each, types.CodeType)] for code in (old, new)]
    if len(inner[0]) == len(inner[1]):
        for pair in zip(*inner, strict=True):
            yield from pair_codes(*pair)


def is_changed(old, new):
    """Whether code differs by more than the functions in it, and where they end."""
    outer = []
    for code in (old, new):
        consts = tuple(each for each in code.co_consts if not isinstance(each, types.CodeType))
        outer.append(code.replace(co_consts=consts, co_linetable=b""))
    return outer[0] != outer[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=30, help="how many faults to draw (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    parser.add_argument("--limit", type=float, default=120, help="seconds that a test may take")
    parser.add_argument("--most", type=int, help="how many tests a fault meets (default: all that reach it)")
    parser.add_argument("--all", action="store_true", help="ask the whole suite before a fault survives")
    parser.add_argument("--trace", help="a file that keeps which tests reach which line, or where it is kept")
    parser.add_argument("--out", help="a file for the table")
    options = parser.parse_args()
    paths = [path for room in options.rooms for path in sorted((ROOT / "ampatch" / room).rglob("*.py"))]
    faults = [fault for path in paths for fault in Faults(path.relative_to(ROOT).as_posix()).found]
    faults = [fault for fault in faults if not fault.is_equivalent()]
    drawn = random.Random(options.seed).sample(faults, min(options.count, len(faults)))
    with tempfile.TemporaryDirectory() as folder:
        results = Campaign(options, Path(folder), drawn).run()
    killed = sum(killer is not None for _, killer in results)
    print(f"{killed} of {len(drawn)} killed, drawn from {len(faults)} with seed {options.seed}")
    if options.out:
        rows = [
            f"| {str(mutant).replace('|', '/')} | {killer or '**survived**'} |" for mutant, killer in results
        ]
        Path(options.out).write_text("\n".join(["| mutant | killed by |", "|---|---|", *rows]) + "\n")


if __name__ == "__main__":
    main()
