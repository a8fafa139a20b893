"""Test `nbkit doctor` and its report, on this machine and on pretended ones."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import machines
import pytest

import nbkit
from nbkit.commands import main, subcommands
from nbkit.errors import NbkitError
from nbkit.notebook import doctor as module
from nbkit.notebook.doctor import DoctorFinding, DoctorReport, doctor, required_versions
from nbkit.notebook.json_text import plain


@pytest.fixture(scope="module", autouse=True)
def torch_is_looked_at_once() -> Iterator[None]:
    """Import torch in a process for the first report only: it takes seconds, and the result never changes."""
    look = module._private_symbols
    once = cache(lambda: tuple(look(metadata.version("torch"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_private_symbols", lambda torch: once())
        yield


def finding(report: DoctorReport, subject: str) -> DoctorFinding:
    return next(finding for finding in report.findings if finding.subject == subject)


def forget(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make packages look as if they were not installed."""
    real = metadata.version

    def version(name: str) -> str:
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_doctor_says_that_this_machine_is_ready() -> None:
    report = doctor()

    assert report.ok
    assert finding(report, "torch").text.startswith(f"{metadata.version('torch')}, built for ")
    assert finding(report, "ipyparallel").text == metadata.version("ipyparallel")
    assert "Ready" in repr(report)


@pytest.mark.long
def test_the_command_prints_the_report_without_importing_torch() -> None:
    code = "import sys; from nbkit.commands import main; main(['doctor']); exit('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert "Ready" in done.stdout


def test_a_missing_torch_gives_the_install_command_and_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forget(monkeypatch, "torch")

    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "Not ready: torch" in printed
    assert "pip install torch" in printed


def test_a_missing_required_package_gives_the_exact_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "ipyparallel")

    (missing,) = doctor().missing

    assert missing.subject == "ipyparallel"
    assert missing.hint == f"{sys.executable} -m pip install 'ipyparallel>={required_versions()['ipyparallel']}'"


def test_a_package_that_is_too_old_is_reported_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "9.1.0" if name == "ipyparallel" else real(name))

    (missing,) = doctor().missing

    assert missing.text == "9.1.0, needed >= 9.2"


def test_a_missing_optional_package_is_only_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "tensorboard", "ipywidgets")
    report = doctor()

    assert report.ok
    assert finding(report, "tensorboard").state == "note"
    assert "tensorboard>=2.21" in finding(report, "tensorboard").hint


def test_gpus_are_shown_with_the_processes_that_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = "GPU-b1d0e6a7-91d5-5c60-e1a9-63a5b9f4c502, 42, python, 9000\n"
    machine = machines.nvidia(machines.KAGGLE_T4, machines.CUDA_13, machines.T4_DRIVER, processes)
    monkeypatch.setattr(module, "read_machine", lambda links: machine)
    report = doctor()

    assert finding(report, "GPU 0").text == "Tesla T4, 15.0 GiB, idle"
    assert "pid 42" in finding(report, "GPU 1").text
    assert finding(report, "torch").text == "2.13.0, built for CUDA 13.0"
    assert finding(report, "rank 0").text.startswith("GPU 0 (GPU-0f4ddc2a-66d0-7bf4-1a0c-2b8d6f0d7a01): idle")


def test_an_unusable_gpu_is_reported_with_a_hint_and_allows_cpu_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = dataclasses.replace(machines.KAGGLE, torch=machines.CPU_TORCH)
    monkeypatch.setattr(module, "read_machine", lambda links: machine)
    report = doctor()

    assert report.ok
    assert finding(report, "GPU 0").text == "Tesla T4, 15.0 GiB, unfit"
    assert "cannot be used, since torch 2.13.0+cpu is built for the CPU" in finding(report, "GPU").text
    assert "pip uninstall torch" in finding(report, "GPU").hint
    assert finding(report, "Kaggle").state == "ok"
    assert finding(report, "rank 0").text.startswith("CPU: torch 2.13.0+cpu is built for the CPU; ")


def test_the_report_shows_itself_as_html_with_everything_escaped() -> None:
    report = DoctorReport(
        (
            DoctorFinding("Topic", "a<b", "x & y"),
            DoctorFinding("Topic", "gone", "not there", "missing", "pip install x>1"),
        )
    )

    shown = report._repr_html_()

    assert "a&lt;b" in shown
    assert "x &amp; y" in shown
    assert "<code>pip install x&gt;1</code>" in shown
    assert "Not ready: gone" in shown


def test_a_finding_of_something_missing_requires_a_hint() -> None:
    with pytest.raises(NbkitError):
        DoctorFinding("Topic", "gone", "not there", "missing")


def test_the_installed_command_prints_its_version() -> None:
    command = Path(sys.executable).with_name("nbkit")

    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)

    assert done.stdout == f"nbkit {nbkit.__version__}\n"
    assert nbkit.__version__ == metadata.version("nbkit-train")


