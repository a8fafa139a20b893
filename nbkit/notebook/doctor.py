"""Check this machine for `nbkit doctor`: its devices, what nbkit would use, and what to type if something is missing.

Versions come from the metadata of installed packages, GPUs from nvidia-smi. Neither torch nor a widget library is
imported.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Literal

from nbkit.durations import text_of
from nbkit.errors import NbkitError
from nbkit.figures import size
from nbkit.jupyter_private import SYMBOLS
from nbkit.name_clash import REMEDY, other_nbkit
from nbkit.notebook.cluster import registry, site_settings
from nbkit.notebook.cluster.launch.pins import pins_within
from nbkit.notebook.cluster.launch.platform_check import check_platform, release, starts_by_forking
from nbkit.notebook.cluster.machine.gpus import show_mib
from nbkit.notebook.cluster.machine.machine import Machine, read_machine
from nbkit.notebook.cluster.machine.remarks import remarks
from nbkit.private_symbols import problems
from nbkit.quoting import shell_words
from nbkit.wire.user_code import hiding

_DISTRIBUTION = "nbkit-train"
_REQUIRED = ("ipyparallel", "ipykernel", "jupyter_client", "numpy", "psutil")
_OPTIONAL = {
    "jupyterlab": "to open notebooks",
    "ipywidgets": "live widgets; without it the same shows as text and HTML",
    "tensorboard": "%board",
}
# Docker's default is 64 MiB, with which DataLoader workers and NCCL die with a bus error.
_SHARED_MEMORY_MIB = 1024
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")

State = Literal["ok", "note", "missing"]
_MARKS: dict[State, str] = {"ok": "✓", "note": "!", "missing": "✗"}


@dataclass(frozen=True)
class DoctorFinding:
    """A line of the report. state "missing": a cluster cannot start without it. "note": worth knowing."""

    topic: str
    subject: str
    text: str
    state: State = "ok"
    hint: str = ""

    def __post_init__(self) -> None:
        if self.state == "missing" and not self.hint:
            raise NbkitError("What is missing comes with the command that installs it.", numbers=self.subject)


@dataclass(frozen=True)
class DoctorReport:
    """All findings, by topic. It has a text and an HTML form."""

    findings: tuple[DoctorFinding, ...]

    @property
    def ok(self) -> bool:
        """Return True if nothing required is missing."""
        return not self.missing

    @property
    def missing(self) -> tuple[DoctorFinding, ...]:
        return tuple(finding for finding in self.findings if finding.state == "missing")

    @property
    def verdict(self) -> str:
        if self.ok:
            return "Ready: %load_ext nbkit, then %cluster start"
        return f"Not ready: {', '.join(finding.subject for finding in self.missing)}"

    def as_json(self) -> dict[str, object]:
        """Return {"ok", "verdict", "findings": [{"topic", "subject", "text", "state", "hint"}, ...]}.

        ok: nothing required is missing. state: "ok", "note" or "missing". hint: what to type, or "".
        """
        return {"ok": self.ok, "verdict": self.verdict, "findings": self.findings}

    def __repr__(self) -> str:
        width = max(len(finding.subject) for finding in self.findings)
        lines: list[str] = []
        topic = ""
        for finding in self.findings:
            if finding.topic != topic:
                topic = finding.topic
                lines += ["", topic] if lines else [topic]
            lines.append(f"  {_MARKS[finding.state]} {finding.subject:<{width}}  {finding.text}")
            if finding.hint:
                lines.append(f"    {'':<{width}}  → {finding.hint}")
        return "\n".join([*lines, "", self.verdict])

    def _repr_html_(self) -> str:
        rows: list[str] = []
        topic = ""
        for finding in self.findings:
            if finding.topic != topic:
                topic = finding.topic
                rows.append(f'<tr><th colspan="3" style="text-align:left">{escape(topic)}</th></tr>')
            hint = f"<br>→ <code>{escape(finding.hint)}</code>" if finding.hint else ""
            colour = "var(--jp-success-color1)" if finding.state == "ok" else "var(--jp-warn-color1)"
            if finding.state == "missing":
                colour = "var(--jp-error-color1)"
            rows.append(
                f'<tr><td style="color:{colour}">{_MARKS[finding.state]}</td>'
                f'<td style="text-align:left">{escape(finding.subject)}</td>'
                f'<td style="text-align:left">{escape(finding.text)}{hint}</td></tr>'
            )
        return f"<table>{''.join(rows)}</table><p><b>{escape(self.verdict)}</b></p>"


def doctor() -> DoctorReport:
    """Check this machine. It takes as long as nvidia-smi. Errors are not raised, but are in the report."""
    machine = read_machine(links=True)
    return DoctorReport(
        (
            *_machine(),
            *_torch(machine),
            *_packages(),
            *_devices(machine),
            *_settings(),
            *_cluster(machine),
        )
    )


def _machine() -> Iterator[DoctorFinding]:
    for clash in filter(None, (other_nbkit(Path(folder or ".")) for folder in dict.fromkeys(sys.path))):
        yield DoctorFinding("Machine", "nbkit", clash, "note", REMEDY)
    python = f"{platform.python_version()}  {sys.executable}"
    try:
        check_platform(torch="999")
        yield DoctorFinding("Machine", "platform", f"{platform.system()} {platform.machine()}")
        yield DoctorFinding("Machine", "Python", python)
    except NbkitError as error:
        yield DoctorFinding("Machine", "platform", f"{error.what} {error.numbers}", "missing", error.hint)
    if os.path.isdir("/dev/shm"):
        total, _, free = (size // 2**20 for size in shutil.disk_usage("/dev/shm"))
        text = f"{show_mib(free)} of {show_mib(total)} free"
        if free < _SHARED_MEMORY_MIB:
            hint = "in Docker: docker run --shm-size=8g; else DataLoader(num_workers=0)"
            yield DoctorFinding("Machine", "shared memory", f"{text}: little for DataLoader workers", "note", hint)
        else:
            yield DoctorFinding("Machine", "shared memory", text)
    if hidden := hiding(os.getcwd()):
        text = f"{', '.join(hidden)} in this folder: programs started here import it instead of Python's own module"
        hint = f"{shell_words('mv', hidden[0], f'my_{hidden[0]}')}   (in a terminal)"
        yield DoctorFinding("Machine", "names of files", text, "note", hint)
    if found := [name for name in _LAUNCHER_VARIABLES if name in os.environ]:
        text = f"{', '.join(found)} set in this process; every rank gets its own"
        yield DoctorFinding("Machine", "launcher variables", text, "note")


def _torch(machine: Machine) -> Iterator[DoctorFinding]:
    version = machine.torch.version
    try:
        check_platform(system="linux", python=(3, 11), torch=version)
    except NbkitError as error:
        yield DoctorFinding("PyTorch", "torch", f"{error.what} {error.numbers}", "missing", error.hint)
        return
    yield DoctorFinding("PyTorch", "torch", f"{version}, built for {machine.torch.target}")
    yield from _private_symbols(version)
    if "torch" in sys.modules:
        text = "is imported in this process too; ranks do not need that, and CUDA memory it takes is missing there"
        yield DoctorFinding("PyTorch", "this kernel", text, "note")


_TORCH_LACKS = "import json; from nbkit.rank import torch_private; print(json.dumps(torch_private.problems_so_far()))"


def _private_symbols(torch: str) -> Iterator[DoctorFinding]:
    """Yield findings about private parts of other libraries that nbkit uses but cannot find.

    A separate process imports torch for this.
    """
    done = subprocess.run([sys.executable, "-c", _TORCH_LACKS], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        hint = f"{_python()} -c 'import torch'"
        yield DoctorFinding("PyTorch", "import", f"torch {torch} cannot be imported: {last}", "missing", hint)
        return
    lacking = [*json.loads(done.stdout.splitlines()[-1]), *problems(SYMBOLS)]
    for sentence in lacking:
        yield DoctorFinding("PyTorch", "degraded", sentence, "note")
    if not lacking:
        yield DoctorFinding(
            "PyTorch", "private symbols", "all that nbkit uses of torch, ipyparallel and IPython are there"
        )


def _packages() -> Iterator[DoctorFinding]:
    minimum = required_versions()
    if not minimum:
        hint = f"{_python()} -m pip install -e .   (in the checkout)"
        text = "is imported but not installed: the versions that it needs are not known"
        yield DoctorFinding("Jupyter", "nbkit", text, "note", hint)
    for name in _REQUIRED:
        yield _package(name, minimum, "missing", "")
    for name, purpose in _OPTIONAL.items():
        yield _package(name, minimum, "note", f" ({purpose})")


def _package(name: str, minimum: Mapping[str, str], state: State, purpose: str) -> DoctorFinding:
    needed = minimum.get(name, "")
    wanted = f"{name}>={needed}" if needed else name
    hint = f"{_python()} -m pip install {shell_words(wanted)}"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return DoctorFinding("Jupyter", name, f"not installed{purpose}", state, hint)
    if release(version) < release(needed):
        return DoctorFinding("Jupyter", name, f"{version}, needed >= {needed}{purpose}", state, hint)
    return DoctorFinding("Jupyter", name, f"{version}{purpose}")


def required_versions() -> dict[str, str]:
    """Return package -> lowest supported version, from nbkit's metadata with extras; {} if nbkit is not installed."""
    try:
        lines = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w-]+)[^;]*?>=\s*([\d.]+)", line) for line in lines)
    return {match[1].replace("-", "_"): match[2] for match in found if match}


