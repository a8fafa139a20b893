"""The settings of the site. `make docs` builds it into docs/build, without the network.

Some pages show files that lie elsewhere in the repository: the notebooks, CONTRIBUTING.md and the tables that tools
write. A link to such a file leads to its page.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

import generated  # noqa: E402
from sphinx.errors import ExtensionError  # noqa: E402

import nbkit  # noqa: E402

project = "nbkit"
author = project_copyright = "The nbkit developers"
release = version = nbkit.__version__
html_title = "nbkit"
html_theme = "furo"
extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns = ["build"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}

# The anchors are those that GitHub makes, so that a link leads to the same place in both.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence"]
smartquotes = False  # they would make one dash of the two in --name
# Cells hold magics, which Python's highlighter does not know; it then shows the cell without colours.
suppress_warnings = ["misc.highlighting_failure"]

# The lessons keep the outputs that they are stored with. Live widgets would load scripts from the network.
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}

SHOWN_AS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing/rules.md",
    "CHANGELOG.md": "contributing/changes.md",
    "bench/results.md": "evidence/all-figures.md",
    "verify/results.md": "evidence/all-models.md",
    "verify/optimizers.md": "evidence/all-optimizers.md",
    **{f"notebooks/{path.name}": f"lessons/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))},
}
"""A file outside of docs/ -> the page that shows it. Notebooks are copied there; the other pages include their file."""

_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def _copy_notebooks() -> None:
    for page in (DOCS / "lessons").glob("*.ipynb"):
        page.unlink()
    for file, page in SHOWN_AS.items():
        if file.startswith("notebooks/"):
            rendered = ROOT / "notebooks" / "rendered" / Path(file).name
            (DOCS / page).write_bytes((rendered if rendered.exists() else ROOT / file).read_bytes())


def _lead_to_pages(app: Any, name: str, source: list[str]) -> None:
    """Change links to files outside of docs/ into links to the pages that show them."""
    notebook = f"notebooks/{Path(name).name}.ipynb"
    lies_in = "notebooks" if notebook in SHOWN_AS else os.path.dirname(f"docs/{name}")

    def shown(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(lies_in, link[1]))
        page = SHOWN_AS.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
        return f"]({os.path.relpath(page, os.path.dirname(name) or '.')}{link[2] or ''})" if page else link[0]

    source[0] = _LINK.sub(shown, source[0])
    if name.startswith("reference/"):
        source[0] = generated.filled(source[0])


def _needs_no_network(app: Any, error: Exception | None) -> None:
    """Raise if a page loads a script, a style or a picture from elsewhere."""
    loaded = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"'](?:https?:)?//[^\"']*")
    for page in () if error else Path(app.outdir).rglob("*.html"):
        if found := loaded.search(page.read_text(encoding="utf-8")):
            raise ExtensionError(f"{page.relative_to(app.outdir)} needs the network: {found[0]}")


def setup(app: Any) -> None:
    """Copy the notebooks, follow links and look at the result, at each build."""
    _copy_notebooks()
    app.connect("source-read", _lead_to_pages)
    app.connect("build-finished", _needs_no_network)
