"""Turn a checkpoint into one safetensors file that plain torch loads into the unmodified model."""

from __future__ import annotations

import argparse
import subprocess
import sys


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "Write the weights of a checkpoint to one safetensors file."
    action = actions.add_parser("export", help=text, description=text)
    action.add_argument("folder", metavar="DIR", help="what trainer.save wrote, under any strategy")
    action.add_argument("file", metavar="FILE", help="for example model.safetensors")
    action.epilog = "model.load_state_dict(safetensors.torch.load_file(FILE)) takes it. Needs no cluster and no GPU."


def run(arguments: argparse.Namespace) -> int:
    # A process of its own: this one never imports torch.
    command = [sys.executable, "-m", "nbkit.rank.train.checkpoint.export_safetensors", arguments.folder, arguments.file]
    return subprocess.run(command, check=False).returncode
