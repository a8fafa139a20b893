"""The lessons: notebooks that are part of nbkit."""

from __future__ import annotations

import re
from pathlib import Path

import nbkit
from nbkit.errors import NbkitError
from nbkit.notebook.user_files import write_file

_TO_THE_MANUAL = re.compile(r"\[([^\]\"]+)\]\(\.\./(docs/[^)\"]+)\)")


def lesson(name: str) -> Path:
    """Return the path of a lesson, such as "00_switch_live". Raises NbkitError if it is not there."""
    path = _folder() / f"{name}.ipynb"
    if not path.is_file():
        raise NbkitError("There is no such lesson.", numbers=str(path), hint="nbkit lab")
    return path


def lesson_names() -> list[str]:
    """Return the names of all lessons, in their order."""
    return sorted(path.stem for path in _folder().glob("*.ipynb"))


def write_lessons(folder: Path) -> list[Path]:
    """Write the lessons into `folder`, and return their paths in order. Existing files stay unchanged.

    A link to a page of the manual becomes the page's name, because the pages are not there. Raises NbkitError if a
    lesson cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{folder}: {error.strerror}"
        raise NbkitError("The folder for the lessons cannot be made.", numbers=why, hint="nbkit lab FOLDER") from None
    written = []
    for path in sorted(_folder().glob("*.ipynb")):
        written.append(folder / path.name)
        if not written[-1].exists():
            text = path.read_text(encoding="utf-8")
            write_file(written[-1], _TO_THE_MANUAL.sub(r"\1 (\2)", text))
    return written


def _folder() -> Path:
    """Return the folder of the lessons: nbkit/lessons in a wheel, notebooks/ in a checkout."""
    package = Path(nbkit.__file__).resolve().parent
    places = (package / "lessons", package.parent / "notebooks")
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        where = " and ".join(map(str, places))
        raise NbkitError("The lessons are not there.", numbers=f"looked in {where}", hint="pip install nbkit-train")
    return found
