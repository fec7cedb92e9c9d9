"""Portable paged attention: one program computes one work item, a tile of packed query rows against its keys."""

import triton
import triton.language as tl

from octavo.kernels.plan import (
    FULL_END,
    HEADER_WORDS,
    ITEM_WORDS,
    KEY_BEGIN,
    KEY_END,
    KV_HEAD,
    KV_LEN,
    NUM_ITEMS,
    PAGE_HIGH,
    PAGE_LOW,
    Q_LEN,
    Q_START,
    ROW_BEGIN,
    ROW_COUNT,
    visible_keys,
)
from octavo.kernels.primitives import finish_softmax, key_offsets, key_pages, load_tile, online_softmax_step


@triton.jit
def attend_keys(state, q, scale, limit, cache, begin, end, key_end, MASKED: tl.constexpr, SAME_STRIDES: tl.constexpr,
                D: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
                NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Fold keys [begin, end) into state (acc, m, l). Row r sees keys below limit[r]; without MASKED it sees them all.

    cache: (K and V of one head, their strides, page table, position of the sequence in it, pages).
    """
    acc, m, l = state
    k_head, v_head, k_strides, v_strides, page_table, position, num_pages = cache
    d = tl.arange(0, q.shape[1])
    dv = tl.arange(0, acc.shape[1])
    for start in tl.range(begin, end, BLOCK_N, num_stages=2 if MASKED else NUM_STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        # Positions past the item's last key repeat it: what lies there must not be read, and 0 * NaN is NaN.
        safe = tl.minimum(keys, key_end - 1) if MASKED else keys
        pages = key_pages(page_table, position, safe, num_pages, PAGE_SIZE)
        offsets = key_offsets(pages, safe, k_strides, PAGE_SIZE)
        k = load_tile(k_head, offsets, d, D, q.shape[1])
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            scores = tl.where(keys[None, :] < limit[:, None], scores, float("-inf"))
        p, alpha, m, l = online_softmax_step(scores, scale, m, l)
        if not SAME_STRIDES:
            offsets = key_offsets(pages, safe, v_strides, PAGE_SIZE)
        v = load_tile(v_head, offsets, dv, DV, acc.shape[1])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m, l


@triton.jit
def load_queries(q_ptr, strides, tokens, heads, inside, scale, SIGNED: tl.constexpr, D: tl.constexpr,
                 D_PADDED: tl.constexpr):  # fmt: skip
    """(q, scale > 0 in base 2) whose product is what was asked for; only SIGNED scales may be negative."""
    d = tl.arange(0, D_PADDED)
    offsets = tokens * strides[0] + heads * strides[1]
    q = tl.load(q_ptr + offsets[:, None] + d[None, :], mask=inside[:, None] & (d[None, :] < D), other=0.0)
    if SIGNED:
        # A negative scale would turn the running maximum into a minimum; -q keeps the product and is exact.
        q = tl.where(scale < 0, -q, q)
    # Not quite zero, as 0 * -inf is NaN for a masked key: 2^(scores 1e-37) is 1 in float32 all the same.
    return q, tl.maximum(tl.abs(scale) * 1.4426950408889634, 1e-37)


@triton.jit
def store_rows(out, lse, values, lse_values, tokens, heads, inside, out_strides, lse_strides, DV: tl.constexpr):
    dv = tl.arange(0, values.shape[1])
    offsets = tokens * out_strides[0] + heads * out_strides[1]
    mask = inside[:, None] if values.shape[1] == DV else inside[:, None] & (dv[None, :] < DV)
    tl.store(out + offsets[:, None] + dv[None, :], values.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + tokens * lse_strides[0] + heads * lse_strides[1], lse_values, mask=inside)


@triton.jit
def tile_rows(item, first_row, num_tokens, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(token in its sequence, token, query head, whether it exists) of the item's rows from first_row on.

    Its loads are volatile, so that the epilogue reads the item again and nothing of this is live in the main loop.
    """
    rows = tl.load(item + ROW_BEGIN, volatile=True) + first_row + tl.arange(0, BLOCK_M)
    token_in_sequence = rows // GROUP
    tokens = tl.load(item + Q_START, volatile=True) + token_in_sequence
    heads = (tl.load(item + KV_HEAD, volatile=True) * GROUP + rows % GROUP).to(tl.int64)
    inside = (token_in_sequence < tl.load(item + Q_LEN, volatile=True)) & (tokens < num_tokens)
    return token_in_sequence, tokens.to(tl.int64), heads, inside


@triton.jit(do_not_specialize=["num_tokens", "num_pages"], do_not_specialize_on_alignment=["plan", "page_table", "lse"])
def attention_kernel(q_ptr, k_cache, v_cache, out, lse, plan, page_table, scale_ptr, sm_scale, num_tokens, num_pages,
                     q_strides, k_strides, v_strides, out_strides, lse_strides,
                     GROUP: tl.constexpr, CAUSAL: tl.constexpr, SAME_STRIDES: tl.constexpr,
                     D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
                     PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                     NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Strides are in elements: q, out, lse (token, head); caches (page, token in page, head)."""
    if tl.program_id(0) >= tl.load(plan + NUM_ITEMS):
        return
    item = plan + HEADER_WORDS + tl.program_id(0).to(tl.int64) * ITEM_WORDS
    q_len = tl.load(item + Q_LEN)
    kv_len = tl.load(item + KV_LEN)
    key_begin = tl.load(item + KEY_BEGIN)
    key_end = tl.load(item + KEY_END)
    full_end = tl.load(item + FULL_END)
    position = (tl.load(item + PAGE_HIGH).to(tl.int64) << 32) | (tl.load(item + PAGE_LOW).to(tl.int64) & 0xFFFFFFFF)

    acc = tl.zeros([BLOCK_M, DV_PADDED], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if (key_end <= key_begin) | (num_pages == 0):
        for first_row in range(0, tl.load(item + ROW_COUNT), BLOCK_M):
            _, tokens, heads, inside = tile_rows(item, first_row, num_tokens, GROUP, BLOCK_M)
            store_rows(out, lse, acc, m, tokens, heads, inside, out_strides, lse_strides, DV)
        return
    token_in_sequence, tokens, heads, inside = tile_rows(item, 0, num_tokens, GROUP, BLOCK_M)

    scale = sm_scale
    if scale_ptr is not None:
        scale *= tl.load(scale_ptr)
    q, scale = load_queries(q_ptr, q_strides, tokens, heads, inside, scale, scale_ptr is not None, D, D_PADDED)
    limit = tl.minimum(visible_keys(token_in_sequence, q_len, kv_len, CAUSAL), key_end)
    head = tl.load(item + KV_HEAD).to(tl.int64)
    k_head, v_head = k_cache + head * k_strides[2], v_cache + head * v_strides[2]
    cache = (k_head, v_head, k_strides, v_strides, page_table, position, num_pages)
    state = (acc, m, tl.zeros([BLOCK_M], tl.float32))
    middle = key_begin + (tl.maximum(full_end - key_begin, 0) // BLOCK_N) * BLOCK_N
    state = attend_keys(state, q, scale, limit, cache, key_begin, middle, key_end, False, SAME_STRIDES,
                        D, DV, PAGE_SIZE, BLOCK_N, NUM_STAGES, PRECISION)  # fmt: skip
    state = attend_keys(state, q, scale, limit, cache, middle, key_end, key_end, True, SAME_STRIDES,
                        D, DV, PAGE_SIZE, BLOCK_N, NUM_STAGES, PRECISION)  # fmt: skip
    values, lse_values = finish_softmax(*state)
    token_in_sequence, tokens, heads, inside = tile_rows(item, 0, num_tokens, GROUP, BLOCK_M)
    store_rows(out, lse, values, lse_values, tokens, heads, inside, out_strides, lse_strides, DV)
