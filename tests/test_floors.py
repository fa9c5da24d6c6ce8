"""The house: imports go down, and no code of a checkpoint runs. Ruff bans unpickling."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

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
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and full name of every import of a file, at any depth, also for types."""
    package = ("offload_rt", *path.relative_to(ROOT).parts[:-1])
    for node in nodes_of(path):
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


def test_only_cost_converts_bytes_to_seconds():
    """A division by a name that ends in `gbps` converts."""
    lines = [
        f"{path}:{node.lineno}"
        for path in MODULES
        if part_of(path) != "cost"
        for node in nodes_of(path)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        if re.search(r"gbps\b", ast.unparse(node.right))
    ]
    assert lines == []


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


def test_no_remote_code_and_no_encoding_of_the_locale():
    """`pyproject.toml` bans unpickling and the execution of texts."""
    calls = [
        (path, node, {each.arg: ast.unparse(each.value) for each in node.keywords})
        for path in MODULES
        for node in nodes_of(path)
        if isinstance(node, ast.Call)
    ]
    for path, node, keywords in calls:
        assert keywords.get("trust_remote_code", "False") == "False", (path, node.lineno)
        # The kernel's own files, which machine.py reads, are ASCII in every locale.
        if getattr(node.func, "attr", "") in ("read_text", "write_text"):
            assert "encoding" in keywords or path.name == "machine.py", (path, node.lineno)


def test_public_methods_have_a_docstring_or_override_a_method_with_one():
    modules = [import_module(module_of(path)) for path in MODULES if path.name != "__main__.py"]
    classes = {cls for module in modules for cls in vars(module).values() if inspect.isclass(cls)}
    undocumented = [
        f"{cls.__module__}.{cls.__name__}.{name}"
        for cls in classes
        if cls.__module__.startswith("offload_rt.") and not cls.__name__.startswith("_")
        for name, member in inspect.getmembers(cls)
        if name in vars(cls) and not name.startswith("_") and inspect.getdoc(member) is None
        if inspect.isroutine(function := getattr(member, "fget", member))
        if function.__name__ == name
    ]
    assert undocumented == []
