"""The form of a plan: what the host decides about it from shapes alone, as integers that travel through operators."""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from octavo.planning.schedule import ScheduleConfig, items_of_tiles, max_tiles
from octavo.planning.split import SplitConfig
from octavo.planning.tiles import LARGE_ROWS, SMALL_ROWS
from octavo.problem import AttentionSpec
from octavo.work_item import HEADER_WORDS, ITEM_WORDS

SMALL_LIST_FRACTION = 8
"""Where tiles outnumber sequences by this, sequences of few rows are too few to be worth a launch of their own."""


SHORT_KEYS = 2048
"""Tiles of few rows read the same keys again and again: up to so many that hardly costs."""


class PlanForm(NamedTuple):
    block_m: int
    """Rows of a tile in the main list."""
    small_m: int
    """Rows of a tile in the small list, which takes sequences of at most so many rows; 0: no small list."""
    workers: int
    """Programs that work on the main list at a time; 0: its tiles' keys are never cut."""
    small_workers: int
    batch_invariant: int = 0
    """1: tiles and cuts of a sequence follow from it alone."""

    def describe(self) -> str:
        """One line for people."""
        text = f"{self.block_m} rows (token, head in group) a tile"
        if self.small_m:
            text += f", {self.small_m} for sequences of at most {self.small_m} rows"
        if self.batch_invariant:
            return f"{text}, keys cut by length alone"
        return f"{text}, keys cut for {self.workers} + {self.small_workers} programs at a time"


SMALL_SPLIT = SplitConfig(key_block=64, min_blocks=4, by_area=False)
LARGE_SPLIT = SplitConfig(key_block=128, min_blocks=4, by_area=True)


@dataclass(frozen=True)
class SplitChoice:
    """Lengths of parts, which an experiment may vary."""

    small: SplitConfig = SMALL_SPLIT
    large: SplitConfig = LARGE_SPLIT
    invariant_keys: int = 1024

    @functools.cached_property
    def least_keys(self) -> int:
        """Sequences of so many keys are never cut."""
        return min(min(s.min_blocks * s.key_block for s in (self.small, self.large)), self.invariant_keys)

    def of(self, block_m: int, workers: int, batch_invariant: int) -> SplitConfig:
        """How tiles of block_m rows are cut. Invariant batches cut small tiles alone, whose states are few."""
        split = self.small if block_m == SMALL_ROWS else self.large
        if workers == 0:
            return replace(split, workers=0)
        if batch_invariant:
            fixed = self.invariant_keys // split.key_block if block_m == SMALL_ROWS else 0
            return replace(split, workers=0, fixed_blocks=fixed)
        return replace(split, workers=workers)


DEFAULT_SPLIT = SplitChoice()


def keys_class(max_keys: int, choice: SplitChoice = DEFAULT_SPLIT) -> tuple[bool, bool]:
    """What a form follows from of the most keys that a sequence can have: whether they are short, and never cut."""
    return max_keys <= SHORT_KEYS, max_keys <= choice.least_keys


def needs_small_list(spec: AttentionSpec, num_tokens: int, num_sequences: int, block_m: int) -> bool:
    """Whether sequences of few rows beside longer ones may be worth tiles of their own."""
    if block_m == SMALL_ROWS or num_sequences <= 1:
        return False
    return num_tokens * spec.group_size < SMALL_LIST_FRACTION * LARGE_ROWS * num_sequences


def schedule_config(form: PlanForm, choice: SplitChoice) -> ScheduleConfig:
    return ScheduleConfig(
        form.block_m,
        form.small_m,
        choice.of(form.block_m, form.workers, form.batch_invariant),
        choice.of(form.small_m or SMALL_ROWS, form.small_workers, form.batch_invariant),
    )


@dataclass(frozen=True)
class PlanLayout:
    """Where things are in a plan, counted in ITEM_WORDS after the header, and how many partial states fit."""

    capacity: int
    """Items."""
    states: int
    """Partial states of the main list, which begin after the items."""
    small_states: int
    small_states_begin: int
    end: int


def plan_words(spec: AttentionSpec, num_tokens: int, num_sequences: int, config: ScheduleConfig) -> int:
    """Room for any batch of at most this size."""
    tiles = max_tiles(spec, num_tokens, num_sequences, config.block_m)
    return HEADER_WORDS + ITEM_WORDS * _layout(spec, tiles, config).end


def layout_of(spec: AttentionSpec, words: int, config: ScheduleConfig) -> PlanLayout:
    """The layout of a plan of so many words: who plans and who reads may know other bounds of the batch."""
    units = (words - HEADER_WORDS) // ITEM_WORDS
    none, one = (_layout(spec, tiles, config).end for tiles in (0, 1))
    return _layout(spec, (units - none) // (one - none), config)


def _layout(spec: AttentionSpec, tiles: int, config: ScheduleConfig) -> PlanLayout:
    capacity = items_of_tiles(tiles, config)
    states = config.split.states(tiles)
    small_states = config.small_split.states(tiles) if config.small_m else 0
    small_begin = capacity + _state_units(spec, config.block_m, states)
    end = small_begin + _state_units(spec, config.small_m, small_states)
    return PlanLayout(capacity, states, small_states, small_begin, end)


def _state_units(spec: AttentionSpec, block_m: int, states: int) -> int:
    """Tiles have a multiple of 16 rows, so this leaves no rest."""
    return states * block_m * (spec.v_dim + 1) // ITEM_WORDS
