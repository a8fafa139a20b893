"""Check a user's class for mine=: whether it is correct, which number is wrong, and what is the likely cause.

The class runs on 2 and on 3 ranks, which are threads of this process. Each method is compared with the result of one
process, in float64, and the sent bytes are counted. An error is recognised by its result: a gradient that equals the
sum, this rank's own gradient, the mean of the previous step, and so on. So the judge can name a cause and not only a
difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbkit.errors import StrategyError, UsageError
from nbkit.plugins import described
from nbkit.rank.comm.delegating_group import stand_in
from nbkit.rank.comm.thread_group import ThreadGroup, ThreadMeeting, ThreadRanks
from nbkit.rank.parallel.data_parallel.ddp import ReplicaSetup
from nbkit.rank.parallel.mine import OwnReplicas
from nbkit.records.readings import sent_bytes
from nbkit.techniques import Judgement
from nbkit.techniques.mine import kind_of
from nbkit.tensor_layout import Layout, bounds


def judge(own: type) -> Judgement:
    """Return whether a class is correct, and the likely cause if it is not; see nbkit.lesson.judge."""
    kind = kind_of(own)
    if not dist.is_initialized():
        raise UsageError("nbkit.lesson.judge must run on a rank.", numbers="no process group", hint="%%distributed")
    said = ""
    for ranks in (2, 3):
        try:
            with torch.random.fork_rng(devices=[]):  # keep the user's random numbers unchanged
                found = {"ddp": _replicas_off, "zero1": _shards_off, "tp": _linears_off}[kind](own, ranks)
        except Exception as error:
            found = _broken(error, ranks)
        if isinstance(found, _Off):
            return Judgement(own.__name__, False, f"on {ranks} ranks {found.numbers}", found.cause)
        said = found
    return Judgement(own.__name__, True, said)


def explained(own: type) -> StrategyError | None:
    """Return why a strategy with this class is refused, or None if the class is correct."""
    if found := judge(own):
        return None
    return StrategyError(f"{found.name} is wrong: {found.numbers}.", hint=f"likely cause: {found.cause}")


@dataclass(frozen=True)
class _Off:
    """A wrong number, in words, and the likely cause."""

    numbers: str
    cause: str


def _broken(error: Exception, ranks: int) -> _Off:
    said = f"it raises {described(error)}"
    if "wait for each other" in str(error):
        return _Off(
            "one rank waits forever",
            "a rank leaves out a collective that the others make: is there one behind an `if rank == ...`?",
        )
    if "make other collectives" in str(error):
        return _Off(
            f"{error}",
            "the ranks make different collectives, or with tensors of different sizes: all need one order.",
        )
    return _Off(said, "the error itself: run the method by hand.")


@dataclass
class _Heard:
    """A collective that a class made."""

    operation: str
    bytes: int
    pointer: int
    is_waited_for: bool = False


class _Watched(dist.Work):
    def __init__(self, inner: dist.Work, heard: _Heard) -> None:
        super().__init__()
        self._inner, self._heard = inner, heard

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._heard.is_waited_for = True
        return self._inner.wait()

    def is_completed(self) -> bool:
        return self._inner.is_completed()


class _Listening(ThreadGroup):
    """A group of threads that records what is sent."""

    def __init__(self, meeting: ThreadMeeting, rank: int) -> None:
        super().__init__(meeting, rank)
        self.heard: list[_Heard] = []

    def _collective(self, operation: str, sent: Any, *rest: Any) -> dist.Work:
        parts = sent if isinstance(sent, tuple) else (sent,)
        heard = _Heard(operation, sum(part.nbytes for part in parts), parts[0].data_ptr())
        self.heard.append(heard)
        return _Watched(super()._collective(operation, sent, *rest), heard)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        self.heard.append(_Heard("send", tensors[0].nbytes, tensors[0].data_ptr(), True))
        return super().send(tensors, peer, tag)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        work = self.reduce_scatter_single(outputs[0], torch.stack(inputs[0]))
        work.wait()
        return work

    def take(self) -> list[_Heard]:
        """Return the collectives since the last call."""
        found, self.heard = self.heard, []
        return found


def _run(ranks: int, of_rank: Callable[[int, _Listening], Any]) -> list[Any]:
    """Run a function on ranks that are threads. The default group is theirs."""
    threads: ThreadRanks[Any] = ThreadRanks(ranks)
    meeting = ThreadMeeting(threads, range(ranks))

    def body(rank: int) -> Any:
        with stand_in(_Listening(meeting, rank)) as group:
            return of_rank(rank, group)

    return threads.run(body)


def _sent(heard: Iterable[_Heard], ranks: int) -> float:
    """Return the bytes that a rank sends. For a broadcast, this is the average over the ranks."""
    return sum(
        one.bytes * (ranks - 1) / ranks if one.operation == "broadcast" else sent_bytes(one.operation, one.bytes, ranks)
        for one in heard
    )


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return bool(torch.allclose(one, other, rtol=1e-9, atol=1e-12))


def _like(found: Tensor | None, known: Mapping[str, Tensor]) -> str:
    """Return the name of the `known` tensor that equals `found`, or ""."""
    if found is None:
        return "nothing"
    return next((name for name, tensor in known.items() if _same(found, tensor)), "")


def _off_by(what: str, rank: int, found: Any, right: Tensor) -> str:
    """Return in words how far `found` is from the right value, on a rank."""
    if not isinstance(found, Tensor) or found.shape != right.shape:
        shown = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        return f"{what} is {shown} on rank {rank}, expected {tuple(right.shape)}"
    off = float((found - right).abs().max())
    return f"{what} is off by {off:.3g} on rank {rank}, where the largest is {float(right.abs().max()):.3g}"


def _all(names: Sequence[str], every: int) -> str:
    """Return names as a list for a sentence, or "all parameters" if there are `every` of them."""
    if len(names) == every:
        return "all parameters"
    return ", ".join(repr(name) for name in names[:3]) + " and others" * (len(names) > 3)


_NOT_WAITED = "nobody waits for the result. Keep what `async_op=True` returns, and call its wait() before you use it."
_KEPT = "something of the step before is left, such as a list that finish() does not clear."
_DIVIDE = "a sum where the mean is wanted: divide by the number of ranks, dist.get_world_size()."
_COUNT = "a number of ranks is written in the code, or something other than it divides: use dist.get_world_size()."


def _scaled(found: Tensor | None, right: Tensor) -> float | None:
    """Return the factor by which `found` is too large, or None if it is not a multiple of `right`."""
    if found is None or found.shape != right.shape:
        return None
    factor = float((found * right).sum() / (right * right).sum())
    return factor if abs(factor) > 1e-9 and _same(found, factor * right) else None


@dataclass
class _Step:
    """A step on one rank: its own gradients, the gradients that the class left, and what it sent.

    pointers: addresses of the gradients, by name. weights: addresses of the weights.
    """

    own: dict[str, Tensor]
    found: dict[str, Tensor | None]
    heard: list[_Heard]
    pointers: dict[str, int]
    weights: set[int]
    is_weight_changed: bool


@dataclass
class _Trained:
    """A rank's weights before and after the class was created, and its steps."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    steps: list[_Step] = field(default_factory=list)


