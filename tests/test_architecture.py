"""The rules for the source, read from it: what folders import, and what a file looks like."""

import ast
import functools
import graphlib
import importlib
import inspect
import textwrap
from pathlib import Path

import ampatch as amp
from ampatch import errors

ROOT = Path(amp.__file__).parent
FRONT = ROOT / "__init__.py"
FILES = sorted(ROOT.rglob("*.py"))


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes(path, *kinds):
    """All of a file, or what is of some kinds of nodes, in the order of `ast.walk`."""
    return [node for node in nodes(path) if isinstance(node, kinds)] if kinds else list(ast.walk(tree(path)))


def module_name(path):
    parts = ["ampatch", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in FILES}


def imported_names(path, *, of_types=False):
    """Yields (module, name) for each import of ours in a file, at any depth; name None for `import`.

    Also those by `importlib`, but for the tools that the front door loads when asked for; those for type
    checkers alone only where asked for.
    """
    blocks = [] if of_types else nodes(path, ast.If)
    unseen = {id(it) for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING" for it in ast.walk(node)}
    for node in nodes(path, ast.Call, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Call) and path != FRONT and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            yield from ((name, None) for name in names if name.split(".")[0] == "ampatch")
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "ampatch")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports say the whole name"
            if node.module.split(".")[0] == "ampatch":
                yield from ((node.module, alias.name) for alias in node.names)


@functools.cache
def all_imports(*, of_types=False):
    """The modules of ours that each one imports."""
    found = {name: set() for name in NAMES}
    for importer, path in NAMES.items():
        for module, name in imported_names(path, of_types=of_types):
            whole = f"{module}.{name}"
            found[importer].add(whole if whole in NAMES or whole == "ampatch.lists" else module)
    return found


def assert_no_circle(graph):
    graphlib.TopologicalSorter(graph).prepare()  # which raises, and names the circle


# ---- Who imports whom ----

PUBLIC = "ampatch"  # the names that the package itself holds

# The whole picture: what each room, or file beside the rooms, imports. `lists` are rows, and import
# the words of `table` alone.
ARROWS = {
    "errors": set(),
    "table": {"errors"},
    "levels": {"errors"},
    "casts": {"errors", "table", "levels", "lists"},
    "steps": {"errors", "levels"},
    "patching": {"errors", "table", "levels", "lists", "casts"},
    "models": {"errors", "levels", "lists", "casts", "steps"},
    "session": {"errors", "table", "levels", "casts", "patching", "models", "steps"},
    "watching": {"errors", "levels", "casts", "patching", "models", "steps", "session"},
    PUBLIC: {"errors", "levels", "steps", "session", "watching"},
    "testing": {PUBLIC, "table", "lists", "casts", "session"},
    "apex": {PUBLIC, "table", "lists", "levels", "patching", "steps"},
    "integrations": {PUBLIC},
    "tools": {"levels"},
    "sweeps": {PUBLIC, "apex", "tools"},
    "doctor": {PUBLIC, "apex", "levels", "patching", "steps", "tools"},
    "__main__": {PUBLIC, "apex", "doctor", "sweeps", "testing"},
}


def room(module):
    return module.split(".")[1] if "." in module else PUBLIC


BESIDE_THE_ENGINE = ("sweeps", "apex", "doctor", "testing", "tools", "integrations")
TOOLS = [name for name in NAMES if room(name) in BESIDE_THE_ENGINE]


def test_the_picture_of_the_rooms_is_whole():
    found = {name: set() for name in ARROWS}
    for module, imports in all_imports().items():
        assert room(module) in ARROWS, f"{module} is in no room of the picture"
        found[room(module)] |= {room(other) for other in imports} - {room(module)}
    assert found == ARROWS  # an arrow that nothing needs any more goes from the picture


ENGINE = ("levels", "casts", "steps", "patching", "models", "session", "watching")


def test_arrows_and_imports_lead_one_way_and_those_of_types_in_the_engine_as_well():
    assert_no_circle(ARROWS)
    assert_no_circle(all_imports())
    imports = {name: them for name, them in all_imports(of_types=True).items() if room(name) in ENGINE}
    assert_no_circle({name: them & imports.keys() for name, them in imports.items()})


def test_the_engine_names_no_listener():
    for name, imports in all_imports(of_types=True).items():
        assert room(name) not in ENGINE[:-1] or "watching" not in map(room, imports), name


def test_the_lists_import_the_table_alone():
    for path in (ROOT.parent / "lists").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("ampatch") for alias in node.names)
            if isinstance(node, ast.ImportFrom):
                assert node.module == "ampatch.table" or node.module.startswith("ampatch.lists")


