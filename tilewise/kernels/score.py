"""The device twins of `spec.py`: which keys a row sees, and how a logit comes about.

Kernels take these values as they are: a field that is None is not there at compile time and costs
nothing. Strides count elements, 0 where a dimension broadcasts. Offsets from a tensor's start are 64-bit.

Traps of the compiler (3.6): `x is None` fails for a struct x that has fields which are None; a struct
that is assigned to a name loses its constexpr fields; one that holds structs must end with a constexpr
field, or loops forget those of the inner ones. Hence flags in capitals, last, and long dotted names.

A tile of scores is [queries, keys] or, TRANSPOSED, [keys, queries]; `across` and `along` below hold the
rows and keys of a tile, shaped so that they broadcast to it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

constexpr = tl.constexpr

NEG_INF = tl.constexpr(float("-inf"))
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Tokens(NamedTuple):
    """q, k, v, out and their gradients: (B, S, H, D); packed (total, H, D) has no batch stride."""

    data: Any
    batch: int
    row: int
    head: int
    column: int


class Lines(NamedTuple):
    """One number per row: lse and delta (B, H, S), packed (H, total); key_range has no heads."""

    data: Any
    batch: int
    head: int
    row: int


class Grid(NamedTuple):
    """mask, bias and its gradient: (B, Hq, Sq, Sk), packed (Hq, total_q, columns).

    Of those with one row or column for all, ROWS or COLUMNS is False.
    """

    data: Any
    batch: int
    head: int
    row: int
    column: int
    columns: int
    ROWS: Any
    COLUMNS: Any


class Band(NamedTuple):
    left: int | None
    right: int | None
    bottom_right: Any


class Scores(NamedTuple):
    """`scale` is the number that a raw product is multiplied by to give a logit in units of `unit`,
    such that probabilities are 2^(unit · (logit − m)).

    FOLDED: logits stay raw products, unit holds the scale, and unit · m is what is carried.
    KEEPS_INF: a product of −inf gives a logit of −inf.
    """

    scale: Any
    unit: Any
    softcap: Any
    slopes: Lines | None
    bias: Grid | None
    mask: Grid | None
    sinks: Any
    FOLDED: Any
    KEEPS_INF: Any


class Dropout(NamedTuple):
    """Keeps where a word of 32 bits is above `highest_dropped`; `scale` is 1 / (1 − p)."""

    seed: Any
    highest_dropped: int
    scale: float


class Packed(NamedTuple):
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    count: int  # type: ignore[assignment]  # hides tuple's method
    SEARCH: Any


class Sizes(NamedTuple):
    """Packed: sq and sk are the totals."""

    sq: int
    sk: int
    heads: int
    kv_heads: int
    groups: int


class Spec(NamedTuple):
    """What is computed, apart from the operands. HIDES: a mask or bias may hide single entries. LEAKS: keys
    may be hidden from rows of whose tile they are, so that 0 · NaN has to be looked for."""

    sizes: Sizes
    band: Band
    scores: Scores
    key_start: Lines | None
    key_end: Lines | None
    dropout: Dropout | None
    packed: Packed | None
    HIDES: Any
    LEAKS: Any


class Tile(NamedTuple):
    """Sides of a tile, all constexpr: BLOCK_Q queries, BLOCK_K keys; D and DV, and the powers of two that
    hold them; PRECISION of products of float32; RAGGED_Q, RAGGED_K: the last tile of a sequence may reach
    past its end."""

    BLOCK_Q: Any
    BLOCK_K: Any
    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    PRECISION: Any
    RAGGED_Q: Any
    RAGGED_K: Any


class Place(NamedTuple):
    """The sequence and the tile that a program works on. `start_q`, `start_k` are the sequence's first
    tokens; `number` is the sequence's among all, for dropout and slopes; not `real` are the tokens past
    the last sequence, taken together."""

    tile_start: Any
    real: Any
    number: Any
    batch: Any
    start_q: Any
    start_k: Any
    sq: Any
    sk: Any
    offset: Any


class Bounds(NamedTuple):
    """As in spec.py: nothing is seen outside [first, last), everything in [full_first, full_last)."""

    first: Any
    full_first: Any
    full_last: Any
    last: Any


class Rows(NamedTuple):
    """Rows of a tile: their numbers, and the keys lo ≤ j < hi that they see."""

    number: Any
    lo: Any
    hi: Any


class Capped(NamedTuple):
    """A logit, and tanh of it before the cap (without a cap: the logit again)."""

    s: Any
    tanh: Any


# ------------------------------------------------------------------ where a program works


@triton.jit
def place(tile, batch, spec, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """Tile number `tile` along the queries (KEYS: along the keys) of a batch entry, or of the packed
    sequences, in which case sequence s begins with tile cu_seqlens[s] // BLOCK + s: that leaves each at
    least the tiles it needs. Behind the last sequence come the tokens that belong to none.
    """
    if spec.packed is None:
        sq = spec.sizes.sq
        sk = spec.sizes.sk
        number = batch
        real = True
        start_q = tl.zeros([], tl.int64)
        start_k = tl.zeros([], tl.int64)
        first_tile = 0
        batch = batch.to(tl.int64)
    else:
        cu = spec.packed.cu_seqlens_k if KEYS else spec.packed.cu_seqlens_q
        before = tl.zeros([], tl.int32)
        for chunk in range(0, spec.packed.count, spec.packed.SEARCH):
            candidate = chunk + 1 + tl.arange(0, spec.packed.SEARCH)
            inside = candidate <= spec.packed.count
            # Lengths that do not fit cannot be refused without waiting for the device: they are clipped.
            # Where they fall a tile may begin before its sequence, but never before the first token.
            start = tl.maximum(tl.load(cu + candidate, mask=inside, other=0).to(tl.int32), 0)
            before += tl.sum((inside & (start // BLOCK + candidate <= tile)).to(tl.int32))
        number = uniform(before)
        real = number < spec.packed.count
        start_q, sq, start_k, sk = spans(number, real, spec)
        if KEYS:
            sq = tl.where(real, sq, 0)
            first_tile = start_k // BLOCK + number
        else:
            sk = tl.where(real, sk, 0)
            first_tile = start_q // BLOCK + number
        start_q = start_q.to(tl.int64)
        start_k = start_k.to(tl.int64)
        batch = tl.zeros([], tl.int64)
    if spec.band.bottom_right:
        offset = sk - sq
    else:
        offset = 0
    start = (tile - first_tile) * BLOCK
    return Place(start, real, number, batch, start_q, start_k, sq, sk, offset)


@triton.constexpr_function
def _on_nvidia():
    return not triton.knobs.runtime.interpret and tl.target_info.is_cuda()


@triton.jit
def uniform(x):
    """x, an int32 that is the same in all threads, as the assembler is to know it. It takes what was loaded
    to differ, and then moves every address in a loop up to such a number from each thread's registers to
    those that all threads share."""
    if _on_nvidia():
        code: tl.constexpr = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
        x = tl.inline_asm_elementwise(code, "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    return x


@triton.jit
def spans(number, real, spec):
    """First tokens and lengths of a sequence's queries and keys, which all threads have in common."""
    start_q, sq = span(spec.packed.cu_seqlens_q, number, real, spec.sizes.sq)
    start_k, sk = span(spec.packed.cu_seqlens_k, number, real, spec.sizes.sk)
    return uniform(start_q), uniform(sq), uniform(start_k), uniform(sk)


