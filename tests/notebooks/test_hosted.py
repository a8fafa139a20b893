"""Test a notebook in an imitation of Colab and Kaggle. The test that starts ranks as a user does is `long`.

/dev/shm has 64 MB, as in a container without --shm-size. There is one kernel and no terminal, so everything is typed
into cells. The kernel has the service's environment variables. The GPUs and the service's own page are not imitated
(tests/notebook/cluster/test_remarks.py has what two T4 report).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from clusters import home_of_clusters
from lessons import LESSONS, code_of, stored

SHARED_MB = 64
CELLS = (
    "%load_ext nbkit\nfrom nbkit.notebook.cluster.launch import launch\nlaunch.START_SECONDS = 900",  # torch is imported
    "%cluster start",  # without -n: two CPU ranks, and a remark
    "import numpy\nbig = numpy.ones(16_000_000)\n%push big\n%pull big --rank 1\nbig.nbytes, int(big.sum())",
    """%%distributed
import os
shared = os.statvfs("/dev/shm")
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.full((250_000,), float(i)), torch.ones(1)
trainer = nbkit.Trainer(
    model=lambda: torch.nn.Linear(250_000, 1), data=Rows(), batch_size=8, loss=torch.nn.functional.mse_loss,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-9), loading=nbkit.Loading(workers=2),
)
print(shared.f_blocks * shared.f_frsize // 2**20, "MB shared")""",
    "%%distributed --detach\ntrainer.fit(10_000)",
    "%strategy zero1",
    "%nbkit why",
    "%train stop",
    "%board",
    "%cluster stop",
)
RUN = """
import json, sys
from pathlib import Path
from nbkit.notebook.headless import Headless, shown_by

cells = [{"cell_type": "code", "metadata": {}, "source": source, "outputs": []} for source in json.loads(sys.argv[1])]
with Headless(Path.cwd(), lambda cell, text: None) as kernel:
    kernel.run({"cells": cells})
html = [str(each.get("data", {}).get("text/html", "")) for cell in cells for each in cell["outputs"]]
Path("shown.json").write_text(json.dumps({"texts": list(map(shown_by, cells)), "html": html}))
"""


TWICE = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
installed = []
shell.register_magic_function(installed.append, "line", "pip")
shell.run_cell(sys.argv[1]).raise_error()
assert "nbkit" in shell.extension_manager.loaded and not installed
sys.modules["nbkit"] = None  # as if it were missing
assert isinstance(shell.run_cell(sys.argv[1]).error_in_exec, ImportError)
print("pip", *installed)
"""


def test_the_first_cell_of_each_lesson_installs_nbkit_only_if_it_is_missing(tmp_path: Path) -> None:
    (first,) = {"".join(code_of(stored(path))[0]["source"]) for path in LESSONS}
    env = os.environ | {"IPYTHONDIR": str(tmp_path)}

    done = subprocess.run([sys.executable, "-c", TWICE, first], env=env, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == 'pip install -q "nbkit-train[widgets]"'


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="needs root, for another /dev/shm")
@pytest.mark.parametrize(
    ("name", "service"),
    [("COLAB_RELEASE_TAG", "Colab"), ("KAGGLE_KERNEL_RUN_TYPE", "Kaggle")],
    ids=["colab", "kaggle"],
)
def test_a_hosted_notebook_starts_trains_switches_and_stops(name: str, service: str, tmp_path: Path) -> None:
    with home_of_clusters(tmp_path / "home"):
        folder = tmp_path / "content"
        folder.mkdir()
        mount = f"mount -t tmpfs -o size={SHARED_MB}m tmpfs /dev/shm"
        words = [sys.executable, "-c", RUN, json.dumps(CELLS)]
        inside = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *words]
        done = subprocess.run(inside, cwd=folder, env={**os.environ, name: "as there"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads((folder / "shown.json").read_text())

    _, start, values, made, _, switched, why, _, board, _ = shown["texts"]
    assert f"{service} gives this notebook no GPU" in start and "2 ranks" in start
    assert "(128000000, 16000000)" in values  # more than fits into the shared memory
    assert f"{SHARED_MB} MB shared" in made
    assert "→ dp=2 zero=1" in switched and "bit for bit" in switched
    assert "rank" in why
    if service == "Colab":  # only its page knows the address of a port
        assert any("google.colab.kernel.proxyPort(" in html for html in shown["html"])
    else:
        assert board
