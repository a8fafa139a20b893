"""Import all that ranks need, once, in the process from which ranks are forked."""

import gc
import importlib
import os

import executing
from IPython.core.ultratb import VerboseTB

from nbkit.errors import NbkitError
from nbkit.rank.train.trainer import Trainer

# ipyparallel takes the folder at its import as the folder of engines. With "." each engine has its own.
_getcwd, os.getcwd = os.getcwd, lambda: "."
importlib.import_module("ipyparallel.apps.baseapp")
os.getcwd = _getcwd

for _name in (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint.format_utils",
    "torch._dynamo",
    "torch.profiler",
    "torch.utils.tensorboard",
    "tensorboard.backend.event_processing.event_accumulator",
    "safetensors.torch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
    "pytest",
    "ipyparallel.controller.app",
    "nbkit.bridge.requests",
    "nbkit.bridge.training_requests",
    "nbkit.rank.models.pretrained",
    "nbkit.rank.parallel.check_model",
    "nbkit.rank.train.trainer",
    "nbkit.rank.world.failure_alarm",
):
    importlib.import_module(_name)

# The first traceback that IPython formats in a process takes most of a second, for imports and source files.
for _name in ("trainer", "job", "builder", "control.make_steps", "step.step"):
    _file = importlib.import_module(f"nbkit.rank.train.{_name}").__file__
    executing.Source.for_filename(_file).asttext()
try:
    Trainer()  # type: ignore[call-arg]
except NbkitError as _error:
    VerboseTB(theme_name="linux").structured_traceback(type(_error), _error, _error.__traceback__)

# Garbage collection in a rank then skips all this, so the ranks keep sharing its memory.
gc.collect()
gc.freeze()
