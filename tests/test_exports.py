"""Test the names that `import nbkit` offers: each exists, and is in the manual."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import nbkit

PAGES = (Path(__file__).resolve().parents[1] / "docs").rglob("*.md")
MANUAL = "\n".join(page.read_text() for page in PAGES)
NAMES = [name for name in nbkit.__all__ if name not in ("load_ipython_extension", *nbkit._MODULES)]


@pytest.mark.parametrize("name", nbkit.__all__)
def test_every_exported_name_resolves(name: str) -> None:
    assert getattr(nbkit, name) is getattr(nbkit, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_exported_name_is_a_class_or_function_with_a_docstring(name: str) -> None:
    offered = getattr(nbkit, name)

    assert callable(offered)
    assert (offered.__doc__ or "").strip()


@pytest.mark.parametrize("name", NAMES)
def test_every_exported_name_is_in_the_manual(name: str) -> None:
    assert re.search(rf"\b{name}\b", MANUAL)


def test_dir_shows_the_exported_names() -> None:
    assert set(nbkit.__all__) <= set(dir(nbkit))


def test_an_unknown_name_raises_an_error_with_the_known_names() -> None:
    with pytest.raises(AttributeError, match="Trainer"):
        _ = nbkit.Trainor
