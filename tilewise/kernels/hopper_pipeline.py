"""What Hopper kernels are made of, in Triton's Gluon: rings of shared memory between a producer and its
consumers, tiles that the TMA engine moves, turns that warpgroups take, operands of matrix instructions.

A ring's slots are used in turn; `count` numbers the uses. The producer waits until a slot is empty and
has it filled; consumers wait until it is full and give it back.

The TMA engine sees a tensor (B, S, H, D) of any strides as it is. Rows past S read as zeros and are not
written. A clipped view has such an end at any row: see `_clipped` in backends/hopper.py.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Names that changed: with Triton 3.8 those of the copies, with 3.9 that of reinterpret.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

# How many dimensions a view has that is not clipped; one that is has five.
WHOLE = gl.constexpr(4)
# The row of a clipped view that its end lies at.
END = gl.constexpr(2**30)

# The rows of one warpgroup's matrix instructions, and its threads.
GROUP_ROWS = gl.constexpr(64)
GROUP_THREADS = gl.constexpr(128)
# Triton's own named barriers have lower ids.
_FIRST_TURN = gl.constexpr(8)


@gluon.constexpr_function
def shared_layout(rank):
    """The layout in shared memory of tiles of 16-bit numbers, for copies and matrix instructions alike."""
    return gl.NVMMASharedLayout(128, 16, rank)


# ------------------------------------------------------------------ rings


class Ring(NamedTuple):
    """`data` [slots, …]; for each slot, barriers that say that it is full, or empty. Slots that are filled once
    have no `empty`: Triton gives the memory of a barrier on which no one waits to others, and what its
    initialisation leaves there may come after what is loaded."""

    data: Any
    full: Any
    empty: Any


@gluon.jit
def ring_of(data, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, PRODUCERS: gl.constexpr = 1):
    """A ring, empty; each of so many consumers has to give a slot back, each of so many producers fills a
    share of it."""
    return Ring(data, barriers(SLOTS, PRODUCERS), barriers(SLOTS, CONSUMERS))


@gluon.jit
def barriers(SLOTS: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def tile_ring(
    dtype: gl.constexpr,
    SLOTS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    return ring_of(tile_buffer(dtype, SLOTS, ROWS, COLUMNS), SLOTS, CONSUMERS)


@gluon.jit
def tile_buffer(
    dtype: gl.constexpr, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    return gl.allocate_shared_memory(dtype, [SLOTS, ROWS, COLUMNS], shared_layout(2))


@gluon.jit
def line_buffer(SLOTS: gl.constexpr, NUMBERS: gl.constexpr):
    """Lines of float32, one beside each slot of a ring (`load_tile_and_line`)."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    return gl.allocate_shared_memory(gl.float32, [SLOTS, NUMBERS], LAYOUT)


@gluon.jit
def slot(ring, count):
    return ring.data.index(count % ring.data.shape[0])


