"""Variants of attention, one device primitive each. V holds which are on: octavo.backends.constants.VariantConstants.

What is off is not compiled: the kernels of a plain spec hold nothing of this.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
ONE_SCALE = tl.constexpr(2)  # V.K_SCALE, V.V_SCALE: 0 is none, 1 a number, which only V_SCALE takes
HEAD_SCALES = tl.constexpr(3)
PACKED_MASK = tl.constexpr(2)  # V.MASK: 1 is a byte a key


@triton.jit
def visible_keys(token, q_len, kv_len, RIGHT: tl.constexpr):
    """End of the keys that a token sees: RIGHT keys past its own, bottom-right aligned (0 is causal); -1: all."""
    seen = token * 0 + kv_len
    if RIGHT >= 0:
        seen = tl.minimum(tl.maximum(seen + token - q_len + (1 + RIGHT), 0), kv_len)
    return seen


@triton.jit
def first_visible(token, q_len, kv_len, LEFT: tl.constexpr):
    """First key that a token sees: LEFT keys before its own; -1: from the first on."""
    first = token * 0
    if LEFT >= 0:
        first = tl.minimum(tl.maximum(token - q_len + kv_len - LEFT, 0), kv_len)
    return first


@triton.jit
def soft_cap(scores, scale, CAP: tl.constexpr):
    """The base-2 logits scores * scale, whose natural ones become CAP tanh(logit / CAP).

    tanh x = 1 - 2 / (1 + e^2x), which is never NaN; PTX's tanh.approx is wrong in the fourth digit.
    """
    power = tl.math.exp2(scores * (scale * (2.0 / CAP)))
    return CAP * LOG2_E - (2.0 * CAP * LOG2_E) / (1.0 + power)


@triton.jit
def alibi_bias(keys, position, slope):
    """slope * (key - position of the row), in base 2 as the slope is (Press et al. 2022)."""
    return slope[:, None] * (keys[None, :] - position[:, None]).to(tl.float32)


@triton.jit
def vary_scores(scores, scale, keys, row, V: tl.constexpr):
    """(scores, scale) whose product is the base-2 logit."""
    if V.ALIBI:
        scores = scores * scale + alibi_bias(keys, row[1], row[2])
        scale = 1.0
    if V.SOFT_CAP > 0.0:
        scores = soft_cap(scores, scale, V.SOFT_CAP)
        scale = 1.0
    return scores, scale


@triton.jit
def masked_in(masks, first, keys, inside, V: tl.constexpr):
    """Whether the batch's mask lets rows see keys; first: (byte where a sequence's mask begins, its element of each
    row's first key). Places outside the mask, which broken offsets ask for, are seen by nobody.
    """
    base, element = first
    mask, mask_length = masks
    at = element[:, None] + keys[None, :]
    if V.MASK == PACKED_MASK:
        bit = (at & 7).to(tl.int32)
        at = at >> 3
    at += base
    found = tl.load(mask + at, mask=inside & (at >= 0) & (at < mask_length), other=0)
    if V.MASK == PACKED_MASK:
        found = (found.to(tl.int32) >> bit) & 1
    return found != 0


@triton.jit
def mask_keys(scores, keys, limit, row, masks, V: tl.constexpr):
    """Scores, with -inf where a row does not see a key. masks: (the batch's mask, its length)."""
    seen = keys[None, :] < limit[:, None]
    if V.LEFT >= 0:
        seen &= keys[None, :] >= row[0][:, None]
    if V.MASK > 0:
        seen &= masked_in(masks, row[3], keys, seen, V)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def load_row(place, kv_len, sequence, token, heads, inside, extras, V: tl.constexpr):
    """What variants need of each row: (first key seen, its position among the keys, ALiBi slope in base 2, place in
    the mask); what V does without is anything.

    extras: (sinks, ALiBi slopes, k_scale, v_scale, mask, mask_indptr).
    """
    first = token
    position = token
    slope = token
    place_in_mask = (token, token)
    if V.LEFT >= 0:
        first = first_visible(token, place[2], kv_len, V.LEFT)
    if V.ALIBI:
        position = token - place[2] + kv_len
        slope = tl.load(extras[1] + heads, mask=inside, other=0.0) * LOG2_E
    if V.MASK > 0:
        place_in_mask = (tl.load(extras[5] + sequence).to(tl.int64), token.to(tl.int64) * kv_len)
    return first, position, slope, place_in_mask


@triton.jit
def start_softmax(part, heads, inside, extras, V: tl.constexpr):
    """(m, l) before the first key. A sink is a logit without a value: part 0 of a tile begins with it, and the others,
    whose states are added to it, without."""
    m = tl.full([heads.shape[0]], float("-inf"), tl.float32)
    l = tl.zeros([heads.shape[0]], tl.float32)
    if V.SINKS:
        sinks = load_sinks(extras, heads, inside & (part == 0))
        m = sinks
        l = tl.where(sinks == float("-inf"), 0.0, 1.0)
    return m, l


@triton.jit
def load_sinks(extras, heads, wanted):
    """Sinks of rows in base 2; -inf, as without, where not wanted."""
    return tl.load(extras[0] + heads, mask=wanted, other=float("-inf")) * LOG2_E


@triton.jit
def head_scale(scale, kv_head, KIND: tl.constexpr):
    """A K/V head's scale: a number, or the element of a tensor of one, or of one a head."""
    value = scale
    if KIND == ONE_SCALE:
        value = tl.load(scale)
    elif KIND == HEAD_SCALES:
        value = tl.load(scale + kv_head)
    return value


@triton.jit
def edge_keys(place, begin, kv_len, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              LEFT: tl.constexpr):  # fmt: skip
    """How many keys from `begin` on some rows of a windowed tile no longer see, in whole key blocks."""
    last_token = tl.minimum((place[0] + BLOCK_M - 1) // GROUP, place[2] - 1)
    return tl.cdiv(tl.maximum(first_visible(last_token, place[2], kv_len, LEFT) - begin, 0), BLOCK_N) * BLOCK_N
