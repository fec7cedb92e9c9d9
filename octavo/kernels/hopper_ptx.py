"""PTX that Gluon cannot express, one named primitive each. Every primitive is executed by whole warps.

A place in shared memory is a constant, in capitals, plus an offset, both in bytes from where the kernel's shared memory
starts. Scalars may differ from lane to lane here, which Gluon does not know: they may meet scalar arithmetic and these
primitives only.
"""

from octavo.kernels.gluon_compat import gl, gluon

WARP = gl.constexpr(32)
SWIZZLE_BYTES = gl.constexpr(128)


@gluon.constexpr_function
def _scope(*lines):
    """A PTX scope that leaves 0 in the result that inline assembly must have."""
    return "{\n" + "\n".join(lines) + "\nmov.b32 $0, 0;\n}"


@gluon.constexpr_function
def _leader(name="leader"):
    """Declares a predicate that is true in the warp's first lane."""
    return f".reg .pred {name};\n.reg .b32 lane;\nmov.u32 lane, %laneid;\nsetp.eq.u32 {name}, lane, 0;"


@gluon.constexpr_function
def _place(name, operand):
    """Declares a register that holds an offset's address."""
    return f".reg .b32 {name};\nmov.u32 {name}, global_smem;\nadd.u32 {name}, {name}, {operand};"


