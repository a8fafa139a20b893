"""Loads a Hugging Face directory as a model to train. Each rank reads only its parts, and no rank ever holds all.

The module is built without weights. Each parameter is a view of a few random numbers, so nbkit can run parts of the
model to inspect them (blocks, costs). Buffers are real, including rotary tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from nbkit.errors import TrainingError
from nbkit.planner.exchange import halves
from nbkit.quoting import user_path
from nbkit.rank.parallel.module.copies import homes, marked, parameter_like, replace_submodule, window
from nbkit.rank.parallel.proof.observe import MemoryUses, memory_of
from nbkit.rank.parallel.reshard.load_local_shards import copy_part
from nbkit.rank.parallel.sharded_model import ShardedModel
from nbkit.rank.rng.seeding import seeded
from nbkit.tensor_layout import Layout

T = TypeVar("T")

_VIEWS = {f"aten.{name}" for name in ("detach", "alias", "view", "t", "transpose", "select", "slice", "unsqueeze")}

_READ_BYTES = 16 << 20
"""A larger part of a tensor is read in pieces of this size, in bytes."""


def from_pretrained(
    directory: str | Path, *, adapt: Callable[[nn.Module], nn.Module] | None = None, **overrides: Any
) -> Pretrained:
    """Return the model in `directory`, for `model=` of the Trainer or of `prepare`.

    Other keyword arguments replace settings of the config (dtype="float32", attn_implementation="sdpa", ...).

    directory: a folder with config.json and one or more safetensors files. Each rank reads only the weights that it
    holds under the strategy. adapt: a function that takes the module and returns the module to train, for example
    lambda model: peft.get_peft_model(model, peft.LoraConfig(...)). The function initialises the weights that it adds.

    The Trainer raises TrainingError if the directory lacks a weight of the model.
    """
    return Pretrained(user_path(directory), adapt, overrides)


@dataclass(frozen=True)
class Pretrained:
    """The result of `from_pretrained`."""

    directory: Path
    adapt: Callable[[nn.Module], nn.Module] | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def build(self, *, seed: int, device: torch.device) -> WeightlessModel:
        """Return the module on `device`, with its weights on disk. Raises TrainingError if some weights are missing."""
        with seeded(device):
            torch.manual_seed(seed)
            module = _built(self.directory, self.overrides)
            files = _Files(self.directory)
            kept = files.find(module)
            for places in homes(module).values():
                old = getattr(*places[0])
                drawn = window(old.shape, old.dtype, device)
                replace_submodule(places, parameter_like(drawn, old))
            for part in module.modules():
                for name, buffer in part._buffers.items():
                    part._buffers[name] = None if buffer is None else marked(buffer.to(device), buffer)
            files.read_buffers(module)
            tensors = {id(p): kept[name] for name, p in module.named_parameters()}
            module = (self.adapt(module) if self.adapt else module).train()
            names = {name: tensors[id(p)] for name, p in module.named_parameters() if id(p) in tensors}
            # The weights that `adapt` has added are in no file.
            added = {name: p.detach() for name, p in module.named_parameters() if name not in names}
        return WeightlessModel(module, files, names, added)


class WeightSource(Protocol):
    """A source from which a rank reads weights."""

    def fill(self, source: Any, target: Tensor, layout: Layout) -> None:
        """Copy the part of the tensor `source` that `layout` names to `target`."""


@dataclass(frozen=True)
class WeightlessModel:
    """A module without its weights.

    names: name of a parameter -> its tensor in `source`. added: name -> value, for parameters that are not in `source`.
    """

    module: nn.Module
    source: WeightSource
    names: Mapping[str, Any]
    added: Mapping[str, Tensor]

    def made_unread(self, factory: Callable[[nn.Module], T], module: nn.Module) -> T:
        """Return factory(module). Raises TrainingError if `factory` reads or changes a weight that is not there yet."""
        unread = {memory_of(p): name for name, p in module.named_parameters() if name not in self.added}
        with MemoryUses(unread, _refuse):
            return factory(module)

    @torch.no_grad()
    def fill(self, sharded_model: ShardedModel) -> None:
        """Copy the weights that this rank holds into `sharded_model`."""
        for name, (target, layout) in sharded_model.data.weights.items():
            if name in self.added:
                copy_part(target, layout, self.added[name].to(target.device))
            else:
                self.source.fill(self.names[name], target, layout)

    @torch.no_grad()
    def make_whole(self) -> None:
        """Give `module` all its weights. The module stays the same object, but gets new parameters."""
        for name, places in homes(self.module).items():
            if name not in self.added:
                old: nn.Parameter = getattr(*places[0])
                whole = torch.empty(old.shape, dtype=old.dtype, device=old.device)
                self.source.fill(self.names[name], whole, Layout.whole(old.shape))
                replace_submodule(places, parameter_like(whole, old))


class ReadsWeights(TrainingError):
    """An optimizer's factory reads or changes weights that are not there yet."""


def _refuse(name: str, tensor: Tensor, how: str, changed: bool) -> None:
    if how not in _VIEWS:
        raise ReadsWeights(
            f"optimizer= {'changes' if changed else 'reads'} {name!r} before the model has its weights: each rank "
            "reads its part of the directory later.",
            numbers=f"shape {tuple(tensor.shape)}, by {how}",
            hint="model=lambda: transformers.AutoModelForCausalLM.from_pretrained(directory), which reads the "
            "weights first",
        )


