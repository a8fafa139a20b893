"""Puts names that others chose into paths, commands and batch scripts. Only this module of nbkit quotes such names.

Such a name may hold anything: spaces, quotes, `$()`, newlines, a leading dash, `%j`, letters of any alphabet.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from nbkit.errors import UsageError

_LONGEST = 120  # bytes of one part of a path; file systems allow 255, and callers append more text
_KEPT = "._-+=@,"


def path_part(name: str) -> str:
    """Return `name` as one part of a path: letters, digits and `._-+=@,` stay, a run of anything else becomes one `_`.

    The result is never empty, hidden or an option, and it is a single word in any shell or batch script. Different
    names may have the same result.
    """
    kept = "".join(each if each.isalnum() or each in _KEPT else "\0" for each in name)
    part = re.sub("\0+", "_", kept).encode("utf-8")[:_LONGEST].decode("utf-8", "ignore")
    return re.sub("^[.-]+", "_", part) or "_"


def user_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` with a leading `~` replaced by the home directory. In a call or a magic, no shell does this."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # the user has no home directory
        return Path(path)


def file_word(path: str | Path) -> str:
    """Return `path` as a word that a command takes as a file, never as an option."""
    text = str(path)
    return f"./{text}" if text.startswith("-") else text


def shell_words(*words: str | Path) -> str:
    """Return a command that a shell splits into exactly these `words`."""
    return shlex.join(map(str, words))


def sbatch_option(option: str, value: object) -> str:
    """Return the line of a batch script that gives sbatch an option.

    Raises UsageError if the value is not a single word there: sbatch has its own rules for quotes.
    """
    text = str(value)
    if not text.isprintable() or set(text) & set(" '\"\\#"):
        raise UsageError(
            f"A batch script cannot give Slurm this --{option}.",
            numbers=f"{text!r:.200}",
            hint=f"--{option} with a value without spaces, quotes and #",
        )
    return f"#SBATCH --{option}={text}"


def slurm_file(path: str | Path) -> str:
    """Return `path` for Slurm as the name of an output file. Each `%` is escaped, since Slurm replaces `%j`."""
    return str(path).replace("%", "%%")


def ssh_command(host: str, *words: str) -> str:
    """Return a command for a terminal that runs `words` on `host`. It is quoted for the shell on the host too."""
    remote = shell_words(*words)
    return f"ssh {host} {remote}" if remote == " ".join(words) else shell_words("ssh", host, remote)


def check_host(name: str) -> str:
    """Return the name of a host. Raises UsageError if ssh or mpirun could take it for something else."""
    if not re.fullmatch(r"[\w.@-]+", name) or name.startswith("-"):
        raise UsageError(
            f"{name!r} is not the name of a host.",
            numbers="it is made of letters, digits and . _ - @, and does not begin with -",
            hint="--hosts node1:4,node2:4",
        )
    return name
