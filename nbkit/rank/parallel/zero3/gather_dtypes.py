"""Finds the parameters that ZeRO 3 may gather in the dtype of autocast: half the bytes, and the same numbers.

Autocast casts a float32 weight before a matrix product. Where nothing but such casts reads a parameter, they may as
well be made before it is gathered: every rank then computes with the same bits. Norms and embeddings read theirs in
float32, and get them so. The model shows who reads what: it runs on an example, and both ways are compared.

The gradient of such a parameter comes out of backward in the dtype of autocast, as out of the product in the other way.
It is cast to float32 as soon as it is made: what several micro-batches add up, and all ranks, is summed in float32.
Products that share one cast in one forward add theirs up in its dtype, in both ways, as torch's autocast does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, ops

from nbkit.rank.parallel.module.meta_module import homes, parameter_like, replace
from nbkit.rank.parallel.proof.memory import SHAPE_ONLY, Memory, memory_of, tensors_in
from nbkit.rank.parallel.proof.unchanged import set_evaluation, unchanged
from nbkit.rank.watching_mode import WatchingMode


@dataclass(frozen=True)
class Casts:
    """names: of the parameters that are gathered in `dtype` in passes under autocast."""

    dtype: torch.dtype
    names: frozenset[str]

    def spelled(self, module: nn.Module) -> str:
        """For people. module: the whole model, or its skeleton."""
        sizes = {name: getattr(*places[0]).numel() for name, places in homes(module).items()}
        share = sum(sizes[name] for name in self.names) / sum(sizes.values())
        return f"{share:.0%} of the weights gathered in {str(self.dtype)[6:]}; gradients summed in float32"


def find_casts(module: nn.Module, run: Callable[[], Tensor], dtype: torch.dtype) -> Casts | None:
    """The parameters of which only casts to `dtype` are read; None without any, or where casting changes the numbers.

    run: the whole model on an example -> its loss. The module is afterwards as before. Raises what the model raises.
    """
    reads = _Reads(module, dtype)
    with unchanged(module), _autocast(module, dtype), reads:
        value = run()
        reads.forward = False
        if value.requires_grad:
            value.backward()
    with unchanged(module), _autocast(module, dtype), reads, torch.no_grad():
        set_evaluation(module)
        run()
    casts = Casts(dtype, frozenset(reads.found))
    if not casts.names:
        return None
    if (cast := _bits(module, run, casts, cast=True)) == (whole := _bits(module, run, casts, cast=False)):
        return casts
    # Where one process does not repeat its own gradients, the loss alone can tell.
    again = _bits(module, run, casts, cast=False)
    return casts if again != whole and again[0] == whole[0] == cast[0] else None


@contextmanager
def _autocast(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """As a step trains: of several readers in one forward, the first one's cast serves all."""
    device = next(module.parameters()).device
    torch.set_autocast_cache_enabled(True)  # which `unchanged` has put off, and puts back
    with torch.autocast(device.type, dtype=dtype):
        yield


class _Reads(WatchingMode):
    """found: the names of the parameters of which one cast a forward was read, and nothing else."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self.forward = dtype, True
        params = {name: getattr(*places[0]) for name, places in homes(module).items()}
        # Keyed by memory: a view of a parameter is one of its readers.
        self._names: dict[Memory, list[str]] = {}
        for name, p in params.items():
            self._names.setdefault(memory_of(p), []).append(name)
        self._params = {id(p) for p in params.values() if p.dtype == torch.float32}
        self._frozen = {name for name, p in params.items() if not p.requires_grad}
        self._casts: dict[str, int] = {}
        self._others: set[str] = set()

    @property
    def found(self) -> set[str]:
        # The gradients of several casts of its own would be summed in float32.
        return {name for name, count in self._casts.items() if count == 1 or name in self._frozen} - self._others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in SHAPE_ONLY:
            cast = func.overloadpacket is ops.aten._to_copy and kwargs.get("dtype") == self._dtype
            for tensor in tensors_in((args, kwargs)):
                for name in self._names.get(memory_of(tensor), ()):
                    if not cast or id(tensor) not in self._params:
                        self._others.add(name)
                    elif self.forward:
                        self._casts[name] = self._casts.get(name, 0) + 1
        return func(*args, **kwargs)


def _bits(module: nn.Module, run: Callable[[], Tensor], casts: Casts, *, cast: bool) -> tuple[int, dict[str, int]]:
    """(the loss, the gradients of what is cast), as checksums of their bits. cast: before the model runs."""
    before = {name: (places, getattr(*places[0])) for name, places in homes(module).items()}
    found: dict[str, int] = {}

    def note(name: str) -> Callable[[Tensor], None]:
        def made(gradient: Tensor) -> None:  # before it is the parameter's: one that takes no memory lets go of it
            found[name] = _checksum(gradient.float())

        return made

    def drop(p: Tensor) -> None:
        p.grad = None

    with unchanged(module), _autocast(module, casts.dtype):
        hooks = []
        try:
            for name, (places, p) in before.items():
                if cast and name in casts.names:
                    p = parameter_like(p.detach().to(casts.dtype), p)
                    replace(places, p)
                if p.requires_grad:
                    hooks.append(p.register_post_accumulate_grad_hook(drop))
                    if name in casts.names:
                        hooks.append(p.register_hook(note(name)))
            value = run()
            if value.requires_grad:
                value.backward()
            return _checksum(value.detach().float()), found
        finally:
            for hook in hooks:
                hook.remove()
            for places, p in before.values():
                replace(places, p)


def _checksum(tensor: Tensor) -> int:
    """Of float32: bits that change, or change places, change it."""
    bits = tensor.contiguous().view(-1).view(torch.int32).long()
    places = torch.arange(1, 1 + len(bits), device=bits.device)
    return int((bits * (2 * places + 1)).sum())
