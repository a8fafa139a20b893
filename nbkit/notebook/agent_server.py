"""Serve tools to a program on this machine over the Model Context Protocol: `nbkit mcp`.

The program starts the server, writes a JSON-RPC 2.0 message on each line of its standard input, and reads the answers
from its standard output. There is no port. The server implements initialize, ping, tools/list and tools/call of
https://modelcontextprotocol.io/specification/2025-11-25. The official package is not used, because it needs a web
server and 25 other packages.

Each tool belongs to a tier, and the user grants tiers on the command line. Every request and its outcome are written to
a log before the answer is sent. A request that cannot be logged is refused.
"""

from __future__ import annotations

import inspect
import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, TypeVar, get_args, get_type_hints

import nbkit
from nbkit.errors import CellStopped, NbkitError, UsageError
from nbkit.notebook.json_text import plain

TIERS = {
    "look": "read what clusters and trainings do",
    "steer": "control a training: strategy, learning rate, pause, save, stop",
    "code": "run code: start and end clusters, run cells, write scripts",
}
"""Each tier includes the tiers before it."""
VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Supported revisions of the protocol, the newest first. For tools they are equal."""
LONGEST_LINE = 1 << 20
"""Largest size of a request in bytes."""
LONGEST_ANSWER = 60_000
"""Largest size of an answer in characters of JSON: about 20,000 tokens."""
MOST_CALLS = 8
"""Largest number of calls at the same time. `why` must still be possible while a cell hangs."""
_WAIT_AT_END = 2.0
_PARSE, _INVALID, _NO_METHOD, _WRONG_PARAMS = -32700, -32600, -32601, -32602
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_F = TypeVar("_F", bound=Callable[..., Any])

cancelled: ContextVar[threading.Event] = ContextVar("cancelled", default=threading.Event())  # noqa: B039
"""Set when the program has cancelled the call that runs in this context."""


def tool(tier: str, **about: str) -> Callable[[_F], _F]:
    """Mark a method as a tool. about: parameter -> its meaning. The method's docstring describes the tool."""

    def mark(function: _F) -> _F:
        function.about_tool = tier, about  # type: ignore[attr-defined]
        return function

    return mark


@dataclass(frozen=True)
class Parameter:
    """A parameter of a tool. kind: str, int, float or bool. several: it is a list of `kind`."""

    about: str
    kind: type
    several: bool
    needed: bool
    default: Any

    @property
    def schema(self) -> dict[str, Any]:
        """Return the parameter as JSON Schema."""
        one = {"type": _TYPES[self.kind]}
        whole: dict[str, Any] = {"type": "array", "items": one} if self.several else one
        given = {} if self.needed or self.default is None else {"default": self.default}
        return {**whole, **given, "description": self.about}

    def fits(self, value: Any) -> bool:
        """Return True if a JSON value has the parameter's type."""
        if self.several:
            return isinstance(value, list) and all(_is_a(each, self.kind) for each in value)
        return _is_a(value, self.kind)


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


