"""Test the pages: their cells run, their links lead to files, the errors they explain exist."""

from __future__ import annotations

import ast
import os
import re
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shots
from clusters import end_clusters
from forked_parents import forked_parents_of_programs
from jupyter_client.manager import start_new_kernel

from magics.arguments import PARSERS, parse
from nbkit.commands import prepare_parser, subcommands
from nbkit.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "build" not in page.relative_to(ROOT).parts)
LAPTOP = ROOT / "docs" / "start" / "laptop.md"
CONCEPTS = sorted((ROOT / "docs" / "concepts").glob("*.md"))
CHINESE = [*ROOT.glob("*.zh-CN.md"), *sorted((ROOT / "docs").rglob("*.zh-CN.md"))]
TO_READ = [page for page in PAGES if page not in CHINESE and page.parent.name not in ("reference", "evidence")]
"""Pages that people read from top to bottom. In those of Reference and Evidence they look something up."""
SECONDS_PER_CELL = 120


def cells(page: Path) -> list[str]:
    """Return the fenced blocks marked python; each is one cell. Blocks that must not run have another mark."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page, without headings, tables, pictures and blocks of code. A list item is one too."""
    text = re.sub(r"^```.*?^```$", "\n", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(?:    |#|\||!\[|<).*$", "\n", text, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|\n(?=- |\d+\. )", re.sub(r"\]\([^)]*\)", "]", text))
    pieces = [piece for each in paragraphs for piece in re.split(r"(?<=[.?!])\*{0,2}\s+", each)]
    return [" ".join(piece.split()) for piece in pieces if len(piece.split()) > 1]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "NBKIT_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    manager, client = start_new_kernel(env=dict(os.environ), cwd=str(tmp_path))
    try:
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        # A cell that failed leaves its cluster behind.
        end_clusters(tmp_path / "NBKIT_HOME")


def run(client: Any, source: str) -> str:
    """Run one cell; "" if it went well, else all that it showed."""
    shown: list[str] = []

    def show(message: dict[str, Any]) -> None:
        content = message["content"]
        shown.append(content.get("text") or "\n".join(content.get("traceback", ())) or "")

    reply = client.execute_interactive(source, output_hook=show, timeout=SECONDS_PER_CELL)
    return "" if reply["content"]["status"] == "ok" else "".join(shown) or str(reply["content"])


@pytest.mark.timeout(600)
def test_every_cell_of_readme_and_of_the_pages_runs(kernel: Any) -> None:
    sources = [(README, source) for source in cells(README)]
    assert sources, "README has no ```python block"
    of_pages = [(page, source) for page in PAGES if page not in (LAPTOP, *CONCEPTS, *CHINESE) for source in cells(page)]

    with forked_parents_of_programs() as forked:
        # README starts and stops its own cluster; the pages assume a notebook that has one.
        before, started = [(ROOT / "docs", forked)], [(ROOT / "docs", "%cluster start -n 2")]
        for page, source in [*before, *sources, *started, *of_pages]:
            problem = run(kernel, source)
            assert not problem, f"a cell of {page.name} failed:\n{source}\n{problem}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_cell_of_concepts_runs_after_the_cells_of_the_laptop_page(kernel: Any) -> None:
    with forked_parents_of_programs() as forked:
        before = [(ROOT / "docs", forked)]
        sources = [(page, source) for page in (LAPTOP, *CONCEPTS) for source in cells(page)]
        assert len(sources) > len(CONCEPTS)
        for page, source in [*before, *sources]:
            problem = run(kernel, source)
            assert not problem, f"a cell of {page.name} failed:\n{source}\n{problem}"


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_a_chinese_page_has_the_same_cells_as_the_english_page(page: Path) -> None:
    chinese, english = (
        re.findall(r"^```(\w+)\n(.*?)^```$", text.read_text(), re.MULTILINE | re.DOTALL)
        for text in (page, page.with_name(page.name.replace(".zh-CN", "")))
    )

    assert chinese == english


def test_every_nbkit_command_and_magic_on_a_page_parses() -> None:
    """Check also the blocks that no test runs. Words after two spaces explain the line."""
    commands = prepare_parser(subcommands())
    seen, refused = set(), []
    for page in [README, *CHINESE, *PAGES]:
        blocks = re.findall(r"^```\w+\n(.*?)^```$|^    ([^\n]*)$", page.read_text(), re.MULTILINE | re.DOTALL)
        for line in "\n".join(fenced or indented for fenced, indented in blocks).splitlines():
            name, _, words = re.split(r"(?<=\S)  +", line)[0].partition(" ")
            if (name != "nbkit" and name not in PARSERS) or "..." in words:
                continue
            seen.add(name)
            try:
                if name == "nbkit":
                    commands.parse_args(shlex.split(words, comments=True))
                else:
                    parse(PARSERS[name](), words.partition(" -- ")[0])  # a launcher reads the words after --
            except (UsageError, SystemExit) as error:
                refused.append(f"{page.name}: {line}: {error}")

    assert {"nbkit", *PARSERS} <= seen
    assert refused == []


def test_run_returns_the_error_of_a_failing_cell(kernel: Any) -> None:
    assert run(kernel, "1 + 1") == ""
    assert "ZeroDivisionError" in run(kernel, "print('before')\n1 / 0")


def test_each_picture_of_the_gallery_has_a_cell_and_is_small() -> None:
    cells = shots.cells_of(shots.PAGE.read_text())
    files = {path.stem: path.stat().st_size for path in (ROOT / "docs" / "pictures").glob("*.png")}
    taken = {name for _, names in cells for name in names}

    assert len(taken) >= 20
    assert taken == files.keys()
    assert {name: size for name, size in files.items() if size > shots.LARGEST_BYTES} == {}


def test_every_link_leads_to_a_file() -> None:
    broken = []
    for page in [README, *CHINESE, ROOT / "CONTRIBUTING.md", *PAGES]:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.name}: {link}")

    assert broken == []


def test_every_page_that_the_source_names_exists() -> None:
    named = {
        (page, path.name)
        for folder in ("nbkit", "magics", "tests", "verify", "bench")
        for path in (ROOT / folder).rglob("*.py")
        for page in re.findall(r"docs/[\w/-]+\.(?:md|png|svg)", path.read_text())
    }

    assert len(named) > 10
    assert [where for where in sorted(named) if not (ROOT / where[0]).exists()] == []


def test_readme_is_short_and_its_first_cell_is_on_the_first_screen() -> None:
    text = README.read_text()
    lines = text.splitlines()

    assert len(lines) <= 120
    assert len(text.split()) <= 900
    assert lines.index("```python") <= 30


def test_pages_of_concepts_and_start_are_short() -> None:
    pages = set((ROOT / "docs" / "start").glob("*.md")) - set(CHINESE)
    start = sum(len(page.read_text().split()) for page in pages)

    assert {page.name: words for page in CONCEPTS if (words := len(page.read_text().split())) > 550} == {}
    assert start <= 1600


def test_the_pages_to_read_have_at_most_20_000_words() -> None:
    words = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in TO_READ}

    assert len(words) > 40
    assert sum(words.values()) <= 20_000, sorted(words.items(), key=lambda item: -item[1])[:8]