@gluon.jit
def wait_full(ring, count):
    mbarrier.wait(ring.full.index(count % ring.data.shape[0]), (count // ring.data.shape[0]) & 1)


@gluon.jit
def wait_empty(ring, count):
    mbarrier.wait(
        ring.empty.index(count % ring.data.shape[0]), ((count // ring.data.shape[0]) & 1) ^ 1
    )


@gluon.jit
def hand_over(ring, count):
    """A producer's share of a slot, written by its threads, may be read, by matrix instructions too."""
    fence_async_shared()
    hand_to_threads(ring, count)


@gluon.jit
def hand_to_threads(ring, count):
    """As hand_over, but not by matrix instructions."""
    mbarrier.arrive(ring.full.index(count % ring.data.shape[0]))


@gluon.jit
def give_back(ring, count):
    mbarrier.arrive(ring.empty.index(count % ring.data.shape[0]))


# ------------------------------------------------------------------ numbers from the producer


@gluon.jit
def number_ring(SLOTS: gl.constexpr, NUMBERS: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of so many int32 per slot, a power of two."""
    data = gl.allocate_shared_memory(
        gl.int32, [SLOTS, NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    return ring_of(data, SLOTS, CONSUMERS)


@gluon.constexpr_function
def _numbers_layout(count, warps):
    """Every thread holds all of them, so that none moves between threads."""
    return gl.BlockedLayout([count], [32], [warps], [0])


@gluon.jit
def put_numbers(ring, count, numbers):
    NUMBERS: gl.constexpr = ring.data.shape[1]
    layout: gl.constexpr = _numbers_layout(NUMBERS, gl.num_warps())
    index = gl.arange(0, NUMBERS, layout)
    together = gl.full([NUMBERS], numbers[0], gl.int32, layout)
    for i in gl.static_range(1, len(numbers)):
        together = gl.where(index == i, numbers[i], together)
    wait_empty(ring, count)
    slot(ring, count).store(together)
    hand_to_threads(ring, count)


@gluon.jit
def take_numbers(ring, count):
    """The numbers of a slot, which must be given back."""
    NUMBERS: gl.constexpr = ring.data.shape[1]
    layout: gl.constexpr = _numbers_layout(NUMBERS, gl.num_warps())
    wait_full(ring, count)
    return slot(ring, count).load(layout)


@gluon.jit
def one_of(numbers, i: gl.constexpr):
    index = gl.arange(0, numbers.shape[0], numbers.type.layout)
    return gl.sum(gl.where(index == i, numbers, 0), 0)


# ------------------------------------------------------------------ tiles in and out


class Part(NamedTuple):
    """The rows of one sequence in a view: of batch entry `batch`, or (clipped) `length` rows from row
    `start` on."""

    batch: Any
    start: Any
    length: Any


@gluon.jit
def _viewed(buffer, view):
    """A buffer [rows, columns] with the shape of a view's tiles, whose rows may be those of several heads."""
    SHAPE: gl.constexpr = view.block_shape
    LAYOUT: gl.constexpr = view.layout
    return _reinterpreted(buffer, buffer.dtype, SHAPE, LAYOUT)


@gluon.jit
def _reinterpreted(buffer, dtype: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The memory of a buffer, taken for another."""
    if _REINTERPRETS:
        other = buffer.reinterpret(dtype, SHAPE, LAYOUT)
    else:
        other = buffer._reinterpret(dtype, SHAPE, LAYOUT)
    return other


@gluon.jit
def load_tile(view, part, row, head, ring, count):
    """Has the ring's slot filled with rows from `row` on of a part, of a head. The slot must be empty."""
    buffer = slot(ring, count)
    full = ring.full.index(count % ring.data.shape[0])
    mbarrier.expect(full, buffer.shape[0] * buffer.shape[1] * 2)
    _copy(view, part, row, head, full, buffer)


@gluon.jit
def load_tile_and_line(view, part, row, head, lines, line, ring, numbers, count):
    """As load_tile; the slot is full when `numbers` of the same slot has a line, too."""
    buffer = slot(ring, count)
    beside = numbers.index(count % ring.data.shape[0])
    full = ring.full.index(count % ring.data.shape[0])
    mbarrier.expect(full, buffer.shape[0] * buffer.shape[1] * 2 + beside.shape[0] * 4)
    _copy(view, part, row, head, full, buffer)
    _tma_load(lines, [line, 0], full, _viewed(beside, lines))


@gluon.jit
def _copy(view, part, row, head, full, buffer):
    if len(view.block_shape) == WHOLE:
        _tma_load(view, [part.batch, row, head, 0], full, _viewed(buffer, view))
    else:
        at = [END, part.start + part.length, END - part.length + row, head, 0]
        _tma_load(view, at, full, _viewed(buffer, view))


@gluon.jit
def await_stored():
    """Waits until all that was stored before has left its buffer."""
    tma.store_wait(0)


@gluon.jit
def store_tile(view, part, row, head, column, buffer):
    """Stores what is in a buffer."""
    fence_async_shared()
    if len(view.block_shape) == WHOLE:
        _tma_store(view, [part.batch, row, head, column], _viewed(buffer, view))
    else:
        at = [END, part.start + part.length, END - part.length + row, head, column]
        _tma_store(view, at, _viewed(buffer, view))


# ------------------------------------------------------------------ parts of columns


@gluon.constexpr_function
def parts_of(columns):
    """Shapes are powers of two: three quarters of one are a half and a quarter."""
    return 1 if columns & (columns - 1) == 0 else 2


@gluon.constexpr_function
def part_start(columns, i):
    return 0 if i == 0 else columns // 3 * 2


@gluon.constexpr_function
def part_width(columns, i):
    return columns if parts_of(columns) == 1 else columns // 3 * (2 - i)


@gluon.jit
def part_of(buffer, COLUMNS: gl.constexpr, i: gl.constexpr):
    """Part i of the first COLUMNS of a buffer [rows, columns]."""
    WIDTH: gl.constexpr = part_width(COLUMNS, i)
    part = buffer
    if buffer.shape[1] != WIDTH:
        part = buffer.slice(part_start(COLUMNS, i), WIDTH, 1)
    return part


# ------------------------------------------------------------------ turns


@gluon.constexpr_function
def _barrier(kind, turn, threads):
    return f"bar.{kind} {turn}, {threads}; mov.b32 $0, 0;"


@gluon.jit
def _named_barrier(KIND: gl.constexpr, TURN: gl.constexpr):
    code: gl.constexpr = _barrier(KIND, _FIRST_TURN + TURN, 2 * GROUP_THREADS)
    gl.inline_asm_elementwise(code, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def open_turns(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Warpgroups issue their products in turn, so that the exponentials of one run under the products of
    another. The first turn is group 0's."""
    if GROUP == GROUPS - 1:
        _named_barrier("arrive", 0)


@gluon.jit
def await_turn(GROUP: gl.constexpr):
    _named_barrier("sync", GROUP)


@gluon.jit
def pass_turn(GROUP: gl.constexpr, GROUPS: gl.constexpr):
    _named_barrier("arrive", (GROUP + 1) % GROUPS)


@gluon.jit
def close_turns(GROUP: gl.constexpr):
    if GROUP == 0:
        _named_barrier("sync", 0)


# ------------------------------------------------------------------ registers


@gluon.constexpr_function
def product_layout(columns):
    """The layout of a warpgroup's product [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def split_columns(product):
    """The numbers of a product's columns as low + high: low depends on the lane alone and high is known at
    compile time, so that nothing which depends on columns needs a register for each of them."""
    columns = gl.arange(0, product.shape[1], gl.SliceLayout(0, product.type.layout))
    return (columns & 6)[None, :], (columns & ~6)[None, :]


@gluon.jit
def partial_row_sums(p):
    """[rows, 4]: sums of a product's rows over the columns of each of the 4 threads that share a row."""
    COLUMNS: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def marked(chosen, like):
    """Which entries of a product (laid out `like` it) are chosen, as `unmarked` takes it: of the 16 that a thread
    has of a row one number, [rows, 4]. They are found out by now, and take two registers up to there."""
    _, high = split_columns(like)
    marks = gl.where(chosen, 1 << _bit(high), 0)
    return keep(partial_row_sums(marks))


@gluon.jit
def unmarked(marks, like):
    LAYOUT: gl.constexpr = product_layout(like.shape[1])
    _, high = split_columns(like)
    of_pairs = gl.expand_dims(gl.expand_dims(marks, 1), 3)
    zeros = gl.reshape(gl.zeros_like(like).to(gl.int32), [like.shape[0], like.shape[1] // 8, 4, 2])
    marks = gl.reshape(zeros + of_pairs, like.shape)
    marks = gl.convert_layout(marks, LAYOUT, assert_trivial=True)
    return (marks & (1 << _bit(high))) != 0


@gluon.jit
def _bit(high):
    return (high >> 3) * 2 + (high & 1)


@gluon.constexpr_function
def _convert_pair(dtype):
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """float32 [rows, columns] as int32 [rows, columns / 2] of pairs of 16-bit numbers: carried around a
    loop as they are, those would take a register each."""
    even, odd = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    code: gl.constexpr = _convert_pair(dtype)
    return gl.inline_asm_elementwise(
        code, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def load_pairs(buffer, GROUP: gl.constexpr):
    """A warpgroup's rows of a buffer [rows, columns] as `pack` has them."""
    COLUMNS: gl.constexpr = buffer.shape[1]
    like = pack(gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, product_layout(COLUMNS)), buffer.dtype)
    SHAPE: gl.constexpr = [buffer.shape[0], COLUMNS // 2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    pairs = _reinterpreted(buffer, gl.int32, SHAPE, LAYOUT)
    pairs = pairs.slice(GROUP * GROUP_ROWS, GROUP_ROWS)
    return pairs.load(like.type.layout)


@gluon.jit
def unpack(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """What `pack` was given, rounded, as the first operand of a product of that layout."""
    even = (pairs & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    both = gl.reshape(gl.join(even, odd), [pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(both, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def add_to(start, product):
    """Adds a product [64, columns] to numbers in memory that lie as a warpgroup's registers hold them:
    [columns / 8, threads, 4], of which 4 are 2 rows by 2 columns (`as_rows`)."""
    EIGHTHS: gl.constexpr = product.shape[1] // 8
    row = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, product.type.layout))
    column = gl.arange(0, product.shape[1], gl.SliceLayout(0, product.type.layout))
    lane = (row // 16 * 32 + row % 8 * 4)[:, None] + (column % 8 // 2)[None, :]
    offset = lane * 4 + (column // 8 * (4 * GROUP_THREADS))[None, :]
    address = (start + _quarters(offset, EIGHTHS)[0]).to(gl.int64)
    a, b, c, d = _quarters(product, EIGHTHS)
    code: gl.constexpr = "red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(
        code, "=r,l,f,f,f,f", [address, a, b, c, d], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _quarters(product, EIGHTHS: gl.constexpr):
    """Of every 2 rows (8 apart) by 2 columns: each of the 4 as a tensor, as threads hold them."""
    apart = gl.reshape(product, [4, 2, 8, EIGHTHS, 4, 2])
    left, right = gl.split(apart)
    a, c = gl.split(gl.permute(left, (0, 2, 3, 4, 1)))
    b, d = gl.split(gl.permute(right, (0, 2, 3, 4, 1)))
    return a, b, c, d


@gluon.jit
def beside_zeros(pairs, wide):
    """pairs, and as many columns of zeros: laid out like `wide`, of twice as many columns."""
    both = gl.permute(gl.join(pairs, gl.zeros_like(pairs)), (0, 2, 1))
    both = gl.reshape(both, [pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(both, wide.type.layout, assert_trivial=True)


@gluon.jit
def add_product(total, pairs, ring, count, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """total + pairs · what is in a ring's slot, which is given back; issued in the warpgroup's turn."""
    operand = unpack(pairs, ring.data.dtype, product_layout(total.shape[1]))
    await_turn(GROUP)
    total = warpgroup_mma(operand, slot(ring, count), total, is_async=True)
    pass_turn(GROUP, GROUPS)
    total = warpgroup_mma_wait(0, [total])
    keep(pairs)
    give_back(ring, count)
    return total


@gluon.jit
def keep(x):
    """x, whose registers hold it up to here: no instruction reads what a product in flight still reads."""
    return gl.inline_asm_elementwise("", "=r,0", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def anew(number, count):
    """A number as if it changed with count: addresses that are the same in all steps would take registers, or
    spills, in all."""
    return keep(count) - count + number


@gluon.jit
def computed(x):
    """x, float32, computed by now: what the assembler moves in between products makes them wait for another
    (C7517)."""
    code: gl.constexpr = "mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(code, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def compute_before(x):
    """Keeps the assembler from moving the computation of x below the next wait: a store that depends on x
    and never happens. (A branch would make it run products one by one.)"""
    code: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0fFF800000;"
        " @p st.volatile.shared.f32 [a], $1; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(code, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
