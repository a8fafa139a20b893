"""Puts names that somebody else chose into paths, shell commands and batch scripts. Nothing else in nbkit does that.

A name may hold anything: spaces, quotes, `$()`, newlines, a leading dash, letters of any alphabet.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from nbkit.errors import UsageError

_LONGEST = 120  # bytes of a part of a path, of the 255 that file systems take: others are put behind it
_KEPT = "._-+=@,"


def path_part(name: str) -> str:
    """Return `name` as one part of a path: letters, digits and `._-+=@,` stay, a run of anything else is one `_`.

    The result is never empty, hidden, an option or `..`. Different names may have the same result.
    """
    kept = "".join(each if each.isalnum() or each in _KEPT else "\0" for each in name)
    part = re.sub("\0+", "_", kept).encode("utf-8")[:_LONGEST].decode("utf-8", "ignore")
    return re.sub("^[.-]+", "_", part) or "_"


def user_path(path: str | Path) -> Path:
    """Return `path` with a leading `~` as the home directory. Unlike in a shell, nobody else has replaced it."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # of a user who has none
        return Path(path)


def shell_words(words: Iterable[str | Path]) -> str:
    """Return `words` as a command that a shell splits into exactly these words.

    Raises UsageError for a character that ends a line or cannot be seen: a script is read line by line.
    """
    return " ".join(shlex.quote(one_line(str(word))) for word in words)


def file_argument(path: str | Path) -> str:
    """Return `path` as a word of a command that never takes it for an option."""
    text = str(path)
    return f"./{text}" if text.startswith("-") else text


def one_line(text: str) -> str:
    """Return `text`. Raises UsageError where it holds a character that ends a line or cannot be seen."""
    if bad := next((each for each in text if not each.isprintable()), None):
        raise UsageError(
            "A name with a character that cannot be seen goes into no command or script.",
            numbers=f"{bad!r} in {text!r:.200}",
            hint="rename it:   mv OLD NEW",
        )
    return text


def sbatch_option(option: str, value: object) -> str:
    """Return the line of a batch script that gives sbatch an option. Raises UsageError as `one_line` does.

    sbatch splits such a line as a shell would, except that it knows no escapes within quotes.
    """
    text = one_line(str(value))
    return f"#SBATCH --{option}={text}"
