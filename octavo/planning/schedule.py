"""The schedule as a pure function of lengths: the model that the planner kernel is held to, item for item."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.problem import AttentionSpec


@dataclass(frozen=True)
class WorkItem:
    """One query tile of one K/V head over keys [key_begin, key_end). Fields as in octavo/work_item.py."""

    q_start: int
    q_len: int
    kv_len: int
    page_position: int
    kv_head: int
    row_begin: int
    key_begin: int
    key_end: int
    full_end: int
    split: int
    num_splits: int
    slot: int
    sequence: int
    row_count: int


@dataclass(frozen=True)
class SequenceShape:
    """Where one sequence lies. The rows of q past the last sequence count as one more, without keys."""

    q_start: int
    q_len: int
    kv_len: int
    page_position: int


@dataclass(frozen=True)
class ScheduleConfig:
    """What the planner kernel takes as constants."""

    block_m: int
    dead_tiles: int = 8
    """Tiles without keys that one item writes: a store each, too little for a program."""
    l2_bytes: int = 20 << 20
    """K/V of one sequence that may be in use at a time: less than the L2 holds."""


def num_tiles(spec: AttentionSpec, shape: SequenceShape, block_m: int) -> int:
    return -(-shape.q_len * spec.group_size // block_m)


def num_dead_tiles(spec: AttentionSpec, shape: SequenceShape, block_m: int) -> int:
    """Leading tiles of which no row sees a key."""
    tiles = num_tiles(spec, shape, block_m)
    if shape.kv_len == 0:
        return tiles
    if not spec.causal:
        return 0
    return max(shape.q_len - shape.kv_len, 0) * spec.group_size // block_m


def max_items(spec: AttentionSpec, num_tokens: int, num_sequences: int, block_m: int) -> int:
    """Items that any batch of at most this size can have: every sequence with tokens, and the padding, ends in one
    tile that is not full."""
    ends = min(num_tokens, num_sequences + 1)
    return (num_tokens * spec.group_size // block_m + ends) * spec.num_kv_heads


def visible_keys(spec: AttentionSpec, shape: SequenceShape, token: int) -> int:
    """Keys [0, n) that a sequence's token sees: bottom-right aligned causal mask."""
    if not spec.causal:
        return shape.kv_len
    return min(max(token + shape.kv_len - shape.q_len + 1, 0), shape.kv_len)


def schedule(spec: AttentionSpec, shapes: Sequence[SequenceShape], config: ScheduleConfig) -> list[WorkItem]:
    """Items in the order in which they are taken.

    Sequences with the most keys first: they hold the longest items, and what is left at the end is short. Inside a
    sequence as many K/V heads at a time as the L2 holds, so that tiles that share K/V run together and find them there;
    inside such a group of heads the last tile, which sees the most keys, first. Tiles that see no key come last.
    """
    order = sorted(range(len(shapes)), key=lambda i: (-shapes[i].kv_len, i))
    return [item for i in order for item in sequence_items(spec, shapes[i], i, config)]


def sequence_items(
    spec: AttentionSpec, shape: SequenceShape, sequence: int, config: ScheduleConfig
) -> Iterator[WorkItem]:
    tiles = num_tiles(spec, shape, config.block_m)
    dead = num_dead_tiles(spec, shape, config.block_m)
    for heads in head_groups(spec, shape, config):
        for tile in reversed(range(dead, tiles)):
            for kv_head in heads:
                yield _item(spec, shape, sequence, kv_head, tile * config.block_m, config.block_m)
    for kv_head in range(spec.num_kv_heads):
        for tile in range(0, dead, config.dead_tiles):
            count = min(config.dead_tiles, dead - tile)
            yield _item(spec, shape, sequence, kv_head, tile * config.block_m, count * config.block_m)


def head_groups(spec: AttentionSpec, shape: SequenceShape, config: ScheduleConfig) -> list[range]:
    """K/V heads in groups whose keys and values of this sequence fit l2_bytes; single heads where none do."""
    head_bytes = shape.kv_len * (spec.head_dim + spec.v_dim) * spec.dtype.itemsize
    together = min(max(config.l2_bytes // max(head_bytes, 1), 1), spec.num_kv_heads)
    return [range(h, min(h + together, spec.num_kv_heads)) for h in range(0, spec.num_kv_heads, together)]


def _item(
    spec: AttentionSpec, shape: SequenceShape, sequence: int, kv_head: int, row_begin: int, row_count: int
) -> WorkItem:
    last_token = min((row_begin + row_count - 1) // spec.group_size, shape.q_len - 1)
    return WorkItem(
        **vars(shape),
        kv_head=kv_head,
        row_begin=row_begin,
        key_begin=0,
        key_end=visible_keys(spec, shape, last_token),
        full_end=visible_keys(spec, shape, row_begin // spec.group_size),
        split=0,
        num_splits=1,
        slot=0,
        sequence=sequence,
        row_count=row_count,
    )
