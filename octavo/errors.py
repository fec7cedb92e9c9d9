"""The one form of an input error: what was expected, what came, how to fix it."""

from typing import NoReturn


def input_error(name: object, expected: str, got: object, fix: str, error: type[Exception] = ValueError) -> Exception:
    """An `error` (ValueError or TypeError) about the argument, option or file `name`, for `raise … from`."""
    return error(f"{name}: expected {expected}, got {got}; fix: {fix}")


def fail(name: object, expected: str, got: object, fix: str, error: type[Exception] = ValueError) -> NoReturn:
    """Raise it."""
    raise input_error(name, expected, got, fix, error)
