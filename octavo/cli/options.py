"""What the commands share: consoles, and options turned into values or into a one-line error with exit code 2."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console

from octavo.errors import fail

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
PLAIN_WIDTH = 140
"""Columns of a table that goes to a file or a pipe."""


def console(*, stderr: bool = False) -> Console:
    """A console on what stdout or stderr is now."""
    plain = Console(stderr=stderr)
    return plain if plain.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)


def usage_error(message: str) -> NoReturn:
    """Print one line to stderr and leave with exit code 2."""
    typer.echo(f"octavo: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Errors about what the user passed become one line and exit code 2."""
    try:
        yield
    except OSError as error:
        where = error.filename or "file"
        usage_error(f"{where}: expected a file or folder to use, got {error.strerror or error}; fix: check the path")
    except UnicodeDecodeError as error:
        usage_error(f"file: expected UTF-8 text, got bytes that are not ({error.reason}); fix: pass JSON lines")
    except (ValueError, TypeError) as error:
        usage_error(str(error))


def option(panel: str, help: str, *names: str, **more: Any) -> Any:
    """A command-line option in a panel of --help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def parse_dtype(name: str) -> torch.dtype:
    """The torch dtype of an option value."""
    if name not in DTYPES:
        fail("--dtype", "one of bf16, fp16, fp32", repr(name), "choose one of these")
    return DTYPES[name]


def given_fields(
    qo_heads: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    value_dim: int | None,
    page_size: int | None,
    causal: bool | None,
    dtype: str | None,
) -> dict[str, Any]:
    """Fields of AttentionSpec that the user gave."""
    given = {
        "num_qo_heads": qo_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "page_size": page_size,
        "causal": causal,
        "dtype": None if dtype is None else parse_dtype(dtype),
    }
    return {name: value for name, value in given.items() if value is not None}


def parse_device(name: str) -> torch.device:
    """The torch device of "auto", "cpu", "cuda" or "cuda:N"; auto takes the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        fail("--device", "auto, cpu, cuda or cuda:N", repr(name), "choose one of these")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = int(index or 0)
    if wanted >= count:
        raise ValueError(
            f"--device: expected a CUDA device below {count}, got {name!r}; fix: --device cpu, or see `octavo info`"
        )
    return torch.device("cuda", wanted)
