"""Test that files do not import each other in large circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES_IN_A_CIRCLE = 3


def modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "nbkit").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """Yield all modules that a file may import, also those for types only or in a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imports(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return module -> modules that it imports.

    A package is part of the name of each module in it. So only an import of the package itself counts as one.
    """
    packages = {name for name, path in files.items() if path.name == "__init__.py"}
    return {name: {each for each in imported(path) if each in files and each not in packages | {name}}
            for name, path in files.items()}  # fmt: skip


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, the largest first."""
    reached = {name: reachable(name, edges) for name in edges}
    found = {frozenset({name} | {other for other in reached[name] if name in reached[other]}) for name in edges}
    return sorted((sorted(circle) for circle in found if len(circle) > 1), key=len, reverse=True)


def reachable(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = list(edges[name])
    while ahead:
        if (one := ahead.pop()) not in found:
            found.add(one)
            ahead += edges[one]
    return found


def test_a_circle_is_found_without_the_modules_that_lead_into_it() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}, "e": {"a"}}

    assert circles(edges) == [["b", "c", "d"]]


def test_imports_for_types_only_count(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from two import Two\n")

    assert "two" in set(imported(tmp_path / "one.py"))


def test_no_more_than_three_files_import_each_other_in_a_circle() -> None:
    found = [circle for circle in circles(imports(modules())) if len(circle) > FILES_IN_A_CIRCLE]

    assert found == []
