"""Push and pull: values between the notebook and the ranks: in shared memory, never through the controller.

Ranks that may be on another host share no memory with the notebook; there a value goes the way that cells go.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ipyparallel.error import IPythonError

from nbkit.errors import ClusterError, TransferError
from nbkit.notebook.cluster.cells.client import Client
from nbkit.wire import parcel
from nbkit.wire.cells import ranks_text


def push(
    client: Client, values: dict[str, Any], ranks: Sequence[int], *, force: bool = False, shared: bool = True
) -> None:
    """Assign `values` by name on `ranks`. shared: one copy into shared memory, however many ranks read it.

    Raises TransferError for what cannot be pickled, or is over 1 GB and not forced.
    """
    names = " ".join(values)
    _identifiers(values)
    try:
        packed = parcel.pack(values)
    except Exception as error:
        raise TransferError(
            f"{names} cannot travel to another process.",
            numbers=f"{type(error).__name__}: {error}",
            hint="make it on the ranks, in a %%distributed cell",
        ) from None
    _check_size(names, parcel.size_of(packed), force, f"%push {names} --force")
    path = parcel.write(packed) if shared else ""
    try:
        if shared:
            answers = client.call_and_wait(ranks, "nbkit.bridge.transfer:put", path)
        else:
            answers = client.call_and_wait(ranks, "nbkit.bridge.transfer:put_parts", parcel.packed_bytes(packed))
        if why := next(filter(None, answers.values()), ""):
            raise ClusterError(why)
    except Exception as error:
        raise TransferError(
            f"{names} could not be assigned on ranks {ranks_text(list(ranks))}.",
            numbers=str(error).strip().splitlines()[-1][:300],
            hint="an instance of a class that a notebook cell defines needs that class on the ranks too: "
            "define it in a %%distributed cell (--here defines it in both places)",
        ) from None
    finally:
        if shared:
            Path(path).unlink(missing_ok=True)


def pull(
    client: Client, expression: str, ranks: Sequence[int], *, force: bool = False, shared: bool = True
) -> list[Any]:
    """The value of `expression` on each of `ranks`. A tensor is an array unless this process has torch."""
    limit = 1 << 62 if force else parcel.LIMIT_BYTES
    token = parcel.reserve() if shared else ""
    try:
        answers = client.call_and_wait(ranks, "nbkit.bridge.transfer:get", expression, limit, token)
        return [_opened(expression, rank, answers[rank], force) for rank in ranks]
    except (IPythonError, ClusterError) as error:
        raise TransferError(
            f"{expression} could not be fetched from ranks {ranks_text(list(ranks))}.",
            numbers=str(error).strip().splitlines()[-1][:300],
            hint="%cluster status",
        ) from None
    finally:
        if shared:
            parcel.discard(token)


def _opened(expression: str, rank: int, answer: dict[str, Any], force: bool) -> Any:
    if "error" in answer:
        raise TransferError(
            f"{expression!r} has no value on rank {rank}.",
            numbers=answer["error"],
            hint=f"%%rank {rank}   to look there",
        )
    _check_size(expression, answer["bytes"], force, f"%pull {expression} --rank {rank} --force")
    try:
        return parcel.read(answer["path"]) if "path" in answer else parcel.unpack(answer["parts"])
    except (AttributeError, ImportError) as error:
        raise TransferError(
            f"{expression} of rank {rank} is of a type that the notebook does not know.",
            numbers=str(error),
            hint="pull plain data instead, for example its state_dict() or str()",
        ) from None


def _identifiers(values: dict[str, Any]) -> None:
    wrong = [name for name in values if not name.isidentifier()]
    if wrong:
        raise TransferError(f"{wrong[0]!r} is not a name that can be assigned.", hint="%push name [name ...]")


def _check_size(name: str, size: int, force: bool, command: str) -> None:
    if size > parcel.LIMIT_BYTES and not force:
        raise TransferError(
            f"{name} is too large to travel by accident.",
            numbers=f"{size / 1e9:.2f} GB, the limit is {parcel.LIMIT_BYTES / 1e9:.2f} GB",
            hint=command,
        )
