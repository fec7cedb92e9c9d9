"""What the warps of the sm_90 kernel share: configuration, map of shared memory, rings of buffers, work items."""

from octavo import work_item as layout
from octavo.kernels import hopper_ptx as ptx
from octavo.kernels.gluon_compat import aggregate, gl, gluon, reinterpret

HEADER_WORDS = gl.constexpr(layout.HEADER_WORDS)
NUM_ITEMS = gl.constexpr(layout.NUM_ITEMS)
ITEMS_TAKEN = gl.constexpr(layout.ITEMS_TAKEN)
ITEM_WORDS = gl.constexpr(layout.ITEM_WORDS)
Q_START = gl.constexpr(layout.Q_START)
Q_LEN = gl.constexpr(layout.Q_LEN)
KV_LEN = gl.constexpr(layout.KV_LEN)
PAGE_LOW = gl.constexpr(layout.PAGE_LOW)
PAGE_HIGH = gl.constexpr(layout.PAGE_HIGH)
KV_HEAD = gl.constexpr(layout.KV_HEAD)
ROW_BEGIN = gl.constexpr(layout.ROW_BEGIN)
KEY_BEGIN = gl.constexpr(layout.KEY_BEGIN)
KEY_END = gl.constexpr(layout.KEY_END)
FULL_END = gl.constexpr(layout.FULL_END)
ROW_COUNT = gl.constexpr(layout.ROW_COUNT)
SPLIT = gl.constexpr(layout.SPLIT)
NUM_SPLITS = gl.constexpr(layout.NUM_SPLITS)
SLOT = gl.constexpr(layout.SLOT)
ARRIVED = gl.constexpr(layout.ARRIVED)
THERE = gl.constexpr(layout.ARRIVED)  # in shared memory: 1 + the item's place in the plan; 0 says that none is left

ROWS = gl.constexpr(64)  # of one attending warpgroup
WARPGROUPS = gl.constexpr(2)
BLOCK_M = ROWS * WARPGROUPS
WARPS = gl.constexpr(12)
ATTENDING_WARPS = gl.constexpr(8)
LOADING_THREADS = gl.constexpr(64)  # for K, and as many for V
LINE = gl.constexpr(1024)  # bytes: shared memory is handed out in lines, so that every tile is aligned to its swizzle
UNIT = gl.constexpr(8)  # elements in 16 bytes: strides are counted in these
TINY_SCALE = gl.constexpr(2.0**-100)
LAZY_BITS = gl.constexpr(8.0)
RUNS_NEVER, RUNS_FLAT, RUNS_IN_PAGE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@aggregate
class Config:
    """What is fixed when the kernel is compiled, and the map of shared memory (in bytes) that follows from it."""

    GROUP: gl.constexpr
    D: gl.constexpr
    PAGE_SIZE: gl.constexpr
    CAUSAL: gl.constexpr
    RUNS: gl.constexpr
    BOX_ROWS: gl.constexpr
    BLOCK_N: gl.constexpr
    SLOTS: gl.constexpr
    STAGES: gl.constexpr
    FENCE: gl.constexpr
    SIGNED: gl.constexpr
    CUTS: gl.constexpr
    dtype: gl.constexpr
    Q_TILE_BYTES: gl.constexpr
    KV_TILE_BYTES: gl.constexpr
    KEYS: gl.constexpr
    VALUES: gl.constexpr
    CONTROL: gl.constexpr
    WORDS: gl.constexpr
    FLAGS: gl.constexpr
    LAST: gl.constexpr
    S_LAYOUT: gl.constexpr
    O_LAYOUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, GROUP, D, PAGE_SIZE, CAUSAL, RUNS, BOX_ROWS, BLOCK_N, SLOTS, STAGES, FENCE, SIGNED, CUTS, dtype):
        self.GROUP = gl.constexpr(GROUP)
        self.D = gl.constexpr(D)
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.RUNS = gl.constexpr(RUNS)
        self.BOX_ROWS = gl.constexpr(BOX_ROWS)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.SLOTS = gl.constexpr(SLOTS)
        self.STAGES = gl.constexpr(STAGES)
        self.FENCE = gl.constexpr(FENCE)
        self.SIGNED = gl.constexpr(SIGNED)
        self.CUTS = gl.constexpr(CUTS)
        self.dtype = gl.constexpr(dtype)
        q_bytes, kv_bytes = 64 * D * 2, BLOCK_N * D * 2
        self.Q_TILE_BYTES = gl.constexpr(q_bytes)
        self.KV_TILE_BYTES = gl.constexpr(kv_bytes)
        self.KEYS = gl.constexpr(SLOTS * 2 * q_bytes)
        self.VALUES = gl.constexpr(SLOTS * 2 * q_bytes + STAGES * kv_bytes)
        control = SLOTS * 2 * q_bytes + 2 * STAGES * kv_bytes
        self.CONTROL = gl.constexpr(control)
        self.WORDS = gl.constexpr(control + 256)
        self.FLAGS = gl.constexpr(control + 512)
        self.LAST = gl.constexpr(control + 576)
        self.S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
        self.O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))


