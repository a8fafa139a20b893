"""Test that the surrounding page has no rules for a class name of the panel, the dashboard or the tab."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nbkit.notebook.widgets import javascript

OURS = Path(javascript.__file__).parent / "static"
BOARDS = javascript._BOARDS
FILES = sorted(path for folder in (OURS, BOARDS) for path in folder.iterdir() if path.suffix in (".css", ".js"))

# Names that have a rule alone (".name {") in JupyterLab and its widgets, Font Awesome 4 to 6, and Bootstrap 3 and 5,
# which nbviewer, nbconvert and many themes include.
PREFIXES = ("jp-", "lm-", "p-", "bp3-", "bp4-", "fa-", "widget-", "jupyter-", "cm-", "btn-", "col-", "text-", "bg-")
NAMES = set(
    """
    fa fab fad fal far fas fat fass fasr glyphicon svg-inline--fa
    active affix alert badge border breadcrumb btn caption card carousel checkbox clearfix close collapse collapsing
    container container-fluid disabled divider dropdown dropdown-menu dropup fade figure form-control form-group hidden
    hide in initialism invisible invalid jumbotron label lead list-group list-group-item list-inline mark media modal
    nav navbar offcanvas open pager pagination panel panel-body popover progress progress-bar radio ratio rounded row
    shadow show small spinner sr-only table thumbnail toast tooltip visible vr well
    """.split()
)


def names_in(text: str, kind: str) -> set[str]:
    """Return the class names that a style sheet has rules for, or that a script gives to elements."""
    if kind == ".css":
        selectors = re.sub(r"\{[^}]*\}", " ", re.sub(r"/\*.*?\*/", "", text, flags=re.S))
        return set(re.findall(r"\.(-?[A-Za-z_][\w-]*)", selectors))
    given = re.findall(r"class=[\"']([^\"'$]+)", text) + re.findall(r"className = [\"'`]([^\"'`$]+)", text)
    for arguments in re.findall(r"make\(\"\w+\", ([^)\n]*)", text):
        given += re.findall(r"[\"'`]([^\"'`]*)[\"'`]", arguments)
    return {name for words in given for name in re.findall(r"[A-Za-z][\w-]*", words)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_class_name_of_nbkit_is_used_by_the_surrounding_page(path: Path) -> None:
    found = names_in(path.read_text(), path.suffix)

    assert sorted(name for name in found if name in NAMES or name.startswith(PREFIXES)) == []


def test_names_in_finds_class_names_in_style_sheets_and_scripts() -> None:
    assert {"nbkit-panel", "legend", "aside", "told"} <= names_in((OURS / "panel.css").read_text(), ".css")
    assert {"nbkit-panel", "headline", "aside", "told"} <= names_in((OURS / "panel.js").read_text(), ".js")
    assert {"nbkit-dashboard", "chip", "reading"} <= names_in((OURS / "dashboard.js").read_text(), ".js")
