"""Plants faults in the engine, one at a time, and says which test catches each: `nox -s mutants`.

The faults are drawn at random from all that `Faults` knows how to make. Each is planted in a copy of the
repository, and first meets the tests that are likely to catch it, then the rest of the short suite (without
those of sweeps and of the drop-in for apex), or of all tests with `--all`.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
ROOMS = ("casts", "patching", "models", "steps")
# Which files of tests to run first, after those that are named as the changed file is: in this order.
LIKELY = {
    "casts": "wrapper cast_cache freshness test_cast. modes custom catalog lists table tensor_kinds disable",
    "patching": "patcher registration bound_names torch_features wrapper freshness data_watch recurrent",
    "models": "test_model. keep_fp32 on_cpu masters written copies layers checkpointing beside dropped",
    "steps": "steps masters accumulation blocks grads scaler host_syncs random_programs several session",
}
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
    """Runs the tests against each fault, two at a time, and remembers who caught what."""

    def __init__(self, options, folder):
        self.options, self.killers, self.broken, self.copies = options, {}, set(), SimpleQueue()
        for index in range(2):
            copy = Path(folder, str(index))
            kept = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
            for path in kept:
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, copy / path)
            self.copies.put(copy)
        tests = sorted(path for path in kept if path.startswith("tests/test_"))
        self.tests = [path for path in tests if options.all or not ("sweep" in path or "apex" in path)]

    def order(self, path):
        """The files of tests in three parts: what caught faults of this file, what is likely to, the rest."""
        caught = [test for test, _ in self.killers.get(path, Counter()).most_common(4)]
        words = [Path(path).stem, *LIKELY[Path(path).parts[1]].split()]
        likely = [test for word in words for test in self.tests if word in test and test not in caught]
        likely = list(dict.fromkeys(likely))
        rest = [test for test in self.tests if test not in {*caught, *likely}]
        return [part for part in (caught, likely, rest) if part]

    def run(self, mutant):
        """Returns the fault and the test that caught it, or None."""
        copy = self.copies.get()
        target = copy / mutant.path
        source = target.read_bytes()
        fault = source[: mutant.begin] + mutant.after.encode() + source[mutant.end :]
        try:
            killer = None
            parts = self.order(mutant.path)
            while parts and killer is None:
                target.write_bytes(fault)
                killer = self.find_failure(copy, parts[0])
                target.write_bytes(source)
                if killer is None:
                    parts.pop(0)
                elif "::" in killer and self.find_failure(copy, [killer]):  # it fails without the fault
                    self.broken.add(killer)
                    killer = None
        finally:
            target.write_bytes(source)
            self.copies.put(copy)
        if killer and "::" in killer:
            self.killers.setdefault(mutant.path, Counter())[killer.partition("::")[0]] += 1
        print(f"{'killed  ' if killer else 'SURVIVED'} {mutant}  {killer or ''}", flush=True)
        return mutant, killer

    def find_failure(self, copy, tests):
        """Returns the first test that fails, or None; tests that run too long have noticed as well."""
        more = [f"--deselect={test}" for test in self.broken] + ["--all"] * self.options.all
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *more, *tests]
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=self.options.limit
            )
        except subprocess.TimeoutExpired:
            return "it ran too long"
        if done.returncode in (0, 5):
            return None
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return failed[0].split()[1].partition("[")[0] if failed else "the start of pytest"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=30, help="how many faults to draw (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    parser.add_argument("--limit", type=float, default=900, help="seconds that a run of tests may take")
    parser.add_argument("--all", action="store_true", help="ask the whole suite before a fault survives")
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
