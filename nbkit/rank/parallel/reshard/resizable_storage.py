"""Sharded models whose memory comes and goes tensor by tensor, so that a switch in place never holds two of them.

A new sharded model is built `hollow`: every tensor has its shape, its views and its place in module and optimizer, and
a storage of no bytes. `Filling` gives the storages of such a model memory, `Emptying` takes it from those of the old
one; both do it key by key, and a storage that several keys share (the flat parts of zero 3) with the first and the
last of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from nbkit.rank.parallel.reshard.redistribute import State

Spaces = dict[int, tuple[torch.UntypedStorage, int]]
"""Address of a storage, which it keeps when its bytes go -> (the storage, the bytes that it is to have)."""

_spaces: ContextVar[Spaces | None] = ContextVar("spaces", default=None)


@contextmanager
def hollow() -> Iterator[Spaces]:
    """What is built inside takes no memory to stay; gives the bytes that `Filling` has to find later.

    Whoever takes memory for something of a sharded model passes it to `emptied` when its views are made. Until it is
    filled such a tensor must not be read: torch reads through an address that is not there.
    """
    spaces: Spaces = {}
    token = _spaces.set(spaces)
    try:
        yield spaces
    finally:
        _spaces.reset(token)


def emptied(tensor: Tensor) -> Tensor:
    """`tensor`; within `hollow` the memory behind it is given back."""
    if (spaces := _spaces.get()) is not None:
        storage = tensor.untyped_storage()
        spaces[storage._cdata] = storage, storage.nbytes()
        storage.resize_(0)
    return tensor


class Filling:
    """The sharded model that gets memory. state: what of it is filled, hollow or not. spaces: what `hollow` gave."""

    def __init__(self, state: State, spaces: Spaces) -> None:
        self.state, self._spaces = state, spaces
        self._keys: dict[int, set[str]] = {}

    def take(self, key: str) -> None:
        """Memory for the tensor of `key`. Raises what the allocator raises."""
        tensor = self.state[key][0]
        if (address := _address(tensor)) not in self._spaces:
            return
        if not (keys := self._keys.setdefault(address, set())):
            storage, num_bytes = self._spaces[address]
            storage.resize_(num_bytes)
            # Between the tensors of a flat one lies padding, which travels.
            tensor.new_empty(0, dtype=torch.uint8).set_(storage).zero_()
        keys.add(key)

    def let_go(self, key: str) -> None:
        """Its memory is free again, once all that share it are let go."""
        address = _address(self.state[key][0])
        if keys := self._keys.get(address):
            keys.discard(key)
            if not keys:
                self._spaces[address][0].resize_(0)


class Emptying:
    """The sharded model that gives memory back, and can take it again.

    state: what is led over. tensors: every further tensor over the same memory. Each of them is pointed elsewhere, at
    a zero of its shape: what nobody else holds is free, and who does hold a part of it goes on reading what was there.
    """

    def __init__(self, state: State, tensors: Iterable[Tensor]) -> None:
        self.state = state
        every = {id(tensor): tensor for tensor in (*(tensor for tensor, _ in state.values()), *tensors)}
        self._blocks: dict[int, _Block] = {}
        for tensor in every.values():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self._blocks.setdefault(storage._cdata, _Block(storage.nbytes())).add(tensor)
        self._home = {
            key: block
            for key, (tensor, _) in state.items()
            if (block := self._blocks.get(_address(tensor))) is not None
        }
        for key, block in self._home.items():
            block.keys.add(key)

    def take(self, key: str) -> None:
        """Memory for the tensor of `key`. Raises what the allocator raises."""
        if (block := self._home.get(key)) is not None:
            if not block.keys:
                block.fill()
            block.keys.add(key)

    def let_go(self, key: str) -> None:
        """Its memory is free, once all that share it are let go."""
        if (block := self._home.get(key)) is not None:
            block.keys.discard(key)
            if not block.keys:
                block.empty()


class _Block:
    """A storage, the tensors that show parts of it, and the keys of what is in it now."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.keys = num_bytes, set[str]()
        self._shown: list[tuple[Tensor, int, torch.Size, tuple[int, ...]]] = []

    def add(self, tensor: Tensor) -> None:
        self._shown.append((tensor, int(tensor.storage_offset()), tensor.shape, tensor.stride()))

    def empty(self) -> None:
        device = self._shown[0][0].device
        for tensor, _, shape, _ in self._shown:
            tensor.data = torch.zeros((), dtype=tensor.dtype, device=device).expand(shape)

    def fill(self) -> None:
        first = self._shown[0][0]
        storage = torch.empty(self.num_bytes, dtype=torch.uint8, device=first.device).untyped_storage()
        for tensor, offset, shape, stride in self._shown:
            # A storage that is shared has padding, which travels; nothing else of it is read before it is filled.
            tensor.data = tensor.detach().new_empty(0).set_(storage, offset, shape, stride)
        first.new_empty(0, dtype=torch.uint8).set_(storage).zero_()


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