@aggregate
class Ring:
    """Buffers that loading warps fill and others use, in turn. Buffers are named by a running count.

    FULL, EMPTY: where the mbarriers of the first stage lie; those of the next stages follow.
    """

    FULL: gl.constexpr
    EMPTY: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, PLACE, STAGES):
        self.FULL = gl.constexpr(PLACE)
        self.EMPTY = gl.constexpr(PLACE + 8 * STAGES)
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def initialize(self, ARRIVALS: gl.constexpr, RELEASES: gl.constexpr):
        for stage in gl.static_range(self.STAGES):
            ptx.initialize_barrier(self.FULL + 8 * stage, ARRIVALS)
            ptx.initialize_barrier(self.EMPTY + 8 * stage, RELEASES)

    @gluon.jit
    def stage(self, count):
        return count & (self.STAGES - 1)

    @gluon.jit
    def parity(self, count):
        return (count // self.STAGES) & 1

    @gluon.jit
    def acquire(self, count):
        """Wait until the buffer's last users have released it."""
        ptx.wait(self.EMPTY, 8 * self.stage(count), self.parity(count) ^ 1)

    @gluon.jit
    def wait_full(self, count):
        ptx.wait(self.FULL, 8 * self.stage(count), self.parity(count))

    @gluon.jit
    def fill_when_copied(self, count):
        ptx.arrive_when_copied(self.FULL, 8 * self.stage(count))

    @gluon.jit
    def release(self, count):
        """By every using warp, once."""
        ptx.arrive(self.EMPTY, 8 * self.stage(count))


@aggregate
class Cache:
    """K or V in global memory. Strides are in 16 bytes; tensor_map is the address of its TMA descriptor, if any."""

    pointer: gl.tensor
    page_stride: gl.tensor
    token_stride: gl.tensor
    head_stride: gl.tensor
    tensor_map: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pointer, page_stride, token_stride, head_stride, tensor_map):
        self.pointer = pointer
        self.page_stride = page_stride
        self.token_stride = token_stride
        self.head_stride = head_stride
        self.tensor_map = tensor_map

    @gluon.jit
    def unit(self, row, config):
        """Where row (page id * page_size + place in the page) lies: below 64 GiB, so 32 bits hold it without a sign."""
        if config.RUNS == RUNS_FLAT or config.PAGE_SIZE == 1:
            unit = row * self.token_stride
        else:
            unit = row // config.PAGE_SIZE * self.page_stride + row % config.PAGE_SIZE * self.token_stride
        return unit


