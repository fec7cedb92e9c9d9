"""A process that has imported everything and touched no device: it forks one worker per request.

`python -m octavo.bench.server FD` speaks JSON lines over the socket FD. Its first line asks for what to import:
{"impls": [...], "peers": ..., "adapters": {...}}. Then each byte that comes with four file descriptors (request,
answers, log, turn) is one worker: the answers are {"pid": N} at once and {"exit": code} when it has ended.
"""

import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from octavo import kernels
from octavo.bench import worker
from octavo.bench.implementations import find

DESCRIPTORS = 4
_DRIVER_FILE = "/dev/nvidia-uvm"
"""The driver opens it when a process initialises CUDA, and not for queries through NVML."""


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    asked = json.loads(control.makefile("rb").readline())
    _say(control, **_import_all(control, asked))
    gc.collect()
    gc.freeze()  # so that forks do not copy what the collector touches
    while _serve_one(control):
        pass
    return 0


def _import_all(control: socket.socket, asked: dict[str, Any]) -> dict[str, Any]:
    """{"ready": true}, or {"spoilt": name} where importing an implementation (or "", Octavo) initialised CUDA."""
    _import_kernels()
    if device_is_open():
        return {"spoilt": ""}
    for name in asked["impls"]:
        _say(control, importing=name)
        find([name], asked["peers"], asked["adapters"])
        if device_is_open():
            return {"spoilt": name}
    return {"ready": True}


def _import_kernels() -> None:
    """What Octavo imports at its first launch."""
    for module in pkgutil.iter_modules(kernels.__path__, "octavo.kernels."):
        with suppress(Exception):  # no Triton here, or one without Gluon: the worker that needs it says so
            importlib.import_module(module.name)


def device_is_open() -> bool:
    """Whether this process has initialised CUDA; a fork of it could not use the device."""
    folder = Path("/proc/self/fd")
    targets = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):  # the directory's own descriptor is gone by now
            targets.append(os.readlink(entry))
    return _DRIVER_FILE in targets


def _say(control: socket.socket, **answer: object) -> None:
    control.sendall(json.dumps(answer).encode() + b"\n")


def _serve_one(control: socket.socket) -> bool:
    """Fork a worker and wait for its end; False when the other side is gone."""
    message, descriptors, _, _ = socket.recv_fds(control, 1, DESCRIPTORS)
    if not message:
        return False
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _work(control, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    _say(control, pid=pid)
    if not _ended(pid, control):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with suppress(BrokenPipeError):
        _say(control, exit=os.waitstatus_to_exitcode(status))
        return True
    return False


def _ended(pid: int, control: socket.socket) -> bool:
    """True when the worker has ended; False when the other side hung up first."""
    watched = os.pidfd_open(pid)
    try:
        return watched in select.select([watched, control.fileno()], [], [])[0]
    finally:
        os.close(watched)


def _work(control: socket.socket, descriptors: list[int]) -> None:
    """The forked worker; does not return."""
    code = 1
    try:
        os.setsid()
        control.close()
        request, answers, log, turn = descriptors
        os.dup2(answers, 1)
        os.dup2(log, 2)
        with os.fdopen(request) as file:
            code = worker.respond(json.load(file), turn)
    except BaseException:  # nothing may return into the server's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
