"""Write the cells of a saved notebook as one script for torchrun, which needs no Jupyter."""

from __future__ import annotations

import argparse

from nbkit.notebook.export.sbatch_file import add_slurm_options


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebook", metavar="NOTEBOOK", help="a saved notebook, whose cells keep the order of the file")
    parser.add_argument("path", nargs="?", default="train.py", metavar="FILE", help="the script to write (train.py)")
    add_slurm_options(parser, "also write an sbatch file beside the script", nodes=True)
    parser.epilog = "In a running notebook, %nbkit export train.py takes the cells in the order in which they ran."


def run(arguments: argparse.Namespace) -> int:
    from nbkit.notebook.export.export import export  # here, since it imports ipyparallel

    options = {name: value for name, value in vars(arguments).items() if name != "run"}
    print(export(**options))
    return 0
