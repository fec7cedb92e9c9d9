"""Every example in README.md, docs/ and the docstrings runs."""

import doctest
import importlib
import os
import pkgutil
import re
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

import octavo
from octavo.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Commands that take minutes, or that other tests run.
SLOW = re.compile(r"octavo (run|check|compile|bench|report)\b(?!.*--help)|pytest|pip|venv|git ")


def blocks(*languages):
    for page in PAGES:
        for i, (language, text) in enumerate(BLOCK.findall(page.read_text())):
            if language in languages:
                yield pytest.param(text, id=f"{page.stem}-{i}")


@pytest.mark.parametrize("code", list(blocks("python")))
def test_python_blocks_run(code, tmp_path, monkeypatch):
    """Each as a main module of its own; not in a process of its own, as most of its time would go into imports."""
    script = tmp_path / "example.py"
    script.write_text(code)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")


def commands(text):
    lines = (line.removeprefix("$ ").split(" #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line.startswith(("octavo ", "python -m octavo"))]


@pytest.mark.parametrize("text", list(blocks("sh", "bash", "console")))
def test_commands_are_commands(text):
    """Each octavo command line parses: --help is appended, so that nothing slow runs; the quick ones do run."""
    for line in commands(text):
        words = line.removeprefix("python -m ").split()[1:]
        subcommand = [w for w in words[:1] if not w.startswith("-")]
        done = CliRunner().invoke(app, [*subcommand, "--help"] if SLOW.search(line) else words)
        assert done.exit_code == 0, f"{line}\n{done.output}"
        if SLOW.search(line):
            unknown = [w for w in words if w.startswith("--") and w.split("=")[0] not in done.stdout]
            assert not unknown, f"{line}: {unknown} not in --help"


PUBLIC = [
    m.name for m in pkgutil.iter_modules(octavo.__path__, "octavo.") if not m.name.rpartition(".")[2].startswith("_")
]


@pytest.mark.parametrize("name", PUBLIC)
def test_doctests(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_there_are_examples():
    assert os.path.exists(ROOT / "README.md")
    assert any(BLOCK.findall(page.read_text()) for page in PAGES)
