"""How many parts a sequence's keys are cut into, so that no item is much longer than the mean load of a worker."""

from dataclasses import dataclass

SLACK_OVER, SLACK_UNDER = 23, 20
"""An item may be 1.15 times the mean load of a worker before its keys are cut."""
NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class SplitConfig:
    """How one list of a plan is cut. Work is counted in keys of one tile, lengths of parts in key blocks.

    The work of a sequence of t tiles is t * kv_len, or, by_area, t times the mean of what its first and last tile see;
    where a window is shorter, what it leaves of these.
    The first is exact for single tiles and keeps extra items to one a worker; the second is exact for long causal
    sequences and keeps them to two.
    """

    workers: int = 0
    """Items that run at a time (SMs times programs on each); 0 never cuts."""
    key_block: int = 128
    """Keys to which parts are rounded up."""
    min_blocks: int = 4
    """Fewest blocks worth a part of their own: a part is written, read and merged."""
    by_area: bool = True
    fixed_blocks: int = 0
    """Where not 0: blocks a part, whatever the batch, but at most fixed_parts parts."""
    fixed_parts: int = 16

    @property
    def cuts(self) -> bool:
        return self.workers > 0 or self.fixed_blocks > 0

    @property
    def extra_items(self) -> int:
        """Items that cutting adds at most, whatever the batch.

        S parts of b blocks have S - 1 <= (b - 1) / limit, and limit * key_block * workers >= total work.
        """
        return self.workers * (2 if self.by_area else 1)

    @property
    def extra_per_tile(self) -> int:
        return self.fixed_parts - 1 if self.fixed_blocks else 0

    def states(self, tiles: int) -> int:
        """Partial states at most: a tile of S > 1 parts has S, at most twice its S - 1 extra items."""
        return self.fixed_parts * tiles if self.fixed_blocks else 2 * self.extra_items


NEVER_CUT = SplitConfig()


def part_limit(config: SplitConfig, total_work: int) -> int:
    """Blocks that a part may have, for a list whose sequences have this much work together."""
    if config.workers == 0:
        return NO_LIMIT
    slack = total_work * SLACK_OVER // (SLACK_UNDER * config.workers * config.key_block)
    even = _ceil_div(total_work, config.workers * config.key_block)
    return min(max(slack, even, config.min_blocks), NO_LIMIT)


def num_parts(config: SplitConfig, span: int, limit: int) -> int:
    """Parts of a sequence's longest tile, which sees `span` keys; at least 1."""
    blocks = _ceil_div(span, config.key_block)
    if config.fixed_blocks:
        limit = max(config.fixed_blocks, _ceil_div(blocks, config.fixed_parts))
    return max(_ceil_div(blocks, limit), 1)


def cut(config: SplitConfig, span: int, parts: int, keys: int) -> tuple[int, int]:
    """(parts, blocks a part) of a tile that sees `keys` > 0 of the `span` keys that make `parts` parts."""
    longest = _ceil_div(_ceil_div(span, config.key_block), parts)
    blocks = _ceil_div(keys, config.key_block)
    count = _ceil_div(blocks, longest)
    return count, _ceil_div(blocks, count)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
