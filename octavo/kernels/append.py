"""Write new tokens' keys and values into their pages."""

import triton
import triton.language as tl

from octavo.kernels.primitives import find_sequence, sequence_shape


@triton.jit
def copy_rows(source, target, source_offsets, target_offsets, mask, DIM: tl.constexpr, PADDED: tl.constexpr):
    d = tl.arange(0, PADDED)
    mask = mask[:, None] & (d[None, :] < DIM)
    values = tl.load(source + source_offsets[:, None] + d[None, :], mask=mask)
    tl.store(target + target_offsets[:, None] + d[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["table_stride", "entries", "num_tokens", "num_sequences", "num_pages", "steps"],
            do_not_specialize_on_alignment=["qo_indptr", "kv_ptr", "last_page_len", "page_table"])  # fmt: skip
def append_kernel(k, v, k_cache, v_cache, qo_indptr, kv_ptr, last_page_len, page_table, table_stride, entries,
                  num_tokens, num_sequences, num_pages, steps, k_in_strides, v_in_strides, k_strides, v_strides,
                  PAGE_SIZE: tl.constexpr, DENSE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                  D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Grid (tokens / BLOCK_T, kv heads). Token i of a sequence goes to position kv_len - q_len + i."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    sequence = find_sequence(qo_indptr, token, num_sequences, steps)
    table = (qo_indptr, kv_ptr, last_page_len, table_stride, entries, num_tokens, num_sequences)
    q_start, q_len, kv_len, position = sequence_shape(table, sequence, PAGE_SIZE, DENSE)
    key = kv_len - q_len + token - q_start
    mask = (token < num_tokens) & (sequence < num_sequences) & (key >= 0) & (key < kv_len)
    page = tl.load(page_table + position + key // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
    mask = mask & (page >= 0) & (page < num_pages)
    in_page = (key % PAGE_SIZE).to(tl.int64)
    token = token.to(tl.int64)
    copy_rows(k, k_cache, token * k_in_strides[0] + head * k_in_strides[1],
              page * k_strides[0] + in_page * k_strides[1] + head * k_strides[2], mask, D, D_PADDED)  # fmt: skip
    copy_rows(v, v_cache, token * v_in_strides[0] + head * v_in_strides[1],
              page * v_strides[0] + in_page * v_strides[1] + head * v_strides[2], mask, DV, DV_PADDED)  # fmt: skip
