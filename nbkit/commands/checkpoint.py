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
    action.add_argument("folder", metavar="DIR", help="a directory that trainer.save has written, under any strategy")
    action.add_argument("file", metavar="FILE", help="the file to write, such as model.safetensors")
    action.epilog = (
        "Load FILE with model.load_state_dict(safetensors.torch.load_file(FILE)). You need no cluster and no GPU."
    )
    action.set_defaults(command=lambda given: ["export_safetensors", given.folder, given.file])
    text = "Write model, optimizer and step to a directory that plain FSDP2 or torchtitan loads."
    action = actions.add_parser("convert", help=text, description=text)
    action.add_argument("folder", metavar="DIR", help="a directory that trainer.save has written, under any strategy")
    action.add_argument("target", metavar="TARGET", help="the directory to write, which must not exist yet")
    action.add_argument("--to", choices=("fsdp2", "torchtitan"), default="fsdp2", help="the layout (default: fsdp2)")
    action.epilog = (
        "Load TARGET with torch.distributed.checkpoint.load. trainer.load reads both layouts without a conversion."
    )
    action.set_defaults(command=lambda given: ["torch_layouts", given.folder, given.target, given.to])


def run(arguments: argparse.Namespace) -> int:
    # A separate process, because this one never imports torch.
    module, *words = arguments.command(arguments)
    return subprocess.run([sys.executable, *OWN_MODULES, f"{_MODULES}.{module}", *words], check=False).returncode
