"""The planner kernel against its Python model, item for item, and the model against what a schedule must be."""

import os
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import work_item
from octavo.backends.hopper import HopperBackend
from octavo.backends.portable import Tuning
from octavo.backends.triton import TritonBackend
from octavo.planning.form import PlanForm, SplitChoice, layout_of, plan_words, schedule_config
from octavo.planning.schedule import (
    ScheduleConfig,
    SequenceShape,
    WorkItem,
    max_items,
    max_tiles,
    num_dead_tiles,
    num_tiles,
    schedule,
    visible_keys,
)
from octavo.planning.split import SplitConfig
from octavo.problem import Arch, AttentionSpec, PagedBatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

lengths = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=0, max_size=12)
heads = st.sampled_from([(1, 1), (8, 1), (4, 2), (7, 1), (6, 2), (32, 4)])
l2_sizes = st.sampled_from([1, 4000, 1 << 30])
block_ms = st.sampled_from([16, 64, 128])


def shapes_of(pairs, page_size=1, padding=0):
    """The sequences and the padding, as the planner sees a CSR batch."""
    shapes, start, position = [], 0, 0
    for q_len, kv_len in pairs:
        shapes.append(SequenceShape(start, q_len, kv_len, position))
        start, position = start + q_len, position - (-kv_len // page_size)
    return [*shapes, SequenceShape(start, padding, 0, 0)]


splits = st.builds(
    SplitConfig,
    workers=st.sampled_from([0, 1, 7, 264]),
    key_block=st.sampled_from([16, 64]),
    min_blocks=st.integers(1, 4),
    by_area=st.booleans(),
    fixed_blocks=st.sampled_from([0, 0, 2]),
    fixed_parts=st.sampled_from([1, 3, 16]),
)
configs = st.builds(
    ScheduleConfig,
    block_m=st.sampled_from([16, 64, 128]),
    small_m=st.sampled_from([0, 16]),
    split=splits,
    small_split=splits,
    dead_tiles=st.integers(1, 9),
    l2_bytes=l2_sizes,
)


def sees(spec, shape):
    """[rows, keys]: which keys each row of a sequence sees."""
    seen = np.array([visible_keys(spec, shape, token) for token in range(shape.q_len)], dtype=int)
    return np.arange(shape.kv_len) < seen.repeat(spec.group_size)[:, None]


@settings(deadline=None, derandomize=True, max_examples=250)
@given(lengths, heads, configs, st.booleans(), st.integers(0, 40))
def test_every_row_sees_each_of_its_keys_once(pairs, heads, config, causal, padding):
    spec = AttentionSpec(*heads, head_dim=16, causal=causal)
    shapes = shapes_of(pairs, padding=padding)
    lists = schedule(spec, shapes, config)
    visible = [sees(spec, s) for s in shapes]
    both = [np.zeros((spec.num_kv_heads, *v.shape), np.int16) for v in visible]
    written = [np.zeros((spec.num_kv_heads, len(v)), np.int16) for v in visible]
    parts = {}
    for items, block_m in ((lists.main, config.block_m), (lists.small, config.small_m)):
        for item in items:
            assert item.row_count in (0, block_m) or item.key_end == 0
            assert item.row_count == 0 or item.num_splits == 1 or item.key_begin < item.key_end
            if item.row_count == 0:
                continue
            rows = slice(item.row_begin, item.row_begin + item.row_count)
            both[item.sequence][item.kv_head, rows, item.key_begin : item.key_end] += 1
            written[item.sequence][item.kv_head, rows] += item.split == 0
            parts.setdefault((item.sequence, item.kv_head, item.row_begin), []).append((item.split, item.num_splits))
            assert item.key_begin <= item.full_end <= item.key_end
            assert visible[item.sequence][rows, item.key_begin : item.full_end].all()
    for mask, count, rows in zip(visible, both, written, strict=True):
        assert (count[:, mask] == 1).all() and (rows == 1).all()
    for found in parts.values():
        assert sorted(found) == [(i, len(found)) for i in range(len(found))]
    tokens = sum(s.q_len for s in shapes)
    assert len(lists.main) + len(lists.small) <= max_items(spec, tokens, len(pairs), config)


@settings(deadline=None, derandomize=True, max_examples=250)
@given(lengths, heads, configs, st.booleans())
def test_states_have_places_of_their_own_inside_the_workspace(pairs, heads, config, causal):
    spec = AttentionSpec(*heads, head_dim=16, causal=causal)
    lists = schedule(spec, shapes_of(pairs), config)
    tokens = sum(q for q, _ in pairs)
    layout = layout_of(spec, plan_words(spec, tokens, len(pairs), config), config)
    tiles = max_tiles(spec, tokens, len(pairs), config.block_m)
    for items, split, room in (
        (lists.main, config.split, layout.states),
        (lists.small, config.small_split, layout.small_states),
    ):
        used = Counter(x.slot + x.split for x in items if x.num_splits > 1 and x.row_count)
        assert all(n == 1 for n in used.values())
        assert all(slot < room for slot in used)
        assert room <= (split.fixed_parts * tiles if split.fixed_blocks else 4 * split.workers)
    assert len(lists.main) + len(lists.small) <= layout.capacity


H200 = Arch("cuda", (9, 0), 132, "H200")


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.sampled_from([TritonBackend(), HopperBackend()]),
    st.lists(st.tuples(st.sampled_from([0, 1, 1, 2, 17, 300]), st.sampled_from([0, 1, 70, 3000])), max_size=12),
    st.tuples(st.integers(0, 900), st.integers(0, 40), st.sampled_from([0, 9000])),
    st.sampled_from([(1, 1), (8, 1), (7, 1), (32, 4)]),
    st.booleans(),
)
def test_a_workspace_sized_by_bounds_holds_every_smaller_batch(backend, pairs, room, heads, invariant):
    """As graphs need it: sized once for the most tokens and sequences, planned for any batch within."""
    spec = AttentionSpec(*heads, head_dim=128)
    tokens, more_sequences, more_pages = sum(q for q, _ in pairs) + room[0], room[1], room[2]
    words = backend.max_plan_words(spec, tokens, len(pairs) + more_sequences, H200, invariant)
    starts = torch.empty(len(pairs) + 1, dtype=torch.int32, device="meta")
    table = torch.empty(sum(kv for _, kv in pairs) + more_pages, dtype=torch.int32, device="meta")
    form = backend.plan_form(spec, tokens, PagedBatch.csr(starts, starts, table), H200, invariant)
    assert backend.plan_words(spec, tokens, len(pairs), form) <= words
    config = schedule_config(form, SplitChoice())
    layout, lists = layout_of(spec, words, config), schedule(spec, shapes_of(pairs, padding=room[0]), config)
    assert len(lists.main) + len(lists.small) <= layout.capacity
    for items, states in ((lists.main, layout.states), (lists.small, layout.small_states)):
        assert all(x.slot + x.num_splits <= states for x in items if x.num_splits > 1 and x.row_count)
    assert work_item.HEADER_WORDS + work_item.ITEM_WORDS * layout.end <= words


