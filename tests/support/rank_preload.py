"""Imported once, by the process that ranks are forked from: everything that each would import anew."""

import gc
import importlib

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
    "nbkit.bridge.training_requests",
    "nbkit.rank.models.pretrained",
    "nbkit.rank.parallel.check_model",
    "nbkit.rank.train.trainer",
    "nbkit.rank.world.watchdog",
):
    importlib.import_module(_name)

# A collection in a rank then passes over all this, which also stays in memory that the ranks share.
gc.collect()
gc.freeze()
