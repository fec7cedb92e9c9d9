"""The one form of an input error: what was expected, what came, how to fix it."""

from typing import NoReturn


def fail(name: str, expected: str, got: object, fix: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raise `error` (ValueError or TypeError) about the argument `name`."""
    raise error(f"{name}: expected {expected}, got {got}; fix: {fix}")