def test_every_subcommand_has_a_docstring_a_parser_and_a_run_function() -> None:
    for command in subcommands():
        assert command.__doc__, command.__name__
        assert callable(command.prepare_parser)
        assert callable(command.run)


def test_an_unknown_subcommand_gives_exit_status_2_and_a_message_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["dance"])

    assert done.value.code == 2
    assert "dance" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "environment", "words", "said"),
    [
        (("-OO",), {}, ("--help",), ["watch"]),
        ((), {"PYTHONIOENCODING": "ascii", "HOME": "/dev/null/x"}, ("doctor",), ["  + Python ", "Not a directory"]),
        ((), {"PYTHONWARNINGS": "error"}, ("list",), ["No cluster."]),
    ],
)
def test_the_command_works_in_odd_environments(
    options: tuple[str, ...], environment: dict[str, str], words: tuple[str, ...], said: list[str], tmp_path: Path
) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("NBKIT_HOME", "XDG_DATA_HOME")}
    env |= {} if "HOME" in environment else {"NBKIT_HOME": str(tmp_path)}
    env |= environment
    done = subprocess.run(
        [sys.executable, *options, "-P", "-m", "nbkit", *words], env=env, capture_output=True, text=True, timeout=60
    )
    assert all(each in done.stdout for each in said) and "Traceback" not in done.stderr, (done.stdout, done.stderr)


def test_a_closed_output_pipe_is_no_error() -> None:
    command = f"'{sys.executable}' -P -m nbkit --help | head -n 0"
    done = subprocess.run(["sh", "-c", f"{command}; {command}"], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_doctor_names_files_that_hide_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not [each for each in doctor().findings if each.subject == "names of files"]
    (tmp_path / "queue.py").touch()
    (tmp_path / "random").mkdir()
    found = finding(doctor(), "names of files")
    assert found.state == "note" and found.text.startswith("queue.py in this folder: ")
    assert found.hint.startswith("mv queue.py my_queue.py")


def test_a_report_has_versions_and_findings_and_nothing_private(tmp_path: Path) -> None:
    told = {"NCCL_DEBUG": "WARN", "TORCH_HUB_TOKEN": "hidden-1", "HUB_TOKEN": "hidden-2", "LOGNAME": "ada.l"}
    told |= {"TORCH_MIRROR": "https://ada:hidden-3@mirror.example/torch", "HOME": str(tmp_path / "ada.l")}
    (tmp_path / "ada.l").mkdir()
    code = "import sys; from nbkit.commands import main; sys.exit(main(['doctor', '--report']))"
    env = {**os.environ, **told, "NBKIT_HOME": str(tmp_path / "ada.l" / "nbkit")}

    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)

    words = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert f"nbkit {nbkit.__version__}" in words and f"torch {metadata.version('torch')}" in words
    assert "NCCL_DEBUG WARN" in words and "TORCH_MIRROR https://...@mirror.example/torch" in words
    assert "TORCH_HUB_TOKEN ..." in words and "✓ folder ~/nbkit" in words and "Ready: %load_ext nbkit" in words
    secrets = ("hidden-", "HUB_TOKEN hidden", str(tmp_path), "ada.l", socket.gethostname())
    assert not [secret for secret in secrets if secret in done.stdout]


def test_the_issue_form_asks_for_the_report() -> None:
    form = (Path(__file__).resolve().parents[2] / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()

    assert "nbkit doctor --report" in form


def test_doctor_json_has_the_findings_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)

    assert (told["ok"], told["verdict"]) == (True, "Ready: %load_ext nbkit, then %cluster start")
    found = next(one for one in told["findings"] if one["subject"] == "torch")
    assert found["topic"] == "PyTorch" and found["state"] == "ok" and found["text"].startswith("2.")


def test_json_has_null_for_nan_and_text_for_unknown_types() -> None:
    told = plain({"a": float("nan"), 2: (1.5, Path("x"), frozenset({"b"})), "c": DoctorFinding("T", "s", "t")})

    assert told["a"] is None and told["2"] == [1.5, "x", ["b"]]
    assert told["c"] == {"topic": "T", "subject": "s", "text": "t", "state": "ok", "hint": ""}


def test_every_command_and_magic_that_shows_a_table_takes_json() -> None:
    tables = "%cluster attach|%cluster status|%cluster list|%cluster resize|%cluster restart|%compare|%nbkit plan"
    tables += "|%nbkit why|%strategy|nbkit doctor|nbkit jobs|nbkit list|nbkit selftest|nbkit watch|nbkit why"
    lines = (Path(__file__).parents[1] / "surface.txt").read_text().splitlines()

    assert sorted(line.partition(" [")[0] for line in lines if "[--json]" in line and "--json" in line) == sorted(
        {line.partition(" [")[0] for line in lines for name in tables.split("|") if f"{line} ".startswith(f"{name} ")}
    )
