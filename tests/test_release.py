"""Test that the files for a release, containers, Binder and conda name only things that exist.

Running them would need outside services.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from nbkit.commands import subcommands

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    *(".github/workflows/release.yml", ".github/ISSUE_TEMPLATE/bug.yml", "Dockerfile"),
    *(".devcontainer/devcontainer.json", "binder/environment.yml", "binder/postBuild"),
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("name", FILES)
def test_extras_commands_and_make_targets_in_each_file_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if re.match(r"[.$\w]", line)}

    assert set(re.findall(r"\[(\w+)\]['\"]", text)) <= {*PROJECT["optional-dependencies"]}
    told = set(re.findall(r"(?:bin/nbkit\" ?|\"nbkit |^ *nbkit )(\w+)", text, re.M))
    assert told <= {module.__name__.rpartition(".")[2] for module in subcommands()}
    for target in re.findall(r'"make (\S+)"', text):
        assert target in {target.replace("$(READY)", ".venv/.installed") for target in targets}


def jobs() -> dict[str, Any]:
    workflow = yaml.safe_load((ROOT / FILES[0]).read_text())
    assert workflow["permissions"] == {}  # each job states its own permissions
    return dict(workflow["jobs"])


def test_only_the_publish_job_has_a_pypi_token_and_no_job_has_a_password() -> None:
    assert jobs()["publish"]["permissions"] == {"id-token": "write"} and jobs()["publish"]["environment"] == "pypi"
    assert jobs()["build"]["permissions"] == {"contents": "read"}
    assert "secrets." not in (ROOT / FILES[0]).read_text()
    order = [job.get("needs") for job in jobs().values()]
    assert order == [None, "build", "publish"]


def test_the_release_reads_the_version_from_its_only_place() -> None:
    (command,) = [step["run"] for step in jobs()["build"]["steps"] if step.get("name") == "The tag is the version"]
    pattern = re.search(r"s/(.*?)/\\1/p", command)

    assert pattern is not None
    found = re.findall(
        pattern[1].replace(r"\(", "(").replace(r"\)", ")"), (ROOT / "nbkit/__init__.py").read_text(), re.M
    )
    assert len(found) == 1 and "version" in PROJECT["dynamic"]


def test_the_urls_that_a_release_adds_to_pyproject_parse() -> None:
    (step,) = [step for step in jobs()["build"]["steps"] if "project.urls" in step.get("run", "")]
    added = re.findall(r"printf '(.*?)'", step["run"])
    text = "".join(added).replace("\\n", "\n").replace("%s", "https://example.org/nbkit")

    urls = tomllib.loads((ROOT / "pyproject.toml").read_text() + text)["project"]["urls"]
    assert list(urls) == ["Repository", "Changelog", "Issues"]


def test_containers_and_environments_use_a_tested_python() -> None:
    tested = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line}
    docker = re.search(r"ARG PYTHON=(\S+)", (ROOT / "Dockerfile").read_text())
    image = json.loads((ROOT / FILES[3]).read_text())["image"]
    conda = yaml.safe_load((ROOT / FILES[4]).read_text())["dependencies"]

    assert docker is not None and docker[1] in tested
    assert image.rpartition(":")[2] in tested
    assert conda[0].partition("=")[2] in tested and "torch>=2.11" in conda[-1]["pip"]