def test_sentences_are_short() -> None:
    lengths = {page: [len(sentence.split()) for sentence in sentences(page)] for page in [README, *TO_READ]}
    counts = [length for page in lengths.values() for length in page]

    assert len(counts) > 1000
    assert statistics.median(counts) <= 12
    assert {
        str(page.relative_to(ROOT)): most for page, each in lengths.items() if each and (most := max(each)) > 30
    } == {}


def test_every_page_begins_with_what_the_reader_can_do_after_it() -> None:
    first = {page: said[0] for page in TO_READ if (said := sentences(page)) and page.name != "changes.md"}
    opening = re.compile(r"After (?:this|a|one of these|these) (?:page|pages|lesson)\b|With nbkit you\b")

    assert len(first) > 40
    assert {str(page.relative_to(ROOT)): said for page, said in first.items() if not opening.match(said)} == {}


def test_every_file_that_the_pages_about_the_inside_name_exists() -> None:
    below = ("", "nbkit", "nbkit/notebook/cluster", "nbkit/rank", "nbkit/rank/train", "nbkit/rank/parallel")
    text = "".join((ROOT / "docs" / name).read_text() for name in ("contributing/inside.md", "reference/waits.md"))
    paths = re.findall(r"(?<![\w/])[a-z_0-9]+(?:/[a-z_0-9]+)*/(?:[a-z_0-9]+\.py)?", text)
    files = {path.name for folder in ("nbkit", "magics", "tests") for path in (ROOT / folder).rglob("*.py")}

    assert len(paths) > 40
    assert [path for path in paths if not any((ROOT / folder / path).exists() for folder in below)] == []
    assert set(re.findall(r"[a-z_0-9]+\.py", text)) - files == set()


def test_every_common_error_is_in_the_source() -> None:
    spoken = "\n".join(
        re.sub(r"\s+", " ", node.value)
        for path in (ROOT / "nbkit").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    titles = re.findall(r"^## (.*)$", (ROOT / "docs" / "reference" / "errors.md").read_text(), re.MULTILINE)
    unknown = [title for title in titles if any(part.strip(" .") not in spoken for part in title.split("…"))]

    assert len(titles) > 10
    assert unknown == []
