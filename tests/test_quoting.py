"""Test that names with any characters reach a path, a shell, a batch script and other hosts unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nbkit.errors import ClusterError, UsageError
from nbkit.notebook.cluster import registry
from nbkit.notebook.cluster.hosts.launcher import agent_command
from nbkit.notebook.cluster.hosts.launchers.mpi import MpiRequest
from nbkit.notebook.cluster.hosts.launchers.ssh import SshRequest, read_hosts
from nbkit.notebook.cluster.launch.launch import make_folder
from nbkit.quoting import file_word, path_part, sbatch_option, shell_words, slurm_file, ssh_command, user_path

HOSTILE = [
    "plain", "two words", "new\nline", "new\n#SBATCH --exclusive", "it's", '"double"', "$(touch made)", "`touch made`",
    "a;touch made", "-rf", "--help", "%j", "größe-名", "back\\slash", "a*[b]?", "$HOME", "~", "..", ".hidden", "#",
    "a\tb", "\x1b[31m", "x" * 300, "", "a/b", "&&", "a\r\nb", "!1", "{a,b}",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_path_part_returns_one_shell_word_and_one_folder_name(name: str, tmp_path: Path) -> None:
    part = path_part(name)

    (tmp_path / part).mkdir()
    assert [path.name for path in tmp_path.iterdir()] == [part]
    assert part[0] not in ".-" and shell_words(part) in (part, f"'{part}'") and len(part.encode()) <= 120
    assert not set(part) & set("/ \n\t'\"$`;%\\*[]?~#&!{}") and path_part(part) == part


def test_a_shell_receives_the_words_unchanged(tmp_path: Path) -> None:
    shown = "import json, sys; print(json.dumps(sys.argv[1:]))"
    command = shell_words(sys.executable, "-c", shown, *HOSTILE)

    for shell in ("sh", "bash"):
        done = subprocess.run([shell, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == HOSTILE
    # ssh passes one line to a shell of the other host.
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift; exec sh -c "$*"\n')
    (tmp_path / "ssh").chmod(0o755)
    for words in (["echo", "-n", "plain"], [sys.executable, "-c", shown, *HOSTILE]):
        typed = ssh_command("node1", *words)
        done = subprocess.run(
            ["sh", "-c", f"PATH={tmp_path}:$PATH; {typed}"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout == "plain" or json.loads(done.stdout) == HOSTILE
    assert ssh_command("node1", "python3", "-m", "nbkit") == "ssh node1 python3 -m nbkit"
    assert not (tmp_path / "made").exists()


def test_file_names_are_never_options_and_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere/else")
    assert [file_word(name) for name in ("-x.py", "x.py", Path("-a/b"))] == ["./-x.py", "x.py", "./-a/b"]
    assert user_path("~/runs") == Path("/somewhere/else/runs") and user_path("a/~/b") == Path("a/~/b")
    assert user_path("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
    assert slurm_file("/home/50%u/job.log") == "/home/50%%u/job.log"
    words = agent_command(SshRequest((("node1", 2),), python="~/env/bin/python", container="run --image ~/a.sif"))
    assert words[:4] == ["run", "--image", "/somewhere/else/a.sif", "/somewhere/else/env/bin/python"]


@pytest.mark.parametrize("value", ["a b", "a\n#SBATCH --exclusive", "it's", 'a"b', "a\\b", "#", "\x00"])
def test_values_that_sbatch_would_misread_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match="cannot give Slurm this --partition"):
        sbatch_option("partition", value)
    assert sbatch_option("time", "1-00:00:00") == "#SBATCH --time=1-00:00:00"


@pytest.mark.parametrize("name", ["-oProxyCommand=touch made", "-v", "a b", "a;b", "$(x)", "a\nb", "", "a:1:2", "a/b"])
def test_text_that_is_not_a_host_name_is_refused(name: str) -> None:
    for request in (SshRequest, MpiRequest):
        with pytest.raises(UsageError, match="is not the name of a host"):
            request(((name, 1),))
    with pytest.raises(UsageError):
        read_hosts(f"{name},")
    assert read_hosts("node1:4,user@node-2.lan") == (("node1", 4), ("user@node-2.lan", 1))


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in ("plain", "größe-名")])
def test_no_cluster_name_escapes_the_folder_of_clusters(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NBKIT_HOME", str(tmp_path / "clusters"))
    (tmp_path / "cluster.json").write_text("{}")

    with pytest.raises(ClusterError, match="made of letters, digits"):
        make_folder(name)
    assert registry.find(name) is None and registry.find("../") is None
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]
