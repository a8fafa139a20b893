"""Run a notebook without a browser, and store it with its outputs as a new notebook."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbkit.errors import CellError, NbkitError, UsageError
from nbkit.notebook.export.sbatch_file import (
    SlurmOptions,
    add_slurm_options,
    check_resumes,
    log_of,
    notebook_job,
    submit_job,
)
from nbkit.notebook.headless import Headless, read_notebook, set_parameters
from nbkit.notebook.user_files import write_file
from nbkit.quoting import file_word, shell_words


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebook", type=Path, metavar="NOTEBOOK", help="the notebook to run, which does not change")
    parser.add_argument(
        "-p",
        dest="parameters",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="replace the value in the first assignment to NAME, in the cell with the tag parameters if there is one",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="notebook to write; default: the notebook's name and the time"
    )
    add_slurm_options(parser, "submit it as a job for one node, instead of running it here", nodes=False)
    parser.epilog = (
        "Without --slurm, the command waits until all cells have ended. The exit status is 1 if a cell fails."
    )


def run(arguments: argparse.Namespace) -> int:
    path: Path = arguments.notebook
    parameters = dict(map(_parameter, arguments.parameters))
    notebook = read_notebook(path)
    set_parameters(notebook, parameters)
    if arguments.output is not None and arguments.output.absolute() == path.absolute():
        raise UsageError("The output is another file than the notebook.", numbers=str(path), hint="--output run.ipynb")
    options = SlurmOptions(
        1, arguments.partition, arguments.time, arguments.gpus, arguments.cpus, requeue=arguments.requeue
    )
    if not arguments.slurm and options != SlurmOptions():
        raise UsageError("--partition, --time, --gpus, --cpus and --requeue are for Slurm.", hint="--slurm")
    check_resumes("\n".join("".join(cell["source"]) for cell in notebook["cells"]), options)
    if arguments.slurm:
        return _submit(path, parameters, arguments.output, options)
    output = arguments.output or Path(f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}.ipynb")
    return _run_here(path, notebook, output)


def _parameter(text: str) -> tuple[str, str]:
    name, is_given, value = text.partition("=")
    if not is_given or not name.isidentifier():
        raise UsageError("A parameter is a name and a value.", numbers=f"-p {text}", hint="-p STEPS=500")
    return name, value


def _submit(path: Path, parameters: Mapping[str, str], output: Path | None, options: SlurmOptions) -> int:
    kept = shell_words(file_word(output)) if output else f'{shell_words(file_word(path.stem))}-"$SLURM_JOB_ID".ipynb'
    words = [shell_words("-p", f"{name}={value}") for name, value in parameters.items()]
    file = Path(f"{path.stem}.sbatch")
    write_file(file, notebook_job(str(path), path.stem, [*words, f"--output {kept}"], options))
    job = submit_job(file)
    print(f"job {job}, from {file}")
    print(f"  outputs   {output or f'{path.stem}-{job}.ipynb'}, cell by cell; what it prints: {log_of(path.stem, job)}")
    print(f"  squeue --job {job}   or   scancel {job}")
    return 0


def _run_here(path: Path, notebook: dict[str, Any], output: Path) -> int:
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]

    def keep() -> None:
        write_file(output, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")

    def on_cell(cell: dict[str, Any]) -> None:
        try:
            keep()
        except NbkitError as error:  # the training goes on; after the last cell this error ends the command
            print(f"{error.what} {error.numbers}", flush=True)
        first = next((line for line in "".join(cell["source"]).splitlines() if line.strip()), "")
        print(f"cell {code.index(cell) + 1} of {len(code)}: {first}", flush=True)

    # A closed terminal, `kill` and a job's time limit end the command like Ctrl-C, with everything that it started.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with Headless(path.absolute().parent, lambda cell, text: print(text, end="", flush=True)) as kernel:
            kernel.run(notebook, on_cell=on_cell)
    except CellError as error:
        error.hint = f"the notebook, with what it did up to there: {output}"
        raise
    finally:
        keep()
    print(f"the notebook, with its outputs: {output}")
    return 0
