"""Device primitives, each named for what it means."""

import triton
import triton.language as tl


@triton.jit
def sequence_shape(table, sequence, PAGE_SIZE: tl.constexpr, DENSE: tl.constexpr):
    """(q_start, q_len, kv_len, position of the first page in the table) of a vector of sequences.

    table: (qo_indptr, kv_indptr or kv_lens, last_page_len or None, row stride of block_table, length of kv_indices or
    columns of block_table, tokens, sequences). One past the last sequence is the padding: the rows past qo_indptr[-1],
    without keys. All is clamped to the tensors' bounds, so that no input makes a kernel read or write outside them.
    """
    qo_indptr, kv_ptr, last_page_len, table_stride, entries, num_tokens, num_sequences = table
    real = sequence < num_sequences
    inside = sequence <= num_sequences
    q_start = tl.load(qo_indptr + sequence, mask=inside, other=0).to(tl.int32)
    q_end = tl.load(qo_indptr + sequence + 1, mask=real, other=0).to(tl.int32)
    q_start = tl.minimum(tl.maximum(q_start, 0), num_tokens)
    q_end = tl.where(real, tl.minimum(tl.maximum(q_end, q_start), num_tokens), num_tokens)
    q_len = tl.where(inside, q_end - q_start, 0)
    if DENSE:
        limit = entries.to(tl.int64) * PAGE_SIZE
        kv_len = tl.load(kv_ptr + sequence, mask=real, other=0).to(tl.int64)
        kv_len = tl.minimum(tl.maximum(kv_len, 0), limit).to(tl.int32)
        position = sequence.to(tl.int64) * table_stride
    else:
        first = tl.load(kv_ptr + sequence, mask=real, other=0).to(tl.int64)
        last = tl.load(kv_ptr + sequence + 1, mask=real, other=0).to(tl.int64)
        position = tl.minimum(tl.maximum(first, 0), entries.to(tl.int64))
        pages = tl.minimum(tl.maximum(last, position), entries.to(tl.int64)) - position
        tail = PAGE_SIZE
        if last_page_len is not None:
            tail = tl.load(last_page_len + sequence, mask=real, other=0).to(tl.int64)
            tail = tl.minimum(tl.maximum(tail, 0), PAGE_SIZE)
        kv_len = tl.where(pages > 0, (pages - 1) * PAGE_SIZE + tail, 0).to(tl.int32)
    return q_start, q_len, kv_len, position


@triton.jit
def key_pages(page_table, position, keys, num_pages, PAGE_SIZE: tl.constexpr):
    """Page ids of keys, int32. A bad id is clamped into the cache: taken as unsigned, a negative one is a large one."""
    page = tl.load(page_table + position + keys // PAGE_SIZE)
    return tl.minimum(page.to(tl.uint32), (num_pages - 1).to(tl.uint32)).to(tl.int32)


@triton.jit
def key_offsets(pages, keys, strides, PAGE_SIZE: tl.constexpr):
    """64-bit element offsets of keys in a cache with strides (page, token in page, head)."""
    offsets = pages.to(tl.int64) * strides[0]
    if PAGE_SIZE > 1:
        offsets += (keys % PAGE_SIZE) * strides[1]
    return offsets


@triton.jit
def load_tile(pointer, offsets, columns, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Rows at `offsets`, DIM elements each; columns from DIM to PADDED are zero."""
    pointers = pointer + offsets[:, None] + columns[None, :]
    mask = None if DIM == PADDED else columns[None, :] < DIM
    return tl.load(pointers, mask=mask, other=None if DIM == PADDED else 0.0)


@triton.jit
def online_softmax_step(scores, scale, m, l):
    """Fold scores [rows, keys] times scale > 0 into running maxima m and sums l; scores of masked keys are -inf.

    Returns (p, alpha, m, l): p = 2^(scores scale - m), alpha what earlier accumulators are multiplied with (Milakov and
    Gimelshein 2018, in base 2). A row that has seen no key keeps m = -inf without making NaN.
    """
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(scores * scale - m_safe[:, None])
    alpha = tl.math.exp2(m - m_safe)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def finish_softmax(acc, m, l):
    """(out, base-2 lse); a row without keys gets 0 and -inf."""
    empty = l == 0.0
    out = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, l))[:, None]
    return out, tl.where(empty, float("-inf"), m + tl.math.log2(tl.where(empty, 1.0, l)))


@triton.jit
def tile_rows(place, first_row, num_tokens, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """(token in its sequence, token, query head, whether it exists) of ROWS rows of a tile from first_row on.

    place: (first row of the tile, first token of the sequence, its tokens, K/V head).
    """
    row_begin, q_start, q_len, kv_head = place
    rows = row_begin + first_row + tl.arange(0, ROWS)
    token_in_sequence = rows // GROUP
    tokens = q_start + token_in_sequence
    heads = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    inside = (token_in_sequence < q_len) & (tokens < num_tokens)
    return token_in_sequence, tokens.to(tl.int64), heads, inside


@triton.jit
def store_rows(out, lse, values, lse_values, tokens, heads, inside, out_strides, lse_strides, DV: tl.constexpr):
    dv = tl.arange(0, values.shape[1])
    offsets = tokens * out_strides[0] + heads * out_strides[1]
    mask = inside[:, None] if values.shape[1] == DV else inside[:, None] & (dv[None, :] < DV)
    tl.store(out + offsets[:, None] + dv[None, :], values.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + tokens * lse_strides[0] + heads * lse_strides[1], lse_values, mask=inside)


@triton.jit
def find_sequence(qo_indptr, token, num_sequences, steps):
    """The sequence that owns each token: how many sequences end at or before it. steps >= log2(num_sequences) + 1."""
    low = tl.zeros_like(token)
    high = low + num_sequences
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        end = tl.load(qo_indptr + middle + 1, mask=searching, other=0).to(tl.int32)
        low = tl.where(searching & (end <= token), middle + 1, low)
        high = tl.where(searching & (end > token), middle, high)
    return low
