"""Replays a trace of requests through a paged cache, as a serving engine would: admit, append, plan, run.

python examples/serve_trace.py                  on a GPU at full length, on the CPU at 1/64 of it
python examples/serve_trace.py --check          every step compared with the float64 oracle

There is no model: a token's query, key and value are rows of a table. What is measured is the attention of --layers
layers with the copies to the device that a step needs. The clock of the replay advances by that time, so requests wait
as they would if nothing else took any. trace.jsonl: sessions of the Mooncake conversation trace (examples/README.md).
"""

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from paging import PageAllocator

import octavo

VOCABULARY = 4096
TRACE_BLOCK = 512
"""Tokens to a hash in the trace."""


@dataclass
class Request:
    """A request, and where it stands. Times are in seconds of the replay's clock."""

    arrival: float
    prompt: list[int]
    output_length: int
    row: int = -1
    """Its row of the table of pages on the device."""
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    shared: int = 0
    published: int = 0
    token_times: list[float] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.token_times) == self.output_length


def read_trace(path: Path, scale: int, limit: int | None) -> list[Request]:
    """Requests with all lengths divided by scale. Equal hashes become equal tokens: prefixes repeat as in the trace."""
    requests = []
    block = TRACE_BLOCK // scale
    for number, line in enumerate(path.read_text().splitlines()[:limit]):
        row = json.loads(line)
        length = max(1, row["input_length"] // scale)
        tokens = [t for h in row["hash_ids"] for t in random.Random(h).choices(range(VOCABULARY), k=block)]
        extra = random.Random(f"rest of {number}").choices(range(VOCABULARY), k=length)
        prompt = (tokens + extra)[:length]
        requests.append(Request(row["timestamp"] / 1000, prompt, max(1, row["output_length"] // scale)))
    return requests


class Engine:
    """Attention of one step over all layers, and the scheduler that forms steps."""

    def __init__(self, args: argparse.Namespace, longest: int) -> None:
        heads, kv_heads = args.heads
        self.args, self.device = args, torch.device(args.device)
        dtype = getattr(torch, args.dtype)
        self.spec = octavo.AttentionSpec(heads, kv_heads, args.head_dim, page_size=args.page_size, dtype=dtype)
        shape = (args.pages, args.page_size, kv_heads, args.head_dim)
        caches = [torch.empty(2, *shape, dtype=dtype, device=self.device) for _ in range(args.layers)]
        self.layers = [octavo.PagedKV(cache[0], cache[1]) for cache in caches]
        generator = torch.Generator(device=self.device).manual_seed(0)
        table = (VOCABULARY, heads + 2 * kv_heads, args.head_dim)
        self.table = torch.randn(table, generator=generator, device=self.device).to(dtype)
        self.attn = octavo.BatchAttention(
            self.spec, device=self.device, max_tokens=args.step_tokens, max_sequences=args.max_requests
        )
        self.allocator = PageAllocator(args.pages, args.page_size)
        self.tables = torch.zeros(args.max_requests, -(-longest // args.page_size), dtype=torch.int32).to(self.device)
        self.rows = list(range(args.max_requests))
        self.running: list[Request] = []
        self.checked = 0

    def admit(self, waiting: deque[Request]) -> None:
        """Requests in order of arrival, each with pages for all it will ever hold: none is ever put off later."""
        while waiting and len(self.running) < self.args.max_requests:
            request = waiting[0]
            shared = self.allocator.match(request.prompt[:-1])  # the last token is computed: its output is wanted
            needed = -(-(len(request.prompt) + request.output_length) // self.args.page_size) - len(shared)
            fresh = self.allocator.take(needed)
            if fresh is None:
                self.allocator.release(shared)
                if not self.running:
                    raise SystemExit(f"--pages: expected at least {needed + len(shared)}, got {self.args.pages}")
                return
            request.pages, request.tokens = shared + fresh, list(request.prompt)
            request.shared = request.cached = len(shared) * self.args.page_size
            request.published = len(shared)
            request.row = self.rows.pop()
            self.tables[request.row, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
            self.running.append(waiting.popleft())

    def form_step(self) -> list[tuple[Request, int]]:
        """(request, new tokens): decoding requests first, then prompts, in chunks, as far as the step's budget goes."""
        budget, step = self.args.step_tokens, []
        for request in sorted(self.running, key=lambda r: len(r.tokens) - r.cached > 1):
            count = min(len(request.tokens) - request.cached, budget)
            if count:
                step.append((request, count))
                budget -= count
        return step

    def attend(self, step: list[tuple[Request, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Lengths and tokens to the device, one plan, append and attention in each layer; the last's (q, out, lse)."""
        lengths = [request.cached + count for request, count in step]
        tokens = [t for request, count in step for t in request.tokens[request.cached : request.cached + count]]
        parts = [offsets([count for _, count in step]), lengths, [request.row for request, _ in step], tokens]
        flat = torch.tensor([x for part in parts for x in part], dtype=torch.int32).to(self.device)
        qo_indptr, kv_lens, rows, token_ids = flat.split([len(part) for part in parts])
        batch = octavo.PagedBatch.dense(qo_indptr, self.tables[rows.long()], kv_lens)
        q, k, v = self.table[token_ids.long()].split([self.spec.num_qo_heads, *[self.spec.num_kv_heads] * 2], dim=1)
        self.attn.plan(batch, num_tokens=len(tokens))
        for kv in self.layers:
            octavo.append(k, v, kv, batch)
            out, lse = self.attn.run(q, kv)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return q, out, lse

    def check(self, step: list[tuple[Request, int]], q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """The last layer against float64 attention over keys built from the sequences' own tokens, without any page."""
        from octavo.bench.verify import verify_rows

        lengths = [request.cached + count for request, count in step]
        tokens = [t for (request, _), n in zip(step, lengths, strict=True) for t in request.tokens[:n]]
        heads, kv_heads = self.args.heads
        kv = self.table[torch.tensor(tokens, device=self.device)].unsqueeze(1)
        spec = octavo.AttentionSpec(heads, kv_heads, self.args.head_dim, dtype=self.spec.dtype)
        tables = [offsets([count for _, count in step]), offsets(lengths), list(range(len(tokens)))]
        batch = octavo.PagedBatch.csr(*(torch.tensor(t, device=self.device, dtype=torch.int32) for t in tables))
        keys, values = kv[:, :, heads : heads + kv_heads], kv[:, :, heads + kv_heads :]
        ends = [end - 1 for end in tables[0][1:]]
        verdict = verify_rows(spec, q, octavo.PagedKV(keys, values), batch, out, lse, ends)
        if not verdict.ok:
            raise SystemExit(f"wrong attention: {verdict.message}")
        self.checked += verdict.rows

    def finish(self, step: list[tuple[Request, int]], now: float) -> None:
        """Full pages become known, requests that saw all their tokens get a new one, and complete ones leave."""
        size = self.args.page_size
        for request, count in step:
            request.cached += count
            for page in range(request.published, request.cached // size):
                parent = request.pages[page - 1] if page else None
                self.allocator.publish(request.pages[page], parent, request.tokens[page * size : (page + 1) * size])
            request.published = request.cached // size
            if request.cached == len(request.tokens):
                request.token_times.append(now)
                request.tokens.append(hash((request.cached, request.tokens[-1])) % VOCABULARY)
            if request.is_done:
                self.allocator.release(request.pages)
                self.rows.append(request.row)
                self.running.remove(request)


def offsets(lengths: Iterable[int]) -> list[int]:
    total, found = 0, [0]
    for length in lengths:
        found.append(total := total + length)
    return found


@dataclass
class Report:
    """What a replay measured."""

    requests: list[Request]
    steps: list[float]
    tokens: int
    checked: int

    def __str__(self) -> str:
        first = [r.token_times[0] - r.arrival for r in self.requests]
        between = [b - a for r in self.requests for a, b in zip(r.token_times, r.token_times[1:], strict=False)]
        prompt, generated = sum(len(r.prompt) for r in self.requests), sum(r.output_length for r in self.requests)
        shared, busy = sum(r.shared for r in self.requests), sum(self.steps)
        lines = [
            f"{len(self.requests)} requests: {prompt} prompt tokens, {shared} of them in shared pages; {generated} new",
            f"{len(self.steps)} steps in {busy:.2f} s: {self.tokens / busy:.0f} tokens/s computed, "
            f"{(prompt + generated) / busy:.0f} tokens/s served",
            f"step                {spread(self.steps)}",
            f"time to first token {spread(first)}",
            f"between tokens      {spread(between)}",
        ]
        return "\n".join(lines + [f"{self.checked} rows compared with float64"] * bool(self.checked))


def spread(values: list[float]) -> str:
    ordered = sorted(values) or [0.0]
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000 for share in (0.5, 0.9, 0.99)]
    return "median {:.2f} ms, 90 % {:.2f} ms, 99 % {:.2f} ms".format(*at)


def replay(args: argparse.Namespace) -> Report:
    requests = read_trace(args.trace, args.scale, args.requests)
    arriving, waiting = deque(sorted(requests, key=lambda r: r.arrival)), deque[Request]()
    for request in requests:
        request.arrival /= args.speedup
    longest = max(len(r.prompt) + r.output_length for r in requests)
    engine, clock, steps, tokens = Engine(args, longest), 0.0, [], 0
    while arriving or waiting or engine.running:
        if not waiting and not engine.running:
            clock = max(clock, arriving[0].arrival)
        while arriving and arriving[0].arrival <= clock:
            waiting.append(arriving.popleft())
        engine.admit(waiting)
        start = time.perf_counter()
        step = engine.form_step()
        result = engine.attend(step)
        steps.append(time.perf_counter() - start)
        clock += steps[-1]
        if args.check:
            engine.check(step, *result)
        tokens += sum(count for _, count in step)
        engine.finish(step, clock)
    return Report(requests, steps, tokens, engine.checked)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=Path(__file__).with_name("trace.jsonl"))
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if on_gpu else "float32", help="of q, k and v")
    parser.add_argument("--scale", type=int, default=1 if on_gpu else 64, help="lengths of the trace are divided by it")
    parser.add_argument("--requests", type=int, help="replay only so many")
    parser.add_argument("--speedup", type=float, default=10.0, help="arrivals come that much faster than in the trace")
    parser.add_argument("--layers", type=int, default=4 if on_gpu else 2)
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8] if on_gpu else [8, 2], metavar=("QO", "KV"))
    parser.add_argument("--head-dim", type=int, default=128 if on_gpu else 64)
    parser.add_argument("--page-size", type=int, default=16 if on_gpu else 4)
    parser.add_argument("--pages", type=int, default=65536 if on_gpu else 4096, help="of each layer's cache")
    parser.add_argument("--step-tokens", type=int, default=4096 if on_gpu else 128, help="most tokens in a step")
    parser.add_argument("--max-requests", type=int, default=128 if on_gpu else 16, help="most requests at a time")
    parser.add_argument("--check", action="store_true", help="compare one row of every sequence and step with float64")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    args = parse_arguments(arguments)
    report = replay(args)
    print(f"{args.device}, {args.dtype}, {args.layers} layers, heads {args.heads}, head_dim {args.head_dim}")
    print(report)
    return report


if __name__ == "__main__":
    main()