def _replicas_off(own: type, ranks: int) -> _Off | str:
    def of_rank(rank: int, group: _Listening) -> _Trained:
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        params = dict(model.named_parameters())
        for number, p in enumerate(params.values()):
            p.data.copy_(_drawn(*p.shape, seed=10 * number + rank))  # other numbers on every rank
        axis = OwnReplicas(model, ReplicaSetup(ranks, rank), own=own)
        axis.lay_out({name: Layout.whole(p.shape) for name, p in params.items()})
        seen = _Trained(_copies(params), {})
        for step in range(2):
            axis.reset()
            seen.after = seen.after or _copies(params)
            x, y = _drawn(4, 5, seed=100 * step + rank), _drawn(4, 3, seed=100 * step + 50 + rank)
            loss = ((model(x) - y) ** 2).mean()
            local = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
            weights = _copies(params)
            group.take()
            axis.start()
            (loss / ranks).backward()
            pointers = {name: p.grad.data_ptr() for name, p in params.items() if p.grad is not None}
            weights_at = {p.data_ptr() for p in params.values()}
            axis.finish()
            found = {name: None if p.grad is None else p.grad.clone() for name, p in params.items()}
            changed = any(not torch.equal(p.detach(), weights[name]) for name, p in params.items())
            own_grads = dict(zip(params, local, strict=True))
            seen.steps.append(_Step(own_grads, found, group.take(), pointers, weights_at, changed))
            with torch.no_grad():
                for name, p in params.items():
                    p.copy_(weights[name])
                    if (grad := found[name]) is not None:
                        p.sub_(0.1 * grad)
                    p.grad = None
        axis.close()
        return seen

    found = _run(ranks, of_rank)
    if (off := _start_off(found, ranks)) is not None:
        return off
    mean: dict[str, Tensor] = {}
    for step in range(2):
        earlier, steps = mean, [one.steps[step] for one in found]
        mean = {name: _mean([one.own[name] for one in steps]) for name in steps[0].own}
        if (off := _gradients_off(steps, mean, earlier)) is not None:
            return off
    size = sum(grad.nbytes for grad in mean.values())
    ideal, sent = 2 * (ranks - 1) / ranks, _sent(steps[0].heard, ranks) / size
    if sent > 1.05 * ideal:
        numbers = (
            f"a rank sends {sent:.3g} S in a step, where S is the bytes of all gradients; {ideal:.3g} S are enough"
        )
        return _Off(numbers, _why_so_much(steps[0]))
    return f"on 2 and on {ranks} ranks, gradients are those of one process, and no byte is sent that is not needed"