def test_only_what_the_user_calls_imports_the_session():
    # Whatever imports it is imported by the package itself, and so holds public functions.
    importers = {name for name, imports in all_imports().items() if "ampatch.session.session" in imports}
    assert importers <= all_imports()["ampatch"] | all_imports()["ampatch.watching.listeners"]


def test_a_tool_takes_public_names_from_the_package():
    rooms = [*ARROWS, "lists", "__version__"]
    for name in TOOLS:
        for module, imported in imported_names(NAMES[name]):
            assert module != "ampatch" or imported in [*amp.__all__, *rooms, None], name
        for node in nodes(NAMES[name], ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "amp":
                assert node.attr in amp.__all__, name


def test_a_room_is_small_and_says_what_it_is_for():
    for folder in {path.parent for path in FILES}:
        files = [path for path in FILES if path.parent == folder and not path.name.startswith("__")]
        assert len(files) <= 12, f"{folder}: {len(files)} files"
        assert ast.get_docstring(tree(folder / "__init__.py")), folder


def test_fifteen_entries_are_the_most_at_the_front_door():
    beside = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    assert len([one for one in ROOT.iterdir() if one.name not in beside]) <= 15


def test_a_script_may_import_amp_from_the_package_as_from_apex():
    from ampatch import amp as imported

    assert imported is amp


def test_what_the_package_imports_is_public_and_named_once():
    imported = {name for _, name in imported_names(FRONT)} - {"listen"}  # which is called there
    assert imported == set(amp.__all__) - {"diagnose", "sweep"}  # which are imported when asked for
    assert len(set(amp.__all__)) == len(amp.__all__)
    assert [name for name in amp.__all__ if name.startswith("_") or not hasattr(amp, name)] == []


# ---- What a file looks like ----


def of_every_file(check):
    """Makes one test of what holds for each file; it names all that break the rule."""

    def test():
        broken = []
        for path in FILES:
            try:
                check(path)
            except AssertionError as error:
                broken.append(f"{path.relative_to(ROOT)}: {error}")
        assert not broken, "\n".join(broken)

    return test


@of_every_file
def test_the_first_line_of_a_file_is_a_sentence_and_it_is_shorter_than_600_lines(path):
    line = (ast.get_docstring(tree(path)) or "").split("\n")[0]
    assert line[:1].isupper() or line.startswith("`")
    assert line.endswith(".")
    assert len(line.split()) >= 4
    assert len(path.read_text().splitlines()) < 600


# Apex has two classes of each of these names, and scripts ask for both.
NAMED_TWICE_BY_OTHERS = {"FP16_Optimizer", "LossScaler"}


def test_a_name_is_that_of_one_class():
    names = [node.name for path in FILES for node in tree(path).body if isinstance(node, ast.ClassDef)]
    assert {name for name in names if names.count(name) > 1} == NAMED_TWICE_BY_OTHERS


def code_length(function):
    """The lines of a function without its docstring."""
    first = function.body[0]
    documented = 0 if ast.get_docstring(function) is None else first.end_lineno - first.lineno + 1
    return function.end_lineno - function.lineno + 1 - documented


def depth(node, inside=0):
    """How many ifs are nested; `elif` is an `if` in `orelse`, on the same level."""
    below = inside + isinstance(node, ast.If)
    rest = getattr(node, "orelse", [])
    flat = rest if isinstance(node, ast.If) and [type(one) for one in rest] == [ast.If] else []
    children = [depth(one, inside if one in flat else below) for one in ast.iter_child_nodes(node)]
    return max([below, *children])


@of_every_file
def test_a_function_is_at_most_45_lines_long_with_ifs_nested_at_most_twice(path):
    functions = nodes(path, ast.FunctionDef, ast.AsyncFunctionDef)
    assert {one.name: code_length(one) for one in functions if code_length(one) > 45} == {}
    assert {one.name: depth(one) for one in functions if depth(one) > 2} == {}


def is_documented(item):
    return bool((inspect.getdoc(item) or "").strip())


def says_all(function):
    """Whether a function that users do not see has one statement, which says what a docstring would."""
    code = function.fget if isinstance(function, property) else function
    if code.__module__ in {getattr(getattr(amp, name), "__module__", "") for name in amp.__all__}:
        return False
    (written,) = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    return not isinstance(written, ast.FunctionDef) or len(written.body) == 1


def undocumented(module):
    """Names the public functions, classes, methods and properties of a module without a docstring."""
    for name, item in vars(module).items():
        if name.startswith("_") or getattr(item, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(item):
            yield from (f"{name}.{method}" for method in undocumented_methods(item))
            if not item.__doc__:
                yield name
        elif inspect.isfunction(item) and not (is_documented(item) or says_all(item)):
            yield name


def undocumented_methods(cls):
    for name, item in vars(cls).items():
        method = item.__func__ if isinstance(item, staticmethod | classmethod) else item
        is_ours = inspect.isfunction(method) or isinstance(method, property)
        if name.startswith("_") or not is_ours:
            continue
        inherited = [vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)]
        if not (any(map(is_documented, [method, *inherited])) or says_all(method)):
            yield name


def test_everything_public_has_a_docstring():
    # The plugins import the trainers that they are for: test_trainers.py does this.
    modules = [importlib.import_module(name) for name in NAMES if room(name) != "integrations"]
    assert {module.__name__: bare for module in modules if (bare := list(undocumented(module)))} == {}


def test_a_docstring_begins_with_one_line_that_ends_with_a_full_stop():
    for name in set(amp.__all__) - {"OPT_LEVELS"}:
        assert inspect.getdoc(getattr(amp, name)).split("\n")[0].endswith("."), name


# `maybe_print` of _amp_state.py prints what a script tells it to.
PRINTING = {
    *("levels/ranks.py", "__main__.py", "testing/lists_command.py"),
    *("apex/amp/_amp_state.py", "apex/checking.py", "doctor/command.py"),
}


@of_every_file
def test_only_the_announcements_and_the_command_line_print(path):
    if path.relative_to(ROOT).as_posix() in PRINTING:
        return
    calls = [node.func for node in nodes(path, ast.Call)]
    assert [call.id for call in calls if isinstance(call, ast.Name) and call.id in ("print", "input")] == []
    writes = [call for call in calls if isinstance(call, ast.Attribute) and call.attr == "write"]
    assert [ast.unparse(call) for call in writes if "std" in ast.unparse(call)] == []


MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = {
    *("list", "dict", "set", "defaultdict", "OrderedDict", "deque", "Counter"),
    *("WeakKeyDictionary", "local"),
}


def is_mutable(value):
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in MAKERS
    return isinstance(value, MUTABLE)


@of_every_file
def test_no_module_has_mutable_state(path):
    found = []
    for node in tree(path).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [ast.unparse(target) for target in targets]
    assert [name for name in found if name != "__all__" and name != name.upper()] == []
    assert nodes(path, ast.Global) == []


@of_every_file
def test_a_module_does_not_write_into_a_constant(path):
    constants = {
        target.id
        for node in tree(path).body
        if isinstance(node, ast.Assign) and is_mutable(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes(path, ast.Subscript, ast.Attribute):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            assert ast.unparse(node.value) not in constants
        if isinstance(node, ast.Attribute) and node.attr in ("append", "add", "update", "pop", "clear"):
            assert ast.unparse(node.value) not in constants


VAGUE = {"handle", "stash", "misc", "utils", "util", "helper", "helpers"}
NAMED_BY_APEX = {"apex/amp/handle.py": {"handle"}}  # what scripts import has the name that it had


@of_every_file
def test_names_are_of_the_field_and_no_type_is_any(path):
    names = [node.name for node in nodes(path, ast.FunctionDef, ast.ClassDef)]
    words = {word for name in [path.stem, *names] for word in name.lower().split("_")}
    assert words & VAGUE == NAMED_BY_APEX.get(path.relative_to(ROOT).as_posix(), set())
    assert "Any" not in {node.id for node in nodes(path, ast.Name)}


def test_every_public_function_says_all_its_types():
    for function in filter(inspect.isfunction, (getattr(amp, name) for name in amp.__all__)):
        signature = inspect.signature(function)
        kinds = [parameter.annotation for parameter in signature.parameters.values()]
        assert inspect.Signature.empty not in (*kinds, signature.return_annotation), function


def test_every_error_is_an_amp_error():
    classes = [item for item in vars(errors).values() if inspect.isclass(item)]
    assert all(issubclass(item, amp.AmpError) for item in classes)
    assert {item.__name__ for item in classes} <= set(amp.__all__)


def test_only_our_own_mistakes_are_asserted():
    """An assertion says what went wrong inside; bad input is told by an error."""
    for path in FILES:
        for node in nodes(path, ast.Assert):
            assert node.msg is not None, f"{path.name}:{node.lineno} says nothing"
