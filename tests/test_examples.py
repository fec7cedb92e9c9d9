"""Every example runs, with small settings; the notebook's code cells too. The page allocator is tested by itself."""

import json
import random
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in ("generate", "paging", "serve_trace", "smollm2"):
        sys.modules.pop(name, None)


TRACE = ["--requests", "60", "--scale", "128", "--page-size", "2", "--step-tokens", "48", "--device", "cpu"]
TRACE += ["--dtype", "float32", "--heads", "6", "2", "--head-dim", "16", "--layers", "2"]


@pytest.mark.parametrize("pages", ["4096", "1000"], ids=["room for all", "pages are given up"])
def test_serve_trace(pages, capsys):
    """--check compares with float64 attention over keys that were never in pages: a wrong page would show."""
    import serve_trace

    report = serve_trace.main([*TRACE, "--pages", pages, "--max-requests", "8", "--check"])
    assert all(len(r.token_times) == r.output_length for r in report.requests)
    assert sum(r.shared for r in report.requests) > 0
    assert report.checked > 100
    assert "time to first token" in capsys.readouterr().out


def test_serve_trace_says_when_the_cache_is_too_small():
    import serve_trace

    with pytest.raises(SystemExit, match="--pages: expected at least"):
        serve_trace.main([*TRACE, "--pages", "4"])


def test_pages_are_shared_and_given_up():
    from paging import PageAllocator

    allocator = PageAllocator(num_pages=4, page_size=2)
    first = allocator.take(2)
    allocator.publish(first[0], None, [1, 2])
    allocator.publish(first[1], first[0], [3, 4])
    assert allocator.match([1, 2, 3, 4, 5]) == first
    assert allocator.match([9, 2, 3, 4]) == []
    allocator.release(first)
    assert allocator.available == 2
    allocator.release(first)
    assert allocator.available == 4
    assert allocator.match([1, 2, 3]) == first[:1]
    assert allocator.take(4) is None
    other = allocator.take(3)
    allocator.release([*first[:1], *other])
    assert allocator.match([1, 2, 3, 4]) == first[:1]  # the second page was given up


def test_a_page_is_not_found_behind_another_page_in_its_predecessors_place():
    from paging import PageAllocator

    allocator = PageAllocator(num_pages=2, page_size=1)
    pages = allocator.take(2)
    allocator.publish(pages[0], None, [1])
    allocator.publish(pages[1], pages[0], [2])
    allocator.release(pages[:1])
    again = allocator.take(1)
    assert again == pages[:1]
    allocator.publish(again[0], None, [7])
    assert allocator.match([7, 2]) == again


def test_no_page_has_two_owners():
    """Random sequences come and go; whatever is in use holds what its sequence wrote."""
    from paging import PageAllocator

    generator, content, live = random.Random(0), {}, []
    allocator = PageAllocator(num_pages=24, page_size=2)
    for _ in range(600):
        if live and generator.random() < 0.45:
            allocator.release(live.pop(generator.randrange(len(live)))[1])
            continue
        tokens = [generator.randrange(2) for _ in range(2 * generator.randrange(1, 7))]
        shared = allocator.match(tokens)
        fresh = allocator.take(len(tokens) // 2 - len(shared))
        if fresh is None:
            allocator.release(shared)
            continue
        pages = shared + fresh
        for i, page in enumerate(pages):
            if page in fresh:
                content[page] = tokens[: 2 * i + 2]
                allocator.publish(page, pages[i - 1] if i else None, tokens[2 * i : 2 * i + 2])
        live.append((tokens, pages))
        for owned, owned_pages in live:
            assert all(content[page] == owned[: 2 * i + 2] for i, page in enumerate(owned_pages))


def test_generate_with_random_weights(capsys):
    pytest.importorskip("transformers", minversion="5.17.0", reason="needs transformers >= 5.17")
    import generate

    results = generate.main(["--random", "--device", "cpu", "--max-new-tokens", "8", "--step-tokens", "24"])
    ours, theirs = results.values()
    assert ours.tokens == theirs.tokens
    assert len(ours.tokens) == len(generate.PROMPTS) and all(len(tokens) == 8 for tokens in ours.tokens)
    assert "same tokens for 6 of 6 prompts" in capsys.readouterr().out


@pytest.mark.weights
def test_generate_with_real_weights(capsys):
    pytest.importorskip("transformers", minversion="5.17.0", reason="needs transformers >= 5.17")
    import generate
    import smollm2

    if not smollm2.is_ready():
        pytest.skip("needs SmolLM2-135M: python examples/smollm2.py")
    results = generate.main(["Name the capital of France.", "--device", "cpu", "--max-new-tokens", "12"])
    ours, theirs = results.values()
    assert ours.tokens == theirs.tokens
    assert "Paris" in capsys.readouterr().out


def test_the_notebooks_cells_run():
    notebook = json.loads((EXAMPLES / "octavo.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {"__name__": "notebook"}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"octavo.ipynb, code cell {number}", "exec"), names)
    assert names["counts"][:, 0].exp2().round().tolist() == [11, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6]
    assert torch.equal(names["lengths"].cpu(), torch.tensor([10, 10], dtype=torch.int32))
