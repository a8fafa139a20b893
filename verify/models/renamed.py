"""Give the attributes of models random names, so that no name helps to find their structure."""

from __future__ import annotations

import ast
import inspect
import random
import sys
from types import ModuleType
from typing import Any, TypeGuard


def renamed(source: ModuleType, seed: int, **globals_: Any) -> tuple[ModuleType, dict[str, str]]:
    """Return a copy of the module `source` in which each attribute that is set as `self.name` has another name, and new
    name -> old name.

    Classes with a decorator, such as dataclasses, stay as they are. globals_: global names of the new module.
    """
    tree = ast.parse(inspect.getsource(source))
    draw = random.Random(seed)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.decorator_list]
    places = [node for each in classes for node in ast.walk(each) if _of_self(node)]
    names = sorted({node.attr for node in places if isinstance(node.ctx, ast.Store)})
    new = {name: f"a{draw.getrandbits(40):010x}" for name in names}
    for node in places:
        node.attr = new.get(node.attr, node.attr)
    made = ModuleType(f"{source.__name__}_renamed_{seed}")
    sys.modules[made.__name__] = made  # dataclasses look there
    exec(compile(tree, "<renamed>", "exec"), vars(made))
    vars(made).update(globals_)
    return made, {name: old for old, name in new.items()}


def _of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
