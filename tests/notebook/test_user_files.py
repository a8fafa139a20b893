"""Test that a user's file is complete, or that the old one stays and one error says why."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_run import FakeRun

from nbkit.errors import NbkitError
from nbkit.notebook.user_files import write_file
from nbkit.notebook.widgets.dashboard.dashboard import Dashboard


@contextlib.contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Make writes beyond `num_bytes` of a file fail, as on a full disk."""
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))


def test_a_file_that_cannot_be_written_completely_keeps_its_old_content(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    assert write_file(path, "before") == path
    path.chmod(0o640)

    with full_disk(1000), pytest.raises(NbkitError) as refused:
        write_file(path, "x" * 2000)

    assert path.read_text() == "before" and os.listdir(tmp_path) == ["a file"]
    assert refused.value.what == f"{str(path)!r} could not be written; what was there before stays."
    numbers = refused.value.numbers
    assert numbers.startswith("File too large; 2,000 bytes, and ") and numbers.endswith(" MB are free there")
    for wrong in (tmp_path / "none" / "file", tmp_path):
        with pytest.raises(NbkitError, match="could not be written"):
            write_file(wrong, b"")


def test_write_file_keeps_links_permissions_and_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("before")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")

    write_file(tmp_path / "link", "a name: \udcff\n")

    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"a name: \xff\n"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640
    assert write_file(Path("/dev/null"), "nothing") == Path("/dev/null")


def test_a_report_on_a_full_disk_is_refused_and_a_tilde_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(FakeRun(tmp_path / "run", 2, "ddp")) as run:
        run.step()
    monkeypatch.setenv("HOME", str(tmp_path))
    board = Dashboard(tmp_path / "run")
    try:
        with full_disk(1000), pytest.raises(NbkitError, match="could not be written"):
            board.report("~/run.html")
        assert not (tmp_path / "run.html").exists()
        assert board.report("~/run.html") == tmp_path / "run.html"
    finally:
        board.close()
