"""The most that one shown value, picture or error takes: text of any length would fill the notebook and its kernel."""

from __future__ import annotations

from typing import Any

TEXT_LIMIT = 100_000  # characters of a value's text, and of each part of a traceback
PICTURE_LIMIT = 16 << 20  # characters of any other form (HTML, base64 of a picture)


def shortened(text: str, limit: int = TEXT_LIMIT, *, hint: str = "") -> str:
    """`text`, or its two ends with the number of characters that were left out between them."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out{hint} ...\n{text[-half:]}"


def limited(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a message that shows a value or an error, its long texts shortened, too large forms left out."""
    if "traceback" in content:
        lines = [shortened(line) for line in content["traceback"]]
        return {**content, "evalue": shortened(content["evalue"]), "traceback": lines}
    if not isinstance(data := content.get("data"), dict):
        return content
    shown = {kind: form for kind, form in data.items() if kind == "text/plain" or not _is_too_large(form)}
    text = shown.get("text/plain")
    if isinstance(text, str):
        shown["text/plain"] = shortened(text, hint=": %pull brings the whole value")
    if left_out := sorted(data.keys() - shown.keys()):
        sizes = ", ".join(f"{kind} of {len(data[kind]):,} characters" for kind in left_out)
        note = f"[not shown, the limit is {PICTURE_LIMIT:,}: {sizes}]"
        shown["text/plain"] = f"{shown['text/plain']}\n{note}" if "text/plain" in shown else note
    return {**content, "data": shown}


def _is_too_large(form: Any) -> bool:
    return isinstance(form, str | bytes) and len(form) > PICTURE_LIMIT
