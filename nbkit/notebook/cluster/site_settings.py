"""The settings of a machine, a user and a project: `nbkit.toml` in /etc, in ~/.config and in the notebook's folder.

    max_ranks = 8       # ranks of all clusters of a user together
    max_gpus = 4        # GPUs, in the same way
    max_ttl = "12h"     # longest time that a cluster lives without a notebook and a cell
    ttl = "2h"          # the default without --ttl
    home = "/scratch"   # clusters' folders, in a folder for each user; not in a project's file
    runs = "/data/runs" # records of trainings without log_dir=, in a folder for each user
    max_disk = "20GB"   # no run begins and no checkpoint is written if the folder of runs is larger

    [clusters]          # %cluster start --on lab
    lab = "--slurm -n 16 --partition gpu --time 4:00:00 -- --account=lab"

A later file wins, but a max_ setting above that of /etc has no effect. The limits prevent accidents; they do not stop a
user who wants to get around them.
"""

from __future__ import annotations

import getpass
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nbkit.durations import seconds_given, seconds_of, text_of
from nbkit.errors import UsageError
from nbkit.quoting import user_path

_NAME = "nbkit.toml"


@dataclass(frozen=True)
class Site:
    """The current settings.

    ttl, max_ttl: seconds. max_disk: bytes. runs: this user's folder. clusters: name -> options. sources: key -> the
    file that sets it. notes: settings without effect, and why.
    """

    max_ranks: int | None = None
    max_gpus: int | None = None
    max_ttl: float | None = None
    ttl: float = 7200.0
    home: Path | None = None
    runs: Path = Path("runs")
    max_disk: int | None = None
    clusters: dict[str, str] = field(default_factory=dict)
    sources: dict[str, Path] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def options_of(self, cluster: str) -> str:
        """Return the options of %cluster start that `cluster` stands for. Raises UsageError, naming the known ones."""
        if cluster not in self.clusters:
            raise UsageError(
                f"No {_NAME} describes a cluster called {cluster!r}.",
                numbers=f"those that there are: {', '.join(self.clusters) or 'none'}",
                hint=f'[clusters]   and below it   {cluster} = "--slurm -n 8"   in {files()[1]}',
            )
        return self.clusters[cluster]

    def ttl_of(self, asked: str | float | None) -> float:
        """Return the time to live of a cluster. Raises UsageError if it is longer than allowed."""
        asked = seconds_given(asked)
        if asked is None:
            return self.ttl if self.max_ttl is None else min(self.ttl, self.max_ttl)
        if self.max_ttl is not None and asked > self.max_ttl:
            raise UsageError(
                "This time to live is longer than allowed here.",
                numbers=f"--ttl {asked:g}s, max_ttl is {text_of(self.max_ttl)} in {self.sources['max_ttl']}",
                hint=f"--ttl {self.max_ttl:g}s",
            )
        return asked


def files() -> tuple[Path, Path, Path]:
    """Return the settings files of the machine, of the user and of the project."""
    config = os.environ.get("XDG_CONFIG_HOME") or user_path("~/.config")
    return Path("/etc") / _NAME, Path(config) / _NAME, Path.cwd() / _NAME


def read(paths: Sequence[Path] | None = None) -> Site:
    """Read the settings. Raises UsageError, which names file and key, for an invalid one."""
    machine, user, project = paths or files()
    limits = {key: value for key, value in _load(machine).items() if key.startswith("max_")}
    values: dict[str, Any] = {}
    sources: dict[str, Path] = {}
    notes = []
    for path in (machine, user, project):
        for key, value in _load(path).items():
            if key == "home" and path == project:
                raise _wrong(path, "home is set for a machine or a user: elsewhere its clusters would not be found")
            if key == "clusters":
                value = {**values.get(key, {}), **value}
            if key in limits and value > limits[key]:
                notes.append(f"{key} in {path} has no effect: {machine} allows less")
            else:
                values[key], sources[key] = value / getpass.getuser() if key == "runs" else value, path
    return Site(**values, sources=sources, notes=tuple(notes))


@cache
def home_here() -> Path | None:
    """Return the folder of clusters that a file names. The first answer is kept, because clusters do not move."""
    home = read((*files()[:2], Path(os.devnull))).home
    return home and home / getpass.getuser() / "nbkit"


def _load(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise _wrong(path, str(error)) from None
    for key, value in found.items():
        if key not in _KEYS:
            raise _wrong(path, f"it has no key {key!r}; keys: {', '.join(_KEYS)}")
        try:
            found[key] = _KEYS[key](value)
        except ValueError:
            raise _wrong(path, f"{key} = {value!r}") from None
    return found


def _wrong(path: Path, what: str) -> UsageError:
    return UsageError(f"{path} cannot be used.", numbers=what, hint='max_ranks = 8   or   ttl = "2h"')


def _count(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError
    return value


def _folder(value: object) -> Path:
    if not isinstance(value, str) or not user_path(value).is_absolute():
        raise ValueError
    return user_path(value)


def _time(value: object) -> float:
    if isinstance(value, str | int | float):
        return seconds_of(value)
    raise ValueError


def _options(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(options, str) for options in value.values()):
        raise ValueError
    return value


def _bytes(value: object) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([MGT])B", str(value))
    if not found or not float(found[1]):
        raise ValueError
    return round(float(found[1]) * {"M": 1e6, "G": 1e9, "T": 1e12}[found[2]])


_KEYS: dict[str, Callable[[object], Any]] = {
    "max_ranks": _count,
    "max_gpus": _count,
    "max_ttl": _time,
    "ttl": _time,
    "home": _folder,
    "runs": _folder,
    "max_disk": _bytes,
    "clusters": _options,
}