@aggregate
class Item:
    """A work item in shared memory; fields are read when they are needed, to keep registers free."""

    PLACE: gl.constexpr
    offset: gl.tensor

    @gluon.constexpr_function
    def __init__(self, PLACE, offset):
        self.PLACE = gl.constexpr(PLACE)
        self.offset = offset

    @gluon.jit
    def word(self, FIELD: gl.constexpr):
        return ptx.load_word(self.PLACE + 4 * FIELD, self.offset)

    @gluon.jit
    def num_blocks(self, config):
        keys = gl.maximum(self.word(KEY_END) - self.word(KEY_BEGIN), 0)
        return (keys + config.BLOCK_N - 1) // config.BLOCK_N

    @gluon.jit
    def position(self):
        """Of the sequence's first page in the page table."""
        return (self.word(PAGE_HIGH).to(gl.int64) << 32) | (self.word(PAGE_LOW).to(gl.int64) & 0xFFFFFFFF)


@aggregate
class Program:
    """Everything that the warp roles share."""

    config: Config
    arena: gl.shared_memory_descriptor
    items: Ring
    queries: Ring
    keys: Ring
    values: Ring
    k_cache: Cache
    v_cache: Cache
    q: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    plan: gl.tensor
    page_table: gl.tensor
    scale: gl.tensor
    num_tokens: gl.tensor
    num_pages: gl.tensor
    states_begin: gl.tensor
    num_states: gl.tensor
    q_token_stride: gl.tensor
    q_head_stride: gl.tensor
    out_token_stride: gl.tensor
    out_head_stride: gl.tensor
    lse_token_stride: gl.tensor
    lse_head_stride: gl.tensor

    @gluon.constexpr_function
    def __init__(self, config, arena, k_cache, v_cache, q, out, lse, plan, page_table, scale, num_tokens, num_pages,
                 states_begin, num_states, q_token_stride, q_head_stride, out_token_stride, out_head_stride,
                 lse_token_stride, lse_head_stride):  # fmt: skip
        self.config = config
        self.arena = arena
        control = config.CONTROL.value
        self.items = Ring(control + 64, config.SLOTS.value)
        self.queries = Ring(control + 96, config.SLOTS.value)
        self.keys = Ring(control + 128, config.STAGES.value)
        self.values = Ring(control + 192, config.STAGES.value)
        self.k_cache = k_cache
        self.v_cache = v_cache
        self.q = q
        self.out = out
        self.lse = lse
        self.plan = plan
        self.page_table = page_table
        self.scale = scale
        self.num_tokens = num_tokens
        self.num_pages = num_pages
        self.states_begin = states_begin
        self.num_states = num_states
        self.q_token_stride = q_token_stride
        self.q_head_stride = q_head_stride
        self.out_token_stride = out_token_stride
        self.out_head_stride = out_head_stride
        self.lse_token_stride = lse_token_stride
        self.lse_head_stride = lse_head_stride

    @gluon.jit
    def tiles(self, rows: gl.constexpr):
        """The arena as tiles [rows, D]."""
        C = self.config
        swizzled: gl.constexpr = gl.NVMMASharedLayout(ptx.SWIZZLE_BYTES, 16, rank=2)
        return reinterpret(self.arena, C.dtype, [C.CONTROL // (2 * rows * C.D), rows, C.D], swizzled)

    @gluon.jit
    def query_tile(self, n, WG: gl.constexpr):
        return self.tiles(ROWS).index(self.items.stage(n) * WARPGROUPS + WG)

    @gluon.jit
    def key_tile(self, count):
        C = self.config
        return self.tiles(C.BLOCK_N).index(C.KEYS // C.KV_TILE_BYTES + self.keys.stage(count))

    @gluon.jit
    def value_tile(self, count):
        C = self.config
        return self.tiles(C.BLOCK_N).index(C.VALUES // C.KV_TILE_BYTES + self.values.stage(count))

    @gluon.jit
    def item(self, n):
        return Item(self.config.WORDS, 4 * ITEM_WORDS * self.items.stage(n))

    @gluon.jit
    def has_item(self, n):
        """Wait for the CTA's n-th item; False when there is none."""
        self.items.wait_full(n)
        return self.item(n).word(THERE) != 0


@gluon.jit
def packed_rows(p, item, rows):
    """(token in sequence, query head) of rows of an item."""
    row = item.word(ROW_BEGIN) + rows
    return row // p.config.GROUP, item.word(KV_HEAD) * p.config.GROUP + row % p.config.GROUP
