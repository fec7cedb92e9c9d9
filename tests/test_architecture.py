"""The architecture of docs/architecture.md: import direction, budgets, no mutable module state, lean import."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "octavo"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module may import its own layer and those to its left.
BASE = ("errors", "shapes", "paged_batch", "problem", "kv_cache", "work_item")
LAYERS = (BASE, ("variants", "validation", "reference"), ("planning", "kernels"), ("backends",), ("ops", "calls"))
LAYERS += (("api", "batch_attention", "append", "merge", "cascade"), ("", "__init__"), ("aot", "bench"))
LAYERS += (("compat", "integrations"), ("cli", "__main__"))

MAX_HOST_LINES, MAX_KERNEL_LINES, MAX_FUNCTION_LINES, MAX_POSITIONAL = 300, 500, 50, 8


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def part_of(module: str) -> str:
    """First component below the package: "backends" for octavo.backends.cpu, "" for octavo itself."""
    return module.split(".")[1] if "." in module else ""


def layer_of(part: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if part in layer)


def imports_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{a.name}" if node.module == "octavo" else str(node.module) for a in node.names]
    return found


def own_imports(path: Path) -> list[str]:
    return [m for m in imports_of(path) if m.split(".")[0] == "octavo"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    part = part_of(name_of(path))
    for module in own_imports(path):
        target = part_of(module) if (PACKAGE / part_of(module)).exists() or part_of(module) in sum(LAYERS, ()) else ""
        assert layer_of(target) <= layer_of(part), f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").glob("*.py")), ids=name_of)
def test_kernels_import_no_host_module(path):
    for module in imports_of(path):
        allowed = module.startswith(("triton", "octavo.kernels.")) or module == "octavo.work_item"
        assert allowed or module in ("__future__", "functools", "octavo.kernels"), f"{name_of(path)} imports {module}"


def test_the_oracle_stands_alone():
    for module in own_imports(PACKAGE / "reference.py"):
        assert part_of(module) in BASE


def is_kernel(path: Path) -> bool:
    return path.parent.name == "kernels"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_are_small(path):
    limit = MAX_KERNEL_LINES if is_kernel(path) else MAX_HOST_LINES
    assert len(path.read_text().splitlines()) <= limit


@pytest.mark.parametrize("path", [p for p in MODULES if not is_kernel(p)], ids=name_of)
def test_functions_are_small(path):
    """Docstrings do not count: they are documentation, not code. Parameters in compat are other libraries' own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"
            positional = [a.arg for a in node.args.posonlyargs + node.args.args if a.arg not in ("self", "cls")]
            foreign = part_of(name_of(path)) == "compat"
            assert foreign or len(positional) <= MAX_POSITIONAL, f"{node.name} takes {positional}"


MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MAKERS = {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "WeakKeyDictionary"}
WRITERS = {"append", "extend", "insert", "pop", "popitem", "remove", "clear", "update", "setdefault", "add", "discard"}


def is_mutable(value: ast.expr | None) -> bool:
    made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in MAKERS
    return made or isinstance(value, MUTABLE)


def module_containers(tree: ast.Module) -> set[str]:
    """Names bound at module level to something that could be written later."""
    bindings = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)) and is_mutable(node.value)]
    targets = [t for node in bindings for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    return {ast.unparse(t) for t in targets}


def written_names(tree: ast.Module) -> set[str]:
    """Names of which an item is assigned or deleted, or on which a method that writes is called."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found.add(ast.unparse(node.value).rpartition(".")[2])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITERS:
            found.add(ast.unparse(node.func.value).rpartition(".")[2])
        if isinstance(node, ast.AugAssign):
            found.add(ast.unparse(node.target).rpartition(".")[2])
    return found


@functools.cache
def written_anywhere() -> frozenset[str]:
    return frozenset(name for path in MODULES for name in written_names(ast.parse(path.read_text())))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_mutable_module_state(path):
    """Module-level containers are constants: named like it, written nowhere. No function rebinds a module's name."""
    tree = ast.parse(path.read_text())
    containers = module_containers(tree) - {"__all__"}
    assert all(name == name.upper() for name in containers)
    assert not containers & written_anywhere()
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree))


def test_writes_to_a_module_container_are_seen():
    tree = ast.parse("CACHE = {}\nSEEN: set[int] = set()\ndef f(x):\n    CACHE[x] = 1\n    SEEN.add(x)\n")
    assert module_containers(tree) == written_names(tree) == {"CACHE", "SEEN"}


HEAVY = ("triton", "typer", "rich", "safetensors", "matplotlib")


def loaded_by(statement: str) -> str:
    code = f"import sys; {statement}; print(*(m for m in {HEAVY} if m in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_needs_torch_alone():
    assert loaded_by("import octavo") == loaded_by("import torch")


def test_the_repository_speaks_of_octavo_alone():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    words = ("/wo" + "rk/", "/fa" + "rm/", "/.lib" + "rary", "nvidia-" + "h200", "this " + "session")
    for name in listed.stdout.split():
        path = ROOT / name
        if path.is_file() and path.suffix in (".py", ".md", ".toml", ".jsonl", ".css", ".html", ""):
            text = path.read_text(errors="replace")
            assert not [w for w in words if w in text], name
