"""Test the files that `%cluster sync` copies: .gitignore applies with or without a repository, sizes are limited."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from nbkit.bridge import calls
from nbkit.errors import UsageError
from nbkit.notebook.cluster.hosts import sync_files
from nbkit.notebook.cluster.hosts.sync_files import project_at


@pytest.mark.parametrize("repository", [True, False])
def test_files_that_git_ignores_are_not_copied(tmp_path: Path, repository: bool) -> None:
    for name in ("train.py", "src/model.py", "src/__pycache__/model.pyc", "runs/log.txt", "src/.env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("runs/\n.env\n")
    if repository:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)

    assert list(project_at(".", tmp_path).files) == [".gitignore", "src/model.py", "train.py"]
    assert list(project_at("src", tmp_path).files) == ["src/model.py"]
    assert list(project_at(tmp_path / "train.py", tmp_path).files) == ["train.py"]
    assert not (tmp_path / ".git").exists() or repository


def test_files_that_are_too_large_or_elsewhere_are_refused_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_files, "LIMIT_FILE", 100)
    monkeypatch.setattr(sync_files, "LIMIT", 250)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/a.py").write_bytes(bytes(90))
    for name in ("b.txt", "c.txt"):
        (tmp_path / name).write_bytes(bytes(100))
    (tmp_path / "d.bin").write_bytes(bytes(101))
    with pytest.raises(UsageError, match="too large to be brought") as raised:
        project_at(".", tmp_path)
    assert "%cluster sync code" in raised.value.hint and "b.txt 100 B" in raised.value.numbers
    (tmp_path / "c.txt").unlink()
    assert project_at(".", tmp_path).left_out == ("d.bin (101 B, more than 100 B)",)
    for wrong in ("missing", ".."):
        with pytest.raises(UsageError, match="cannot be brought"):
            project_at(wrong, tmp_path)


def test_a_changed_file_of_equal_time_and_size_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_home", lambda: tmp_path)
    source = tmp_path / "one.py"
    calls.write([("one.py", 0o600, b"X = 1")])
    written = source.stat()
    py_compile.compile(str(source))
    calls.write([("one.py", 0o600, b"X = 2")])
    os.utime(source, ns=(written.st_atime_ns, written.st_mtime_ns))

    spec = importlib.util.spec_from_file_location("one", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.X == 2


@pytest.mark.parametrize(
    ("seen", "copied", "used"), [("X = 1", "", "root"), ("X = 2", "", "root"), ("X = 2", "X = 1", "home")]
)
def test_a_new_rank_imports_from_the_same_folder_as_others_on_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str, copied: str, used: str
) -> None:
    """Test a file in two places. seen: the notebook's folder on this host. copied: by %cluster sync."""
    monkeypatch.setattr(calls, "_home", lambda: tmp_path / "home")
    monkeypatch.setattr(calls, "brought", None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "one.py").write_text(seen)
    if copied:
        calls.write([("one.py", 0o600, copied.encode())])
    project = calls.BroughtProject(str(tmp_path / "root"), {"one.py": hashlib.sha256(b"X = 1").hexdigest()})

    calls.use_as_others(project)

    assert sys.path[0] == str(tmp_path / used)
    assert calls.brought == project
