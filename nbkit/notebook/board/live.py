"""TensorBoard's own tabs made to follow a training: one script more in its page, which presses its reload button."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_SCRIPT = b'<script type="module" src="data/plugin/communication/static/live.js"></script>'
_PAGES = ("", "/", "/index.html")

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def following(app: App) -> App:
    """`app` with the script in its first page. Whatever does not look as expected passes unchanged."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO", "") not in _PAGES or environ.get("REQUEST_METHOD") != "GET":
            return app(environ, start_response)
        begun: list[Any] = []

        def hold(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            begun[:] = [status, headers, *rest]
            return lambda data: None

        # Compressed it could not be read.
        parts = app({**environ, "HTTP_ACCEPT_ENCODING": "identity"}, hold)
        page = b"".join(parts)
        if callable(close := getattr(parts, "close", None)):
            close()
        status, headers, *rest = begun
        page = page.replace(b"</body>", _SCRIPT + b"</body>", 1)
        length = [("Content-Length", str(len(page)))]
        kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start_response(status, kept + length, *rest)
        return [page]

    return answer
