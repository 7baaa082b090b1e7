"""The forward pass: one program, one tile of queries of one head, all keys that it sees.

Online softmax (arXiv 1805.02867, 2307.08691): `m`, `l` and `acc` are the running maximum, sum and
numerator. A NaN or Inf in a key or value reaches no tile of rows of which none sees it. Rows of one tile
are not kept apart: where one sees it, 0 · NaN lets it reach the others.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.score import (
    LN2,
    LOG2E,
    NEG_INF,
    add_product,
    bounds,
    grid_tile,
    has_nan,
    keep,
    line,
    load_rows,
    load_tile,
    logits,
    place,
    probabilities,
    rows_inside,
    seen_by,
    seen_product,
    tile_pointers,
    walks,
)


class Operands(NamedTuple):
    """A program's tile of q with its rows, and pointers to the first tiles of k and v with their row strides."""

    q: Any
    rows: Any
    k: Any
    v: Any
    k_row: Any
    v_row: Any


class Running(NamedTuple):
    """Of the online softmax: numerator, sum and maximum (FOLDED: times the unit)."""

    acc: Any
    l: Any
    m: Any


@triton.jit
def forward_kernel(q, k, v, k_tma, v_tma, bias_tma, out, lse, lse_low, spec, tile):
    """q, k, v, out: Tokens; k_tma, v_tma: descriptors of tiles (1, BLOCK_K, 1, width) or None; bias_tma: of
    tiles (1, 1, BLOCK_Q, BLOCK_K) or None; lse: Lines; lse_low: Lines of what rounding took from it, or
    None. Grid: (tiles · heads · batch,)."""
    tiles = tl.cdiv(spec.sizes.sq, tile.BLOCK_Q)
    if spec.packed is not None:
        tiles += spec.packed.count + 1
    program = tl.program_id(0)
    head = program // tiles % spec.sizes.heads
    # Under a causal mask the last tiles have the most to do: they come first.
    number = tiles - 1 - program % tiles
    at = place(number, program // tiles // spec.sizes.heads, spec, tile.BLOCK_Q, False)
    i0 = at.tile_start
    if i0 >= at.sq:
        return
    kv_head = head // spec.sizes.groups
    numbers = i0 + tl.arange(0, tile.BLOCK_Q)
    keys = tl.arange(0, tile.BLOCK_K)
    columns = tl.arange(0, tile.BLOCK_D)
    columns_v = tl.arange(0, tile.BLOCK_DV)
    inside = numbers < at.sq
    x = Operands(
        load_rows(tile_pointers(q, at, head, at.start_q, numbers, columns), inside, tile.D),
        rows_inside(numbers, at, spec),
        tile_pointers(k, at, kv_head, at.start_k, keys, columns),
        tile_pointers(v, at, kv_head, at.start_k, keys, columns_v),
        k.row,
        v.row,
    )
    edges = bounds(i0, tl.minimum(i0 + tile.BLOCK_Q, at.sq), numbers, at, spec)
    edges = walks(edges, tile.BLOCK_K, False)

    found = _walk(x, k_tma, v_tma, bias_tma, edges, at, head, spec, tile, False)
    if spec.LEAKS and _leaked(found, spec):
        found = _walk(x, k_tma, v_tma, bias_tma, edges, at, head, spec, tile, True)
    acc = found.acc
    l = found.l
    m = found.m

    if spec.scores.FOLDED:
        m = m * LN2
    if spec.scores.sinks is not None:
        sink = tl.load(spec.scores.sinks + head).to(acc.dtype)
        if spec.packed is not None:
            sink = tl.where(at.real, sink, NEG_INF)
        total = tl.maximum(m, sink)
        base = tl.where(total == NEG_INF, 0.0, total)
        rebase = tl.math.exp2((m - base) * LOG2E)
        l = l * rebase + tl.math.exp2((sink - base) * LOG2E)
        acc = acc * rebase[:, None]
        m = total
    empty = l == 0.0
    share = 1.0 / tl.where(empty, 1.0, l)
    if spec.dropout is not None:
        share = share * spec.dropout.scale
    tl.store(
        tile_pointers(out, at, head, at.start_q, numbers, columns_v),
        (acc * share[:, None]).to(out.data.dtype.element_ty),
        mask=inside[:, None] & (columns_v < tile.DV)[None, :],
    )
    of_l = tl.log(l)
    total = tl.where(empty, NEG_INF, m + of_l)
    tl.store(line(lse, at, head, at.start_q, numbers), total, mask=inside)
    if lse_low is not None:
        low = tl.where(empty, 0.0, rounded_off(m, of_l, total))
        tl.store(line(lse_low, at, head, at.start_q, numbers), low, mask=inside)


@triton.jit
def _leaked(found, spec):
    """Whether a NaN may have come from a key that is hidden; of one that is dropped only the sum tells."""
    leaked = has_nan(found.acc)
    if spec.dropout is not None:
        leaked |= has_nan(found.l)
    return leaked


@triton.jit
def rounded_off(a, b, total):
    """What rounding took from total = a + b (TwoSum: exact, whichever is larger)."""
    of_b = total - a
    return (a - (total - of_b)) + (b - of_b)


@triton.jit
def _walk(x, k_tma, v_tma, bias_tma, edges, at, head, spec, tile, CAREFUL: tl.constexpr):
    """All tiles of keys from the first to the last. CAREFUL: nothing of hidden keys is read."""
    ACC: tl.constexpr = tl.float64 if x.q.dtype == tl.float64 else tl.float32
    found = Running(
        tl.zeros([tile.BLOCK_Q, tile.BLOCK_DV], ACC),
        tl.zeros([tile.BLOCK_Q], ACC),
        tl.full([tile.BLOCK_Q], NEG_INF, ACC),
    )
    if CAREFUL:
        for j in tl.range(edges.first, edges.last, tile.BLOCK_K, num_stages=1):
            found = _step(found, x, None, None, None, j, at, head, spec, tile, True, True)
    else:
        if (spec.band.left is not None) or (spec.key_start is not None):
            for j in range(edges.first, edges.full_first, tile.BLOCK_K):
                found = _step(
                    found, x, k_tma, v_tma, bias_tma, j, at, head, spec, tile, True, False
                )
        for j in range(edges.full_first, edges.full_last, tile.BLOCK_K):
            found = _step(found, x, k_tma, v_tma, bias_tma, j, at, head, spec, tile, False, False)
        if tile.RAGGED_K or (spec.band.right is not None) or (spec.key_start is not None):
            for j in range(edges.full_last, edges.last, tile.BLOCK_K):
                found = _step(
                    found, x, k_tma, v_tma, bias_tma, j, at, head, spec, tile, True, False
                )
    return found


@triton.jit
def _step(found, x, k_tma, v_tma, bias_tma, j, at, head, spec, tile, EDGE: tl.constexpr, CAREFUL: tl.constexpr):  # fmt: skip
    """One tile of keys; EDGE: not every row sees all of them."""
    if spec.scores.mask is None:
        found = _attend(
            found, x, k_tma, v_tma, bias_tma, j, None, at, head, spec, tile, EDGE, CAREFUL
        )
    else:
        allowed = grid_tile(spec.scores.mask, None, at, head, at.tile_start, j, False, tile, False)
        if tl.max(allowed.to(tl.int32)) > 0:
            found = _attend(
                found, x, k_tma, v_tma, bias_tma, j, allowed, at, head, spec, tile, EDGE, CAREFUL
            )
    return found


@triton.jit
def _attend(
    found, x, k_tma, v_tma, bias_tma, j, allowed, at, head, spec, tile,
    EDGE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    rows = x.rows
    across = rows.number[:, None]
    keys = j + tl.arange(0, tile.BLOCK_K)
    along = keys[None, :]
    kv_head = head // spec.sizes.groups
    bias = None
    if spec.scores.bias is not None:
        bias = grid_tile(
            spec.scores.bias, bias_tma, at, head, at.tile_start, j, NEG_INF, tile, False
        ).to(found.acc.dtype)
    start = tl.cast(j, tl.int64)
    k_pointers = x.k + start * x.k_row
    v_pointers = x.v + start * x.v_row
    if CAREFUL:
        seen = seen_by(rows, j, allowed, bias, spec, tile, True)
        wanted = tl.max(seen.to(tl.int32), 0) > 0
        k_tile = load_rows(k_pointers, wanted, tile.D)
        v_tile = load_rows(v_pointers, wanted, tile.DV)
    else:
        seen = seen_by(rows, j, allowed, None, spec, tile, EDGE)
        inside = keys < at.sk if EDGE and tile.RAGGED_K else None
        k_tile = load_tile(k_tma, at, kv_head, at.start_k + j, k_pointers, inside, tile.D)
        v_tile = load_tile(v_tma, at, kv_head, at.start_k + j, v_pointers, inside, tile.DV)
    EARLY: tl.constexpr = spec.scores.KEEPS_INF and not CAREFUL
    s = seen_product(x.q, tl.trans(k_tile), seen if EARLY else None, tile.PRECISION)
    s = logits(s, at, head, across, along, bias, spec).s
    if seen is not None and (CAREFUL or not spec.scores.KEEPS_INF):
        s = tl.where(seen, s, NEG_INF)
    highest = tl.max(s, 1)
    if spec.scores.FOLDED:
        highest = highest * spec.scores.unit
    m = tl.maximum(found.m, highest)
    # A row without a key so far has m = −inf; its terms, all 0, need any finite base.
    base = tl.where(m == NEG_INF, 0.0, m) if EDGE or CAREFUL or spec.HIDES else m
    p = probabilities(s, base[:, None], 0.0, spec)
    rebase = tl.math.exp2(found.m - base if spec.scores.FOLDED else (found.m - base) * LOG2E)
    l = found.l * rebase + tl.sum(p, 1)
    acc = found.acc * rebase[:, None]
    if spec.dropout is not None:
        p = tl.where(keep(at, head, rows.number, j, spec, tile.BLOCK_K, False), p, 0.0)
    return Running(add_product(acc, p.to(v_tile.dtype), v_tile, tile.PRECISION), l, m)
