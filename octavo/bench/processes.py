"""How worker processes are started: forked from a server that has imported everything, or each from the beginning."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

IMPORT_S = 180.0
"""Imports may take this long."""


class Files(NamedTuple):
    """Files of one worker: its request, where it answers, its stderr, whose turn it is."""

    request: IO[bytes]
    answers: int
    log: IO[bytes]
    turn: IO[bytes]


class Process(Protocol):
    """A started worker."""

    def wait(self, seconds: float) -> int:
        """The exit code, negative for a signal. Raises TimeoutError."""

    def end(self) -> None:
        """End it and what it started."""


Start = Callable[[Files], Process]


class ServerFailure(Exception):
    """The server cannot be used. `blame` is the implementation whose import broke it, or ""."""

    def __init__(self, message: str, blame: str = "") -> None:
        super().__init__(message)
        self.blame = blame


@contextlib.contextmanager
def processes(
    root: Path, impls: Sequence[str], peers: str | None, adapters: Mapping[str, str], fork: bool = True
) -> Iterator[Start]:
    """A way to start workers of the package in `root`: forks where the system and that package can, else new processes.

    An implementation whose import initialises CUDA or breaks the server is left to the workers themselves.
    """
    server = _open_server(root, impls, peers, adapters) if fork else None
    try:
        yield _Spawner(root).start if server is None else _Fallback(server, _Spawner(root)).start
    finally:
        if server is not None:
            server.close()


def _open_server(
    root: Path, impls: Sequence[str], peers: str | None, adapters: Mapping[str, str]
) -> "ForkServer | None":
    if not (hasattr(os, "pidfd_open") and hasattr(os, "fork") and (root / "octavo/bench/server.py").is_file()):
        return None
    wanted = list(impls)
    while True:
        try:
            return ForkServer(root, {"impls": wanted, "peers": peers, "adapters": dict(adapters)})
        except ServerFailure as failure:
            if failure.blame not in wanted:
                return None
            # Those that share the first word share a library.
            wanted = [name for name in wanted if name.split("-")[0] != failure.blame.split("-")[0]]


def environment(root: Path) -> dict[str, str]:
    """Of a worker or the server."""
    return {
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting devices must not initialise CUDA
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",  # FA4 compiles once per machine, not once per process
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(Path(tempfile.gettempdir()) / "octavo-bench-fa4"),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }


class _Spawner:
    """Each worker a new interpreter."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def start(self, files: Files) -> Process:
        command = [sys.executable, "-m", "octavo.bench.worker"]
        return _Child(
            subprocess.Popen(
                command,
                cwd=self._root,  # -m puts it first on sys.path
                env=environment(self._root),
                stdin=files.request,
                stdout=files.answers,
                stderr=files.log,
                pass_fds=[files.turn.fileno()],
                start_new_session=True,
            )
        )


class _Child:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def wait(self, seconds: float) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None

    def end(self) -> None:
        if self._process.poll() is None:
            _kill(self._process.pid)
        self._process.wait()


def _kill(pid: int) -> None:
    """The session that `pid` leads; before it leads one, itself."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


class ForkServer:
    """Client of `server.py`. Raises ServerFailure when it does not get as far as serving."""

    def __init__(self, root: Path, asked: Mapping[str, Any]) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "octavo.bench.server", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                cwd=root,
                env=environment(root),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._unread = b""
        try:
            self._socket.sendall(json.dumps(asked).encode() + b"\n")
            self._await_imports()
        except BaseException:
            self.close()
            raise

    def _await_imports(self) -> None:
        blame, deadline = "", time.monotonic() + IMPORT_S
        while True:
            try:
                answer = self.read(deadline - time.monotonic())
            except (OSError, ServerFailure) as failure:
                raise ServerFailure(str(failure), blame) from failure
            if "spoilt" in answer:
                raise ServerFailure("importing it initialises CUDA", answer["spoilt"])
            if "ready" in answer:
                return
            blame = answer["importing"]

    def read(self, seconds: float) -> dict[str, Any]:
        """The server's next line. Raises TimeoutError, or ServerFailure when the server is gone."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._unread:
            self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
            part = self._socket.recv(4096)
            if not part:
                raise ServerFailure("the server ended")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def start(self, files: Files) -> Process:
        descriptors = [files.request.fileno(), files.answers, files.log.fileno(), files.turn.fileno()]
        try:
            socket.send_fds(self._socket, [b"w"], descriptors)
            return _Fork(self, self.read(IMPORT_S)["pid"])
        except OSError as error:
            raise ServerFailure(str(error)) from error

    def close(self) -> None:
        self._socket.close()
        if self._process.poll() is None:
            _kill(self._process.pid)
        self._process.wait()


class _Fork:
    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self._pid = server, pid
        self._code: int | None = None

    def wait(self, seconds: float) -> int:
        if self._code is None:
            self._code = int(self._server.read(seconds)["exit"])
        return self._code

    def end(self) -> None:
        if self._code is None:
            _kill(self._pid)
            with contextlib.suppress(OSError, ServerFailure):
                self.wait(IMPORT_S)


class _Fallback:
    """Forks for as long as the server lives, then new interpreters."""

    def __init__(self, server: ForkServer, spawner: _Spawner) -> None:
        self._server: ForkServer | None = server
        self._spawner = spawner

    def start(self, files: Files) -> Process:
        if self._server is not None:
            try:
                return self._server.start(files)
            except ServerFailure:
                self._server = None
                files.request.seek(0)
        return self._spawner.start(files)
