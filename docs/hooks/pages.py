"""Pages from files outside docs/: examples, the notebook, the changelog. Links follow the files to their pages."""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "benchmarks/README.md": "recorded.md",
    "examples/README.md": "examples/index.md",
    "examples/octavo.ipynb": "examples/octavo.md",
    "examples/generate.py": "examples/generate.md",
    "examples/serve_trace.py": "examples/serve_trace.md",
    "examples/paging.py": "examples/paging.md",
    "examples/smollm2.py": "examples/smollm2.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
TARGET = re.compile(r"(?<=\]\()[^)\s#]+")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each file of PAGES."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=markdown_of(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links between the repository's files at the files' pages."""
    here = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))

    def follow(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[0]))
        found = PAGES.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        return match[0] if found is None else posixpath.relpath(found, posixpath.dirname(here) or ".")

    return TARGET.sub(follow, markdown)


def markdown_of(path: Path) -> str:
    """The text of a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return "\n\n".join(block for cell in json.loads(text)["cells"] for block in blocks_of(cell))
    return f"# {path.name}\n\n{fenced(text, 'python' if path.suffix == '.py' else 'text')}"


def blocks_of(cell: dict) -> list[str]:
    """A notebook cell as Markdown, with the output that was printed."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    printed = "".join(
        line for out in cell["outputs"] for line in out.get("text", out.get("data", {}).get("text/plain", []))
    )
    return [fenced(source, "python"), *([fenced(printed, "text")] if printed else [])]


def fenced(text: str, language: str) -> str:
    """A code block, whatever fences the text itself holds."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
