"""Test the wheel and source distribution built from this tree, and the installed wheel.

Also test name clashes: another project is called nbkit, and other packages are called magics.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from importlib.metadata import version
from pathlib import Path

import pytest

import nbkit
from tests.commands.test_lab import assert_serves

ROOT = Path(__file__).resolve().parents[1]
NOT_BUILT = shutil.ignore_patterns(".git*", ".venv", "__pycache__", "runs", "dist", "build", ".*_cache", ".ipynb_*")
OTHER = "__version__ = '0.0.10'\n__all__ = ['NotebookFinder']\n"
"""What the other project has in its nbkit/__init__.py, in short."""


def build(folder: Path, out: Path, *what: str) -> None:
    command = [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(out), *what, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a wheel and a source distribution of this tree."""
    folder = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, folder / "tree", ignore=NOT_BUILT)
    (folder / "tree" / "notebooks" / "runs").mkdir()
    (folder / "tree" / "notebooks" / "runs" / "left.jsonl").touch()  # git ignores a training's files
    shutil.copy(ROOT / ".gitignore", folder / "tree")
    build(folder / "tree", folder / "dist", "--sdist")
    build(folder / "tree", folder / "dist", "--wheel")
    return folder / "dist"


@pytest.fixture
def installed(built: Path, tmp_path: Path) -> Iterator[Path]:
    """Yield a folder that holds the wheel as pip lays it out."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    yield tmp_path / "site"


def python(code: str, *places: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run code with `places` first on the module path, as a notebook's kernel there would."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "IPYTHONDIR": str(cwd / "ipython")}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, cwd=cwd, capture_output=True, text=True, timeout=90
    )


def files(folder: str, *patterns: str) -> set[str]:
    found = {path.relative_to(ROOT / folder) for pattern in patterns for path in (ROOT / folder).rglob(pattern)}
    return {str(path) for path in found}


def test_the_wheel_has_only_code_javascript_magics_lessons_and_licence(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and ".data/" not in name}
        data = {name.partition(".data/")[2]: archive.read(name) for name in archive.namelist() if ".data/" in name}
        meta = {name.partition("/")[2]: archive.read(name).decode() for name in archive.namelist() if "-info/" in name}

    expected = {f"nbkit/{name}" for name in files("nbkit", "*.py", "*.js", "*.css", "py.typed", "LICENSE")}
    of_lab = {name for name in expected if name.startswith("nbkit/notebook/lab/nbkit-train/")}
    expected -= of_lab
    expected |= {f"nbkit/magics/{name}" for name in files("magics", "*.py")}
    expected |= {f"nbkit/lessons/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert names == expected
    # JupyterLab and its server look there, so users need not enable anything.
    lab, share = ROOT / "nbkit" / "notebook" / "lab", "data/share/jupyter/labextensions/nbkit-train"
    of_lab = {f"{share}/static/{Path(name).name}" for name in of_lab}
    enabled = "data/etc/jupyter/jupyter_server_config.d/nbkit-train.json"
    assert data.keys() == {*of_lab, f"{share}/package.json", enabled}
    assert data[f"{share}/package.json"] == (lab / "nbkit-train" / "package.json").read_bytes()
    told = HeaderParser().parsestr(meta["METADATA"])
    assert (told["Name"], told["Version"]) == ("nbkit-train", nbkit.__version__)
    assert {"all", "board", "lab", "widgets"} <= set(told.get_all("Provides-Extra") or [])
    assert "torch" not in {line.split(">")[0] for line in told.get_all("Requires-Dist") or [] if "extra" not in line}
    assert meta["licenses/LICENSE"] == (ROOT / "LICENSE").read_text()


def test_the_source_distribution_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (source,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    build(tmp_path / source.name.removesuffix(".tar.gz"), tmp_path, "--wheel")

    (again,) = tmp_path.glob("*.whl")
    assert again.read_bytes() == wheel.read_bytes()


LOADED = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for line in ("%load_ext nbkit", "%load_ext nbkit"):
    shell.run_cell(line).raise_error()
cell = shell.transform_cell("%%distributed\\n1")
assert "nbkit.magics.cells" in cell, cell
shell.run_cell("%cluster list").raise_error()
shell.run_cell(cell)                       # the rewritten cell finds its function: only a cluster is missing
import magics
print("theirs:", magics.OF)
"""


