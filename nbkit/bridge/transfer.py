"""The rank's side of push and pull."""

from __future__ import annotations

from typing import Any

from nbkit.bridge import calls
from nbkit.wire import parcel


def put(path: str) -> None:
    """Assign the names in a parcel. The notebook unlinks it when every rank has it mapped."""
    assert calls.runner is not None
    calls.runner.shell.user_ns.update(parcel.read(path, unlink=False))


def put_parts(parts: list[bytes]) -> None:
    """`put` for a rank that may be on another host than the notebook."""
    assert calls.runner is not None
    calls.runner.shell.user_ns.update(parcel.unpack(parts))


def get(expression: str, limit: int, token: str) -> dict[str, Any]:
    """The value of an expression as a parcel: {"path", "bytes"}; or {"bytes"} alone if it is over `limit` bytes;
    or {"error": text}. token: where the parcel lies, so that the notebook can discard it whatever happens; "" for a
    notebook that may be on another host: then the answer has "parts" in place of "path"."""
    assert calls.runner is not None
    shell = calls.runner.shell
    try:
        value = eval(expression, shell.user_global_ns, shell.user_ns)
        packed = parcel.pack(value)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    size = parcel.size_of(packed)
    if size > limit:
        return {"bytes": size}
    if not token:
        return {"bytes": size, "parts": parcel.packed_bytes(packed)}
    try:
        return {"bytes": size, "path": parcel.write(packed, f"{token}/{calls.runner.rank}")}
    except FileNotFoundError:
        return {"error": "nobody waits for it any more"}
