"""Lists every private symbol of torch that nbkit uses, with its purpose and what happens if it is missing.

Other code imports functions and classes from here. Attributes of torch's objects (`module._parameters`) are used by
their own names; they are listed and checked here too. A test compares this list with the code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._C._distributed_c10d as bindings
import torch.distributed.distributed_c10d as c10d
import torch.overrides
from torch import Tensor, nn

from nbkit.private_symbols import Missing, Symbol, listed
from nbkit.private_symbols import problems as problems_of

SYMBOLS: list[Symbol] = []


def _symbol(path: str, purpose: str, without: str, *, parameters: tuple[str, ...] = (), fallback: Any = None) -> Any:
    """Add a symbol to the list and return it. If it is missing, return `fallback`, or an object that raises if used."""
    symbol = Symbol(path, purpose, without, parameters)
    SYMBOLS.append(symbol)
    try:
        return symbol.resolve()
    except (ImportError, AttributeError, TypeError):
        return fallback if fallback is not None else Missing(symbol)


def _later(path: str, purpose: str, without: str, *, parameters: tuple[str, ...] = ()) -> Symbol:
    """Add a symbol of a module that takes long to import. `__getattr__` below imports it at its first use."""
    SYMBOLS.append(symbol := Symbol(path, purpose, without, parameters))
    return symbol


def _attributes(owner: str, names: str, purpose: str, without: str, *, at_use: bool = False) -> list[Symbol]:
    """Add attributes of a module ("torch.utils.checkpoint:") or of a class ("torch:Tensor.") to the list."""
    SYMBOLS.extend(symbols := listed(owner, names, purpose, without, at_use=at_use))
    return symbols


def problems() -> list[str]:
    """Return one sentence for each symbol that this torch lacks, or has with other arguments.

    This imports the modules of all symbols, which takes seconds. `problems_so_far` checks only imported modules.
    """
    return problems_of(SYMBOLS)


def problems_so_far() -> list[str]:
    """Return the sentences of `problems` for the modules that this process has imported."""
    return problems_of(SYMBOLS, imported=True)


# --- Operations on many tensors at once -------------------------------------------------------------------------------


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _multiply_each(tensors: Sequence[Tensor], factor: Any) -> None:
    for tensor in tensors:
        tensor.mul_(factor)


def _norm_of_each(tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _unscale_each(grads: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    for grad in grads:
        found.logical_or_(~torch.isfinite(grad).all())
        grad.mul_(inverse)


def _assert_now(condition: Tensor, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _softmax_of_masked(scores: Tensor, dim: int) -> Tensor:
    """Return the softmax of `scores`, with zeros in rows that are completely masked. Plain softmax gives nan there."""
    masked = (scores == -torch.inf).all(dim, keepdim=True)
    return torch.where(masked, 0.0, torch.softmax(scores, dim))


_SLOWER = "nbkit handles one tensor after the other, which is slower"
foreach_copy_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = _symbol(
    "torch:_foreach_copy_", "copy many tensors in one call", _SLOWER, fallback=_copy_each
)
foreach_mul_: Callable[[Sequence[Tensor], Any], None] = _symbol(
    "torch:_foreach_mul_", "scale many gradients in one call", _SLOWER, fallback=_multiply_each
)
foreach_norm: Callable[..., list[Tensor]] = _symbol(
    "torch:_foreach_norm", "take the norms of many gradients in one call", _SLOWER, fallback=_norm_of_each
)
unscale_: Callable[[Sequence[Tensor], Tensor, Tensor], None] = _symbol(
    "torch:_amp_foreach_non_finite_check_and_unscale_", "unscale fp16 gradients", _SLOWER, fallback=_unscale_each
)
assert_async: Callable[[Tensor, str], None] = _symbol(
    "torch:_assert_async", "check token ids without waiting for the device", "each check waits", fallback=_assert_now
)
safe_softmax: Callable[[Tensor, int], Tensor] = _symbol(
    "torch:_safe_softmax", "compute attention weights of rows that are masked whole", "softmax and a mask compute them",
    fallback=_softmax_of_masked,
)  # fmt: skip


# --- Autograd and modes -----------------------------------------------------------------------------------------------


def _graph_task_by_frames() -> int:
    """Return 0 if a frame of this thread runs a backward pass, else -1. CUDA's backward threads have no such frame."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("_engine_run_backward", "run_backward"):
            return 0
        frame = frame.f_back
    return -1


