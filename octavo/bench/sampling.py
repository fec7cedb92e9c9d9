"""Which rows of a batch to verify: few enough for the oracle, and where kernels go wrong."""

import random
from collections.abc import Iterator
from itertools import accumulate

from octavo.problem import AttentionSpec, PagedBatch
from octavo.reference import seen_keys, sequence_lengths

TILE_ROWS = (16, 64, 128)
TILE_KEYS = (64, 128)
FEW_ROWS = 16


def sample_rows(
    spec: AttentionSpec,
    batch: PagedBatch,
    num_tokens: int,
    *,
    max_rows: int = 48,
    max_keys: int = 300_000,
    seed: int = 0,
) -> list[int]:
    """Token rows worth comparing, ascending; the same for the same lengths and seed.

    First and last rows of sequences, the edge between dead and living rows, query and key tile edges, padding rows, and
    some random ones, taken round robin over the shortest, the longest, the first, the last and random sequences.

    Args:
        num_tokens: rows of q, at least qo_indptr[-1].
        max_rows: most rows to take.
        max_keys: bound on keys gathered plus keys seen, summed over the rows: what the oracle's time grows with. One
            row that sees a key is taken even past both bounds.
    """
    q_lens, kv_lens = sequence_lengths(batch, spec.page_size)
    starts = [0, *accumulate(q_lens)]
    rng = random.Random(seed)
    queues = {i: _tokens(spec, q_lens[i], kv_lens[i], rng) for i in _order(q_lens, kv_lens, rng)}
    chosen = set(range(starts[-1], num_tokens)[:2])
    gathered: set[int] = set()
    keys, skipped = 0, []
    for sequence, token in _round_robin(queues):
        if len(chosen) >= max_rows:
            break
        seen = seen_keys(spec, q_lens[sequence], kv_lens[sequence], token)
        cost = seen + (0 if sequence in gathered or not seen else kv_lens[sequence])
        if keys + cost > max_keys:
            skipped.append((cost, starts[sequence] + token))
            continue
        keys += cost
        chosen.add(starts[sequence] + token)
        if seen:
            gathered.add(sequence)
    if not gathered and skipped:
        chosen.add(min(skipped)[1])
    return sorted(chosen)


def _round_robin(queues: dict[int, Iterator[int]]) -> Iterator[tuple[int, int]]:
    """(sequence, token): one of each queue in turn until all are empty."""
    while queues:
        alive = {}
        for sequence, tokens in queues.items():
            token = next(tokens, None)
            if token is not None:
                alive[sequence] = tokens
                yield sequence, token
        queues = alive


def _order(q_lens: list[int], kv_lens: list[int], rng: random.Random) -> list[int]:
    live = [i for i, n in enumerate(q_lens) if n]
    if not live:
        return []
    by_keys = sorted(live, key=lambda i: kv_lens[i])
    dead = [i for i in live if kv_lens[i] < q_lens[i]]
    first = [by_keys[0], live[0], live[-1], max(live, key=lambda i: q_lens[i]), *dead[:2], by_keys[-1]]
    rest = rng.sample(live, len(live))
    return list(dict.fromkeys([*first, *rest]))


def _tokens(spec: AttentionSpec, q_len: int, kv_len: int, rng: random.Random) -> Iterator[int]:
    """Tokens of one sequence, the most telling first."""
    offset = kv_len - q_len if spec.causal else 0
    group = spec.group_size
    wanted = [q_len - 1, 0, -offset - 1, -offset]
    for tile in TILE_ROWS:
        wanted += [tile // group - 1, tile // group, q_len // max(1, tile // group) * max(1, tile // group)]
    for tile in TILE_KEYS:
        last_edge = (offset + q_len) // tile * tile
        wanted += [tile - offset - 1, tile - offset, last_edge - offset - 1, last_edge - offset]
    wanted += range(q_len) if q_len <= FEW_ROWS else [rng.randrange(q_len) for _ in range(FEW_ROWS // 2)]
    return iter(dict.fromkeys(t for t in wanted if 0 <= t < q_len))
