"""Docstrings as their parser wants them: a section "Examples", and one entry for each parameter."""

import re
import textwrap
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> ", re.MULTILINE)
SHARED = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +.*)*)$", re.MULTILINE)


class Conventions(griffe.Extension):
    """Applies `adapted` to the docstring of every object."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that is loaded."""
        if obj.docstring:
            obj.docstring.value = adapted(obj.docstring.value)


def adapted(docstring: str) -> str:
    """Doctests at the end get a title; parameters that share an entry ("k, v: ...") get one each."""
    docstring = SHARED.sub(_one_each, docstring)
    found = DOCTEST.search(docstring)
    if not found:
        return docstring
    text, tests = docstring[: found.start()], docstring[found.start() :]
    return f"{text.rstrip()}\n\nExamples:\n{textwrap.indent(tests, '    ')}"


def _one_each(match: re.Match[str]) -> str:
    return "\n".join(f"{match['indent']}{name}: {match['text']}" for name in match["names"].split(", "))
