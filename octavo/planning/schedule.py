"""The schedule as a pure function of lengths: the model that the planner kernel is held to, item for item."""

from collections.abc import Sequence
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


@dataclass(frozen=True)
class SequenceShape:
    """Where one sequence lies. The rows of q past the last sequence count as one more, without keys."""

    q_start: int
    q_len: int
    kv_len: int
    page_position: int


def num_tiles(q_len: int, group_size: int, block_m: int) -> int:
    return -(-q_len * group_size // block_m)


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


def schedule(spec: AttentionSpec, shapes: Sequence[SequenceShape], block_m: int) -> list[WorkItem]:
    """Items in the order in which they are taken.

    Sequences with the most keys first: they hold the longest items, and what is left at the end is short. Inside a
    sequence K/V heads one after the other, so that tiles that share K/V run together and find them in the L2; inside a
    head the last tile, which sees the most keys, first.
    """
    order = sorted(range(len(shapes)), key=lambda i: (-shapes[i].kv_len, i))
    return [item for i in order for item in sequence_items(spec, shapes[i], i, block_m)]


def sequence_items(spec: AttentionSpec, shape: SequenceShape, sequence: int, block_m: int) -> list[WorkItem]:
    tiles = num_tiles(shape.q_len, spec.group_size, block_m)
    items = []
    for kv_head in range(spec.num_kv_heads):
        for tile in reversed(range(tiles)):
            row_begin = tile * block_m
            first_token = row_begin // spec.group_size
            last_token = min((row_begin + block_m - 1) // spec.group_size, shape.q_len - 1)
            items.append(
                WorkItem(
                    **vars(shape),
                    kv_head=kv_head,
                    row_begin=row_begin,
                    key_begin=0,
                    key_end=visible_keys(spec, shape, last_token),
                    full_end=visible_keys(spec, shape, first_token),
                    split=0,
                    num_splits=1,
                    slot=0,
                    sequence=sequence,
                )
            )
    return items