active_saved_tensors_hooks: Callable[[bool], Any] = _symbol(
    "torch._C._autograd:_top_saved_tensors_default_hooks",
    "see which outputs a recomputed block needs for backward",
    "recompute='selective' keeps the output of a block's last product too",
    fallback=lambda _: None,
)
graph_task_id: Callable[[], int] = _symbol(
    "torch._C:_current_graph_task_id",
    "know whether a layer is computed again within backward",
    "the stack is searched for it, which is slower and does not see CUDA's backward threads",
    fallback=_graph_task_by_frames,
)
disabled_torch_function: Any = _symbol(
    "torch._C:_disabled_torch_function_impl",
    "keep placeholders of weights out of function modes",
    "the one of nn.Parameter is taken",
    fallback=nn.Parameter.__torch_function__,
)
without_subclasses: Any = _symbol(
    "torch._C:DisableTorchFunctionSubclass",
    "work on a split tensor's own parts",
    "DisableTorchFunction is taken",
    fallback=getattr(torch._C, "DisableTorchFunction", None),
)
_number_of_modes: Any = _symbol(
    "torch._C:_len_torch_function_stack", "leave function modes for a moment", "they stay", fallback=lambda: 0
)
_without_one_mode: Any = _symbol(
    "torch.overrides:_pop_mode_temporarily", "leave function modes for a moment", "pipelines cannot be cut"
)


@contextmanager
def no_function_modes() -> Iterator[None]:
    """Disable all active function modes inside this context."""
    with ExitStack() as stack:
        for _ in range(_number_of_modes()):
            stack.enter_context(_without_one_mode())
        yield


class _NoMode:
    """A stand-in for the base class of modes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Missing(_DISPATCH_MODE)()


_DISPATCH_MODE = Symbol(
    "torch.utils._python_dispatch:TorchDispatchMode",
    "watch a model's operations",
    "strategies other than ddp are refused, and no memory is predicted",
)
SYMBOLS.append(_DISPATCH_MODE)
TorchDispatchMode: Any = _NoMode if _DISPATCH_MODE.problem() else _DISPATCH_MODE.resolve()
_TREES = ("find the tensors in what a model takes and gives", "strategies other than ddp are refused")
pytree: Any = _symbol("torch.utils._pytree:", *_TREES)
tree_flatten: Any = _symbol("torch.utils._pytree:tree_flatten", *_TREES)
tree_unflatten: Any = _symbol("torch.utils._pytree:tree_unflatten", *_TREES)
tree_leaves: Any = _symbol("torch.utils._pytree:tree_leaves", *_TREES)
tree_map_only: Any = _symbol("torch.utils._pytree:tree_map_only", *_TREES)

_attributes(
    "torch:Tensor.", "_version _backward_hooks _make_subclass _make_wrapper_subclass",
    "stand in for weights that are elsewhere, and see which tensors a forward changes", "zero3, tp and pp are refused",
)  # fmt: skip
_attributes(
    "torch:empty(0).", "_post_accumulate_grad_hooks",
    "hand hooks of a parameter on to its shard", "they are not handed on", at_use=True,
)  # fmt: skip
_attributes(
    "torch.autograd.graph:Node.", "_sequence_nr _forward_cls",
    "split a backward pass into input and weight gradients", "zb, zbv and dualpipev are refused", at_use=True,
)  # fmt: skip
_attributes(
    "torch.autograd.graph:Node.", "_saved_reduction _saved_target _saved_weight _saved_ignore_index",
    "see over which targets a cross entropy is a mean", "a loss without weight= is not refused", at_use=True,
)  # fmt: skip
_attributes(
    "torch:UntypedStorage.", "_cdata", "tell storages apart", "nothing else tells them apart on meta", at_use=True
)
unsafe_view: Any = _symbol(
    "torch.ops:aten._unsafe_view.default", "let what a pipeline receives enter its graph without a copy",
    "it is copied", fallback=lambda received, shape: received.clone(),
)  # fmt: skip
_attributes("torch.ops:aten.", "_local_scalar_dense _to_copy", "recognise operations", "they are not recognised")
_ATTENTION = "attend on the CPU to keys before a run of causal queries", "cp gives the kernel a mask"
cpu_attention: Any = _symbol(
    "torch.ops:aten._scaled_dot_product_flash_attention_for_cpu", *_ATTENTION, fallback=False,
)  # fmt: skip
cpu_attention_backward: Any = _symbol(
    "torch.ops:aten._scaled_dot_product_flash_attention_for_cpu_backward", *_ATTENTION, fallback=False,
)  # fmt: skip
_attributes(
    "torch.ops:aten.mm.default.", "_schema", "see which arguments an operation changes", "strategies are refused"
)


# --- Modules ----------------------------------------------------------------------------------------------------------

call_of_module: Any = _symbol(
    "torch.nn:Module._call_impl", "see which module's call is on the stack", "it is not seen",
    fallback=nn.Module.__call__,
).__code__  # fmt: skip
_attributes(
    "torch.nn:Module().", "_parameters _buffers _modules _non_persistent_buffers_set _forward_hooks _forward_pre_hooks",
    "replace a model's parameters and see who calls it", "no strategy can be applied",
)  # fmt: skip
_attributes(
    "torch.nn:Module().", "_forward_hooks_always_called", "see hooks that always run", "they are not seen", at_use=True
)
_attributes(
    "torch.nn:MultiheadAttention.", "_qkv_same_embed_dim", "split attention over ranks", "it is not split", at_use=True
)
_attributes(
    "torch.nn:Module().", "_call_impl _compiled_call_impl", "skip modules of other pipeline stages", "pp is refused"
)
_attributes(
    "torch.nn:BatchNorm1d.", "_check_input_dim", "compute batch normalisation over ranks", "it is refused", at_use=True
)
_attributes(
    "torch.optim:Optimizer.step.",
    "_wrapped_by_lr_sched",
    "see that a scheduler was made",
    "it is not seen",
    at_use=True,
)
sync_batch_norm: Any = _symbol(
    "torch.nn.modules._functions:SyncBatchNorm", "compute a BatchNorm with a forward of its own over ranks with GPUs",
    "it is refused",
)  # fmt: skip
BatchNorm: Any = _symbol(
    "torch.nn.modules.batchnorm:_BatchNorm", "find batch normalisations", "torch's public ones are found",
    fallback=(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)  # fmt: skip
NormBase: Any = _symbol(
    "torch.nn.modules.batchnorm:_NormBase", "find normalisations over rows", "torch's public ones are found",
    fallback=(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)  # fmt: skip
ConvNd: Any = _symbol(
    "torch.nn.modules.conv:_ConvNd", "find convolutions", "torch's public ones are found",
    fallback=(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)  # fmt: skip
DropoutNd: Any = _symbol(
    "torch.nn.modules.dropout:_DropoutNd", "find dropouts", "torch's public ones are found",
    fallback=(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)  # fmt: skip


def _mask_of_zeros(
    mask: Tensor | None, mask_name: str, other_type: Any, other_name: str, target_type: torch.dtype, *_: Any
) -> Tensor | None:
    """Return a mask that can be added to scores: True becomes -inf."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=target_type).masked_fill_(mask, -torch.inf)


