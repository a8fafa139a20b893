"""Test that paths into the arguments of a call are read and written like the paths of torch's pytrees."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nbkit.rank.parallel.pipeline.partial_forward import look, put

Pair = namedtuple("Pair", "left right")


def test_every_leaf_is_found_and_changed_at_its_pytree_path() -> None:
    tree = ((1, [2, (3, 4)], Pair(5, {"a b": 6})), {"x": OrderedDict(y=(7,)), "z": Pair(8, 9)})
    flat, spec = pytree.tree_flatten_with_path(tree)
    assert len(flat) == 9
    for i, (key, leaf) in enumerate(flat):
        path = pytree.keystr(key)
        assert look(tree, path) == leaf
        leaves = [value for _, value in flat]
        leaves[i] = -1
        changed = put(tree, path, -1)
        assert changed == pytree.tree_unflatten(leaves, spec)
        assert pytree.tree_structure(changed) == pytree.tree_structure(tree)
    assert [leaf for _, leaf in flat] == pytree.tree_leaves(tree)


def test_output_objects_of_hugging_face_can_be_changed() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    state = torch.ones(1)
    args = ((BaseModelOutput(last_hidden_state=state),), {})
    [path] = [pytree.keystr(key) for key, leaf in pytree.tree_flatten_with_path(args)[0] if isinstance(leaf, Tensor)]
    changed = put(args, path, state * 2)
    assert look(args, path) is state and float(changed[0][0].last_hidden_state) == 2 == float(changed[0][0][0])


def test_a_missing_path_gives_none() -> None:
    assert look(((1,), {"a": None}), "[0][3]") is None
    assert look(((1,), {"a": None}), "[1]['a'][0]") is None
    assert look(((1,), {}), "[1]['a']") is None