@triton.jit
def span(cu, number, real, total):
    """First token and length of a sequence; for the number past the last, of the rest."""
    start = tl.load(cu + number).to(tl.int32)
    end = tl.load(cu + number + 1, mask=real, other=total).to(tl.int32)
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.minimum(tl.maximum(end, start), total)
    return start, end - start


@triton.jit
def line(t, at, head, start, rows):
    """Pointers to the numbers of rows of a sequence in a `Lines`."""
    base = t.data + at.batch * t.batch + tl.cast(head, tl.int64) * t.head + start * t.row
    return base + rows.to(tl.int64) * t.row


@triton.jit
def tile_pointers(t, at, head, start, rows, columns):
    """Pointers [rows, columns] into a sequence's part of a `Tokens`."""
    base = t.data + at.batch * t.batch + head.to(tl.int64) * t.head + start * t.row
    return base + rows.to(tl.int64)[:, None] * t.row + columns[None, :] * t.column


# ------------------------------------------------------------------ what a row sees


@triton.jit
def interval(rows, at, spec):
    """Rows with the keys lo ≤ j < hi that they see, within 0 … Sk (spec.Problem.interval)."""
    position = rows + at.offset
    lo = rows * 0  # Gluon has no zeros_like without a layout
    hi = lo + at.sk
    if spec.band.left is not None:
        lo = tl.maximum(lo, position - spec.band.left)
    if spec.band.right is not None:
        hi = tl.minimum(hi, position + spec.band.right + 1)
    if spec.key_start is not None:
        start, end = _key_range(rows, at, spec)
        lo = tl.maximum(lo, start)
        hi = tl.minimum(hi, end)
    return Rows(rows, lo, hi)


