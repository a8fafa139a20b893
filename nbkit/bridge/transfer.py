"""The rank's side of push and pull."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from nbkit.bridge import calls
from nbkit.wire import parcel

T = TypeVar("T")


def put(path: str) -> str:
    """Assign the names in a parcel. The notebook unlinks it when every rank has it mapped. Returns why not, or ""."""
    return _assign(lambda: parcel.read(path, unlink=False))


def put_parts(parts: list[bytes]) -> str:
    """`put` for a rank that may be on another host than the notebook."""
    return _assign(lambda: parcel.unpack(parts))


def _assign(read: Callable[[], dict[str, Any]]) -> str:
    assert calls.runner is not None
    values, why = _served(read)
    calls.runner.shell.user_ns.update(values or {})
    return why


def _served(act: Callable[[], T]) -> tuple[T | None, str]:
    """Return what act() returns, or why not: values have code of their own, which may fail, exit, or never end."""
    assert calls.runner is not None
    try:
        with calls.runner.open_to_stop():
            try:
                return act(), ""
            except BaseException as error:
                return None, f"{type(error).__name__}: {calls.runner.said(error)}"
    except KeyboardInterrupt:
        return None, "stopped"


def get(expression: str, limit: int, token: str) -> dict[str, Any]:
    """The value of an expression as a parcel: {"path", "bytes"}; or {"bytes"} alone if it is over `limit` bytes;
    or {"error": text}. token: where the parcel lies, so that the notebook can discard it whatever happens; "" for a
    notebook that may be on another host: then the answer has "parts" in place of "path"."""
    assert calls.runner is not None
    shell = calls.runner.shell
    packed, why = _served(lambda: parcel.pack(eval(expression, shell.user_global_ns, shell.user_ns)))
    if packed is None:
        return {"error": why}
    size = parcel.size_of(packed)
    if size > limit:
        return {"bytes": size}
    if not token:
        return {"bytes": size, "parts": parcel.packed_bytes(packed)}
    try:
        return {"bytes": size, "path": parcel.write(packed, f"{token}/{calls.runner.rank}")}
    except FileNotFoundError:
        return {"error": "nobody waits for it any more"}