long_lengths = st.lists(st.tuples(st.sampled_from([1, 1, 2, 17, 300]), st.integers(1, 5000)), min_size=1, max_size=20)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(long_lengths, heads, st.sampled_from([8, 132, 264]), st.sampled_from([16, 128]), st.booleans())
def test_longest_item_is_near_the_mean_load(pairs, heads, workers, block_m, causal):
    """At most 1.15 of the mean load of a worker, or that rounded up to a key block, or a part of the least length."""
    spec = AttentionSpec(*heads, head_dim=16, causal=causal)
    split = SplitConfig(workers, key_block=64, by_area=block_m > 16)
    shapes = shapes_of(pairs)
    items = schedule(spec, shapes, ScheduleConfig(block_m, split=split)).main
    # What the tiles hold, which the planner's sum of trapezoids or boxes must be close to, or above.
    tiles = [
        visible_keys(spec, s, min(((tile + 1) * block_m - 1) // spec.group_size, s.q_len - 1))
        for s in shapes
        for tile in range(num_dead_tiles(spec, s, block_m), num_tiles(spec, s, block_m))
    ]
    kv = [s.kv_len * (num_tiles(spec, s, block_m) - num_dead_tiles(spec, s, block_m)) for s in shapes]
    held = spec.num_kv_heads * (sum(tiles) if block_m > 16 else sum(kv))
    ideal = held / workers
    longest = max((item.key_end - item.key_begin for item in items), default=0)
    limit = max(1.15 * ideal * 1.01, (ideal * 1.01 // 64 + 1) * 64, 4 * 64)
    assert longest <= limit


def test_equal_decodes_fill_one_wave():
    """16 sequences of 4096 keys, 4 heads, 264 programs at a time: 4 parts of 1024, not 5 that need a second wave."""
    spec = AttentionSpec(32, 4, 128)
    split = SplitConfig(264, key_block=64, by_area=False)
    items = schedule(spec, shapes_of([(1, 4096)] * 16), ScheduleConfig(16, split=split)).main
    assert len(items) == 256 and {item.key_end - item.key_begin for item in items} == {1024}
    items = schedule(spec, shapes_of([(1, 4096)] * 64), ScheduleConfig(16, split=split)).main
    assert len(items) == 256 and {item.num_splits for item in items} == {1}


def test_a_long_decode_beside_a_prefill_has_its_own_tile_and_share():
    spec = AttentionSpec(32, 4, 128)
    config = schedule_config(PlanForm(128, 16, 132, 264), SplitChoice())
    lists = schedule(spec, shapes_of([(2048, 32768), (1, 65536), (1, 100)]), config)
    assert {item.sequence for item in lists.main} == {0}
    assert Counter(item.sequence for item in lists.small) == {1: 4 * 61, 2: 4}


@settings(deadline=None, derandomize=True, max_examples=60)
@given(lengths, lengths, st.tuples(st.integers(1, 40), st.integers(1, 5000)))
def test_invariant_cuts_do_not_know_the_neighbours(before, after, pair):
    spec = AttentionSpec(8, 2, head_dim=16)
    config = schedule_config(PlanForm(64, 16, 132, 264, batch_invariant=1), SplitChoice())

    def cuts(pairs, sequence):
        lists = schedule(spec, shapes_of(pairs), config)
        return sorted(
            (x.row_begin, x.kv_head, x.key_begin, x.key_end, x in lists.small)
            for x in lists.main + lists.small
            if x.sequence == sequence
        )

    assert cuts([*before, pair, *after], len(before)) == cuts([pair], 0)


@given(lengths, heads, block_ms)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_longest_items_do_not_come_last(pairs, heads, block_m):
    """Sequences are taken by falling number of keys: greedy assignment then ends within one short item of balance."""
    spec = AttentionSpec(*heads, head_dim=16)
    shapes = shapes_of(pairs)
    order = list(dict.fromkeys(item.sequence for item in schedule(spec, shapes, ScheduleConfig(block_m)).main))
    assert [shapes[i].kv_len for i in order] == sorted((shapes[i].kv_len for i in order), reverse=True)


def test_heads_that_fit_the_l2_together_are_interleaved():
    spec = AttentionSpec(4, 4, head_dim=16)
    head_bytes = 1000 * (16 + 16) * 2
    items = schedule(spec, shapes_of([(32, 1000)]), ScheduleConfig(16, l2_bytes=2 * head_bytes)).main
    assert [(item.kv_head, item.row_begin) for item in items] == [
        (0, 16), (1, 16), (0, 0), (1, 0), (2, 16), (3, 16), (2, 0), (3, 0),
    ]  # fmt: skip


def read_plan(spec, plan, config):
    capacity = layout_of(spec, plan.numel(), config).capacity
    words = plan[work_item.HEADER_WORDS :][: capacity * work_item.ITEM_WORDS].view(capacity, -1).cpu().tolist()
    items = [WorkItem(*w[:3], (w[4] << 32) | (w[3] & 0xFFFFFFFF), *w[5:15]) for w in words]
    main, small = int(plan[work_item.NUM_ITEMS]), int(plan[work_item.NUM_SMALL_ITEMS])
    assert int(plan[work_item.ITEMS_TAKEN]) == 0
    assert all(w[work_item.ARRIVED] == 0 for w in words[:main] + words[capacity - small :])
    return items[:main] + items[capacity - small :][::-1]


def plan_on_device(spec, batch, num_tokens, form, choice=SplitChoice()):  # noqa: B008
    backend = TritonBackend(Tuning(choice))
    words = backend.plan_words(spec, num_tokens, batch.num_sequences, form)
    plan = torch.full((words,), -1, dtype=torch.int32, device=batch.device)
    backend.plan(spec, batch, num_tokens, form, plan)
    return read_plan(spec, plan, backend.tuning.config(form))


def model(spec, shapes, form, choice=SplitChoice()):  # noqa: B008
    lists = schedule(spec, shapes, schedule_config(form, choice))
    return lists.main + lists.small


def csr(pairs, page_size, index_dtype):
    pages = [-(-kv // page_size) for _, kv in pairs]
    last = [kv - (p - 1) * page_size if p else 0 for (_, kv), p in zip(pairs, pages, strict=True)]

    def indptr(lens):
        return torch.tensor([0, *lens], device=DEVICE).cumsum(0).to(index_dtype)

    indices = torch.zeros(sum(pages), dtype=torch.int32, device=DEVICE)
    return PagedBatch.csr(
        indptr([q for q, _ in pairs]), indptr(pages), indices, torch.tensor(last, dtype=index_dtype, device=DEVICE)
    )


BATCHES = [
    [],
    [(0, 0)],
    [(1, 1)],
    [(5, 40), (0, 7), (3, 0), (20, 12), (1, 1)],
    [(300, 2), (2, 300), (129, 129)],
    [(40, 1), (0, 90), (100, 0), (7, 33)],
    [(i % 3, 7 * i % 50) for i in range(40)],
    [(1, 100)] * 18,
]


# Parts as short as can be, so that short batches have them.
EAGER = SplitChoice(SplitConfig(key_block=16, min_blocks=1, by_area=False), SplitConfig(key_block=16, min_blocks=2), 32)
FORMS = {
    "small": (True, 1, PlanForm(16, 0, 0, 0), torch.int32),
    "small cut": (True, 1, PlanForm(16, 0, 9, 0), torch.int32),
    "both": (False, 3, PlanForm(64, 16, 0, 5), torch.int64),
    "both cut": (True, 16, PlanForm(128, 16, 12, 40), torch.int64),
    "invariant": (True, 1, PlanForm(64, 16, 12, 40, batch_invariant=1), torch.int32),
    "invariant small": (True, 1, PlanForm(16, 0, 12, 0, batch_invariant=1), torch.int32),
}


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("pairs", BATCHES, ids=lambda p: f"{len(p)}seq{sum(q for q, _ in p)}")
@pytest.mark.parametrize(("causal", "page_size", "form", "dtype"), FORMS.values(), ids=FORMS)
def test_kernel_equals_model(pairs, causal, page_size, form, dtype):
    spec = AttentionSpec(14, 2, head_dim=16, page_size=page_size, causal=causal)
    padding = 5
    tokens = sum(q for q, _ in pairs) + padding
    got = plan_on_device(spec, csr(pairs, page_size, dtype), tokens, form, EAGER)
    want = model(spec, shapes_of(pairs, page_size, padding), form, EAGER)
    # The padding has no pages: its position in the table is whatever the clamp gives.
    assert [strip(x, len(pairs)) for x in got] == [strip(x, len(pairs)) for x in want]


def strip(item, padding_sequence):
    return WorkItem(**{**vars(item), "page_position": 0}) if item.sequence == padding_sequence else item


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
def test_dense_table_equals_model():
    spec = AttentionSpec(8, 2, head_dim=16, page_size=4)
    kv_lens = torch.tensor([9, 0, 16], dtype=torch.int32, device=DEVICE)
    table = torch.zeros(3, 6, dtype=torch.int32, device=DEVICE)[:, :4]
    batch = PagedBatch.dense(torch.tensor([0, 2, 3, 40], dtype=torch.int32, device=DEVICE), table, kv_lens)
    shapes = [
        SequenceShape(0, 2, 9, 0),
        SequenceShape(2, 1, 0, 6),
        SequenceShape(3, 37, 16, 12),
        SequenceShape(40, 0, 0, 0),
    ]
    form = PlanForm(16, 0, 4, 0)
    assert plan_on_device(spec, batch, 40, form, EAGER) == model(spec, shapes, form, EAGER)


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
def test_broken_indptr_stays_inside_the_tensors():
    spec = AttentionSpec(4, 2, head_dim=16)
    qo = torch.tensor([0, 9, 4, 900], dtype=torch.int32, device=DEVICE)
    kv = torch.tensor([0, 50, -3, 70], dtype=torch.int32, device=DEVICE)
    batch = PagedBatch.csr(qo, kv, torch.zeros(20, dtype=torch.int32, device=DEVICE))
    items = plan_on_device(spec, batch, 12, PlanForm(16, 0, 9, 0), EAGER)
    assert items
    for item in items:
        assert item.q_start >= 0 and item.q_start + item.q_len <= 12
        assert item.page_position >= 0 and item.page_position + item.kv_len <= 20


@pytest.mark.interpreter
@pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="needs a GPU or TRITON_INTERPRET=1")
def test_falling_indptr_does_not_outgrow_the_plan():
    spec = AttentionSpec(4, 2, head_dim=16)
    qo = torch.tensor([0, 100] * 20, dtype=torch.int32, device=DEVICE)
    batch = PagedBatch.csr(qo, torch.zeros_like(qo), torch.zeros(1, dtype=torch.int32, device=DEVICE))
    backend, form = TritonBackend(), PlanForm(64, 16, 4, 4)
    words = backend.plan_words(spec, 100, 39, form)
    guarded = torch.full((words + 4096,), -1, dtype=torch.int32, device=DEVICE)
    backend.plan(spec, batch, 100, form, guarded[:words])
    assert (guarded[words:] == -1).all()
    assert int(guarded[work_item.NUM_ITEMS]) <= max_items(spec, 100, 39, backend.tuning.config(form))