def _copies(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


def _start_off(found: Sequence[_Trained], ranks: int) -> _Off | None:
    first = found[0].before
    wrong = [
        (rank, name) for rank, one in enumerate(found) for name in first if not _same(one.after[name], first[name])
    ]
    if not wrong:
        return None
    rank, name = wrong[0]
    names = list(dict.fromkeys(name for _, name in wrong))
    numbers = _off_by(f"the weight {name!r} at the start", rank, found[rank].after[name], first[name])
    start = {name: [one.before[name] for one in found] for name in first}
    like = {
        _like(found[rank].after[name], {"own": start[name][rank], "last": start[name][-1], "mean": _mean(start[name])})
        for rank, name in wrong
    }
    if like == {"own"}:
        which = "" if len(names) == len(first) else f" of {_all(names, len(first))}"
        return _Off(numbers, f"no broadcast at the start{which}: every rank begins with its own weights.")
    if like == {"mean"}:
        return _Off(numbers, "the start averages the weights of the ranks: it has to take those of rank 0.")
    if like <= {"last", "own"}:
        return _Off(numbers, f"the weights are those of rank {ranks - 1}, not of rank 0: broadcast with src=0.")
    return _Off(numbers, "the weights at the start are not those of rank 0: broadcast(p.data, src=0), without more.")


def _gradients_off(steps: Sequence[_Step], mean: Mapping[str, Tensor], earlier: Mapping[str, Tensor]) -> _Off | None:
    ranks = len(steps)
    wrong: dict[tuple[int, str], str] = {}
    for rank, one in enumerate(steps):
        for name, right in mean.items():
            if _same(one.found[name], right):
                continue
            own = [each.own[name] for each in steps]
            known = {
                "sum": right * ranks,
                "own": own[rank],
                "own/n": own[rank] / ranks,
                "mean/n": right / ranks,
                "sum*n": right * ranks * ranks,
                "first": own[0],
                "last": own[-1],
                "zeros": torch.zeros_like(right),
                "largest": torch.stack(own).amax(0),
            }
            known |= {"earlier": earlier[name]} if earlier else {}
            wrong[rank, name] = _like(one.found[name], known)
    if not wrong:
        return None
    rank, name = next(iter(wrong))
    like, names = set(wrong.values()), list(dict.fromkeys(name for _, name in wrong))
    numbers = _off_by(f"the gradient of {name!r}", rank, steps[rank].found[name], mean[name])
    calls = [call.pointer for call in steps[rank].heard]
    at = steps[rank].pointers.get(name)
    which = _all(names, len(mean))
    if any(not call.is_waited_for for one in steps for call in one.heard):
        return _Off(numbers, _NOT_WAITED)
    if any(one.is_weight_changed or one.weights & {call.pointer for call in one.heard} for one in steps):
        return _Off(numbers, "the backward pass sums or changes the weights: sum parameter.grad, not parameter.")
    if like <= {"sum", "sum*n"} and at is not None and calls.count(at) > 1:
        return _Off(numbers, f"the gradient of {which} is reduced twice.")
    if like == {"sum"}:
        return _Off(numbers, _DIVIDE)
    if like == {"mean/n"}:
        return _Off(numbers, "the gradients are divided by the number of ranks twice.")
    if like == {"earlier"}:
        return _Off(numbers, "stale gradients: these are the means of the step before.")
    if like == {"zeros"} or like == {"nothing"}:
        return _Off(numbers, f"the gradient of {which} is lost: finish() has to leave the mean in parameter.grad.")
    if "nothing" in like:
        return _Off(numbers, "some ranks are left without a gradient: every rank needs the mean in parameter.grad.")
    if like <= {"first", "own"} and "first" in like and {r for r, _ in wrong} == set(range(ranks)):
        return _Off(numbers, "all ranks take the gradient of rank 0: a broadcast where a sum over the ranks is wanted.")
    if like == {"largest"}:
        return _Off(numbers, "the largest gradient in place of the mean: op=dist.ReduceOp.SUM, then divide.")
    if like <= {"own", "own/n", "first", "last"}:
        if 0 not in {rank for rank, _ in wrong}:
            return _Off(numbers, "only rank 0 gets the result, as with dist.reduce: every rank needs it, all_reduce.")
        if at in calls or len(calls) >= len(mean):
            return _Off(numbers, "the mean is in another tensor: copy it into parameter.grad.")
        lost = f"the gradient of {which} is" if len(names) == 1 else f"the gradients of {which} are"
        divided = " They are divided, and never summed." if like == {"own/n"} and len(names) == len(mean) else ""
        return _Off(numbers, f"{lost} never reduced: a hook, or a parameter, is lost.{divided}")
    factors = {
        None if (factor := _scaled(steps[rank].found[name], mean[name])) is None else round(factor, 6)
        for rank, name in wrong
    }
    if len(factors) == 1 and None not in factors:
        (factor,) = factors
        return _Off(f"{numbers}: {factor:.3g} times what is right", _COUNT)
    if "" not in like:
        return _Off(
            numbers, f"the gradients of {which} are wrong in different ways on the ranks: {', '.join(sorted(like))}."
        )
    if 0 not in {rank for rank, _ in wrong}:
        return _Off(numbers, "only rank 0 gets the right result: every rank has to do the same.")
    if earlier:
        return _Off(f"the first step is right, and in the second {numbers}", _KEPT)
    return _Off(numbers, f"the gradient of {which} is no mean over the ranks.")


def _why_so_much(step: _Step) -> str:
    operations = [call.operation for call in step.heard]
    reduced = [call.pointer for call in step.heard if call.operation == "all_reduce"]
    if "all_gather" in operations or "all_to_all" in operations:
        return "bytes wasted: every rank gets all gradients of all ranks. An all-reduce adds them on the way."
    if len(reduced) > len(set(reduced)):
        return "bytes wasted: a gradient is reduced twice in a step."
    if "broadcast" in operations:
        return "bytes wasted: a broadcast in each step. Ranks that make equal updates need it only at the start."
    return "bytes wasted: one all-reduce of each gradient is enough."


def _parts_off(made: Any, ranks: int) -> _Off | None:
    for size in (ranks, 4 * ranks):
        given = [made.part(size, rank, ranks) for rank in range(ranks)]
        parts = [tuple(part) if isinstance(part, (tuple, list)) and len(part) == 2 else None for part in given]
        right = [bounds(size, ranks, rank) for rank in range(ranks)]
        if parts == right:
            continue
        rank = next(rank for rank in range(ranks) if parts[rank] != right[rank])
        numbers = f"part({size}, {rank}, {ranks}) is {given[rank]}, expected {right[rank]}"
        if None in parts:
            return _Off(numbers, "part() returns (start, stop).")
        ends = [part for part in parts if part is not None]
        held = [sum(start <= i < stop for start, stop in ends) for i in range(size)]
        if sorted(ends) == right:
            return _Off(numbers, "the parts are in another order than the ranks: rank 0 has the first part.")
        if len(set(parts)) == 1:
            return _Off(numbers, "all ranks have the same part: start = rank * (size // ranks).")
        gap, twice = held.count(0), sum(count > 1 for count in held)
        if gap or twice:
            said = [f"{gap} of {size} elements belong to nobody"] * bool(gap)
            said += [f"{twice} of {size} belong to two ranks"] * bool(twice)
            return _Off(numbers, f"an off-by-one part: {' and '.join(said)}. `stop` is one past the last.")
        return _Off(numbers, "the parts are not equal: each rank has size // ranks elements.")
    return None


def _shards_off(own: type, ranks: int) -> _Off | str:
    if (off := _parts_off(own(), ranks)) is not None:
        return off
    each = 6

    def of_rank(rank: int, group: _Listening) -> list[Any]:
        made, seen = own(), []
        for step in range(2):
            flat = _drawn(ranks * each, seed=10 * step + rank)
            part = made.reduce(flat)
            part = part.clone() if isinstance(part, Tensor) else part
            reduced = group.take()
            weights, mine = _drawn(ranks * each, seed=70), _drawn(each, seed=80 + 10 * step + rank)
            given = made.gather(mine.clone(), weights)
            seen.append((part, reduced, weights.clone(), given, group.take()))
        return seen

    found = _run(ranks, of_rank)
    for step in range(2):
        flats = [_drawn(ranks * each, seed=10 * step + rank) for rank in range(ranks)]
        if (off := _reduced_off([one[step][:2] for one in found], flats, each)) is not None:
            return off
        right = torch.cat([_drawn(each, seed=80 + 10 * step + rank) for rank in range(ranks)])
        if (
            off := _gathered_off([one[step][2:] for one in found], right, _drawn(ranks * each, seed=70), each)
        ) is not None:
            return off
    size, ideal = right.nbytes, (ranks - 1) / ranks
    for what, heard, better in (
        ("reduce", found[0][1][1], "all-reduce of everything, of which a part is kept: use a reduce-scatter"),
        ("gather", found[0][1][4], "every rank sends more than its part: use an all-gather of the parts"),
    ):
        if (sent := _sent(heard, ranks) / size) > 1.05 * ideal:
            numbers = f"{what} sends {sent:.3g} S, where S is the bytes of the flat tensor; {ideal:.3g} S are enough"
            return _Off(numbers, f"bytes wasted. {better[0].upper()}{better[1:]}.")
    return (
        f"on 2 and on {ranks} ranks, parts and weights are those of one process, and no byte is sent that is not needed"
    )


def _reduced_off(found: Sequence[Any], flats: Sequence[Tensor], each: int) -> _Off | None:
    ranks, mean = len(flats), _mean(flats)
    cut = [slice(rank * each, (rank + 1) * each) for rank in range(ranks)]
    wrong: dict[int, str] = {}
    for rank, (part, _) in enumerate(found):
        if isinstance(part, Tensor) and _same(part.view(-1), mean[cut[rank]]):
            continue
        known = {
            "sum": mean[cut[rank]] * ranks,
            "own": flats[rank][cut[rank]],
            "own/n": flats[rank][cut[rank]] / ranks,
            "mean/n": mean[cut[rank]] / ranks,
            "all": mean,
            "all sums": mean * ranks,
            "zeros": torch.zeros(each).double(),
        }
        known |= {f"part {other}": mean[cut[other]] for other in range(ranks)}
        known |= {f"sum of part {other}": mean[cut[other]] * ranks for other in range(ranks)}
        wrong[rank] = _like(part.view(-1) if isinstance(part, Tensor) else None, known)
    if not wrong:
        return None
    rank, like = next(iter(wrong)), set(wrong.values())
    numbers = _off_by("the part that reduce() returns", rank, found[rank][0], mean[cut[rank]])
    if any(not call.is_waited_for for _, heard in found for call in heard):
        return _Off(numbers, _NOT_WAITED)
    if like == {"sum"}:
        return _Off(numbers, _DIVIDE)
    if like <= {"all", "all sums"}:
        return _Off(numbers, "reduce() returns everything: a rank keeps only its part.")
    if like == {"nothing"}:
        return _Off(numbers, "reduce() returns nothing: it has to return this rank's part.")
    if like == {"mean/n"}:
        return _Off(numbers, "the gradients are divided by the number of ranks twice.")
    if like <= {"own", "own/n"}:
        return _Off(numbers, "the gradients of the other ranks are missing: the part is cut, and never reduced.")
    if like == {"zeros"}:
        return _Off(numbers, "the result is not written: the part is still zero.")
    if all("part" in one for one in like):
        return _Off(numbers, f"a wrong part: rank {rank} gets that of rank {wrong[rank].split()[-1]}.")
    factor = _scaled(found[rank][0], mean[cut[rank]]) if isinstance(found[rank][0], Tensor) else None
    return _Off(numbers, "the part is no mean over the ranks." if factor is None else _COUNT)


def _gathered_off(found: Sequence[Any], right: Tensor, before: Tensor, each: int) -> _Off | None:
    ranks = len(found)
    wrong: dict[tuple[int, int], str] = {}
    for rank, (weights, _, _) in enumerate(found):
        for other in range(ranks):
            cut = slice(other * each, (other + 1) * each)
            if not _same(weights[cut], right[cut]):
                known = {
                    "stale": before[cut],
                    "zeros": torch.zeros(each).double(),
                    "sum": right[cut] + before[cut] * (ranks - 1),
                }
                known |= {f"part {one}": right[one * each : (one + 1) * each] for one in range(ranks)}
                known |= {
                    "times n": right[cut] * ranks,
                    "mean": right[cut] / ranks,
                    "added": right[cut] + before[cut] * ranks,
                }
                wrong[rank, other] = _like(weights[cut], known)
    if not wrong:
        return None
    (rank, other), like = next(iter(wrong)), set(wrong.values())
    cut = slice(other * each, (other + 1) * each)
    numbers = _off_by(f"part {other} of the weights after gather()", rank, found[rank][0][cut], right[cut])
    if any(not call.is_waited_for for _, _, heard in found for call in heard):
        return _Off(numbers, _NOT_WAITED)
    if like == {"stale"}:
        if any(given is not None for _, given, _ in found):
            return _Off(numbers, "stale weights: gather() returns a new tensor, and has to write into `weights`.")
        if any(heard for _, _, heard in found):
            return _Off(numbers, "stale weights: what was gathered is not copied into `weights`.")
        return _Off(numbers, "stale weights: the parts of the other ranks are never gathered.")
    if all(one.startswith("part") for one in like):
        return _Off(numbers, "the parts are in the wrong places: that of rank r begins at r * size // ranks.")
    if like == {"mean"}:
        return _Off(numbers, "gather() divides the weights: the parts are written as they are.")
    if like <= {"sum", "added", "times n"}:
        return _Off(numbers, "the parts are added to old weights, or to each other: set everything else to zero first.")
    if like <= {"zeros", "stale"}:
        return _Off(numbers, "a part is left out: the loop over the ranks ends too early, or begins too late.")
    return _Off(numbers, "the weights are not the parts of the ranks, one after the other.")


def _linears_off(own: type, ranks: int) -> _Off | str:
    if (off := _parts_off(own(), ranks)) is not None:
        return off
    rows, wide, each = 4, 6, 4
    hidden = ranks * each
    up, up_bias, down, down_bias = (
        _drawn(*shape, seed=i) for i, shape in enumerate([(hidden, wide), (hidden,), (wide, hidden), (wide,)])
    )
    x, flow, h, back = (
        _drawn(*shape, seed=9 + i)
        for i, shape in enumerate([(rows, wide), (rows, hidden), (rows, hidden), (rows, wide)])
    )

    def of_rank(rank: int, group: _Listening) -> dict[str, Any]:
        made, cut = own(), slice(rank * each, (rank + 1) * each)
        seen: dict[str, Any] = {}
        for name, given, weight, bias, grad in (
            ("column", x, up[cut], up_bias[cut], flow[:, cut]),
            ("row", h[:, cut], down[:, cut], down_bias, back),
        ):
            leaves = [one.clone().requires_grad_() for one in (given, weight, bias)]
            y = getattr(made, name)(*leaves)
            forward = group.take()
            seen[name] = y, forward, None, []
            if isinstance(y, Tensor) and y.shape == grad.shape and y.requires_grad:
                before = y.detach().clone()
                y.backward(grad)
                seen[name] = before, forward, [leaf.grad for leaf in leaves], group.take()
        return seen

    found = _run(ranks, of_rank)
    cuts = [slice(rank * each, (rank + 1) * each) for rank in range(ranks)]
    if (off := _column_off([one["column"] for one in found], (x, up, up_bias, flow), cuts)) is not None:
        return off
    if (off := _row_off([one["row"] for one in found], (h, down, down_bias, back), cuts)) is not None:
        return off
    ideal = 2 * (ranks - 1) / ranks
    for what, size, free, end in (
        ("column", x.nbytes, "forward", "input"),
        ("row", back.nbytes, "backward", "output"),
    ):
        heard = [*found[0][what][1], *found[0][what][3]]
        if (sent := _sent(heard, ranks) / size) > 1.05 * ideal:
            numbers = f"{what} sends {sent:.3g} times the bytes of its {end}, where {ideal:.3g} are enough"
            return _Off(numbers, f"bytes wasted: {what} needs no collective in the {free} pass, and one in the other.")
    return f"on 2 and on {ranks} ranks, outputs and gradients are those of one process, with one all-reduce for a map"


_CUT_OFF = "the collective cuts the graph, so that no gradient comes back: put it into a torch.autograd.Function."


def _column_off(found: Sequence[Any], given: Sequence[Tensor], cuts: Sequence[slice]) -> _Off | None:
    x, weight, bias, flow = given
    out, ranks = F.linear(x, weight, bias), len(cuts)
    own_dx = [flow[:, cut] @ weight[cut] for cut in cuts]
    for rank, (y, forward, grads, _) in enumerate(found):
        cut = cuts[rank]
        if not (isinstance(y, Tensor) and _same(y, out[:, cut])):
            numbers = _off_by("the output of column()", rank, y, out[:, cut])
            if isinstance(y, Tensor) and _same(y, out):
                return _Off(numbers, "column() gathers its output: the next layer wants this rank's features only.")
            if isinstance(y, Tensor) and _same(y, F.linear(x, weight[cut])):
                return _Off(numbers, "column() does not add the bias.")
            if forward and isinstance(y, Tensor) and y.shape == out[:, cut].shape:
                return _Off(
                    numbers,
                    "column() sums over the ranks in the forward pass: its outputs are other features on each rank.",
                )
            return _Off(numbers, "the output of column() is not F.linear(x, weight, bias).")
        if grads is None or grads[0] is None:
            return _Off(f"column() gives no gradient of its input on rank {rank}", _CUT_OFF)
        dx = torch.stack(own_dx).sum(0)
        if not _same(grads[0], dx):
            numbers = _off_by("the gradient of column()'s input", rank, grads[0], dx)
            known = {"own": own_dx[rank], "mean": dx / ranks, "times n": dx * ranks, "zeros": torch.zeros_like(dx)}
            cause = {
                "own": "column() does not sum the gradient of its input: the backward pass needs an all-reduce.",
                "mean": "column() averages the gradient of its input: the parts of the ranks have to be added.",
                "times n": "the gradient of column()'s input is summed twice.",
                "zeros": _CUT_OFF,
            }
            return _Off(
                numbers,
                cause.get(_like(grads[0], known), "the gradient of column()'s input is not the sum over the ranks."),
            )
        for name, grad, right in (("weight", grads[1], flow[:, cut].T @ x), ("bias", grads[2], flow[:, cut].sum(0))):
            if not _same(grad, right):
                numbers = _off_by(f"the gradient of column()'s {name}", rank, grad, right)
                return _Off(numbers, f"the gradient of the {name} belongs to this rank: it is not reduced.")
    return None


def _row_off(found: Sequence[Any], given: Sequence[Tensor], cuts: Sequence[slice]) -> _Off | None:
    h, weight, bias, back = given
    product, ranks = h @ weight.T, len(cuts)
    for rank, (y, _, grads, _) in enumerate(found):
        cut = cuts[rank]
        if not (isinstance(y, Tensor) and _same(y, product + bias)):
            own = h[:, cut] @ weight[:, cut].T
            known = {
                "adds the bias on every rank: add it once, after the sum.": product + ranks * bias,
                "does not add the bias.": product,
                "returns this rank's part of the sum: the forward pass needs an all-reduce.": own + bias,
                "returns this rank's part of the sum, and no bias: the forward pass needs an all-reduce.": own,
                "averages over the ranks: the parts have to be added.": product / ranks + bias,
                "averages over the ranks, also the bias: the parts have to be added.": product / ranks + bias / ranks,
            }
            found_in = _like(y, known) if isinstance(y, Tensor) else ""
            numbers = _off_by("the output of row()", rank, y, product + bias)
            return _Off(numbers, f"row() {found_in or 'does not return the sum of the parts plus the bias.'}")
        if grads is None or grads[0] is None:
            return _Off(f"row() gives no gradient of its input on rank {rank}", _CUT_OFF)
        for name, grad, right in (
            ("input", grads[0], back @ weight[:, cut]),
            ("weight", grads[1], back.T @ h[:, cut]),
            ("bias", grads[2], back.sum(0)),
        ):
            if not _same(grad, right):
                numbers = _off_by(f"the gradient of row()'s {name}", rank, grad, right)
                if _same(grad, right * ranks):
                    said = f"the gradient is {ranks} times too large"
                    return _Off(
                        numbers, f"{said}: the backward pass of row() sums too, and has to pass it on as it is."
                    )
                if grad is None or not grad.any():
                    return _Off(numbers, _CUT_OFF)
                if _same(grad, right / ranks):
                    return _Off(numbers, "row() divides the gradient by the number of ranks: pass it on as it is.")
                return _Off(numbers, "the backward pass of row() passes the gradient on as it is.")
    return None
