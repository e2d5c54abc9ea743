"""Plants faults in the engine, one at a time, and says which test catches each: `nox -s mutants`.

The faults are drawn at random from all that `Faults` knows how to make. Each is planted in a copy of the
repository, and meets the tests that reach its line: those of the short suite, but for sweeps and the drop-in
for apex, or all tests with `--all`. Which those are is found by one run under coverage (`--trace` keeps it).
"""

import argparse
import ast
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch._dynamo  # noqa: F401 (so that the forks that run tests have it already)

ROOT = Path(__file__).parents[1]
ROOMS = ("casts", "patching", "models", "steps")
CASES = 4  # of a test that are asked first
# Faults that change nothing anybody can see: (file, before, after) and why.
EQUIVALENT: dict[tuple[str, str, str], str] = {}

SWAPS = {
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn},
    **{ast.NotIn: ast.In, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{
        ast.And: ast.Or,
        ast.Or: ast.And,
        ast.Add: ast.Sub,
        ast.Sub: ast.Add,
        ast.Mult: ast.Div,
        ast.Div: ast.Mult,
    },
}


@dataclass(frozen=True)
class Mutant:
    """One fault: what stands in a file from `begin` to `end`, and what to write there."""

    path: str
    line: int
    begin: int
    end: int
    before: str
    after: str

    def __str__(self):
        before, after = (" ".join(text.split())[:60] for text in (self.before, self.after))
        return f"{self.path}:{self.line}: `{before}` -> `{after}`"


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
        if node.value is not None:
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
    """Runs the tests that reach a fault's line, in two processes, and remembers which caught it."""

    def __init__(self, options, folder):
        self.options, self.killers, self.copies = options, Counter(), SimpleQueue()
        self.sound: dict[str, bool] = {}  # whether tests that failed pass without a fault
        kept = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        for copy in (Path(folder, "0"), Path(folder, "1")):
            for path in kept:
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, copy / path)
            self.copies.put(copy)
        self.tests = [path for path in kept if path.startswith("tests/test_")]
        if not options.all:
            self.tests = [path for path in self.tests if "sweep" not in path and "apex" not in path]
        self.reached = self.trace(copy)
        known = next(iter(tests for tests in self.reached.values() if tests))
        assert not self.find_failure(copy, [min(known)]), "tests fail without a fault"

    def trace(self, copy):
        """Runs the tests once, and returns which of them reach which line: {(path, line): names of tests}."""
        import coverage  # which the other tests do without

        data = Path(self.options.trace or copy / "coverage")
        if not data.exists():
            more = ["-n", "2", "--dist", "loadfile", "--cov=ampatch", "--cov-context=test", "--cov-report="]
            subprocess.run(
                [sys.executable, "-m", "pytest", "-q", *more, *["--all"] * self.options.all, *self.tests],
                cwd=copy,
                env={**os.environ, "PYTHONPATH": str(copy), "COVERAGE_FILE": str(data.absolute())},
            )
        found = coverage.CoverageData(data)
        found.read()
        reached = defaultdict(set)
        for path in found.measured_files():
            name = path[path.rindex("/ampatch/") + 1 :]
            for line, contexts in found.contexts_by_lineno(path).items():
                reached[name, line].update(each.partition("|")[0] for each in contexts if each)
        return reached

    def order(self, mutant):
        """The tests that reach a fault, in parts: some cases of each, in likely files first; the rest."""
        tests = self.reached[mutant.path, mutant.line]  # none: a line that runs at import
        tests = tests or {
            test for place in self.reached if place[0] == mutant.path for test in self.reached[place]
        }
        cases, files = defaultdict(list), defaultdict(list)
        for test in sorted(tests):
            cases[test.partition("[")[0]].append(test)
        for name, each in cases.items():
            files[name.partition("::")[0]] += each[:: -(-len(each) // CASES)]
        stem = Path(mutant.path).stem
        ranked = sorted(
            files, key=lambda path: (stem not in path, -self.killers[mutant.path, path], len(files[path]))
        )
        parts = [
            [test for path in part for test in files[path]]
            for part in (ranked[:4], ranked[4:16], ranked[16:])
        ]
        parts.append(sorted(tests.difference(*parts)))
        return [part for part in parts if part]

    def run(self, mutant):
        """Returns the fault and the test that caught it, or None."""
        copy = self.copies.get()
        try:
            killer = next(
                filter(None, (self.find_killer(copy, mutant, tests) for tests in self.order(mutant))), None
            )
        finally:
            self.copies.put(copy)
        self.killers[mutant.path, (killer or "").partition("::")[0]] += 1
        print(f"{'killed  ' if killer else 'SURVIVED'} {mutant}  {killer or ''}", flush=True)
        return mutant, killer

    def find_killer(self, copy, mutant, tests):
        """Returns a test that fails with the fault and passes without it."""
        target = copy / mutant.path
        source = target.read_bytes()
        while tests := [test for test in tests if self.sound.get(test, True)]:
            target.write_bytes(source[: mutant.begin] + mutant.after.encode() + source[mutant.end :])
            try:
                killer = self.find_failure(copy, tests)
            finally:
                target.write_bytes(source)
            if killer is None or "::" not in killer:
                return killer
            if killer not in self.sound:
                self.sound[killer] = self.find_failure(copy, [killer]) is None
            if self.sound[killer]:
                return killer
        return None

    def find_failure(self, copy, tests):
        """Returns the first test that fails, or None; tests that run too long have noticed as well."""
        reader, writer = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=run_tests, args=(copy, tests, writer))
        child.start()
        writer.close()
        try:
            while reader.poll(self.options.limit):
                if (failed := reader.recv()) != STILL_RUNNING:
                    return failed
            return "it ran too long"
        except EOFError:
            return "the process died"
        finally:
            child.kill()
            child.join()


STILL_RUNNING = "still running"


class Chosen:
    """A plugin of pytest that runs some tests alone, one case of each function first."""

    def __init__(self, tests, tell):
        self.tests, self.tell, self.failed = set(tests), tell, None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        seen = Counter()
        chosen = [item for item in items if item.nodeid in self.tests]
        turns = []
        for item in chosen:
            seen[item.function] += 1
            turns.append(seen[item.function])
        items[:] = [
            item for _, item in sorted(zip(turns, chosen, strict=True), key=lambda pair: min(pair[0], 2))
        ]

    def pytest_runtest_logreport(self, report):
        self.tell(STILL_RUNNING)
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def run_tests(copy, tests, writer):
    """Runs tests in this fork of a process that has imported torch, and sends the first that fails."""
    sys.dont_write_bytecode = True
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    os.chdir(copy)
    sys.path[:0] = [str(copy), str(copy / "tests")]
    files = sorted({test.partition("::")[0] for test in tests})
    chosen = Chosen(tests, writer.send)
    status = pytest.main(
        ["-x", "-q", "--all", "-W", "ignore::pytest.PytestAssertRewriteWarning", *files], [chosen]
    )
    writer.send(chosen.failed or (None if status in (0, 5) else "the start of pytest"))
    writer.close()
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=30, help="how many faults to draw (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    parser.add_argument("--limit", type=float, default=120, help="seconds that a test may take")
    parser.add_argument("--all", action="store_true", help="ask the whole suite before a fault survives")
    parser.add_argument("--trace", help="a file that keeps which tests reach which line, or where it is kept")
    parser.add_argument("--out", help="a file for the table")
    options = parser.parse_args()
    paths = [path for room in options.rooms for path in sorted((ROOT / "ampatch" / room).rglob("*.py"))]
    faults = [fault for path in paths for fault in Faults(path.relative_to(ROOT).as_posix()).found]
    faults = [fault for fault in faults if (fault.path, fault.before, fault.after) not in EQUIVALENT]
    drawn = random.Random(options.seed).sample(faults, min(options.count, len(faults)))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        results = list(pool.map(Campaign(options, folder).run, drawn))
    killed = sum(killer is not None for _, killer in results)
    print(f"{killed} of {len(drawn)} killed, drawn from {len(faults)} with seed {options.seed}")
    if options.out:
        rows = [
            f"| {str(mutant).replace('|', '/')} | {killer or '**survived**'} |" for mutant, killer in results
        ]
        Path(options.out).write_text("\n".join(["| mutant | killed by |", "|---|---|", *rows]) + "\n")


if __name__ == "__main__":
    main()
