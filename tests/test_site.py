"""The docs site builds in strict mode without a network, and nothing in it leads nowhere or asks for a network."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import octavo

ROOT = Path(__file__).parent.parent
PARTS = ("mkdocs", "material", "mkdocstrings", "griffe")
MISSING = [name for name in PARTS if importlib.util.find_spec(name) is None]
needs_mkdocs = pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: pip install -e '.[docs]'")

# mkdocs in a process that may not look up or connect to any host.
OFFLINE_BUILD = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise RuntimeError(f"the build asks for a network: {event} {arguments}")

sys.addaudithook(refuse)
from mkdocs.__main__ import cli
cli(["build", "--strict", "--site-dir", sys.argv[1]])
"""

LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
    "use": "href",
}
LOADED_STYLES = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


class References(HTMLParser):
    """What a page links to, what it loads, and the anchors in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.text: list[str] = []
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self._in_style = tag == "style"
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and not {"next", "prev", "canonical"} & set(given.get("rel", "").split()):
            self.loads.append(given["href"])
        if given.get(LOADED.get(tag, "")):
            self.loads.append(given[LOADED[tag]])
        self.loads += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        self.loads += loaded_by_style(given.get("style", ""))
        if "mermaid" in given.get("class", "").split():
            self.loads.append("https://: the theme's script fetches a library for diagrams")

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._in_style:
            self.loads += loaded_by_style(data)


def loaded_by_style(css: str) -> list[str]:
    return [a or b for a, b in LOADED_STYLES.findall(css)]


def problems(site: Path) -> list[str]:
    """Links and loads of every page and style sheet under site that do not end in a file, or anchor, of the site."""
    pages = {path: References(path.read_text()) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        base = site if name.name == "404.html" else path.parent
        for url in page.loads:
            found += [f"{name} loads {url}"] if not is_file(base, url) else []
        for url in page.links:
            parts = urlsplit(url)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = path if not parts.path else at(base, parts.path)
            if not is_file(base, url) and parts.path:
                found.append(f"{name} links to {url}")
            elif parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name} links to {url}: no such anchor")
    for path in site.rglob("*.css"):
        urls = loaded_by_style(path.read_text())
        found += [f"{path.relative_to(site)} loads {url}" for url in urls if not is_file(path.parent, url)]
    return found


def at(folder: Path, path: str) -> Path:
    return Path(os.path.normpath(folder / unquote(path).lstrip("/")))


def is_file(folder: Path, url: str) -> bool:
    parts = urlsplit(url)
    inside = parts.scheme == "data" or url.startswith("#")
    return inside or (not parts.scheme and not parts.netloc and at(folder, parts.path).is_file())


def built(site: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-c", OFFLINE_BUILD, str(site)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = built(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@needs_mkdocs
def test_nothing_leads_nowhere_or_needs_a_network(site):
    assert not problems(site)


@needs_mkdocs
def test_every_public_name_is_in_the_reference(site):
    anchors = References((site / "reference.html").read_text()).anchors
    for name in octavo.__all__:  # some functions have their module's name
        path = f"octavo.{name}.{name}" if f"octavo.{name}" in sys.modules else f"octavo.{name}"
        assert path in anchors


@needs_mkdocs
def test_docstrings_keep_their_form(site):
    """Doctests are code, not quotations; parameters are lists, not running text."""
    page = (site / "reference.html").read_text()
    assert "<blockquote>" not in page
    assert "&gt;&gt;&gt;" in page
    assert "Args:" not in "".join(References(page).text)


@needs_mkdocs
def test_the_notebook_is_there_with_its_output(site):
    text = "".join(References((site / "examples/octavo.html").read_text()).text)
    cells = json.loads((ROOT / "examples/octavo.ipynb").read_text())["cells"]
    lines = ["".join(cell["source"]).splitlines()[-1] for cell in cells if cell["cell_type"] == "code"]
    lines += [line.strip() for c in cells for out in c.get("outputs", []) for line in out.get("text", [])]
    assert len(lines) > 10
    assert not [line for line in lines if line not in text]


@needs_mkdocs
def test_lists_and_tables_are_rendered(site):
    """Markdown that GitHub takes for a list or a table, and Python-Markdown for running text, is found."""
    for path in site.rglob("*.html"):
        code_left_out = re.sub(r"<(pre|script|style)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        for paragraph in re.findall(r"<p>(.*?)</p>", code_left_out, re.DOTALL):
            assert not re.search(r"^\s*([-*|]|\d+\.) |\]\(|```", paragraph, re.MULTILINE), f"{path.name}: {paragraph}"


PAGE = '<h1 id="top"></h1><a href="{link}"></a><img src="{image}"><style>{style}</style>'
GOOD = {"link": "other.html#top", "image": "picture.svg", "style": "a { color: red }"}
BAD = {
    "a page that is not there": {"link": "gone.html"},
    "an anchor that is not there": {"link": "#gone"},
    "an anchor of another page": {"link": "other.html#gone"},
    "a picture that is not there": {"image": "gone.svg"},
    "a picture from a network": {"image": "https://example.org/picture.svg"},
    "a host without a scheme": {"image": "//example.org/picture.svg"},
    "a font from a network": {"style": "@font-face { src: url('https://example.org/font.woff2') }"},
    "a diagram drawn by a library": {"link": '#top" class="mermaid'},
    "a style sheet from a network": {"style": '@import "https://example.org/a.css"'},
}


@pytest.mark.parametrize("change", [{}, *BAD.values()], ids=["nothing", *BAD])
def test_the_check_finds(change, tmp_path):
    (tmp_path / "index.html").write_text(PAGE.format(**(GOOD | change)))
    (tmp_path / "other.html").write_text('<p id="top">')
    (tmp_path / "picture.svg").write_text("<svg/>")
    assert len(problems(tmp_path)) == len(change)
