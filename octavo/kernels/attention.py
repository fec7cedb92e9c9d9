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
    visible_keys,
)
from octavo.kernels.primitives import finish_softmax, key_offsets, key_pages, load_tile, online_softmax_step


@triton.jit
def attend_keys(acc, m, l, q, k_cache, v_cache, page_table, position, num_pages, begin, end, limit, key_end, scale,
                k_strides, v_strides, MASKED: tl.constexpr, SAME_STRIDES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
                BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Fold keys [begin, end) into (acc, m, l). Row r sees keys below limit[r]; without MASKED every row sees them all."""
    d = tl.arange(0, q.shape[1])
    dv = tl.arange(0, acc.shape[1])
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        keys = start + tl.arange(0, BLOCK_N)
        # Positions past the item's last key repeat it: what lies there must not be read, and 0 * NaN is NaN.
        safe = tl.minimum(keys, key_end - 1) if MASKED else keys
        pages = key_pages(page_table, position, safe, num_pages, PAGE_SIZE)
        offsets = key_offsets(pages, safe, k_strides, PAGE_SIZE)
        k = load_tile(k_cache, offsets, d, D, q.shape[1])
        logits = tl.dot(q, k.T, input_precision=PRECISION) * scale
        if MASKED:
            logits = tl.where(keys[None, :] < limit[:, None], logits, float("-inf"))
        p, alpha, m, l = online_softmax_step(logits, m, l)
        if not SAME_STRIDES:
            offsets = key_offsets(pages, safe, v_strides, PAGE_SIZE)
        v = load_tile(v_cache, offsets, dv, DV, acc.shape[1])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m, l


@triton.jit
def store_rows(out, lse, values, lse_values, tokens, heads, inside, out_strides, lse_strides, DV: tl.constexpr):
    dv = tl.arange(0, values.shape[1])
    offsets = tokens.to(tl.int64) * out_strides[0] + heads * out_strides[1]
    mask = inside[:, None] if values.shape[1] == DV else inside[:, None] & (dv[None, :] < DV)
    tl.store(out + offsets[:, None] + dv[None, :], values.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + tokens.to(tl.int64) * lse_strides[0] + heads * lse_strides[1], lse_values, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_pages"], do_not_specialize_on_alignment=["plan", "page_table", "lse"])
def attention_kernel(q_ptr, k_cache, v_cache, out, lse, plan, page_table, scale_ptr, sm_scale, num_tokens, num_pages,
                     q_strides, k_strides, v_strides, out_strides, lse_strides,
                     GROUP: tl.constexpr, CAUSAL: tl.constexpr, SAME_STRIDES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr,
                     DV_PADDED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                     NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Strides are in elements: q, out, lse (token, head); caches (page, token in page, head)."""
    if tl.program_id(0) >= tl.load(plan + NUM_ITEMS):
        return
    item = plan + HEADER_WORDS + tl.program_id(0).to(tl.int64) * ITEM_WORDS
    q_start = tl.load(item + Q_START)
    q_len = tl.load(item + Q_LEN)
    kv_len = tl.load(item + KV_LEN)
    kv_head = tl.load(item + KV_HEAD)
    row_begin = tl.load(item + ROW_BEGIN)
    key_begin = tl.load(item + KEY_BEGIN)
    key_end = tl.load(item + KEY_END)
    full_end = tl.load(item + FULL_END)
    position = (tl.load(item + PAGE_HIGH).to(tl.int64) << 32) | (tl.load(item + PAGE_LOW).to(tl.int64) & 0xFFFFFFFF)

    rows = row_begin + tl.arange(0, BLOCK_M)
    token_in_sequence = rows // GROUP
    tokens = q_start + token_in_sequence
    heads = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    inside = (token_in_sequence < q_len) & (tokens < num_tokens)
    acc = tl.zeros([BLOCK_M, DV_PADDED], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if (key_end <= key_begin) | (num_pages == 0):
        store_rows(out, lse, acc, m, tokens, heads, inside, out_strides, lse_strides, DV)
        return

    d = tl.arange(0, D_PADDED)
    q_offsets = tokens.to(tl.int64) * q_strides[0] + heads * q_strides[1]
    q_mask = inside[:, None] & (d[None, :] < D)
    q = tl.load(q_ptr + q_offsets[:, None] + d[None, :], mask=q_mask, other=0.0)
    scale = sm_scale
    if scale_ptr is not None:
        scale *= tl.load(scale_ptr)
    # A negative scale would turn the running maximum into a minimum; -q keeps the product and is exact.
    q = tl.where(scale < 0, -q, q)
    scale = tl.abs(scale) * 1.4426950408889634

    seen = visible_keys(token_in_sequence, q_len, kv_len, CAUSAL)
    limit = tl.minimum(seen, key_end)
    l = tl.zeros([BLOCK_M], tl.float32)
    k_head, v_head = k_cache + kv_head.to(tl.int64) * k_strides[2], v_cache + kv_head.to(tl.int64) * v_strides[2]
    middle = key_begin + (tl.maximum(full_end - key_begin, 0) // BLOCK_N) * BLOCK_N
    acc, m, l = attend_keys(acc, m, l, q, k_head, v_head, page_table, position, num_pages, key_begin, middle, limit,
                            key_end, scale, k_strides, v_strides, False, SAME_STRIDES, D, DV, PAGE_SIZE, BLOCK_N, NUM_STAGES,
                            PRECISION)  # fmt: skip
    acc, m, l = attend_keys(acc, m, l, q, k_head, v_head, page_table, position, num_pages, middle, key_end, limit,
                            key_end, scale, k_strides, v_strides, True, SAME_STRIDES, D, DV, PAGE_SIZE, BLOCK_N, NUM_STAGES,
                            PRECISION)  # fmt: skip
    values, lse_values = finish_softmax(acc, m, l)
    store_rows(out, lse, values, lse_values, tokens, heads, inside, out_strides, lse_strides, DV)
