"""The schedule as a pure function of lengths: the model that the planner kernel is held to, item for item."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from octavo.planning.split import NEVER_CUT, SplitConfig, cut, num_parts, part_limit
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
    """Rows of a tile in the main list."""
    small_m: int = 0
    """Sequences of at most so many rows make tiles of so many, in the small list; 0: there is no small list."""
    split: SplitConfig = NEVER_CUT
    small_split: SplitConfig = NEVER_CUT
    dead_tiles: int = 8
    """Tiles without keys that one item writes: a store each, too little for a program."""
    l2_bytes: int = 20 << 20
    """K/V of one sequence that may be in use at a time: less than the L2 holds."""


@dataclass(frozen=True)
class Schedule:
    """Two lists of items, each in the order in which they are taken."""

    main: list[WorkItem]
    small: list[WorkItem]


def num_tiles(spec: AttentionSpec, shape: SequenceShape, block_m: int) -> int:
    return -(-shape.q_len * spec.group_size // block_m)


def num_dead_tiles(spec: AttentionSpec, shape: SequenceShape, block_m: int) -> int:
    """Leading tiles of which no row sees a key."""
    tiles = num_tiles(spec, shape, block_m)
    if shape.kv_len == 0:
        return tiles
    right = right_of(spec)
    if right < 0:
        return 0
    return max(shape.q_len - shape.kv_len - right, 0) * spec.group_size // block_m


def max_tiles(spec: AttentionSpec, num_tokens: int, num_sequences: int, block_m: int) -> int:
    """Tiles, times K/V heads, that any batch of at most this size can have: every sequence with tokens, and the
    padding, ends in one tile that is not full. A sequence of the small list is one tile."""
    ends = min(num_tokens, num_sequences + 1)
    return (num_tokens * spec.group_size // block_m + ends) * spec.num_kv_heads


def max_items(spec: AttentionSpec, num_tokens: int, num_sequences: int, config: ScheduleConfig) -> int:
    """Items of both lists together, at most."""
    return items_of_tiles(max_tiles(spec, num_tokens, num_sequences, config.block_m), config)


def items_of_tiles(tiles: int, config: ScheduleConfig) -> int:
    splits = (config.split, config.small_split) if config.small_m else (config.split,)
    return tiles + sum(s.extra_items + s.extra_per_tile * tiles for s in splits)


def right_of(spec: AttentionSpec) -> int:
    """Keys past its own that a row may see: 0 is causal; -1: all. A custom mask replaces causal."""
    return 0 if spec.causal and not spec.custom_mask else spec.window_right


def visible_keys(spec: AttentionSpec, shape: SequenceShape, token: int) -> int:
    """End of the keys that a sequence's token may see: bottom-right aligned."""
    right = right_of(spec)
    if right < 0:
        return shape.kv_len
    return min(max(token + shape.kv_len - shape.q_len + 1 + right, 0), shape.kv_len)


def first_visible(spec: AttentionSpec, shape: SequenceShape, token: int) -> int:
    """First key that a sequence's token may see."""
    if spec.window_left < 0:
        return 0
    return min(max(token + shape.kv_len - shape.q_len - spec.window_left, 0), shape.kv_len)


