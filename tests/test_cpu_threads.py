"""The CPU backend's threads: every job once, errors reach the caller, nobody else's thread count changes."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import octavo
from octavo import AttentionSpec
from octavo.backends import cpu_attention
from octavo.backends.cpu_threads import WORKERS, run_jobs
from octavo.bench.workloads import Workload, make_inputs

SPEC = AttentionSpec(8, 2, 64, page_size=3)
BATCH = Workload("threads", (300, 1, 40, 1, 700), (900, 500, 40, 2000, 700))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("at_once", range(1, WORKERS + 1))
def test_every_job_runs_once_and_what_it_returns_too(at_once, two_threads):
    done, lock = [], threading.Lock()

    def job(name, more=()):
        def run():
            with lock:
                done.append(name)
            return [job(f"{name}.{i}") for i in more]

        return run

    run_jobs([job("a", range(3)), job("b"), job("c", range(2))], at_once)
    assert sorted(done) == ["a", "a.0", "a.1", "a.2", "b", "c", "c.0", "c.1"]


def test_an_error_reaches_the_caller_and_ends_the_rest(two_threads):
    done = []

    def fail():
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        run_jobs([fail] + [lambda: done.append(1) or ()] * 1000, 2)
    assert len(done) < 1000
    run_jobs([lambda: done.append(2) or ()], 2)
    assert done[-1] == 2


def test_thread_counts_of_others_stay(two_threads):
    x = make_inputs(BATCH, SPEC, "cpu")
    octavo.attend(x.q, x.kv, x.batch)
    assert torch.get_num_threads() == 2
    with ThreadPoolExecutor(1) as other:
        assert other.submit(torch.get_num_threads).result() == 2


def test_bits_do_not_depend_on_who_computes(two_threads, monkeypatch):
    x = make_inputs(BATCH, SPEC, "cpu")
    expected = octavo.attend(x.q, x.kv, x.batch)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(octavo.attend(x.q, x.kv, x.batch), expected, strict=True))
    monkeypatch.setattr(cpu_attention, "SMALL_WORK", 1 << 62)  # one job at a time
    assert all(torch.equal(a, b) for a, b in zip(octavo.attend(x.q, x.kv, x.batch), expected, strict=True))


def test_callers_in_several_threads(two_threads):
    x = make_inputs(BATCH, SPEC, "cpu")
    expected = octavo.attend(x.q, x.kv, x.batch)
    with ThreadPoolExecutor(3) as callers:
        for result in callers.map(lambda _: octavo.attend(x.q, x.kv, x.batch), range(6)):
            assert torch.allclose(result[0].float(), expected[0].float(), atol=2e-2)
            assert torch.allclose(result[1], expected[1], atol=1e-4)


def test_inference_mode(two_threads):
    x = make_inputs(BATCH, SPEC, "cpu")
    expected = octavo.attend(x.q, x.kv, x.batch)
    with torch.inference_mode():
        result = octavo.attend(x.q.clone(), x.kv, x.batch)
    assert result[0].is_inference() and torch.equal(result[0], expected[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_has_threads_of_its_own(two_threads):
    def count():
        done = []
        run_jobs([lambda: done.append(1) or ()] * 8, 2)
        return len(done)

    assert count() == 8
    child = os.fork()
    if child == 0:
        os._exit(0 if count() == 8 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