@gluon.jit
def lane():
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def warp():
    """Index of the warp in the CTA. The shuffle lets the compiler see that it is the same for all lanes."""
    text: gl.constexpr = """{
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        shr.u32 thread, thread, 5;
        shfl.sync.idx.b32 $0, thread, 0, 31, 0xffffffff;
    }"""
    return gl.inline_asm_elementwise(text, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def accumulator_rows(zeros):
    """The rows that a thread holds of a 64-row accumulator, for a tensor of zeros in that layout.

    gl.arange would say the same, but LLVM keeps it in registers from the start of the kernel on, and spills.
    """
    text: gl.constexpr = """{
        .reg .b32 thread, row;
        mov.u32 thread, %tid.x;
        shr.u32 row, thread, 1;
        and.b32 row, row, 48;
        shr.u32 thread, thread, 2;
        and.b32 thread, thread, 7;
        add.u32 $0, row, thread;
        add.u32 $1, $0, 8;
    }"""
    return gl.inline_asm_elementwise(text, "=&r,=&r,r,r", [zeros], gl.int32, is_pure=False, pack=2)


@gluon.constexpr_function
def _copy_rows(lanes):
    shift = lanes.bit_length() - 1
    return "\n".join([
        "{",
        ".reg .b32 row;",
        "mov.u32 row, %tid.x;",
        f"bfe.u32 row, row, {shift}, {7 - shift};",
        *(f"add.u32 ${i}, row, {i * 128 // lanes};" for i in range(lanes // 2)),
        "}",
    ])  # fmt: skip


@gluon.constexpr_function
def _operands(count):
    return ",".join(["=&r"] * count + ["r"] * count)


@gluon.jit
def copy_rows(zeros, LANES: gl.constexpr):
    """The rows that a thread holds of a 64-row tile of which LANES threads hold a row each, for a tensor of zeros.

    As above, in place of gl.arange.
    """
    text: gl.constexpr = _copy_rows(LANES)
    operands: gl.constexpr = _operands(LANES // 2)
    return gl.inline_asm_elementwise(text, operands, [zeros], gl.int32, is_pure=False, pack=LANES // 2)


# mbarriers


@gluon.constexpr_function
def _initialize(place, arrivals):
    return _scope(
        ".reg .pred first;",
        ".reg .b32 thread;",
        "mov.u32 thread, %tid.x;",
        "setp.eq.u32 first, thread, 0;",
        f"@first mbarrier.init.shared::cta.b64 [global_smem+{place}], {arrivals};",
    )


@gluon.jit
def initialize_barrier(PLACE: gl.constexpr, ARRIVALS: gl.constexpr):
    """By the CTA's first thread. Others may use the barrier once the CTA has synchronised."""
    text: gl.constexpr = _initialize(PLACE, ARRIVALS)
    gl.inline_asm_elementwise(text, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _wait(place):
    return _scope(
        _place("barrier", "$1"),
        ".reg .pred done;",
        f"AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [barrier+{place}], $2;",
        "@!done bra.uni AGAIN;",
    )


@gluon.jit
def wait(PLACE: gl.constexpr, offset, phase):
    """Block until the barrier has completed the phase of this parity."""
    text: gl.constexpr = _wait(PLACE)
    gl.inline_asm_elementwise(text, "=r,r,r", [offset, phase], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _arrive(place):
    return _scope(_leader(), _place("barrier", "$1"), f"@leader mbarrier.arrive.shared::cta.b64 _, [barrier+{place}];")


@gluon.jit
def arrive(PLACE: gl.constexpr, offset):
    """One arrival for the warp."""
    text: gl.constexpr = _arrive(PLACE)
    gl.inline_asm_elementwise(text, "=r,r", [offset], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _arrive_when_copied(place):
    return _scope(_place("barrier", "$1"), f"cp.async.mbarrier.arrive.noinc.shared::cta.b64 [barrier+{place}];")


@gluon.jit
def arrive_when_copied(PLACE: gl.constexpr, offset):
    """One arrival for each lane, once its cp.async copies so far have landed."""
    text: gl.constexpr = _arrive_when_copied(PLACE)
    gl.inline_asm_elementwise(text, "=r,r", [offset], gl.int32, is_pure=False, pack=1)


# words in shared memory


@gluon.constexpr_function
def _load_word(place):
    return "{\n" + _place("word", "$1") + f"\nld.shared.b32 $0, [word+{place}];\n}}"


@gluon.jit
def load_word(PLACE: gl.constexpr, offset):
    text: gl.constexpr = _load_word(PLACE)
    return gl.inline_asm_elementwise(text, "=r,r", [offset], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _store_words(place, barrier):
    return _scope(
        _leader(),
        _place("word", "$1"),
        _place("barrier", "$3"),
        ".reg .pred on;",
        "setp.ne.b32 on, $4, 0;",
        f"@on st.shared.b32 [word+{place}], $2;",
        "bar.warp.sync 0xffffffff;",
        "and.pred on, on, leader;",
        f"@on mbarrier.arrive.shared::cta.b64 _, [barrier+{barrier}];",
    )


@gluon.jit
def store_words_and_arrive(PLACE: gl.constexpr, offset, word, BARRIER: gl.constexpr, barrier_offset, enabled):
    """Each lane of an enabled warp stores its word, then the warp arrives once."""
    text: gl.constexpr = _store_words(PLACE, BARRIER)
    gl.inline_asm_elementwise(text, "=r,r,r,r,r", [offset, word, barrier_offset, enabled], gl.int32, is_pure=False,
                              pack=1)  # fmt: skip


@gluon.constexpr_function
def _flag(place, bound):
    return f"""{{
        {_leader()}
        {_place("word", "$4")}
        .reg .pred first, second;
        setp.gt.f32 first, $2, {bound};
        setp.gt.f32 second, $3, {bound};
        or.pred first, first, second;
        vote.sync.any.pred first, first, 0xffffffff;
        selp.b32 $0, 1, 0, first;
        @leader st.shared.b32 [word+{place}], $0;
        bar.warp.sync 0xffffffff;
        mov.b32 $1, $0;
    }}"""


@gluon.jit
def flag_if_above(values, BOUND: gl.constexpr, PLACE: gl.constexpr, offset):
    """Leave in the warp's word whether any of its values (two for each thread) exceeds a constant."""
    text: gl.constexpr = _flag(PLACE, BOUND)
    gl.inline_asm_elementwise(text, "=&r,=&r,f,f,r,r", [values, offset], gl.int32, is_pure=False, pack=2)


# the queue of work items


@gluon.jit
def take_number(counter, last, enabled):
    """An enabled warp's next number from a counter in global memory. Whoever draws `last` resets the counter."""
    text: gl.constexpr = """{
        .reg .pred on;
        .reg .b32 lane, zero;
        mov.u32 lane, %laneid;
        setp.eq.u32 on, lane, 0;
        setp.ne.and.b32 on, $3, 0, on;
        mov.b32 $0, 0;
        mov.b32 zero, 0;
        @on atom.global.relaxed.gpu.add.u32 $0, [$1], 1;
        setp.eq.and.u32 on, $0, $2, on;
        @on st.global.relaxed.gpu.u32 [$1], zero;
        shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff;
    }"""
    return gl.inline_asm_elementwise(text, "=&r,l,r,r", [counter, last, enabled], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _count_arrival(place):
    return f"""{{
        .reg .pred on;
        .reg .b32 thread, seen, zero;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 on, thread, 0;
        mov.b32 seen, 0;
        mov.b32 zero, 0;
        @on atom.global.acq_rel.gpu.add.u32 seen, [$1], 1;
        setp.eq.u32.and on, seen, $2, on;
        @on st.global.relaxed.gpu.u32 [$1], zero;
        selp.b32 seen, 1, 0, on;
        setp.eq.u32 on, thread, 0;
        @on st.shared.b32 [global_smem+{place}], seen;
        mov.b32 $0, 0;
    }}"""


@gluon.jit
def count_arrival(counter, last, PLACE: gl.constexpr):
    """A warpgroup's first thread adds 1 and leaves in shared memory whether it saw `last`; then it resets the counter.

    What the warpgroup wrote before its last barrier is released; what others released is acquired, after the next.
    """
    text: gl.constexpr = _count_arrival(PLACE)
    gl.inline_asm_elementwise(text, "=r,l,r", [counter, last], gl.int32, is_pure=False, pack=1)


# tiles: 32 rows for each warp, in blocks of 64 columns (128 bytes), 128-byte swizzle


@gluon.constexpr_function
def _gather(place, column_blocks, column_block_bytes):
    lines = [
        _place("even", "$2"),
        ".reg .b32 lane, row, chunk, odd, from, unit;",
        ".reg .b64 column, source;",
        "mov.u32 lane, %laneid;",
        "shr.u32 row, lane, 3;",
        "and.b32 chunk, lane, 7;",
        # Chunk c of row r lies at chunk c ^ (r % 8); this lane's rows are row, row + 4, row + 8, ...
        "mad.lo.u32 even, row, 128, even;",
        "add.u32 odd, row, 4;",
        "xor.b32 odd, chunk, odd;",
        "mad.lo.u32 odd, odd, 16, even;",
        "xor.b32 from, chunk, row;",
        "mad.lo.u32 even, from, 16, even;",
        "mul.wide.u32 column, chunk, 16;",
        "add.u64 column, column, $3;",
    ]
    for step in range(8):
        lines += [
            f"add.u32 from, row, {4 * step};",
            "shfl.sync.idx.b32 unit, $1, from, 31, 0xffffffff;",
            "mad.wide.u32 source, unit, 16, column;",
        ]
        for block in range(column_blocks):
            to = f"{'odd' if step % 2 else 'even'}+{place + 512 * step + block * column_block_bytes}"
            lines.append(f"cp.async.cg.shared.global [{to}], [source+{128 * block}], 16;")
    return _scope(*lines)


@gluon.jit
def gather_rows(unit, base, PLACE: gl.constexpr, offset, COLUMN_BLOCKS: gl.constexpr, COLUMN_BLOCK_BYTES: gl.constexpr):
    """Copy 32 rows from global to shared memory with cp.async: row i starts 16 * (lane i's unit) bytes after base.

    COLUMN_BLOCK_BYTES: distance in shared memory between the tile's blocks of 64 columns.
    """
    text: gl.constexpr = _gather(PLACE, COLUMN_BLOCKS, COLUMN_BLOCK_BYTES)
    gl.inline_asm_elementwise(text, "=r,r,r,l", [unit, offset, base], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _consecutive(rows):
    return f"""{{
        .reg .pred same;
        .reg .b32 lane, leader, start, first;
        mov.u32 lane, %laneid;
        and.b32 leader, lane, {32 - rows};
        sub.u32 start, $1, lane;
        shfl.sync.idx.b32 first, start, leader, 31, 0xffffffff;
        setp.eq.u32 same, first, start;
        vote.sync.all.pred same, same, 0xffffffff;
        selp.b32 $0, 1, 0, same;
    }}"""


@gluon.jit
def consecutive(row, ROWS: gl.constexpr):
    """1 where the lanes' rows run consecutively in groups of ROWS, else 0; the same for all lanes."""
    text: gl.constexpr = _consecutive(ROWS)
    return gl.inline_asm_elementwise(text, "=r,r", [row], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _boxes(place, barrier, rows, column_blocks, column_block_bytes):
    copy = "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
    lines = [
        ".reg .pred first;",
        ".reg .b32 lane, column;",
        "mov.u32 lane, %laneid;",
        f"and.b32 column, lane, {rows - 1};",
        "setp.eq.u32 first, column, 0;",
        _place("to", "$1"),
        _place("barrier", "$2"),
        "mad.lo.u32 to, lane, 128, to;",
        f"add.u32 to, to, {place};",
        f"add.u32 barrier, barrier, {barrier};",
        "@!first mbarrier.arrive.shared::cta.b64 _, [barrier];",
        "@!first bra JOIN;",
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], {rows * 128 * column_blocks};",
        "mov.b32 column, 0;",
    ]
    for _ in range(column_blocks):
        lines += [
            f"{copy} [to], [$3, {{column, $4, $5, $6}}], [barrier];",
            f"add.u32 to, to, {column_block_bytes};",
            "add.u32 column, column, 64;",
        ]
    return _scope(*lines, "JOIN: bar.warp.sync 0xffffffff;")


@gluon.jit
def load_boxes(tensor_map, row, head, page, ROWS: gl.constexpr, PLACE: gl.constexpr, offset, BARRIER: gl.constexpr,
               barrier_offset, COLUMN_BLOCKS: gl.constexpr, COLUMN_BLOCK_BYTES: gl.constexpr):  # fmt: skip
    """Copy 32 rows with TMA, in groups of ROWS consecutive ones; each lane says where its row is, each group's first
    lane is heard. Each lane arrives once; the bytes count on the barrier.
    """
    text: gl.constexpr = _boxes(PLACE, BARRIER, ROWS, COLUMN_BLOCKS, COLUMN_BLOCK_BYTES)
    gl.inline_asm_elementwise(text, "=r,r,r,l,r,r,r", [offset, barrier_offset, tensor_map, row, head, page], gl.int32,
                              is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def acquire_tensor_map(tensor_map):
    """Before the first use of a descriptor in global memory, whose bytes came there by an ordinary copy."""
    text: gl.constexpr = "fence.proxy.tensormap::generic.acquire.gpu [$1], 128; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r,l", [tensor_map], gl.int32, is_pure=False, pack=1)


@gluon.jit
def finish_copies():
    """Wait for this thread's cp.async copies, which a thread must not leave behind when it exits."""
    text: gl.constexpr = _scope("cp.async.wait_all;")
    gl.inline_asm_elementwise(text, "=r", [], gl.int32, is_pure=False, pack=1)