@dataclass(frozen=True)
class Tool:
    """A tool that programs can call. tier: its tier. call: takes the arguments and returns a dict."""

    name: str
    tier: str
    about: str
    call: Callable[..., Any]
    parameters: Mapping[str, Parameter]

    @classmethod
    def of(cls, method: Any) -> Tool:
        """Return the tool for a method that `tool` has marked."""
        tier, about = method.about_tool
        hints, parameters = get_type_hints(method), {}
        for name, each in inspect.signature(method).parameters.items():
            kind = hints[name]
            if isinstance(kind, UnionType):
                kind = next(one for one in get_args(kind) if one is not type(None))
            several = bool(get_args(kind))
            kind = get_args(kind)[0] if several else kind
            parameters[name] = Parameter(about[name], kind, several, each.default is each.empty, each.default)
        text = " ".join((method.__doc__ or method.__name__).split())  # python -OO has no docstrings
        return cls(method.__name__, tier, text, method, parameters)

    @property
    def described(self) -> dict[str, Any]:
        """Return the tool's entry in tools/list."""
        schema = {
            "type": "object",
            "properties": {name: each.schema for name, each in self.parameters.items()},
            "required": [name for name, each in self.parameters.items() if each.needed],
            "additionalProperties": False,
        }
        hints = {"readOnlyHint": self.tier == "look", "openWorldHint": False}
        return {"name": self.name, "description": self.about, "inputSchema": schema, "annotations": hints}

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise UsageError if the arguments do not fit the tool's parameters."""
        takes = ", ".join(f"{name}{'' if each.needed else '?'}" for name, each in self.parameters.items()) or "nothing"
        for name, value in arguments.items():
            if name not in self.parameters:
                raise UsageError(f"{self.name} has no argument {name!r}.", numbers=f"it takes: {takes}")
            if not self.parameters[name].fits(value):
                schema = self.parameters[name].schema
                wanted = f"an array of {schema['items']['type']}" if "items" in schema else schema["type"]
                raise UsageError(
                    f"The argument {name!r} of {self.name} is of another type.",
                    numbers=f"{json.dumps(value)[:200]} is no {wanted}",
                    hint=self.parameters[name].about,
                )
        for name, each in self.parameters.items():
            if each.needed and name not in arguments:
                raise UsageError(
                    f"{self.name} needs the argument {name!r}.", numbers=f"it takes: {takes}", hint=each.about
                )


def tools_of(offered: object) -> dict[str, Tool]:
    """Return name -> tool for the tools among an object's methods, in the order of their tiers."""
    methods = [getattr(offered, name) for name in vars(type(offered)) if hasattr(getattr(offered, name), "about_tool")]
    made = sorted(map(Tool.of, methods), key=lambda each: list(TIERS).index(each.tier))
    return {each.name: each for each in made}


class AuditLog:
    """An append-only file of JSON lines that only this user can read."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it. Raises NbkitError if others own it or can read it."""
        self.path = path
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise self._unfit(error.strerror or str(error)) from None
        found = os.fstat(self._file)
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
            raise self._unfit("it is no file, or belongs to another user")
        os.fchmod(self._file, 0o600)

    def _unfit(self, why: str) -> NbkitError:
        return NbkitError(
            "The log of requests cannot be written, so no request is served.",
            numbers=f"{self.path}: {why}",
            hint="%env NBKIT_HOME=/tmp/nbkit   or another folder of yours",
        )

    def write(self, **line: Any) -> None:
        """Append one line in one write, so that lines of two servers do not mix. Raises NbkitError if that fails."""
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        text = json.dumps({"time": when, "pid": os.getpid(), **line}, ensure_ascii=False, default=str)
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        try:
            if os.write(self._file, data) < len(data):
                raise OSError("the disk is full")
        except OSError as error:
            raise self._unfit(error.strerror or str(error)) from None