class _Files:
    """The safetensors files of a directory. A file is opened when it is first read."""

    def __init__(self, directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        self._open: dict[Path, Any] = {}
        self._home: dict[str, Path] = {}
        if index.exists():
            named = json.loads(index.read_text())["weight_map"]
            if other := [file for file in named.values() if Path(file).name != file]:
                raise TrainingError(
                    f"{index.name} names a file outside of its directory.",
                    numbers=f"{other[0]!r:.80}, in {str(directory)!r}",
                    hint="the directory that model.save_pretrained wrote",
                )
            self._home = {name: directory / file for name, file in named.items()}
        elif (one := directory / "model.safetensors").exists():
            self._home = dict.fromkeys(self._opened(one).keys(), one)
        else:
            raise TrainingError(
                f"{str(directory)!r} holds no safetensors.",
                numbers=f"it holds {', '.join(sorted(path.name for path in directory.iterdir())[:8]) or 'nothing'}",
                hint="model.save_pretrained(directory) writes them",
            )

    def _opened(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        return self._open[path]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._opened(self._home[name]).get_slice(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...]) -> Tensor:
        """Read and return only this part of a tensor."""
        file = self._opened(self._home[name])
        found: Tensor = file.get_slice(name)[part] if part else file.get_tensor(name)
        return found

    def fill(self, source: str, target: Tensor, layout: Layout) -> None:
        """Copy a part as WeightSource does. A large part is read in pieces."""
        for here, there in layout.pieces:
            for box in halves(there, _READ_BYTES // target.element_size()):
                place = box.moved(there.start, here.start)
                target[place.slices].copy_(self.read(source, box.slices))

    def find(self, module: nn.Module) -> dict[str, str]:
        """Return the name of the tensor in the files for each parameter.

        A tied parameter may be stored under any of its names. Names may have the base model's prefix. Raises
        TrainingError if a tensor is missing, or has another shape.
        """
        prefix = f"{getattr(module, 'base_model_prefix', '')}."
        first = {id(p): name for name, p in module.named_parameters()}
        found: dict[str, str] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if id(value) not in first or first[id(value)] in found:
                continue
            for spelling in (name, name.removeprefix(prefix), prefix + name):
                if spelling in self._home:
                    found[first[id(value)]] = spelling
                    break
        params = dict(module.named_parameters())
        missing = [name for name in params if name not in found]
        other = [name for name, kept in found.items() if self.shape(kept) != tuple(params[name].shape)]
        if missing or other:
            numbers = f"{len(missing)} of {len(params)} missing, first {missing[:1]}"
            if not missing:
                name = other[0]
                numbers = f"{name} is {self.shape(found[name])} there, {tuple(params[name].shape)} here"
            raise TrainingError(
                f"The files do not hold the weights of a {type(module).__name__}.",
                numbers=numbers,
                hint="the directory that model.save_pretrained wrote; no overrides that change sizes",
            )
        return found

    def read_buffers(self, module: nn.Module) -> None:
        """Read the buffers that a file holds, such as running means."""
        kept = module.state_dict().keys()
        for name, buffer in module.named_buffers():
            if name in kept and name in self._home:
                buffer.copy_(self.read(name, ()))


def _built(directory: Path, overrides: Mapping[str, Any]) -> nn.Module:
    """Return the module that the config names, with its parameters on the meta device."""
    try:
        import transformers
    except ImportError as error:
        raise TrainingError(
            "from_pretrained needs transformers.", hint="pip install transformers safetensors"
        ) from error
    if not (directory / "config.json").exists():
        raise TrainingError(
            f"{str(directory)!r} holds no model.",
            numbers="no config.json",
            hint="the directory that model.save_pretrained wrote",
        )
    # Code in the directory runs only if the user asks for it. transformers must not prompt for it on a rank.
    trusted = {"trust_remote_code": bool(overrides.get("trust_remote_code"))}
    config = transformers.AutoConfig.from_pretrained(directory, **{**overrides, **trusted})
    name = (config.architectures or ["AutoModelForCausalLM"])[0]
    kind = getattr(transformers, name, None)
    if kind is None:
        raise TrainingError(
            f"transformers has no {name}.", numbers=f"version {transformers.__version__}", hint="a newer transformers"
        )
    auto = isinstance(name, str) and name.startswith("AutoModel")
    if not auto and not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise TrainingError(
            f"{name} of transformers is not a model.",
            numbers=f"'architectures' in {str(directory / 'config.json')!r}",
            hint="the directory that model.save_pretrained wrote",
        )
    wanted = getattr(config, "dtype", None) or torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, wanted) if isinstance(wanted, str) else wanted)
    try:
        with _without_weights():
            module: nn.Module = kind.from_config(config, **trusted) if auto else kind(config)
    finally:
        torch.set_default_dtype(before)
    return module


@contextmanager
def _without_weights() -> Iterator[None]:
    """Free the memory of every parameter as soon as a module gets it inside this context. Buffers are real."""
    register = nn.Module.register_parameter

    def without(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = parameter_like(param.detach().to("meta"), param)
        register(module, name, param)

    nn.Module.register_parameter = without  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
