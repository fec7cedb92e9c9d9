"""One self-contained Python source out of several of Octavo's modules: what a name needs, and nothing else."""

import ast
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class _Piece(NamedTuple):
    """A top-level statement: what it defines, what it refers to, its text with the comment above it."""

    defines: tuple[str, ...]
    needs: frozenset[str]
    text: str


def inline(modules: Sequence[str], wanted: Sequence[str], given: Mapping[str, str]) -> str:
    """The definitions in `modules` that `wanted` names need, in order.

    Args:
        modules: dotted names, each after those it imports from; their imports of each other are dropped.
        wanted: names that the result must define.
        given: names that the result may use without defining them, and the text that defines each, or "" where the
            surrounding source does.

    Raises:
        ValueError: a name is defined twice, or one that is needed nowhere.
    """
    pieces = [piece for module in modules for piece in _pieces(_source(module))]
    by_name: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        for name in piece.defines:
            if name in by_name or name in given:
                raise ValueError(f"inline: expected one definition of {name}, got two; fix: rename one in the kernels")
            by_name[name] = index
    absent = [name for name in wanted if name not in by_name]
    if absent:
        raise ValueError(f"inline: expected {absent} in {list(modules)}, found none; fix: name the kernel's module")
    chosen, used = _reach(pieces, by_name, wanted)
    texts = [given[name] for name in given if name in used and given[name]]
    return "\n\n".join([*texts, *(pieces[index].text for index in sorted(chosen))])


def _reach(pieces: list[_Piece], by_name: Mapping[str, int], wanted: Sequence[str]) -> tuple[set[int], set[str]]:
    """(indices of the pieces that `wanted` needs, all names that these refer to)."""
    chosen: set[int] = set()
    used: set[str] = set()
    left = list(wanted)
    while left:
        index = by_name.get(left.pop())
        if index is not None and index not in chosen:
            chosen.add(index)
            used |= pieces[index].needs
            left += pieces[index].needs
    return chosen, used


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"inline: expected a module with a source file, got {module}; fix: install Octavo from source")
    return Path(spec.origin).read_text()


def _pieces(source: str) -> Iterator[_Piece]:
    lines = source.splitlines()
    for node in ast.parse(source).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or isinstance(node, ast.Import | ast.ImportFrom):
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        needs = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        yield _Piece(tuple(_defined(node)), frozenset(needs), "\n".join(lines[first : node.end_lineno]))


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    for target in getattr(node, "targets", [getattr(node, "target", None)]):
        if isinstance(target, ast.Name):
            yield target.id