def test_magics_of_the_wheel_work_with_another_package_named_magics(installed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "magics"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("OF = 'weather maps'\n")

    done = python(LOADED, installed, other.parent, cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "theirs: weather maps" in done.stdout and "%cluster start -n 2" in done.stdout
    assert "No module" not in done.stdout + done.stderr


def test_a_checkout_names_the_package_that_hides_its_magics(tmp_path: Path) -> None:
    other = tmp_path / "other" / "magics"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()

    done = python("import nbkit; nbkit.load_ipython_extension(None)", other.parent, ROOT, cwd=tmp_path)

    assert f"Another package named magics hides nbkit's.\n{other}/__init__.py" in done.stderr


def test_the_installed_wheel_finds_its_lessons(installed: Path, tmp_path: Path) -> None:
    code = "from nbkit.notebook.lessons import lesson; print(lesson('00_switch_live'))"

    assert python(code, installed, cwd=tmp_path).stdout.strip() == f"{installed}/nbkit/lessons/00_switch_live.ipynb"


def test_import_and_doctor_report_the_other_project_named_nbkit(installed: Path, tmp_path: Path) -> None:
    (installed / "nbkit-0.0.10.dist-info").mkdir()
    code = "import nbkit; from nbkit.notebook.doctor import _machine; print(*_machine(), sep='\\n')"

    done = python(code, installed, cwd=tmp_path)

    said = f"nbkit 0.0.10 in {installed} is another project. It has the same import name as nbkit-train."
    remedy = "pip uninstall -y nbkit; pip install --force-reinstall --no-deps nbkit-train"
    assert f"UserWarning: {said} Keep one of them: {remedy}" in done.stderr
    assert said in done.stdout.splitlines()[0] and remedy in done.stdout.splitlines()[0]


@pytest.mark.long
def test_a_command_reports_that_the_other_project_overwrote_nbkit(installed: Path, tmp_path: Path) -> None:
    (installed / "nbkit" / "__init__.py").write_text(OTHER)

    done = python("from nbkit.commands import main; main(['doctor'])", installed, cwd=tmp_path)

    assert done.returncode == 1
    assert f"{installed}/nbkit/__init__.py belongs to another project named nbkit, not to nbkit-train." in done.stderr
    assert "Traceback" not in done.stderr and "pip uninstall -y nbkit" in done.stderr


FIRST = "from IPython.core.interactiveshell import InteractiveShell as S; S.instance().run_cell({!r}).raise_error()"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_first_cell_installs_nbkit_in_an_empty_environment_and_demo_and_lab_run(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    own = tmp_path / "environment" / "bin" / "python"

    def run(*words: object) -> str:
        done = subprocess.run([str(word) for word in words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", own.parents[1])
    run(
        own, "-m", "pip", "install", "-q", "ipykernel", f"torch=={version('torch').partition('+')[0]}"
    )  # as hosted services have them
    lesson = json.loads((ROOT / "notebooks" / "00_quickstart.ipynb").read_text())
    first = next("".join(cell["source"]) for cell in lesson["cells"] if cell["cell_type"] == "code")

    monkeypatch.setenv("PIP_FIND_LINKS", str(built))
    run(own, "-c", FIRST.format(first))

    said = run(own.with_name("nbkit"), "demo", "--cpu", "-n", "2", "--steps", "60")
    assert said.count("state identical") == 5 and "went on as if nothing had happened" in said

    run(own, "-m", "pip", "install", "-q", "nbkit-train[lab]")
    (tmp_path / "lab").mkdir()
    assert_serves(own, tmp_path / "lab")