canonical_mask: Any = _symbol(
    "torch.nn.functional:_canonical_mask", "read the masks of nn.MultiheadAttention", "masks are read without checks",
    fallback=_mask_of_zeros,
)  # fmt: skip


def dtype_of(mask: Tensor | None) -> torch.dtype | None:
    """Return the dtype of a mask; None without a mask. `canonical_mask` takes it in this form."""
    return None if mask is None else mask.dtype


# --- Process groups ---------------------------------------------------------------------------------------------------

_GROUPS = "groups are torch's own: communication is not counted, and DDP and FSDP objects do not outlive an interrupt"
_PURPOSE = "put a group of its own in the place of each of torch's"


def _c10d(name: str, *parameters: str) -> bool:
    symbol = Symbol(f"torch.distributed.distributed_c10d:{name}", _PURPOSE, _GROUPS, parameters)
    SYMBOLS.append(symbol)
    return not symbol.problem()


CAN_DELEGATE_GROUPS: bool = all(
    [
        _c10d("_new_process_group_helper", "group_size", "group_rank", "global_ranks_in_group", "backend", "store",
              "group_name", "backend_options", "timeout", "pg_tag", "device_id", "group_desc"),
        _c10d("_process_group_name", "ranks", "use_hashed_name"),
        _c10d("_get_default_timeout", "backend"),
        _c10d("_get_split_source", "pg"),
        _c10d("_unregister_process_group"),
        _c10d("_register_process_group"),
        _c10d("_cleanup_process_group_global_state", "pg"),
        *(_c10d(f"_world.{name}") for name in (
            "default_pg", "pg_map", "pg_names", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state",
            "group_count",
        )),
        not problems_of(_attributes(
            "torch.distributed:ProcessGroup.",
            "_device_types _get_backend _get_backend_name _register_backend _has_hooks _wait_for_pending_works "
            "_enable_collectives_timing _start_coalescing _end_coalescing",
            _PURPOSE, _GROUPS,
        )),
    ]
)  # fmt: skip
"""If this is False, nbkit uses torch's own groups."""

group_tables: Any = (
    SimpleNamespace(
        default_pg=None, pg_map={}, pg_names={}, pg_backend_config={}, pg_to_tag={}, tags_to_pg={},
        pg_coalesce_state={}, group_count=0,
    )
    if any("_world" in problem for problem in problems_so_far())
    else c10d._world
)  # fmt: skip
"""torch's tables of process groups."""