@triton.jit
def rows_inside(rows, at, spec):
    """As interval; a row past the last sees nothing."""
    all = interval(rows, at, spec)
    return Rows(rows, all.lo, tl.where(rows < at.sq, all.hi, 0))


@triton.jit
def _key_range(rows, at, spec):
    inside = rows < at.sq
    start = line(spec.key_start, at, 0, at.start_q, rows)
    end = line(spec.key_end, at, 0, at.start_q, rows)
    start = tl.load(start, mask=inside, other=0).to(tl.int64)
    end = tl.load(end, mask=inside, other=0).to(tl.int64)
    start = tl.minimum(tl.maximum(start, 0), at.sk).to(tl.int32)
    return start, tl.minimum(tl.maximum(end, 0), at.sk).to(tl.int32)


@triton.jit
def bounds(i0, i1, rows, at, spec):
    """The bounds of rows i0 … i1 − 1, of which `rows` are all and maybe more (spec.Problem.bounds)."""
    first = 0
    full_first = 0
    full_last = at.sk
    last = at.sk
    if spec.band.left is not None:
        first = i0 + at.offset - spec.band.left
        full_first = i1 - 1 + at.offset - spec.band.left
    if spec.band.right is not None:
        full_last = i0 + at.offset + spec.band.right + 1
        last = i1 + at.offset + spec.band.right
    if spec.key_start is not None:
        start, end = _key_range(rows, at, spec)
        inside = (rows >= i0) & (rows < i1)
        first = tl.maximum(first, tl.min(tl.where(inside, start, at.sk), 0))
        full_first = tl.maximum(full_first, tl.max(tl.where(inside, start, 0), 0))
        full_last = tl.minimum(full_last, tl.min(tl.where(inside, end, at.sk), 0))
        last = tl.minimum(last, tl.max(tl.where(inside, end, 0), 0))
    return Bounds(
        tl.minimum(tl.maximum(first, 0), at.sk),
        tl.minimum(tl.maximum(full_first, 0), at.sk),
        tl.minimum(tl.maximum(full_last, 0), at.sk),
        tl.minimum(tl.maximum(last, 0), at.sk),
    )


@triton.jit
def bounds_of_keys(j0, j1, at, spec):
    """The rows that see keys j0 … j1 − 1 as the band has it: nothing outside [first, last), everything
    in [full_first, full_last). A key_range may hide more."""
    first = 0
    full_first = 0
    full_last = at.sq
    last = at.sq
    if spec.band.right is not None:
        first = j0 - at.offset - spec.band.right
        full_first = j1 - 1 - at.offset - spec.band.right
    if spec.band.left is not None:
        full_last = j0 - at.offset + spec.band.left + 1
        last = j1 - at.offset + spec.band.left
    return Bounds(
        tl.minimum(tl.maximum(first, 0), at.sq),
        tl.minimum(tl.maximum(full_first, 0), at.sq),
        tl.minimum(tl.maximum(full_last, 0), at.sq),
        tl.minimum(tl.maximum(last, 0), at.sq),
    )


