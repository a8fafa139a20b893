"""Run a sample of the tests on other versions of torch and Python: python -m tests.support.versions [VERSION ...]

A version is one of torch ("2.14.1", on this Python) or "PYTHON:TORCH" ("3.12:2.14.1"). Each gets an environment below
.venv/versions, which stays. Without arguments all of VERSIONS are run, and the table in
docs/evidence/versions.md is written.
Exits with 1 if a test failed. A version that cannot be installed becomes a row that says why.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence" / "versions.md"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
VERSIONS = ["2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0", "3.12:2.14.1", "3.13:2.14.1", "3.14:2.15.0"]
SAMPLE = [
    "tests/test_private_symbols.py",
    "tests/rank/comm",
    "tests/rank/world",
    "tests/rank/parallel",
    "tests/rank/rng",
    "tests/rank/telemetry",
    "tests/rank/train/switch",
    "tests/rank/train/replace",
    "tests/rank/train/test_job.py",
    "tests/rank/train/test_trainer.py",
    "tests/verify/test_strategies.py",
    "tests/verify/test_planted.py",
    "tests/bridge",
    "tests/magics/test_notebook.py",
    "tests/notebook/cluster/test_cells.py",
]
_BEGIN, _END = "<!-- table -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Version:
    python: str
    torch: str

    @classmethod
    def parse(cls, text: str) -> Version:
        python, _, torch = text.rpartition(":")
        return cls(python or HERE, torch)

    @property
    def folder(self) -> Path:
        return ROOT / ".venv" / "versions" / f"{self.python}-{self.torch}"


@dataclass(frozen=True)
class Result:
    """The tests on one version. passed: None if the version could not be installed."""

    version: Version
    passed: int | None
    text: str

    @property
    def row(self) -> str:
        return f"| {self.version.torch} | {self.version.python} | {self.text} |"


def requirements() -> list[str]:
    """Return the packages that the tests need besides torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(name for extra in ("board", "widgets", "lab", "test") for name in extras[extra]),
    ]
    return [name for name in wanted if not name.startswith("nbkit-train")]


def interpreter(version: str) -> str | None:
    """Return the Python of a version, if this machine has one that can make environments."""
    names = [sys.executable] if version == HERE else [f"python{version}"]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    names += [str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"), reverse=True)]
    for name in names:
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return found
    return None


def install(version: Version) -> str:
    """Make the environment of a version if it does not exist. Return why that failed, or ""."""
    ready, python = version.folder / ".installed", version.folder / "bin" / "python"
    wanted = "\n".join(requirements())
    if ready.exists() and ready.read_text() == wanted:
        return ""
    made_by = interpreter(version.python)
    if made_by is None:
        return f"there is no Python {version.python} on this machine"
    steps = [
        [made_by, "-m", "venv", str(version.folder)],
        # In one call, so that no package replaces this torch.
        [str(python), "-m", "pip", "install", "-q", f"torch=={version.torch}", *requirements()],
        [str(python), "-m", "pip", "install", "-q", "--no-deps", "--editable", str(ROOT)],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["pip gave no reason"]
            return f"it could not be installed: {lines[-1].removeprefix('ERROR: ')}"
    ready.write_text(wanted)
    return ""


def run(version: Version) -> Result:
    if why := install(version):
        return Result(version, None, why)
    python = version.folder / "bin" / "python"
    print(f"torch {version.torch} on Python {version.python}", flush=True)
    began = time.monotonic()
    # Without the bytecode of another Python's environment, and without the cache of its last failures.
    command = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command += [
        "--max-worker-restart",
        "0",
        *SAMPLE,
    ]  # else the run would wait forever for the tests of a worker that died
    # A shell makes background commands ignore interrupts, but some tests send them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if re.search(r"\d+ (passed|failed|error)", line) else last
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped|rerun)", last)}
    minutes = (time.monotonic() - began) / 60
    shown = ", ".join(f"{number} {word}" for word, number in counts.items())
    green = process.returncode == 0
    return Result(version, counts.get("passed", 0) if green else 0, f"{shown}, {minutes:.0f} min")


def write(results: list[Result]) -> None:
    """Put the table into the page of versions."""
    text = PAGE.read_text()
    head, rest = text.split(_BEGIN)
    table = "\n".join(["| torch | Python | result of tests |", "|---|---|---|", *(result.row for result in results)])
    PAGE.write_text(f"{head}{_BEGIN}\n{table}\n{rest[rest.index(_END) :]}")


def main(asked: list[str]) -> int:
    results = [run(Version.parse(each)) for each in asked or VERSIONS]
    print("\n".join(result.row for result in results))
    if not asked:
        write(results)
    # Always run a version that is named.
    wrong = [result for result in results if result.passed == 0 or (asked and result.passed is None)]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
