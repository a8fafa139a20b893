"""Test rules that the project's own files follow."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = sorted(path for folder in ("nbkit", "magics") for path in (ROOT / folder).rglob("*.py"))
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
# Home folders of a user, and package indexes, which each machine configures for itself.
FOREIGN = re.compile(
    r"(?<![\w.~-])(/home/[a-z]|/Users/[A-Za-z]|/root/)"
    r"|\b(?:pypi|pythonhosted|download\.pytorch)\.org\b"
    r"|--(?:extra-)?index-url[ =]\S*://|--find-links[ =]\S*/"
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tracked_files() -> list[Path]:
    # Without this, git refuses a checkout of another owner (CI as root).
    done = subprocess.run(["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    return [ROOT / path for path in done.stdout.split("\0") if path and (ROOT / path).is_file()]


def test_no_file_or_folder_has_a_meaningless_name() -> None:
    assert [name(path) for path in CODE if NAMES_THAT_SAY_NOTHING & {path.stem, path.parent.name}] == []


def test_every_module_has_a_docstring() -> None:
    silent = [name(path) for path in CODE if not re.match(r'\s*(#.*\n)*\s*r?"""', path.read_text())]

    assert silent == []


def test_no_tracked_file_names_a_folder_of_one_machine_or_a_package_index() -> None:
    own = [re.escape(str(ROOT)), re.escape(str(Path.home())) + "/"]
    pattern = re.compile(f"{FOREIGN.pattern}|(?<![\\w.~-])(?:{'|'.join(own)})")
    parts = ("/home/", "/Users/", "/root/", ".org", "index-url", "find-links", str(ROOT), str(Path.home()))
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if not any(part in text for part in parts):  # because a search of every line takes seconds
            continue
        for number, line in enumerate(text.splitlines(), 1):
            # This file contains the pattern itself.
            if path != Path(__file__) and (match := pattern.search(line)):
                found.append(f"{name(path)}:{number}: {match[0]}")

    assert found == []


def test_every_target_in_make_help_exists() -> None:
    help_lines = re.findall(r'@echo "make (\S+) ', (ROOT / "Makefile").read_text())
    planned = subprocess.run(["make", "--dry-run", *help_lines], cwd=ROOT, capture_output=True, text=True)

    assert len(help_lines) > 10 and planned.returncode == 0, planned.stderr