class AgentServer:
    """A server for one program. allow: the highest granted tier. out: gets a line for each answer."""

    def __init__(self, tools: Mapping[str, Tool], allow: str, log: AuditLog, out: BinaryIO) -> None:
        granted = list(TIERS)[: list(TIERS).index(allow) + 1]
        self.tools, self.allow, self.granted, self.log, self._out = tools, allow, granted, log, out
        self._client = ""
        self._calls: dict[Any, threading.Event] = {}
        self._writing, self._counting = threading.Lock(), threading.Condition()

    def serve(self, lines: BinaryIO) -> None:
        """Answer lines until the input ends. Then wait two seconds for calls that still run."""
        while line := lines.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                while not line.endswith(b"\n") and (line := lines.readline(LONGEST_LINE)):
                    pass
                self._refuse(None, _INVALID, f"A request has at most {LONGEST_LINE:,} bytes.")
            elif line.strip():
                self._take(line)
        for event in list(self._calls.values()):
            event.set()
        with self._counting:
            self._counting.wait_for(lambda: not self._calls, _WAIT_AT_END)

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            self._refuse(None, _PARSE, f"This line is not JSON: {error}")
            return
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            self._refuse(None, _INVALID, "Each line must be one JSON object with jsonrpc = 2.0.")
            return
        method, params, id = message.get("method"), message.get("params") or {}, message.get("id")
        if method is None and ("result" in message or "error" in message):
            return  # an answer, although the server sends no requests
        if not isinstance(method, str) or not isinstance(params, dict) or not isinstance(id, str | int | None):
            self._refuse(None, _INVALID, "A request has a method, params as an object, and an id.")
        elif "id" not in message:
            if method == "notifications/cancelled" and (call := self._calls.get(params.get("requestId"))) is not None:
                call.set()
        elif method == "tools/call":
            self._call(id, params)
        elif method in _METHODS:
            self._answer(id, method, _METHODS[method](self, params))
        else:
            self._refuse(id, _NO_METHOD, f"There is no method {method!r}: {', '.join([*_METHODS, 'tools/call'])}.")

    def _initialize(self, params: Mapping[str, Any]) -> dict[str, Any]:
        asked, client = params.get("protocolVersion"), params.get("clientInfo")
        self._client = str(client.get("name", ""))[:100] if isinstance(client, dict) else ""
        return {
            "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": {"name": "nbkit", "version": nbkit.__version__},
            "instructions": self._instructions(),
        }

    def _instructions(self) -> str:
        lines = [
            "nbkit trains PyTorch models on clusters: each rank is a process, and a cell runs on every rank.",
            f"The user has granted: {', '.join(self.granted)}.",
            *(f"Not granted: {tier} ({what}). {_GRANT.format(tier)}" for tier, what in TIERS.items()
              if tier not in self.granted),
            "An argument `cluster` may be left out if only one cluster runs. Sizes are in bytes, times in seconds.",
            "Errors may name what a person types in a notebook: `%strategy zero3` is switch, `%nbkit why` is why.",
        ]  # fmt: skip
        return "\n".join(lines)

    def _list(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"tools": [each.described for each in self.tools.values() if each.tier in self.granted]}

    def _ping(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def _call(self, id: Any, params: Mapping[str, Any]) -> None:
        """Check a call, and run it in its own thread."""
        name, arguments = params.get("name"), params.get("arguments") or {}
        asked = {"id": id, "tool": name, "arguments": arguments}
        found = self.tools.get(name) if isinstance(name, str) else None
        if not isinstance(arguments, dict):
            self._refuse(id, _WRONG_PARAMS, "The arguments of a tool are an object.", asked)
        elif found is None:
            known = ", ".join(each["name"] for each in self._list({})["tools"])
            self._refuse(id, _WRONG_PARAMS, f"There is no tool {str(name)[:100]!r}. There are: {known}.", asked)
        else:
            try:
                self._check(found, arguments)
                self._write(outcome="asked", **asked)
            except NbkitError as error:
                self._finish(asked, "refused", error, 0.0)
                return
            event = self._calls[id] = threading.Event()
            threading.Thread(target=self._run, args=(found, asked, event), daemon=True).start()

    def _check(self, found: Tool, arguments: Mapping[str, Any]) -> None:
        if found.tier not in self.granted:
            raise UsageError(
                f"The user has not granted the tier {found.tier!r} that {found.name} needs.",
                numbers=f"granted: {', '.join(self.granted)}",
                hint=_GRANT.format(found.tier),
            )
        if len(self._calls) >= MOST_CALLS:
            raise UsageError(f"{MOST_CALLS} calls are running already.", hint="wait for one of them, or cancel it")
        found.check(arguments)

    def _run(self, found: Tool, asked: dict[str, Any], event: threading.Event) -> None:
        cancelled.set(event)
        began = time.monotonic()
        answer: Any
        try:
            answer, outcome = plain(found.call(**asked["arguments"])), "done"
        except (NbkitError, CellStopped, TimeoutError, OSError) as error:
            answer, outcome = error, "failed"
        except Exception as error:
            print(f"nbkit mcp: {found.name}: {type(error).__name__}: {error}", file=sys.stderr)
            answer, outcome = error, "failed"
        try:
            self._finish(asked, outcome, answer, time.monotonic() - began)
        finally:
            with self._counting:
                self._calls.pop(asked["id"], None)
                self._counting.notify_all()

    def _finish(self, asked: Mapping[str, Any], outcome: str, answer: Any, seconds: float) -> None:
        """Log the outcome of a call, then send it. An error of a tool is sent as a result, as the protocol says."""
        wrong = isinstance(answer, BaseException)
        text = str(answer) or type(answer).__name__
        if wrong and not isinstance(answer, NbkitError):
            text = f"{type(answer).__name__}: {answer}"
        told = {"why": text[:2000]} if wrong else {}
        told |= {"arguments": asked["arguments"]} if outcome == "refused" else {}  # no line has been written for it yet
        try:
            self._write(outcome=outcome, id=asked["id"], tool=asked["tool"], seconds=round(seconds, 3), **told)
        except NbkitError as error:
            wrong, text = True, str(error)
        result: dict[str, Any] = {"content": [{"type": "text", "text": text}], "isError": wrong}
        if not wrong:
            answer = shortened(answer)
            shown = json.dumps(answer, ensure_ascii=False)
            result = {"content": [{"type": "text", "text": shown}], "structuredContent": answer, "isError": False}
        self._send({"jsonrpc": "2.0", "id": asked["id"], "result": result})

    def _answer(self, id: Any, method: str, result: dict[str, Any]) -> None:
        try:
            self._write(outcome="done", id=id, method=method)
        except NbkitError as error:
            self._send({"jsonrpc": "2.0", "id": id, "error": {"code": -32603, "message": str(error)}})
            return
        self._send({"jsonrpc": "2.0", "id": id, "result": result})

    def _refuse(self, id: Any, code: int, why: str, asked: Mapping[str, Any] | None = None) -> None:
        try:
            self._write(outcome="refused", why=why[:2000], **(asked or {"id": id}))
        except NbkitError as error:
            why = str(error)
        self._send({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": why}})

    def _write(self, **line: Any) -> None:
        self.log.write(client=self._client, allow=self.allow, **line)

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._writing:
            self._out.write(data)
            self._out.flush()


_GRANT = "The user grants it: nbkit mcp --allow {}"
_METHODS: dict[str, Callable[[AgentServer, Mapping[str, Any]], dict[str, Any]]] = {
    "initialize": AgentServer._initialize,
    "ping": AgentServer._ping,
    "tools/list": AgentServer._list,
}


def shortened(value: Any, limit: int = LONGEST_ANSWER) -> Any:
    """Return a JSON value with at most about `limit` characters, by cutting the middle of long texts and lists.

    The end of a text matters most, so it gets three quarters of the room. A note with a count replaces the middle.
    """
    room, short = limit, value
    while len(json.dumps(short, ensure_ascii=False)) > limit and room > 100:
        short, room = _cut(value, room // 4, max(4, room // 400)), room // 2
    return short


def _cut(value: Any, characters: int, elements: int) -> Any:
    if isinstance(value, str) and len(value) > characters:
        head, tail = characters // 4, characters - characters // 4
        return f"{value[:head]}\n… {len(value) - characters:,} characters are left out …\n{value[-tail:]}"
    if isinstance(value, dict):
        items = list(value.items())
        kept = {name: _cut(each, characters, elements) for name, each in items[:elements]}
        return kept | ({"…": f"{len(items) - elements:,} more are left out"} if len(items) > elements else {})
    if isinstance(value, Sequence) and not isinstance(value, str):
        several = [_cut(each, characters, elements) for each in value]
        if len(several) > elements:
            half = elements // 2
            several = [*several[:half], f"… {len(several) - 2 * half:,} are left out …", *several[-half:]]
        return several
    return value
