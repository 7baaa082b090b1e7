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
    interval,
    keep,
    line,
    load_full,
    load_rows,
    logits,
    place,
    probabilities,
    product,
    seen_by,
    tile_pointers,
    walks,
    wanted_keys,
)


class Operands(NamedTuple):
    """A program's tile of q, pointers to the first tiles of k and v with their row strides, and the bounds
    of the keys that the tile sees."""

    q: Any
    k: Any
    v: Any
    k_row: Any
    v_row: Any
    edges: Any


@triton.jit
def forward_kernel(q, k, v, k_tma, v_tma, out, lse, spec, tile):
    """q, k, v, out: Tokens; k_tma, v_tma: descriptors of tiles (1, BLOCK_K, 1, width) or None; lse: Lines.
    Grid: (tiles · heads · batch,)."""
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
    rows = interval(numbers, at, spec)
    edges = bounds(i0, tl.minimum(i0 + tile.BLOCK_Q, at.sq), numbers, at, spec)
    x = Operands(
        load_rows(tile_pointers(q, at, head, at.start_q, numbers, columns), inside, tile.D),
        tile_pointers(k, at, kv_head, at.start_k, keys, columns),
        tile_pointers(v, at, kv_head, at.start_k, keys, columns_v),
        k.row,
        v.row,
        edges,
    )
    edges = walks(edges, tile.BLOCK_K, spec.HIDES)

    ACC: tl.constexpr = tl.float64 if x.q.dtype == tl.float64 else tl.float32
    m = tl.full([tile.BLOCK_Q], NEG_INF, ACC)
    l = tl.zeros([tile.BLOCK_Q], ACC)
    acc = tl.zeros([tile.BLOCK_Q, tile.BLOCK_DV], ACC)
    if spec.HIDES or (spec.band.left is not None) or (spec.key_start is not None):
        for j in range(edges.first, edges.full_first, tile.BLOCK_K):
            acc, l, m = _step(acc, l, m, x, k_tma, v_tma, rows, j, at, head, spec, tile, True)
    if not spec.HIDES:
        for j in range(edges.full_first, edges.full_last, tile.BLOCK_K):
            acc, l, m = _step(acc, l, m, x, k_tma, v_tma, rows, j, at, head, spec, tile, False)
        if tile.RAGGED_K or (spec.band.right is not None):
            for j in range(edges.full_last, edges.last, tile.BLOCK_K):
                acc, l, m = _step(acc, l, m, x, k_tma, v_tma, rows, j, at, head, spec, tile, True)

    if spec.scores.FOLDED:
        m = m * LN2
    if spec.scores.sinks is not None:
        sink = tl.load(spec.scores.sinks + head).to(ACC)
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
    total = tl.where(empty, NEG_INF, m + tl.log(l))
    tl.store(line(lse, at, head, at.start_q, numbers), total, mask=inside)


@triton.jit
def _step(acc, l, m, x, k_tma, v_tma, rows, j, at, head, spec, tile, EDGE: tl.constexpr):
    """One tile of keys; EDGE: not every row sees all of them."""
    if spec.scores.mask is None:
        acc, l, m = _attend(acc, l, m, x, k_tma, v_tma, rows, j, None, at, head, spec, tile, EDGE)
    else:
        along = (j + tl.arange(0, tile.BLOCK_K))[None, :]
        allowed = grid_tile(spec.scores.mask, at, head, rows.number[:, None], along, False)
        if tl.max(allowed.to(tl.int32)) > 0:
            acc, l, m = _attend(
                acc, l, m, x, k_tma, v_tma, rows, j, allowed, at, head, spec, tile, EDGE
            )
    return acc, l, m


@triton.jit
def _attend(acc, l, m, x, k_tma, v_tma, rows, j, allowed, at, head, spec, tile, EDGE: tl.constexpr):
    across = rows.number[:, None]
    along = (j + tl.arange(0, tile.BLOCK_K))[None, :]
    start = tl.cast(j, tl.int64)
    kv_head = head // spec.sizes.groups
    bias = None
    if spec.scores.bias is not None:
        bias = grid_tile(spec.scores.bias, at, head, across, along, NEG_INF).to(acc.dtype)
    if EDGE:
        seen = seen_by(rows, across, along, allowed, bias, False)
        wanted = wanted_keys(seen, j + tl.arange(0, tile.BLOCK_K), x.edges, spec)
        k_tile = load_rows(x.k + start * x.k_row, wanted, tile.D)
    else:
        k_tile = load_full(k_tma, at, kv_head, j, x.k + start * x.k_row, tile.D)
    s = product(x.q, tl.trans(k_tile), tile.PRECISION)
    s = logits(s, at, head, across, along, bias, spec).s
    if EDGE:
        s = tl.where(seen, s, NEG_INF)
    highest = tl.max(s, 1)
    if spec.scores.FOLDED:
        highest = highest * spec.scores.unit
    new = tl.maximum(m, highest)
    # A row without a key so far has m = −inf; its terms, all 0, need any finite base.
    base = tl.where(new == NEG_INF, 0.0, new) if EDGE else new
    p = probabilities(s, base[:, None], spec)
    rebase = tl.math.exp2(m - base if spec.scores.FOLDED else (m - base) * LOG2E)
    l = l * rebase + tl.sum(p, 1)
    acc = acc * rebase[:, None]
    if spec.dropout is not None:
        p = tl.where(keep(at, head, rows.number, j, spec, tile.BLOCK_K, False), p, 0.0)
    if EDGE:
        v_tile = load_rows(x.v + start * x.v_row, wanted, tile.DV)
    else:
        v_tile = load_full(v_tma, at, kv_head, j, x.v + start * x.v_row, tile.DV)
    acc = add_product(acc, p.to(v_tile.dtype), v_tile, tile.PRECISION)
    return acc, l, new