CAN_BATCH_P2P: bool = all(
    [_c10d("_check_p2p_op_list", "p2p_op_list"), _c10d("_coalescing_manager", "group", "device", "async_ops")]
)
"""If this is False, nbkit uses torch's own `batch_isend_irecv`."""

default_store: Any = _symbol(
    "torch.distributed.distributed_c10d:_get_default_store", "meet in the store of torchrun's world",
    "nbkit.init() under torchrun is refused",
)  # fmt: skip
_attributes(
    "torch._C._distributed_c10d:", "_dump_nccl_trace_json", "read the flight recorder of NCCL", "it is not read",
    at_use=True,
)  # fmt: skip
nccl_recorder: Any = getattr(bindings, "_dump_nccl_trace_json", None)
"""Returns the flight recorder of NCCL as JSON. torch has it only if it is built with NCCL."""

_attributes("torch.distributed:Work.", "_get_duration", "time collectives on CUDA", "they are not timed", at_use=True)
_attributes(
    "torch.distributed:Work.", "_pybind11_conduit_v1_", "end a wait for a message on gloo",
    "it ends with its connection", at_use=True,
)  # fmt: skip
_BROKEN = ("go on with DDP and FSDP objects after a broken step", "create them again after an error in a cell")
_attributes("torch.nn.parallel:DistributedDataParallel.", "_has_rebuilt_buckets", *_BROKEN, at_use=True)
_attributes("torch.distributed:Reducer.", "_reset_state", *_BROKEN, at_use=True)
_attributes(
    "torch.distributed.fsdp:FSDPModule.", "_get_fsdp_state _is_root _state_ctx _fsdp_param_groups _all_gather_result",
    *_BROKEN, at_use=True,
)  # fmt: skip


# --- Data, checkpoints, programs --------------------------------------------------------------------------------------

data_worker: Any = _symbol(
    "torch.utils.data._utils.worker:", "give each rank its shards of iterable data",
    "data that asks get_worker_info() is not divided",
)  # fmt: skip
_attributes(
    "torch.utils.data._utils.worker:", "_worker_info", "give each rank its shards of iterable data",
    "data that asks get_worker_info() is not divided",
)  # fmt: skip
_attributes(
    "torch.utils.data:DataLoader.", "_iterator _shutdown_workers _worker_result_queue", "end workers with their job",
    "they end with the process", at_use=True,
)  # fmt: skip
_attributes(
    "torch.utils.checkpoint:", "_checkpoint_without_reentrant_generator _checkpoint_without_reentrant_generator_impl",
    "draw the same dropout when a layer is computed again", "a model that checkpoints layers with dropout is refused",
    at_use=True,
)  # fmt: skip
_attributes(
    "torch.nn.utils.clip_grad:", "_get_total_norm _group_tensors_by_device_and_dtype",
    "refuse torch's clip_grad_norm_ where a rank has a part of the gradients",
    "use job.clip: torch's own clips by the norm of a part, without an error",
)  # fmt: skip


class _NoIterator:
    """A placeholder in a torch that lacks the base class of data loaders' iterators."""

    def __next__(self) -> Any:
        raise StopIteration


DataLoaderIterator: Any = _symbol(
    "torch.utils.data.dataloader:_BaseDataLoaderIter", "see how long a program that listens waits for data",
    "that time counts as computing", fallback=_NoIterator,
)  # fmt: skip
_attributes(
    "torch.distributed.launcher.api:elastic_launch.", "_config _entrypoint",
    "run launchers in the ranks that are there", "notebook_launcher starts processes of its own", at_use=True,
)  # fmt: skip
_attributes(
    "torch.utils.tensorboard:SummaryWriter.", "_get_file_writer", "write several scalars at once",
    "they are not written", at_use=True,
)  # fmt: skip


# --- Resolved late, because their modules take long to import ---------------------------------------------------------

_NOT_READ = ("read checkpoints of torch", "they are not read")


@dataclass
class _StorageInfo:
    """The place of a tensor in a checkpoint: the file, the first byte and the number of bytes."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None = None


_LATER = {
    "FakeTensorMode": _later(
        "torch._subclasses.fake_tensor:FakeTensorMode", "predict memory without allocating it", "none is predicted"
    ),
    "memory_formats": _later("torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING", *_NOT_READ),
    "tensor_layout": _later("torch.serialization:_get_layout", *_NOT_READ),
    "StorageInfo": _later(
        "torch.distributed.checkpoint.filesystem:_StorageInfo", "write checkpoints that torch reads",
        "torch does not read them", parameters=("relative_path", "offset", "length"),
    ),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _LATER[name].resolve()
    except (ImportError, AttributeError, TypeError):
        return _StorageInfo if name == "StorageInfo" else Missing(_LATER[name])
