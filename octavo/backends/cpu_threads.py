"""The jobs of one call on the CPU, taken one by one by two threads that share out the caller's intra-op threads.

A sequence is a dozen short operations. Threads inside each of them wait for each other and for Python at every one;
threads that each have a sequence, or a tile of one, meet at the end.
"""

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait

import torch

WORKERS = 2
"""As many sequences are held in memory at once."""

Job = Callable[[], "Iterable[Job]"]
"""What it returns are jobs to be taken next, before those that wait already."""

_INITIALISING = threading.Lock()


def run_jobs(jobs: Iterable[Job], at_once: int) -> None:
    """Run the jobs and those that they return; if one raises, no further ones begin, and it is raised here.

    At most `at_once` (up to WORKERS) run at a time. On how many threads an operation runs does not depend on it: so
    neither do the results' bits.
    """
    queue, threads = _Queue(jobs), torch.get_num_threads()
    if threads == 1 or not _counts_are_per_thread():
        queue.work()
        return
    pool, inference = _pool(os.getpid(), max(1, threads // WORKERS)), torch.is_inference_mode_enabled()
    try:
        futures = [pool.submit(_work_in, inference, queue) for _ in range(at_once)]
    except RuntimeError:
        # The interpreter is ending, and starts no threads any more.
        queue.work()
        return
    try:
        for future in futures:
            future.result()
    finally:
        queue.stop()
        wait(futures)


class _Queue:
    def __init__(self, jobs: Iterable[Job]) -> None:
        self._waiting, self._running = deque(jobs), 0
        self._changed = threading.Condition()

    def work(self) -> None:
        """Take jobs until none waits and none runs that could return more."""
        while job := self._take():
            more: Iterable[Job] = ()
            try:
                more = job()
            except BaseException:
                self.stop()
                raise
            finally:
                self._done(more)

    def stop(self) -> None:
        with self._changed:
            self._waiting.clear()

    def _take(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._running)
            if not self._waiting:
                return None
            self._running += 1
            return self._waiting.popleft()

    def _done(self, more: Iterable[Job]) -> None:
        with self._changed:
            self._running -= 1
            self._waiting.extendleft(reversed(list(more)))
            self._changed.notify_all()


def _work_in(inference: bool, queue: _Queue) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        queue.work()


@functools.cache
def _counts_are_per_thread() -> bool:
    """OpenMP has a number of threads for each thread that calls PyTorch; other backends one for all."""
    return "parallel backend: OpenMP" in torch.__config__.parallel_info()


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """WORKERS threads with `threads` intra-op threads each. A fork has none of its parent's threads: it gets a pool."""
    return ThreadPoolExecutor(WORKERS, "octavo", initializer=_limit_threads, initargs=(threads,))


def _limit_threads(threads: int) -> None:
    """Set this thread's number of intra-op threads and no other's.

    PyTorch also gives the number set last to threads that have not called it yet. So it is set once more, to what it
    was, by a thread that ends at once.
    """
    with _INITIALISING:
        inherited = torch.get_num_threads()
        torch.set_num_threads(threads)
        other = threading.Thread(target=torch.set_num_threads, args=(inherited,))
        other.start()
        other.join()
