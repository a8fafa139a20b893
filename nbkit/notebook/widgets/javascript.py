"""Join nbkit's JavaScript files into one module, for a widget or a saved page. There is no build step.

The charts of a step are those of TensorBoard's tab Communication. uPlot draws the curves of a run. It is bundled as it
was published (static/uplot), and every page contains its license. Each of nbkit's modules becomes a function, so that
names never collide. `colours` reads the colors of paint.js for Python.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from nbkit.errors import NbkitError

_OURS = Path(__file__).parent / "static"
_BOARDS = Path(__file__).parents[1] / "board" / "plugin" / "static"
_PAINT = _BOARDS / "paint.js"
_MODULES = (_PAINT, _BOARDS / "charts.js", _BOARDS / "grids.js", _BOARDS / "health.js")
_OWN = ("curves", "rows", "dashboard")
_UPLOT = _OURS / "uplot"

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.M)
_EXPORT = re.compile(r"^export ((?:async )?(?:const|function|class) (\w+))", re.M)
# In TensorBoard, `dark` asks TensorBoard's own page. Elsewhere this replacement asks the surrounding page.
_DARK = re.compile(r"^export const dark = .*$", re.M)
_ASK_PAGE = """export const dark = () => {
  const { jpThemeLight } = document.body.dataset;
  if (jpThemeLight) return jpThemeLight === "false";
  if (document.body.className.includes("vscode")) return document.body.classList.contains("vscode-dark");
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
};"""


@cache
def joined() -> str:
    """Return the dashboard's module. Its default export is for anywidget; `show` draws a saved page."""
    paths = [*_MODULES, *(_OURS / f"{name}.js" for name in _OWN)]
    parts = map(_as_function, paths)
    # The first line of the published file is a comment with a web address, which a page must not contain.
    version, _, uplot = (_UPLOT / "uPlot.iife.min.js").read_text().partition("\n")
    named = f"uPlot {version[version.index('(') : version.index(')') + 1]}"
    uplot = f"/*!\n{named}\n{(_UPLOT / 'LICENSE').read_text().strip()}\n*/\n{uplot}"
    return "\n".join([uplot, *parts, "export const { show } = dashboard;", "export default dashboard.widget;", ""])


@cache
def panel() -> str:
    """Return the module of the strategy panel. Its default export is for anywidget."""
    return "\n".join([_as_function(_PAINT), _as_function(_OURS / "panel.js"), "export default panel.widget;", ""])


@cache
def colours(name: str) -> dict[str, str]:
    """Return {meaning: color as "#rrggbb"} of a set in paint.js, such as "FAMILIES"."""
    (found,) = re.findall(rf"^export const {name} = \{{(.*?)\}}", _PAINT.read_text(), re.M | re.S)
    return dict(re.findall(r'(\w+): "(#[0-9a-f]{6})"', found))


@cache
def style() -> str:
    """Return the CSS of the dashboard."""
    return (_UPLOT / "uPlot.min.css").read_text() + (_OURS / "dashboard.css").read_text()


def _as_function(path: Path) -> str:
    name, source = path.stem, path.read_text()
    if name == "paint":
        source, count = _DARK.subn(lambda _: _ASK_PAGE, source)
        if count != 1:
            raise NbkitError(
                "The charts do not ask once whether the page is dark.", numbers=f"{count} times in paint.js"
            )
    source = _IMPORT.sub(lambda found: f"const {{{found[1].replace(' as ', ': ')}}} = {found[2]};", source)
    names = [found[2] for found in _EXPORT.finditer(source)]
    source = _EXPORT.sub(lambda found: found[1], source)
    return f"const {name} = (() => {{\n{source}\nreturn {{ {', '.join(names)} }};\n}})();"
