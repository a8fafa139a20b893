"""Find the blocks of a model by its structure alone. A block may become a stage, a sharded unit or a checkpointed unit.

Blocks are the children of the outermost ModuleLists, ModuleDicts and Sequentials. If there are several kinds of lists,
the blocks are in those whose children have submodules (a list of transformer layers, but not the Sequential of a head).
A model without such a list uses its direct children.

This module also finds mixtures of experts: layers that send each token to a few of many experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn


def structural_blocks(module: nn.Module) -> list[str]:
    """Return the names of the blocks with parameters, in the order of the module tree; [] if there are not two."""
    groups = list(_lists(module, ""))
    composite = [group for group in groups if 2 * sum(_has_parts(module, name) for name in group) >= len(group)]
    found = [name for group in composite or groups for name in group]
    return found or _direct(module, "")


def _lists(module: nn.Module, path: str) -> Iterator[list[str]]:
    """Yield the children with parameters of each outermost list.

    A list with only one such child is not a list of blocks, and the search continues inside it. The same applies to a
    list with a child that cannot be called, such as the ModuleDict(embedding, list of blocks, norm) of nanoGPT.
    """
    children = _children(module, path)
    listed = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    if listed and len(children) > 1 and all(_has_forward(child) for _, child in children):
        yield [name for name, _ in children]
        return
    for name, child in children:
        yield from _lists(child, name)


def _direct(module: nn.Module, path: str) -> list[str]:
    children = _children(module, path)
    if len(children) == 1:
        return _direct(children[0][1], children[0][0])
    found = []
    for name, child in children:
        found += [name] if _has_forward(child) else _direct(child, name)
    return found


def _has_forward(module: nn.Module) -> bool:
    """Return True if the module can be called. A ModuleList cannot."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _children(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    return [
        (f"{path}.{name}" if path else name, child)
        for name, child in module.named_children()
        if any(True for _ in child.parameters())
    ]


def _has_parts(module: nn.Module, name: str) -> bool:
    return any(True for _ in module.get_submodule(name).children())


ROUTERS = {"gate", "router", "gating", "gate_network", "wg"}


def experts_in(model: nn.Module) -> str:
    """Return the name of the first mixture of experts in `model`, or ""."""
    return next((name or type(model).__name__ for name in mixtures(model)), "")


def mixtures(model: nn.Module) -> list[str]:
    """Return the paths of the mixtures of experts in `model`: modules with experts and a router."""
    found = []
    for name, part in model.named_modules():
        inside = {child for child, _ in part.named_children()} | set(part._parameters)
        if "experts" in inside and inside & ROUTERS:
            found.append(name)
    return found


def within(path: str, mixtures: Iterable[str]) -> bool:
    """Return True if `path` is one of `mixtures`, or inside one."""
    return any(not mixture or path == mixture or path.startswith(f"{mixture}.") for mixture in mixtures)
