"""Test the words of the code: class names are unique, docstrings begin with a verb, named files exist."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "nbkit").rglob("*.py"))
FOLDERS = ("bench", "magics", "tests", "verify")
ALSO_DOCUMENTED = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
"""Files whose docstrings begin like those of nbkit; their class names may exist twice."""
OPENINGS = frozenset(
    "What Whether Of One As How From Where Who Which Whose When That Those In By For To At".split()
)  # these mostly begin a phrase without a verb
OF_OTHERS = {"nanny.py", "notebook.py", "version.py", "dualpipev.py", "queue.py", "random.py"}
"""Files of other projects, or of users, that comments name."""


def documented() -> Iterator[tuple[Path, str]]:
    for path in [*SOURCES, *ALSO_DOCUMENTED]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
                text := ast.get_docstring(node)
            ):
                yield path, text


def test_a_public_class_name_is_defined_once() -> None:
    homes = defaultdict(set)
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(str(path.relative_to(ROOT)))
    assert {name: sorted(where) for name, where in homes.items() if len(where) > 1} == {}


def test_docstrings_do_not_begin_with_a_question_word_or_preposition() -> None:
    """Check that functions begin like "Return ..."; classes may begin with a noun."""
    found = [f"{path.relative_to(ROOT)}: {text.splitlines()[0]}" for path, text in documented()
             if text.split()[0].strip(".,:`") in OPENINGS]  # fmt: skip
    assert found == []


def test_files_named_in_docstrings_and_comments_exist() -> None:
    folders = ("nbkit", "tests", "bench", "verify", "magics", "docs")
    names = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")} | OF_OTHERS
    stale = []
    for path in SOURCES:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            is_doc = token.type == tokenize.STRING and token.string.lstrip("rbuRBU").startswith('"""')
            if token.type == tokenize.COMMENT or is_doc:
                named = re.findall(r"\b([a-z_][a-z_0-9]*\.py)\b", token.string)
                stale += [f"{path.relative_to(ROOT)}: {name}" for name in named if name not in names]
    assert stale == []
