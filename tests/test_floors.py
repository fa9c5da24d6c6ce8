"""The house: imports go down, nothing is unpickled, and no code of a checkpoint runs."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import offload_rt

ROOT = Path(offload_rt.__file__).parent
FLOORS = (
    {"errors", "dtypes", "packing", "chunks", "bad_words", "lazy"}, {"system", "config"},
    {"sampling_params", "ops"}, {"models", "tree", "text", "sampling"}, {"cost"}, {"weights", "kv"},
    {"offload"}, {"parallel"}, {"executor"}, {"speculate"}, {"engine"}, {"llm"},
    {"planning", "server"}, {"cli"},
    {"run", "chat", "serve", "plan", "calibrate", "convert", "report"},
)  # fmt: skip
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
MODULES = sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    """The part of the house a file belongs to: its folder, or its own name at the top."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node, at any depth."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield node
            yield from statements(node)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and full name of every import of a file, at any depth, also for types."""
    package = ("offload_rt", *path.relative_to(ROOT).parts[:-1])
    for node in statements(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, node.module) if node.module else above)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def violations(path: Path) -> list[str]:
    """The imports of a file that go up, or across a floor."""
    here = FLOOR_OF[part_of(path)]
    problems = []
    for line, name in imported(path):
        package, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        if package == "offload_rt" and part not in ("__version__", part_of(path)):
            there = FLOOR_OF.get(part)  # none: what the package shows belongs to its users
            if there is None or there >= here:
                problems.append(f"{path.name}:{line} on floor {here} imports {name} of {there}")
    return problems


def test_imports_point_to_lower_floors():
    # the package's face shows what the upper floors have, on demand
    modules = [path for path in MODULES if path != ROOT / "__init__.py"]
    assert {part_of(path) for path in modules} <= {*FLOOR_OF}, "give it a floor"
    assert [found for path in modules for found in violations(path)] == []


@pytest.mark.parametrize(("part", "line", "is_allowed"), [
    ("offload", "from offload_rt.executor import runner", False),
    ("offload", "from offload_rt.weights import layout", True),
    ("ops", "from offload_rt import LLM", False), ("ops", "import offload_rt", False),
    ("engine", "import offload_rt.cli.run", False), ("engine", "from ..llm import LLM", False),
    ("engine", "from .runner import Runner", True),
    ("offload", "if TYPE_CHECKING:\n    from offload_rt.engine.engine import Engine", False),
    ("kv", "def f():\n    from offload_rt.llm import LLM", False),
])  # fmt: skip
def test_import_parser_finds_all_imports(part, line, is_allowed, monkeypatch):
    path = ROOT / part / "imagined.py"
    monkeypatch.setitem(globals(), "tree_of", lambda _: ast.parse(line))
    assert (violations(path) == []) == is_allowed


def divisions_by_rate(tree: ast.Module) -> list[int]:
    """Lines that divide by a name ending in `gbps`, i.e. convert bytes to seconds."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and any(
            getattr(part, "attr", getattr(part, "id", "")).endswith("gbps")
            for part in ast.walk(node.right)
        )
    ]


def test_only_cost_converts_bytes_to_seconds():
    modules = (path for path in MODULES if part_of(path) != "cost")
    lines = {str(path): rates for path in modules if (rates := divisions_by_rate(tree_of(path)))}
    assert lines == {}


def module_of(path: Path) -> str:
    return ".".join(("offload_rt", *path.relative_to(ROOT).with_suffix("").parts))


def test_modules_import_each_other_without_cycles():
    """Imports within functions and for types count as well. Packages are no modules here."""
    names = {module_of(path): path for path in MODULES if path.name != "__init__.py"}
    edges = {
        name: {
            module
            for _, full in imported(path)
            for module in (full, full.rpartition(".")[0])
            if module in names
        }
        for name, path in names.items()
    }
    TopologicalSorter(edges).prepare()  # raises CycleError with the modules of a cycle


def test_package_root_imports_only_its_exports():
    names = {name for _, name in imported(ROOT / "__init__.py") if name.startswith("offload_rt")}
    parts = {name.split(".")[1] for name in names}
    assert parts == {"llm", "sampling_params"}


# Modules that unpickle or run what they read, and calls that do.
_DANGEROUS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
_DANGEROUS_CALLS = {
    "torch.load", "torch.save", "torch.jit.load", "numpy.load", "np.load", "eval", "exec",
}  # fmt: skip
_LAST_NAMES = {name.rpartition(".")[2] for name in _DANGEROUS_CALLS}


def dangers(path: Path) -> list[str]:
    calls = [
        f"{path.name}:{line} {name}"
        for line, name in imported(path)
        if name.split(".")[0] in _DANGEROUS or name in _DANGEROUS_CALLS
    ]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            # unparsing is slow
            if name in _LAST_NAMES and ast.unparse(node.func) in _DANGEROUS_CALLS:
                calls.append(f"{path.name}:{node.lineno} {ast.unparse(node.func)}")
            trusts = [each for each in node.keywords if each.arg == "trust_remote_code"]
            if any(ast.unparse(each.value) != "False" for each in trusts):
                calls.append(f"{path.name}:{node.lineno} trust_remote_code")
            # The kernel's own files, which machine.py reads, are ASCII in every locale.
            is_text = name in ("read_text", "write_text") and path.name != "machine.py"
            if is_text and not any(each.arg == "encoding" for each in node.keywords):
                calls.append(f"{path.name}:{node.lineno} depends on the encoding of the locale")
    return calls


def test_no_unpickling_no_remote_code_and_no_encoding_of_the_locale():
    assert [found for path in MODULES for found in dangers(path)] == []


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def undocumented(modules: list[Path]) -> list[str]:
    """Public methods without a docstring that override no method with one."""
    nodes = [node for path in modules for node in tree_of(path).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def documented(name: str) -> set[str]:
        if name not in classes:
            return set()
        bases = (getattr(base, "value", base) for base in classes[name].bases)
        inherited = (documented(getattr(base, "id", "")) for base in bases)
        own = {node.name for node in methods(classes[name]) if ast.get_docstring(node)}
        return own.union(*inherited)

    return [
        f"{name}.{method.name}"
        for name in classes
        for method in methods(classes[name])
        if not name.startswith("_") and not method.name.startswith("_")
        and method.name not in documented(name)
    ]  # fmt: skip


def test_methods_have_a_docstring_or_override_a_method_with_one():
    assert undocumented(MODULES) == []


@pytest.mark.parametrize(("base", "n_missing"), [("Base", 0), ("Base[int]", 0), ("object", 1)])
def test_undocumented_methods_are_found(base, n_missing, monkeypatch):
    code = f"""class Base:\n def f(self): 'F.'\nclass Other({base}):\n def f(self): ..."""
    monkeypatch.setitem(globals(), "tree_of", lambda _: ast.parse(code))
    assert len(undocumented([ROOT])) == n_missing
