"""`%nbkit export train.py`, `nbkit export notebook.ipynb train.py`, `nbkit.export("train.py")`: one function."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from nbkit.errors import UsageError
from nbkit.notebook.cluster.cluster import current
from nbkit.notebook.export.running_notebook import read_running
from nbkit.notebook.export.saved_notebook import read_saved
from nbkit.notebook.export.sbatch_file import SlurmOptions, check_resumes, script_job
from nbkit.notebook.export.script import MARK, script_of
from nbkit.notebook.export.source import Code, LeftOut, Switch
from nbkit.notebook.user_files import write_file
from nbkit.quoting import file_word, shell_words, user_path


@dataclass(frozen=True)
class Exported:
    """What was written. beside: the other files, each with what to type. Stands for its path wherever one is wanted."""

    path: Path
    run: str
    num_cells: int
    beside: tuple[tuple[Path, str], ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        cells = f"{self.num_cells} cell{'s' * (self.num_cells != 1)} for the ranks"
        lines = [f"{self.path}   {cells}, {len(self.left_out)} lines of the notebook left out (listed in it)"]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  {typed}" for typed in (self.run, *(typed for _, typed in self.beside))]
        return "\n".join(lines)


def export(
    path: str | os.PathLike[str],
    notebook: str | os.PathLike[str] | None = None,
    *,
    slurm: bool = False,
    nodes: int = 1,
    partition: str = "",
    time: str = "",
    gpus: int | None = None,
    cpus: int | None = None,
    requeue: bool = False,
) -> Exported:
    """Write the cells that the ranks have run as one script for torchrun, which needs no Jupyter.

    notebook: a saved one, whose cells are taken in the order in which they stand; default: the notebook that runs, in
    the order in which its cells ran since the ranks were started. slurm: also an sbatch file, for so many nodes with as
    many ranks each as the notebook had; gpus, cpus: on each node; requeue: the job goes on later, from a checkpoint,
    where its time limit, or another job, has ended it. Where the notebook has switched its strategy, the switches are
    written beside the script, for --switches. A file that nobody has exported is not overwritten. Raises
    UsageError, with nothing written, for what a script cannot have.
    """
    to = user_path(os.fspath(path))
    options = SlurmOptions(nodes, partition, time, gpus, cpus, requeue)
    if not slurm and options != SlurmOptions():
        raise UsageError("This is for an sbatch file.", numbers=f"{options}", hint="--slurm")
    _check_free(to)
    source = read_running(current()) if notebook is None else read_saved(user_path(os.fspath(notebook)))
    script = script_of(source, to.name)
    check_resumes(script.text, options)
    run = f"torchrun --nproc-per-node {source.num_ranks} {shell_words(file_word(to))}"
    files = [(to, script.text, "")]
    if source.switches:
        plan = to.with_suffix(".switches.json")
        typed = f"{run} --switches {shell_words(file_word(plan))}   as the notebook was switched"
        files.append((plan, json.dumps(_plan(source.switches), indent=2) + "\n", typed))
    if slurm:
        batch = to.with_suffix(".sbatch")
        if source.gpus:
            options = replace(options, gpus=gpus or source.num_ranks)
        elif source.threads:
            options = replace(options, cpus=cpus or source.num_ranks * source.threads)
        text = script_job(str(to), to.stem, source.num_ranks, options)
        files.append((batch, text, f"sbatch {shell_words(file_word(batch))}"))
    for file, text, _ in files:
        write_file(file, text)
    return Exported(
        to,
        run,
        sum(isinstance(part, Code) for part in source.parts),
        tuple((file, typed) for file, _, typed in files[1:]),
        source.left_out,
        script.notes,
    )


def _check_free(to: Path) -> None:
    if to.suffix != ".py":
        raise UsageError("A script's name ends in .py.", numbers=str(to), hint="%nbkit export train.py")
    if not to.parent.is_dir():
        raise UsageError(f"There is no folder {to.parent}.", numbers=str(to), hint="%nbkit export train.py")
    if to.exists() and not to.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        raise UsageError(f"{to} is there, and nbkit has not written it.", hint="%nbkit export another.py")


def _plan(switches: tuple[Switch, ...]) -> dict[str, str]:
    """Of the last training: steps that go down again are another one's."""
    last: list[Switch] = []
    for each in switches:
        last = [*last, each] if not last or each.step >= last[-1].step else [each]
    return {"0": last[0].old, **{str(each.step): each.new for each in last}}
