"""Prove that a copy of the model uses only its own parts, and computes the same as the model.

Strategies, inspections and proofs run copies. If a copy reads a weight of the original model, then training changes
this weight, or none. A proof would not notice, because it compares two such copies. So, before the first step, the
user's own model and a copy with the same weights are run on the same rows, while every argument of every torch function
is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from math import inf
from types import FunctionType
from typing import Any, Self

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nbkit.errors import TrainingError
from nbkit.rank.loss.output_tensors import leaves
from nbkit.rank.parallel.module.copies import homes, marked, parts_of, reaches, replace_submodule
from nbkit.rank.parallel.proof.observe import gap
from nbkit.rank.parallel.proof.unchanged import unchanged
from nbkit.rank.parallel.reshard.plain_attributes import OF_MODULES
from nbkit.rank.rng.host_generators import Drawn
from nbkit.rank.torch_private import tree_leaves

Run = Callable[[nn.Module], Any]


def look_at_copies(module: nn.Module, skeleton: nn.Module, copies: Sequence[nn.Module], run: Run) -> list[str]:
    """Return, for each of `copies` of `module`, the evidence that it uses parts of another model, or "".

    skeleton: the skeleton from which they were made. run: a forward pass on some rows. All models are restored. Raises
    TrainingError if the model itself uses parts of a copy that its callable has built, or if it registers parameters or
    buffers while it runs.
    """
    made = [_tensors(each, buffers=False) for each in copies]
    foreign: dict[int, tuple[Tensor, str]] = {}
    for each in (*made, _tensors(skeleton)):
        foreign |= each
    reads, kept, late = _Reads(foreign, module), set(module.state_dict()), list[str]()

    def first(runs: nn.Module) -> Any:
        try:
            output = run(runs)
        except TrainingError as error:
            # For example, the example is not a batch. This proves nothing, because training may use another batch.
            raise RuntimeError("the model fails with these rows") from error
        late.extend(name for name in module.state_dict() if name not in kept)
        return output

    expected = _output(module, module, first, reads)
    if late:
        raise TrainingError(
            f"The first forward pass registers {late[0]!r}, which other ranks and copies of the model do not have.",
            numbers=f"{len(late)} more in state_dict() after it",
            hint="self.register_buffer(...) in __init__, or one that is not persistent",
        )
    if reads.found:
        raise TrainingError(
            "A second call of model= changes the model of the first call.",
            numbers=f"it reads {next(iter(reads.found.values()))!r} of the second model, perhaps by a global "
            "name or a class",
            hint="model=build(), the model itself; or keep its parts only in its attributes",
        )
    return [_astray(module, copied, foreign | _tensors(module), expected, run) for copied in copies]


def _astray(
    module: nn.Module, copied: nn.Module, foreign: dict[int, tuple[Tensor, str]], expected: Any, run: Run
) -> str:
    weights, empty = dict(module.named_parameters()), list[tuple[Any, Any]]()
    reads = _Reads(foreign, copied)
    for name, places in homes(copied).items():
        empty.append((places, getattr(*places[0])))
        own = nn.Parameter(weights[name].detach(), requires_grad=weights[name].requires_grad)
        replace_submodule(places, marked(own, empty[-1][1]))
    try:
        found = _output(module, copied, run, reads)
    except Exception as error:
        return f"a copy fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        for places, param in empty:
            replace_submodule(places, param)
    if reads.found:
        who, what = next(iter(reads.found.items()))
        return f"{_holder(module, who)} reads {what!r} of the model that was copied"
    if (off := _unlike(expected, found)) and not _unlike(expected, _output(module, module, run, nullcontext())):
        return (
            f"the output of a copy differs by {off:.2g}" if off < inf else "the output of a copy has different tensors"
        )
    return ""


def _tensors(module: nn.Module, *, buffers: bool = True) -> dict[int, tuple[Tensor, str]]:
    held = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    return {id(tensor): (tensor, name) for name, tensor in held}


def _output(module: nn.Module, runs: nn.Module, run: Run, reads: AbstractContextManager[Any]) -> Any:
    """Run a forward of `runs` inside `reads`. All forwards here draw the same random numbers."""
    drawn = Drawn.so_far()
    try:
        with ExitStack() as around:
            around.enter_context(unchanged(module))
            if runs is not module:
                around.enter_context(unchanged(runs))
            around.enter_context(reads)
            return run(runs)
    finally:
        drawn.restore()


def _unlike(a: Any, b: Any) -> float:
    ours, theirs = leaves(a), leaves(b)
    if ours.keys() != theirs.keys():
        return float("inf")
    # A GPU kernel may add in another order each time.
    gaps = [(gap(own, theirs[name]), 3e-2 if own.dtype.itemsize < 4 else 1e-5) for name, own in ours.items()]
    return max((off for off, least in gaps if off > least), default=0.0)


class _Reads(TorchFunctionMode):
    """Notes which module runs when one of the `foreign` tensors is passed to a torch function."""

    def __init__(self, foreign: dict[int, tuple[Tensor, str]], made: nn.Module) -> None:
        super().__init__()
        self._foreign, self._made, self._path = foreign, made, [""]
        self._handles = list[Any]()
        self.found: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self._look(value)
            elif isinstance(value, list | tuple | dict):
                for inner in tree_leaves(value):
                    self._look(inner)
        return func(*args, **(kwargs or {}))

    def _look(self, value: Any) -> None:
        if (known := self._foreign.get(id(value))) is not None:
            self.found.setdefault(self._path[-1], known[1])

    def __enter__(self) -> Self:
        for path, part in self._made.named_modules():
            enter, leave = lambda *_, path=path: self._path.append(path), lambda *_: self._leave()
            self._handles.append(part.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(part.register_forward_hook(leave, always_call=True))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _leave(self) -> None:
        if len(self._path) > 1:
            self._path.pop()


def _holder(module: nn.Module, path: str) -> str:
    """Return what refers from the module at `path` to other parts of the model: a function or an attribute."""
    part, wanted = module.get_submodule(path), parts_of(module)
    beyond = wanted - {id(each) for each in (*part.modules(), *part.parameters(), *part.buffers())}
    for kind in type(part).__mro__:
        for function in vars(kind).values() if not kind.__module__.startswith("torch.") else ():
            if isinstance(function, FunctionType):
                names = [function.__globals__.get(name) for name in function.__code__.co_names]
                names = [each for each in names if not isinstance(each, FunctionType)]
                if reaches([function, names], beyond):
                    return f"{path or 'the model'}: {kind.__name__}.{function.__name__}"
    for name, value in vars(part).items():
        if name not in OF_MODULES and not isinstance(value, nn.Module | Tensor) and reaches(value, wanted):
            return f"{path}.{name}".lstrip(".")
    return path or "the model"