def _devices(machine: Machine) -> Iterator[DoctorFinding]:
    for gpu in machine.gpus:
        use = "unfit" if gpu.unfit else gpu.in_use_by_others(os.getpid())
        text = f"{gpu.name}, {show_mib(gpu.total_mib)}, {use or 'idle'}"
        yield DoctorFinding("Devices", f"GPU {gpu.number}", text, "note" if use else "ok")
    for remark in remarks(machine):
        state: State = "ok" if remark.told == "doctor" else "note"
        yield DoctorFinding("Devices", remark.subject, f"{remark.seen}: {remark.used}", state, remark.hint)
    if not machine.gpus and not remarks(machine):
        yield DoctorFinding("Devices", "GPU", "none found: ranks run on the CPU")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        yield DoctorFinding("Devices", "CUDA_VISIBLE_DEVICES", f"{visible!r}: nothing else is used", "note")
    yield DoctorFinding("Devices", "CPU cores", f"{len(machine.cores)} usable of {os.cpu_count()}")


def _settings() -> Iterator[DoctorFinding]:
    """Yield findings about the nbkit.toml files of this machine, user and project."""
    try:
        found = site_settings.read()
    except NbkitError as error:
        yield DoctorFinding("Settings", "nbkit.toml", f"{error.what} {error.numbers}", "missing", error.hint)
        return
    for key, path in found.sources.items():
        value = getattr(found, key)
        shown = size(value) if key == "max_disk" else text_of(value) if isinstance(value, float) else value
        shown = ", ".join(shown) if key == "clusters" else shown
        yield DoctorFinding("Settings", key, f"{shown}  {path}")
    for note in found.notes:
        yield DoctorFinding("Settings", "note", note, "note")
    if not found.sources:
        yield DoctorFinding("Settings", "nbkit.toml", f"none: {', '.join(map(str, site_settings.files()))}")


def _cluster(machine: Machine) -> Iterator[DoctorFinding]:
    """Yield findings about what `%cluster start` without options would do now."""
    try:
        yield DoctorFinding("%cluster start would use", "folder", str(registry.check_home()))
    except NbkitError as error:
        yield DoctorFinding(
            "%cluster start would use", "folder", f"{error.what} {error.numbers}", "missing", error.hint
        )
    try:
        plan = pins_within(site_settings.read(), machine)
    except NbkitError as error:
        yield DoctorFinding("%cluster start would use", "ranks", f"{error.what} {error.numbers}", "note", error.hint)
        return
    how = "forked from one parent" if starts_by_forking() else "spawned one by one"
    yield DoctorFinding("%cluster start would use", "ranks", f"{len(plan.pins)}, {plan.backend}, {how}")
    for pin in plan.pins:
        yield DoctorFinding("%cluster start would use", f"rank {pin.rank}", pin.why)
    for note in plan.notes:
        yield DoctorFinding("%cluster start would use", "note", note, "note")


def _python() -> str:
    return shell_words(sys.executable)
