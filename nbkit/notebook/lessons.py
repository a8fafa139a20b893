"""The lessons: notebooks that come with nbkit."""

from __future__ import annotations

from pathlib import Path

import nbkit
from nbkit.errors import NbkitError
from nbkit.notebook.user_files import write_file


def lesson(name: str) -> Path:
    """Return the path of a lesson, such as "00_switch_live". Raises NbkitError if it is not there."""
    path = _folder() / f"{name}.ipynb"
    if not path.is_file():
        raise NbkitError("There is no such lesson.", numbers=str(path), hint="nbkit lab")
    return path


def write_lessons(folder: Path) -> list[Path]:
    """Write the lessons into `folder`, and return their paths in order. A file that is there already stays as it is.

    Raises NbkitError if they cannot be written.
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
            write_file(written[-1], path.read_bytes())
    return written


def _folder() -> Path:
    """Return nbkit/lessons, where a wheel has them, or notebooks/ of a checkout."""
    package = Path(nbkit.__file__).resolve().parent
    places = (package / "lessons", package.parent / "notebooks")
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        where = " and ".join(map(str, places))
        raise NbkitError("The lessons are not there.", numbers=f"looked in {where}", hint="pip install nbkit-train")
    return found
