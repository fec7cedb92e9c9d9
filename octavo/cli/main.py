"""Entry point. Says what to install where the command line's own dependencies are missing."""

import sys

_NEEDED = ("typer", "rich", "click")


def main() -> None:
    """Run the command line."""
    try:
        from octavo.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        sys.stderr.write(
            f"octavo: expected typer and rich, got no module {error.name}; fix: pip install 'octavo[cli]'\n"
        )
        raise SystemExit(2) from error
    app(prog_name="octavo")