@triton.jit
def walks(edges, BLOCK: tl.constexpr, ALL_EDGE: tl.constexpr):
    """Bounds as three walks in steps of BLOCK: first … full_first on the edge, full_first … full_last
    in full, full_last … last on the edge. All begin at multiples of BLOCK.

    ALL_EDGE: single entries may be hidden anywhere; the first walk is all there is.
    """
    first = edges.first // BLOCK * BLOCK
    if ALL_EDGE:
        full_first = tl.maximum(first, edges.last)
        full_last = full_first
    else:
        full_first = (edges.full_first + BLOCK - 1) // BLOCK * BLOCK
        full_first = tl.maximum(first, tl.minimum(full_first, edges.last))
        full_last = tl.maximum(full_first, edges.full_last // BLOCK * BLOCK)
    return Bounds(first, full_first, full_last, edges.last)


@triton.jit
def seen_by(rows, j, allowed, bias, spec, tile, EDGE: tl.constexpr):
    """Which entries of the tile of keys j … are seen, None for all, by what is given: its part of a mask and
    of a bias, and on an EDGE the rows' intervals."""
    seen = allowed
    if EDGE:
        # Few numbers change from tile to tile, and all columns are compared with those.
        keys = tl.arange(0, tile.BLOCK_K)[None, :]
        if (spec.band.left is not None) or (spec.key_start is not None):
            inside = keys >= (rows.lo - j)[:, None]
            seen = inside if seen is None else seen & inside
        if tile.RAGGED_K or (spec.band.right is not None) or (spec.key_start is not None):
            inside = keys < (rows.hi - j)[:, None]
            seen = inside if seen is None else seen & inside
    if bias is not None:
        inside = bias != NEG_INF
        seen = inside if seen is None else seen & inside
    return seen


@triton.jit
def seen_of_keys(i, j, at, allowed, spec, tile):
    """Which entries of the TRANSPOSED tile of queries i … and keys j … are seen, None for all, as bands and
    key_range have it; keys past the last, of which nothing is written, may seem seen."""
    seen = allowed
    queries = tl.arange(0, tile.BLOCK_Q)[None, :]
    keys = tl.arange(0, tile.BLOCK_K) + (j - i - at.offset)
    if spec.band.right is not None:
        inside = queries >= (keys - spec.band.right)[:, None]
        seen = inside if seen is None else seen & inside
    if spec.band.left is not None:
        inside = queries <= (keys + spec.band.left)[:, None]
        seen = inside if seen is None else seen & inside
    if spec.key_start is not None:
        start, end = _key_range(i + tl.arange(0, tile.BLOCK_Q), at, spec)
        keys = (j + tl.arange(0, tile.BLOCK_K))[:, None]
        inside = (keys >= start[None, :]) & (keys < end[None, :])
        seen = inside if seen is None else seen & inside
    return seen


@triton.jit
def has_nan(x):
    """Whether there is a NaN in a tile, or there are infinities of both signs."""
    total = tl.sum(x)
    return total != total


@triton.jit
def load_tile(tma, at, head, row, pointers, inside, WIDTH: tl.constexpr):
    """The tile that begins with a row of a tensor, by the tensor memory accelerator where there is a
    descriptor for it. Rows that are not `inside` (None: all are) may hold anything: what follows in memory,
    too, which is another sequence's where they are packed."""
    if tma is None:
        tile = load_rows(pointers, inside, WIDTH)
    else:
        place_in = [at.batch.to(tl.int32), tl.cast(row, tl.int32), head, 0]
        tile = tma.load(place_in).reshape(pointers.shape)
    return tile


@triton.jit
def load_rows(pointers, wanted, WIDTH: tl.constexpr):
    """A tile of which the last column may lie past WIDTH, and of the rows those that are `wanted`
    (None: all); 0 elsewhere."""
    PADDED: tl.constexpr = pointers.shape[1] != WIDTH
    if PADDED:
        inside = (tl.arange(0, pointers.shape[1]) < WIDTH)[None, :]
        if wanted is not None:
            inside = inside & wanted[:, None]
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif wanted is not None:
        tile = tl.load(pointers, mask=wanted[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


# ------------------------------------------------------------------ how a logit comes about


@triton.jit
def grid_tile(t, tma, at, head, i, j, other, tile, TRANSPOSED: tl.constexpr):
    """The part of a `Grid` beside the tile of queries i … and keys j …, 1 wide where it is broadcast;
    `other` where it has no part (by `tma`, a descriptor or None: anything)."""
    if tma is not None:
        # Where one is for all, the stride is 0.
        batch = tl.minimum(at.batch, at.batch * t.batch)
        owner = tl.minimum(head, head * t.head)
        place_in = [
            batch.to(tl.int32),
            owner.to(tl.int32),
            tl.cast(i, tl.int32),
            tl.cast(j, tl.int32),
        ]
        part = tma.load(place_in).reshape([tile.BLOCK_Q, tile.BLOCK_K])
        if TRANSPOSED:
            part = tl.trans(part)
    else:
        across = (i + tl.arange(0, tile.BLOCK_Q)).expand_dims(0 if TRANSPOSED else 1)
        along = (j + tl.arange(0, tile.BLOCK_K)).expand_dims(1 if TRANSPOSED else 0)
        base = t.data + at.batch * t.batch + head.to(tl.int64) * t.head
        if t.ROWS:
            base += at.start_q * t.row
        columns = tl.minimum(at.sk, t.columns)
        if t.ROWS and t.COLUMNS:
            inside = (across < at.sq) & (along < columns)
            offsets = across.to(tl.int64) * t.row + along.to(tl.int64) * t.column
            part = tl.load(base + offsets, mask=inside, other=other)
        elif t.ROWS:
            part = tl.load(base + across.to(tl.int64) * t.row, mask=across < at.sq, other=other)
        elif t.COLUMNS:
            part = tl.load(base + along.to(tl.int64) * t.column, mask=along < columns, other=other)
        else:
            part = tl.load(base + tl.zeros([1, 1], tl.int32))
    return part


@triton.jit
def logits(products, at, head, across, along, bias, spec):
    """Logits from raw products, in this order: scale, softcap, alibi, bias."""
    s = products
    if not spec.scores.FOLDED:
        s = s * spec.scores.scale
    t = s
    if spec.scores.softcap is not None:
        # 1 − 2 / (e^2x + 1): accurate to the last bits of 1, which is what the cap is a multiple of.
        t = 1.0 - 2.0 / (tl.math.exp2(s * (2.0 * LOG2E / spec.scores.softcap)) + 1.0)
        s = t * spec.scores.softcap
    if spec.scores.slopes is not None:
        s = s - slope_of(at, head, spec, s.dtype) * distance(at, across, along).to(s.dtype)
    if bias is not None:
        s = s + bias
    return Capped(s, t)


@triton.jit
def slope_of(at, head, spec, dtype: tl.constexpr):
    place_in = at.number.to(tl.int64) * spec.scores.slopes.batch + head * spec.scores.slopes.head
    slope = spec.scores.slopes.data + place_in
    if spec.packed is None:
        found = tl.load(slope)
    else:
        # Tokens that belong to no sequence have none.
        found = tl.load(slope, mask=at.real, other=0.0)
    return found.to(dtype)


@triton.jit
def distance(at, across, along):
    return tl.abs(across + at.offset - along)


@triton.jit
def probabilities(s, base, low, spec):
    """2^(unit · (s − m)), where base is m (FOLDED: unit · m) and `low` is what rounding took from it, 0 where
    FOLDED."""
    if spec.scores.FOLDED:
        p = tl.math.exp2(s * spec.scores.unit - base)
    else:
        p = tl.math.exp2((s - base - low) * spec.scores.unit)
    return p


@triton.jit
def keep(at, head, rows, j, spec, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Which probabilities dropout keeps (random.py): word j % 4 of counter (j // 4, i, head, sequence).
    The tile begins with key j, a multiple of 4."""
    quads = (j // 4 + tl.arange(0, BLOCK_K // 4))[None, :]
    i = rows[:, None]
    zero = tl.zeros_like(quads + i)
    seed = tl.load(spec.dropout.seed)
    w0, w1, w2, w3 = tl.philox(
        seed, quads + zero, i + zero, head + zero, at.number + zero, n_rounds=7
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    words = tl.reshape(words, [rows.shape[0], BLOCK_K])
    if TRANSPOSED:
        words = tl.trans(words)
    return words.to(tl.uint32, bitcast=True) > spec.dropout.highest_dropped


# ------------------------------------------------------------------ products


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b summed in float32 (float64 for float64)."""
    if a.dtype == tl.float64:
        c = tl.dot(a, b, out_dtype=tl.float64)
    else:
        c = tl.dot(a, b, input_precision=PRECISION)
    return c


@triton.jit
def seen_product(a, b, seen, PRECISION: tl.constexpr):
    """a @ b; where it is not seen, −inf, or NaN if the product is NaN or +inf. Cheaper than a choice
    afterwards, since the sums begin with it. `seen`: None for all."""
    if seen is None:
        c = product(a, b, PRECISION)
    else:
        ACC: tl.constexpr = tl.float64 if a.dtype == tl.float64 else tl.float32
        none = tl.zeros([a.shape[0], b.shape[1]], ACC)
        c = add_product(tl.where(seen, none, NEG_INF), a, b, PRECISION)
    return c


@triton.jit
def add_product(c, a, b, PRECISION: tl.constexpr):
    """c + a @ b."""
    if a.dtype == tl.float64:
        c = tl.dot(a, b, c, out_dtype=tl.float64)
    else:
        c = tl.dot(a, b, c, input_precision=PRECISION)
    return c
