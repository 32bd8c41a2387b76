"""The documentation is held to the code: examples run, quotes are exact, generated pages are fresh."""

from __future__ import annotations

import doctest
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("examples/*/README.md")])


def blocks(page: Path) -> list[tuple[str, str | None, str]]:
    """Return (language, file it quotes, text) of every fenced block of a page."""
    return [(m[1], m[2], m[3]) for m in FENCE.finditer(page.read_text("utf-8"))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


EXAMPLES = [page for page in PAGES if any(">>> " in text for _, _, text in blocks(page))]
QUOTES = [(page, file, text) for page in PAGES for _, file, text in blocks(page) if file]


@pytest.mark.parametrize("page", EXAMPLES, ids=named)
def test_examples_give_what_the_page_says(page):
    text = "\n".join(text for _, _, text in blocks(page) if ">>> " in text)
    test = doctest.DocTestParser().get_doctest(text, {}, named(page), str(page), 0)
    assert len(test.examples) > 0
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    report: list[str] = []
    runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


def test_the_pages_with_examples_are_found():
    assert {"docs/concepts.md", "docs/layouts.md"} <= {named(page) for page in EXAMPLES}


@pytest.mark.parametrize(("page", "file", "text"), QUOTES, ids=lambda v: named(v) if isinstance(v, Path) else None)
def test_quoted_files_are_quoted_as_they_are(page, file, text):
    source = (ROOT / file).read_text("utf-8")
    assert f"\n{text}" in f"\n{source}", f"{named(page)} quotes {file}, but these lines are not in it"


def test_the_vendor_page_quotes_every_file_of_the_example():
    quoted = {file for page, file, _ in QUOTES if page == DOCS / "write-a-backend.md"}
    folder = ROOT / "examples" / "kvcore-acme"
    wanted = {str(p.relative_to(ROOT)) for p in [folder / "pyproject.toml", *folder.rglob("src/**/*.py")]}
    assert wanted <= quoted


@pytest.mark.parametrize("name", ["configuration.md", "environment.md", "ops.md", "metrics.md"])
def test_generated_pages_are_up_to_date(name):
    pages = runpy.run_path(str(DOCS / "generate.py"))["PAGES"]
    assert name in pages
    assert (DOCS / name).read_text("utf-8") == pages[name](), "run: make docs-pages"
