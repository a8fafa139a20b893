"""Turn a checkpoint into a safetensors file for plain torch, or into the layout of plain FSDP2 or of torchtitan."""

from __future__ import annotations

import argparse
import subprocess
import sys

from nbkit.wire.user_code import OWN_MODULES

_MODULES = "nbkit.rank.train.checkpoint"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "Write the weights of a checkpoint to one safetensors file."
    action = actions.add_parser("export", help=text, description=text)
    action.add_argument("folder", metavar="DIR", help="what trainer.save wrote, under any strategy")
    action.add_argument("file", metavar="FILE", help="for example model.safetensors")
    action.epilog = "model.load_state_dict(safetensors.torch.load_file(FILE)) takes it. Needs no cluster and no GPU."
    action.set_defaults(command=lambda given: ["export_safetensors", given.folder, given.file])
    text = "Write model, optimizer and step to a directory that plain FSDP2 or torchtitan loads."
    action = actions.add_parser("convert", help=text, description=text)
    action.add_argument("folder", metavar="DIR", help="what trainer.save wrote, under any strategy")
    action.add_argument("target", metavar="TARGET", help="a directory that is not there yet")
    action.add_argument("--to", choices=("fsdp2", "torchtitan"), default="fsdp2", help="whose layout (default: fsdp2)")
    action.epilog = "torch.distributed.checkpoint.load reads it; trainer.load reads both layouts without conversion."
    action.set_defaults(command=lambda given: ["torch_layouts", given.folder, given.target, given.to])


def run(arguments: argparse.Namespace) -> int:
    # A separate process, because this one never imports torch.
    module, *words = arguments.command(arguments)
    return subprocess.run([sys.executable, *OWN_MODULES, f"{_MODULES}.{module}", *words], check=False).returncode