def longest_span(spec: AttentionSpec, shape: SequenceShape, block_m: int) -> int:
    """The most keys that one tile of a sequence may see."""
    if spec.window_left < 0:
        return shape.kv_len
    right, tokens = right_of(spec), shape.q_len
    if right >= 0:
        # Of a tile's rows, whose first may be the last of its token's group.
        tokens = min(-(-(block_m - 1) // spec.group_size) + 1, shape.q_len) + right
    return min(shape.kv_len, tokens + spec.window_left)


def is_small(spec: AttentionSpec, shape: SequenceShape, config: ScheduleConfig) -> bool:
    return shape.q_len * spec.group_size <= config.small_m


def work(spec: AttentionSpec, shape: SequenceShape, block_m: int, split: SplitConfig) -> int:
    """What a sequence counts for when the mean load is computed: keys that its tiles see, over all K/V heads."""
    tiles, dead = num_tiles(spec, shape, block_m), num_dead_tiles(spec, shape, block_m)
    first = span = longest_span(spec, shape, block_m)
    if split.by_area:
        last_token = min(((dead + 1) * block_m - 1) // spec.group_size, shape.q_len - 1)
        first = min(visible_keys(spec, shape, last_token), span)
    return (tiles - dead) * ((first + span + 1) // 2) * spec.num_kv_heads


def schedule(spec: AttentionSpec, shapes: Sequence[SequenceShape], config: ScheduleConfig) -> Schedule:
    """Sequences with the most keys first: they hold the longest items, and what is left at the end is short.

    Inside a sequence as many K/V heads at a time as the L2 holds, so that tiles that share K/V run together and find
    them there; inside such a group of heads the last tile, which sees the most keys, first; the parts of a tile one
    after another. Tiles that see no key come last.
    """
    order = sorted(range(len(shapes)), key=lambda i: (-shapes[i].kv_len, i))
    small = [i for i in order if config.small_m and is_small(spec, shapes[i], config)]
    small_config = replace(config, block_m=config.small_m, split=config.small_split)
    main = [i for i in order if not (config.small_m and is_small(spec, shapes[i], config))]
    return Schedule(_list(spec, shapes, main, config), _list(spec, shapes, small, small_config))


def _list(
    spec: AttentionSpec, shapes: Sequence[SequenceShape], order: list[int], config: ScheduleConfig
) -> list[WorkItem]:
    total = sum(work(spec, shapes[i], config.block_m, config.split) for i in order)
    limit = part_limit(config.split, total)
    items: list[WorkItem] = []
    slot = 0
    for i in order:
        span = longest_span(spec, shapes[i], config.block_m)
        parts = num_parts(config.split, span, limit) if config.split.cuts else 1
        items += sequence_items(spec, shapes[i], i, config, parts, slot)
        if parts > 1:
            tiles, dead = num_tiles(spec, shapes[i], config.block_m), num_dead_tiles(spec, shapes[i], config.block_m)
            slot += (tiles - dead) * spec.num_kv_heads * parts
    return items


def sequence_items(
    spec: AttentionSpec, shape: SequenceShape, sequence: int, config: ScheduleConfig, parts: int, first_slot: int
) -> Iterator[WorkItem]:
    """Every tile takes `parts` places in the list; where its keys make fewer parts, the last ones do nothing."""
    block_m = config.block_m
    tiles, dead = num_tiles(spec, shape, block_m), num_dead_tiles(spec, shape, block_m)
    for heads in head_groups(spec, shape, config):
        for tile in reversed(range(dead, tiles)):
            for kv_head in heads:
                item = _item(spec, shape, sequence, kv_head, tile * block_m, block_m)
                slot = first_slot + ((tile - dead) * spec.num_kv_heads + kv_head) * parts
                yield from _parts(item, config.split, parts, slot, longest_span(spec, shape, block_m))
    for kv_head in range(spec.num_kv_heads):
        for tile in range(0, dead, config.dead_tiles):
            count = min(config.dead_tiles, dead - tile)
            yield _item(spec, shape, sequence, kv_head, tile * block_m, count * block_m)


def _parts(item: WorkItem, split: SplitConfig, parts: int, slot: int, span: int) -> Iterator[WorkItem]:
    """A tile's item cut into parts of equal length, but for the last."""
    count, blocks = cut(split, span, parts, item.key_end - item.key_begin)
    for part in range(parts):
        begin = min(item.key_begin + part * blocks * split.key_block, item.key_end)
        end = min(begin + blocks * split.key_block, item.key_end)
        yield replace(
            item,
            key_begin=begin,
            key_end=end,
            full_end=min(max(item.full_end, begin), end),
            split=part,
            num_splits=count,
            slot=slot if count > 1 else 0,
            row_count=item.row_count if part < count else 0,
        )


def head_groups(spec: AttentionSpec, shape: SequenceShape, config: ScheduleConfig) -> list[range]:
    """K/V heads in groups whose keys and values of this sequence fit l2_bytes; single heads where none do."""
    head_bytes = shape.kv_len * (spec.head_dim + spec.v_dim) * spec.cache_dtype.itemsize
    together = min(max(config.l2_bytes // max(head_bytes, 1), 1), spec.num_kv_heads)
    return [range(h, min(h + together, spec.num_kv_heads)) for h in range(0, spec.num_kv_heads, together)]


def _item(
    spec: AttentionSpec, shape: SequenceShape, sequence: int, kv_head: int, row_begin: int, row_count: int
) -> WorkItem:
    first_token = row_begin // spec.group_size
    last_token = min((row_begin + row_count - 1) // spec.group_size, shape.q_len - 1)
    begin = first_visible(spec, shape, first_token)
    return WorkItem(
        **vars(shape),
        kv_head=kv_head,
        row_begin=row_begin,
        key_begin=begin,
        key_end=max(visible_keys(spec, shape, last_token), begin),
        full_end=visible_keys(spec, shape, first_token),
        split=0,
        num_splits=1,
        slot=0,
        sequence=sequence,
        row_count=row_count,
    )
