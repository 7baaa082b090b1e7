"""The backward pass by recomputation: P = exp(S − lse), dS = P ∘ (dP − delta) (arXiv 2205.14135).

dK and dV come from one kernel, whose programs own a tile of keys, and dQ from another, whose programs own
a tile of queries: no two programs write to one place, so the result is the same in every run. Gradients
of slopes and sinks, and of a bias that is broadcast over rows or over keys, leave as sums per row or per
key; that of any other bias has a kernel of its own.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.score import (
    LOG2E,
    NEG_INF,
    Rows,
    add_product,
    bounds,
    bounds_of_keys,
    distance,
    grid_tile,
    has_nan,
    keep,
    line,
    load_rows,
    load_tile,
    logits,
    place,
    probabilities,
    product,
    rows_inside,
    seen_by,
    seen_of_keys,
    seen_product,
    tile_pointers,
    walks,
)


class Sums(NamedTuple):
    """Per row: the shares of bias, slopes and sinks in their gradients, None where there are none.
    WANTED: there is one at least."""

    bias: Any
    slopes: Any
    sinks: Any
    dlse: Any
    WANTED: Any


class Stats(NamedTuple):
    """Lines of numbers per row. `base` is lse as `probabilities` wants it, +inf where there is no
    probability; `low` what rounding took from it, None where that is not kept. Of packed sequences `base` and
    `delta` lie in tiles of BLOCK rows (else None): see `first_of`."""

    base: Any
    delta: Any
    low: Any
    BLOCK: Any


class Queries(NamedTuple):
    """A tile of q and dout with its rows and what `Stats` has of them."""

    q: Any
    dout: Any
    rows: Any
    base: Any
    delta: Any
    low: Any


class Keys(NamedTuple):
    """Pointers to the first tiles of k and v with their row strides. Where a program owns keys: its tiles of
    k and v alone."""

    k: Any
    v: Any
    k_row: Any
    v_row: Any


class Scored(NamedTuple):
    """P as dV needs it, dS, and d(raw product) but for the scale."""

    p: Any
    kept: Any
    ds: Any
    draw: Any


class OfQueries(NamedTuple):
    """dq but for the scale, and per row the sums over keys of dS, of P and of dS by distance."""

    dq: Any
    ds: Any
    p_far: Any
    ds_far: Any


class OfKeys(NamedTuple):
    """dk but for the scale, dv, and per key the sum over rows of dS."""

    dk: Any
    dv: Any
    ds: Any


@triton.jit
def delta_kernel(
    out, dout, dlse, lse, base, delta, cleared, spec,
    FOLDED: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DV: tl.constexpr, SHARE: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """base: lse as `probabilities` wants it, +inf where there is no probability. delta = rowsum(dout ∘ out) −
    dlse. PADDED: they have room for whole tiles, one for each program, whose rows past the last have none.
    Each program also clears its SHARE of what is to be cleared, if anything.
    Grid: (tiles of rows · heads · batch entries,)."""
    tiles = tl.cdiv(spec.sizes.sq, BLOCK)
    if spec.packed is not None:
        tiles += spec.packed.count + 1
    program = tl.program_id(0)
    if cleared is not None:
        place_in = cleared + program.to(tl.int64) * SHARE + tl.arange(0, SHARE)
        tl.store(place_in, tl.zeros([SHARE], cleared.dtype.element_ty))
    tile = program % tiles
    head = program // tiles % spec.sizes.heads
    at = place(tile, program // tiles // spec.sizes.heads, spec, BLOCK, False)
    i = at.tile_start + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_DV)
    real = i < at.sq
    inside = real[:, None] & (columns < DV)[None, :]
    o = tl.load(tile_pointers(out, at, head, at.start_q, i, columns), mask=inside, other=0.0)
    do = tl.load(tile_pointers(dout, at, head, at.start_q, i, columns), mask=inside, other=0.0)
    ACC: tl.constexpr = delta.data.dtype.element_ty
    total = tl.sum(o.to(ACC) * do.to(ACC), 1)
    if dlse is not None:
        total -= tl.load(line(dlse, at, head, at.start_q, i), mask=real, other=0.0)
    found = tl.load(line(lse, at, head, at.start_q, i), mask=real, other=NEG_INF)
    found = tl.where(found == NEG_INF, float("inf"), found * LOG2E if FOLDED else found)
    start = at.start_q
    if PADDED:
        start = tile.to(tl.int64) * BLOCK - at.tile_start
        real = i >= 0
    tl.store(line(delta, at, head, start, i), total, mask=real)
    tl.store(line(base, at, head, start, i), found, mask=real)


@triton.jit
def first_of(stats, at, spec):
    """Where a sequence begins in the lines of `base` and `delta`: packed, with the tile that `place` has
    it begin with."""
    start = at.start_q
    if spec.packed is not None:
        start = (start // stats.BLOCK + at.number) * stats.BLOCK
    return start


@triton.jit
def alone(q, dout, stats, at, head, i, spec, tile):
    """The tile of queries i … of a head, of which nothing is read of rows that see nothing."""
    numbers = i + tl.arange(0, tile.BLOCK_Q)
    rows = rows_inside(numbers, at, spec)
    inside = numbers < at.sq
    first = first_of(stats, at, spec)
    base = tl.load(line(stats.base, at, head, first, numbers), mask=inside, other=float("inf"))
    alive = (rows.hi > rows.lo) & (base != float("inf"))
    delta = tl.load(line(stats.delta, at, head, first, numbers), mask=alive, other=0.0)
    low = tl.zeros_like(base)
    if stats.low is not None:
        low = tl.load(line(stats.low, at, head, at.start_q, numbers), mask=alive, other=0.0)
    of_q = tile_pointers(q, at, head, at.start_q, numbers, tl.arange(0, tile.BLOCK_D))
    of_dout = tile_pointers(dout, at, head, at.start_q, numbers, tl.arange(0, tile.BLOCK_DV))
    q_tile = load_rows(of_q, alive, tile.D)
    dout_tile = load_rows(of_dout, alive, tile.DV)
    return Queries(q_tile, dout_tile, rows, base, delta, low)


@triton.jit
def load_lines(t, tma, at, head, start, i, other, tile):
    """The numbers of rows i … of a head, whose line begins at `start`; past the last row `other`, by a
    descriptor what is there: 0, or packed the tile's."""
    rows = i + tl.arange(0, tile.BLOCK_Q)
    if tma is not None:
        place_in = [at.batch.to(tl.int32), head, tl.cast(start + i, tl.int32)]
        numbers = tma.load(place_in).reshape([tile.BLOCK_Q])
    elif tile.RAGGED_Q:
        numbers = tl.load(line(t, at, head, start, rows), mask=rows < at.sq, other=other)
    else:
        numbers = tl.load(line(t, at, head, start, rows))
    return numbers


@triton.jit
def scored(s, dp, x, j, seen, bias, at, head, spec, tile, CAREFUL: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """From raw products s and dp of a tile to P, dS and the gradient of the raw product. `seen`: None for
    all. CAREFUL: what is not seen may be anything in s and dp; else s is −inf or NaN there."""
    if TRANSPOSED:
        across = x.rows.number[None, :]
        along = (j + tl.arange(0, tile.BLOCK_K))[:, None]
        base = x.base[None, :]
        delta = x.delta[None, :]
        low = x.low[None, :]
    else:
        across = x.rows.number[:, None]
        along = (j + tl.arange(0, tile.BLOCK_K))[None, :]
        base = x.base[:, None]
        delta = x.delta[:, None]
        low = x.low[:, None]
    capped = logits(s, at, head, across, along, bias, spec)
    s = capped.s
    if seen is not None and (CAREFUL or not spec.scores.KEEPS_INF):
        s = tl.where(seen, s, NEG_INF)
    p = probabilities(s, base, low, spec)
    kept = p
    if spec.dropout is not None:
        keeps = keep(at, head, x.rows.number, j, spec, tile.BLOCK_K, TRANSPOSED)
        kept = tl.where(keeps, p * spec.dropout.scale, 0.0)
        dp = tl.where(keeps, dp * spec.dropout.scale, 0.0)
    ds = p * (dp - delta)
    if CAREFUL:
        ds = tl.where(seen, ds, 0.0)
    draw = ds
    if spec.scores.softcap is not None:
        draw = ds * (1.0 - capped.tanh * capped.tanh)
        if CAREFUL:
            draw = tl.where(seen, draw, 0.0)
    return Scored(p, kept, ds, draw)


# ------------------------------------------------------------------ dQ: a program owns queries


@triton.jit
def queries_kernel(
    q, k, v, dout, stats, k_tma, v_tma, bias_tma, dq, dbias, dbias_tma, sums, spec, tile
):  # fmt: skip
    """dq, the gradient of a bias of which every entry is one pair's, and per row the shares of any other
    bias, slopes and sinks. Grid: (tiles · heads · batch entries,).
    k_tma, v_tma: descriptors of tiles (1, BLOCK_K, 1, width) or None; bias_tma, dbias_tma: of tiles
    (1, 1, BLOCK_Q, BLOCK_K) or None."""
    tiles = tl.cdiv(spec.sizes.sq, tile.BLOCK_Q)
    if spec.packed is not None:
        tiles += spec.packed.count + 1
    program = tl.program_id(0)
    head = program // tiles % spec.sizes.heads
    number = tiles - 1 - program % tiles
    at = place(number, program // tiles // spec.sizes.heads, spec, tile.BLOCK_Q, False)
    i0 = at.tile_start
    if i0 >= at.sq:
        return
    kv_head = head // spec.sizes.groups
    numbers = i0 + tl.arange(0, tile.BLOCK_Q)
    x = alone(q, dout, stats, at, head, i0, spec, tile)
    keys = tl.arange(0, tile.BLOCK_K)
    columns = tl.arange(0, tile.BLOCK_D)
    y = Keys(
        tile_pointers(k, at, kv_head, at.start_k, keys, columns),
        tile_pointers(v, at, kv_head, at.start_k, keys, tl.arange(0, tile.BLOCK_DV)),
        k.row,
        v.row,
    )
    edges = bounds(i0, tl.minimum(i0 + tile.BLOCK_Q, at.sq), numbers, at, spec)
    edges = walks(edges, tile.BLOCK_K, False)
    found = _query_walk(
        x, y, k_tma, v_tma, bias_tma, edges, dbias, dbias_tma, at, head, sums, spec, tile, False
    )
    if spec.LEAKS and has_nan(found.dq):
        found = _query_walk(
            x, y, k_tma, v_tma, bias_tma, edges, dbias, dbias_tma, at, head, sums, spec, tile, True
        )
    inside = numbers < at.sq
    tl.store(
        tile_pointers(dq, at, head, at.start_q, numbers, columns),
        (found.dq * spec.scores.scale).to(dq.data.dtype.element_ty),
        mask=inside[:, None] & (columns < tile.D)[None, :],
    )
    if sums.WANTED:
        _store_sums(sums, x, found.ds, found.p_far, found.ds_far, inside, at, head, spec)


@triton.jit
def _query_walk(
    x, y, k_tma, v_tma, bias_tma, edges, dbias, dbias_tma, at, head, sums, spec, tile, CAREFUL: tl.constexpr
):  # fmt: skip
    """All tiles of keys from the first to the last. CAREFUL: nothing of hidden keys is read."""
    none = tl.zeros([tile.BLOCK_Q], x.base.dtype)
    found = OfQueries(tl.zeros([tile.BLOCK_Q, tile.BLOCK_D], x.base.dtype), none, none, none)
    if CAREFUL:
        for j in tl.range(edges.first, edges.last, tile.BLOCK_K, num_stages=1):
            found = _query_step(
                found, x, y, None, None, None, j, dbias, dbias_tma, at, head, sums, spec, tile, True, True
            )  # fmt: skip
    else:
        if (spec.band.left is not None) or (spec.key_start is not None):
            for j in range(edges.first, edges.full_first, tile.BLOCK_K):
                found = _query_step(
                    found, x, y, k_tma, v_tma, bias_tma, j, dbias, dbias_tma, at, head, sums, spec, tile,
                    True, False,
                )  # fmt: skip
        for j in range(edges.full_first, edges.full_last, tile.BLOCK_K):
            found = _query_step(
                found, x, y, k_tma, v_tma, bias_tma, j, dbias, dbias_tma, at, head, sums, spec, tile,
                False, False,
            )  # fmt: skip
        if tile.RAGGED_K or (spec.band.right is not None) or (spec.key_start is not None):
            for j in range(edges.full_last, edges.last, tile.BLOCK_K):
                found = _query_step(
                    found, x, y, k_tma, v_tma, bias_tma, j, dbias, dbias_tma, at, head, sums, spec, tile,
                    True, False,
                )  # fmt: skip
    return found


@triton.jit
def _query_step(
    found, x, y, k_tma, v_tma, bias_tma, j, dbias, dbias_tma, at, head, sums, spec, tile,
    EDGE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    if spec.scores.mask is None:
        found = _query_tile(
            found, x, y, k_tma, v_tma, bias_tma, j, None, dbias, dbias_tma, at, head, sums, spec, tile,
            EDGE, CAREFUL,
        )  # fmt: skip
    else:
        allowed = grid_tile(spec.scores.mask, None, at, head, at.tile_start, j, False, tile, False)
        if tl.max(allowed.to(tl.int32)) > 0:
            found = _query_tile(
                found, x, y, k_tma, v_tma, bias_tma, j, allowed, dbias, dbias_tma, at, head, sums, spec,
                tile, EDGE, CAREFUL,
            )  # fmt: skip
    return found


@triton.jit
def _query_tile(
    found, x, y, k_tma, v_tma, bias_tma, j, allowed, dbias, dbias_tma, at, head, sums, spec, tile,
    EDGE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    keys = j + tl.arange(0, tile.BLOCK_K)
    bias = None
    if spec.scores.bias is not None:
        bias = grid_tile(
            spec.scores.bias, bias_tma, at, head, at.tile_start, j, NEG_INF, tile, False
        ).to(x.base.dtype)
    start = tl.cast(j, tl.int64)
    kv_head = head // spec.sizes.groups
    k_pointers = y.k + start * y.k_row
    v_pointers = y.v + start * y.v_row
    if CAREFUL:
        seen = seen_by(x.rows, j, allowed, bias, spec, tile, True)
        wanted = tl.max(seen.to(tl.int32), 0) > 0
        k_tile = load_rows(k_pointers, wanted, tile.D)
        v_tile = load_rows(v_pointers, wanted, tile.DV)
    else:
        seen = seen_by(x.rows, j, allowed, None, spec, tile, EDGE)
        inside = keys < at.sk if EDGE and tile.RAGGED_K else None
        k_tile = load_tile(k_tma, at, kv_head, at.start_k + j, k_pointers, inside, tile.D)
        v_tile = load_tile(v_tma, at, kv_head, at.start_k + j, v_pointers, inside, tile.DV)
    EARLY: tl.constexpr = spec.scores.KEEPS_INF and not CAREFUL
    s = seen_product(x.q, tl.trans(k_tile), seen if EARLY else None, tile.PRECISION)
    dp = product(x.dout, tl.trans(v_tile), tile.PRECISION)
    g = scored(s, dp, x, j, seen, bias, at, head, spec, tile, CAREFUL, False)
    if dbias is not None:
        _store_pairs(dbias, dbias_tma, g.ds, at, head, j, tile)
    dq = add_product(found.dq, g.draw.to(k_tile.dtype), k_tile, tile.PRECISION)
    ds = found.ds
    p_far = found.p_far
    ds_far = found.ds_far
    if sums.WANTED:
        ds += tl.sum(g.ds, 1)
        if spec.scores.slopes is not None:
            far = distance(at, x.rows.number[:, None], keys[None, :]).to(x.base.dtype)
            p_far += tl.sum(g.p * far, 1)
            ds_far += tl.sum(g.ds * far, 1)
    return OfQueries(dq, ds, p_far, ds_far)


@triton.jit
def _store_pairs(dbias, tma, ds, at, head, j, tile):
    """A tile of a gradient (B, Hq, Sq, Sk), packed (Hq, total_q, columns), to which no other is added."""
    if tma is not None:
        place_in = [at.batch.to(tl.int32), head, at.tile_start, tl.cast(j, tl.int32)]
        part = ds.to(dbias.data.dtype.element_ty)
        tma.store(place_in, part.reshape([1, 1, tile.BLOCK_Q, tile.BLOCK_K]))
    else:
        rows = at.tile_start + tl.arange(0, tile.BLOCK_Q)
        keys = j + tl.arange(0, tile.BLOCK_K)
        store_grid(dbias, at, at.batch, head, rows, keys, ds)


@triton.jit
def store_grid(t, at, batch, head, rows, keys, values):
    base = t.data + at.start_q * t.row
    base += tl.cast(batch, tl.int64) * t.batch + tl.cast(head, tl.int64) * t.head
    offsets = rows.to(tl.int64)[:, None] * t.row + keys.to(tl.int64)[None, :] * t.column
    inside = (rows < at.sq)[:, None] & (keys < tl.minimum(at.sk, t.columns))[None, :]
    tl.store(base + offsets, values.to(t.data.dtype.element_ty), mask=inside)


@triton.jit
def _store_sums(sums, x, sum_ds, sum_p_far, sum_ds_far, inside, at, head, spec):
    """The shares of a tile's rows.

    delta comes from an output that was rounded, which sums over many rows would show. What it should have
    been follows from Σ dS = Σ P ∘ dP − delta · Σ P: hence `missing`, by which delta was too small.
    """
    numbers = x.rows.number
    dlse = tl.zeros_like(x.delta)
    if sums.dlse is not None:
        dlse = tl.load(line(sums.dlse, at, head, at.start_q, numbers), mask=inside, other=0.0)
    p_sink = tl.zeros_like(x.delta)
    if spec.scores.sinks is not None:
        sink = tl.load(spec.scores.sinks + head).to(x.base.dtype)
        natural = x.base / LOG2E if spec.scores.FOLDED else x.base
        p_sink = tl.math.exp2((sink - natural - x.low) * LOG2E)
    dead = x.base == float("inf")
    p_keys = tl.where(dead, 0.0, 1.0 - p_sink)
    missing = tl.where(dead, 0.0, sum_ds - x.delta * p_sink - dlse)
    if sums.bias is not None:
        share = sum_ds - missing * p_keys
        tl.store(line(sums.bias, at, head, at.start_q, numbers), share, mask=inside)
    if sums.slopes is not None:
        share = missing * sum_p_far - sum_ds_far
        tl.store(line(sums.slopes, at, head, at.start_q, numbers), share, mask=inside)
    if sums.sinks is not None:
        share = -p_sink * (x.delta + missing)
        tl.store(line(sums.sinks, at, head, at.start_q, numbers), share, mask=inside)


# ------------------------------------------------------------------ dK, dV: a program owns keys


class Tmas(NamedTuple):
    """Descriptors, or None: of tiles (1, BLOCK_Q, 1, width) of q and dout, (1, 1, BLOCK_Q) of `Stats`,
    (1, 1, BLOCK_Q, BLOCK_K) of the bias."""

    q: Any
    dout: Any
    base: Any
    delta: Any
    low: Any
    bias: Any


@triton.jit
def keys_kernel(
    q, k, v, dout, stats, q_tma, dout_tma, base_tma, delta_tma, low_tma, bias_tma, dk, dv, bias_sums, spec,
    tile,
):  # fmt: skip
    """dk and dv, and per key and query head the shares of a bias. Grid: (tiles · key heads · batch,).
    The descriptors: see Tmas."""
    tiles = tl.cdiv(spec.sizes.sk, tile.BLOCK_K)
    if spec.packed is not None:
        tiles += spec.packed.count + 1
    program = tl.program_id(0)
    kv_head = program // tiles % spec.sizes.kv_heads
    at = place(program % tiles, program // tiles // spec.sizes.kv_heads, spec, tile.BLOCK_K, True)
    j0 = at.tile_start
    if j0 >= at.sk:
        return
    keys = j0 + tl.arange(0, tile.BLOCK_K)
    inside = keys < at.sk
    columns = tl.arange(0, tile.BLOCK_D)
    columns_v = tl.arange(0, tile.BLOCK_DV)
    y = Keys(
        load_rows(tile_pointers(k, at, kv_head, at.start_k, keys, columns), inside, tile.D),
        load_rows(tile_pointers(v, at, kv_head, at.start_k, keys, columns_v), inside, tile.DV),
        None,
        None,
    )
    edges = bounds_of_keys(j0, tl.minimum(j0 + tile.BLOCK_K, at.sk), at, spec)
    first = edges.first // tile.BLOCK_Q * tile.BLOCK_Q
    last = edges.last
    found = _key_walk(
        q, dout, stats, Tmas(q_tma, dout_tma, base_tma, delta_tma, low_tma, bias_tma),
        y, first, last, at, kv_head, bias_sums, spec, tile, False,
    )  # fmt: skip
    if spec.LEAKS and (has_nan(found.dk) or has_nan(found.dv)):
        found = _key_walk(
            q, dout, stats, Tmas(None, None, None, None, None, None),
            y, first, last, at, kv_head, bias_sums, spec, tile, True,
        )  # fmt: skip
    tl.store(
        tile_pointers(dk, at, kv_head, at.start_k, keys, columns),
        (found.dk * spec.scores.scale).to(dk.data.dtype.element_ty),
        mask=inside[:, None] & (columns < tile.D)[None, :],
    )
    tl.store(
        tile_pointers(dv, at, kv_head, at.start_k, keys, columns_v),
        found.dv.to(dv.data.dtype.element_ty),
        mask=inside[:, None] & (columns_v < tile.DV)[None, :],
    )


@triton.jit
def _key_walk(
    q, dout, stats, tmas, y, first, last, at, kv_head, bias_sums, spec, tile, CAREFUL: tl.constexpr
):  # fmt: skip
    """All tiles of queries from the first to the last. CAREFUL: nothing is read of rows that see nothing.

    One loop, in which a band is an edge everywhere: sums that one loop handed to the next would have the
    compiler wait after every product.
    """
    ACC: tl.constexpr = stats.delta.data.dtype.element_ty
    STAGES: tl.constexpr = 1 if CAREFUL else None
    none = tl.zeros([tile.BLOCK_K], ACC)
    found = OfKeys(
        tl.zeros([tile.BLOCK_K, tile.BLOCK_D], ACC),
        tl.zeros([tile.BLOCK_K, tile.BLOCK_DV], ACC),
        none,
    )
    for member in range(spec.sizes.groups):
        head = kv_head * spec.sizes.groups + member
        found = OfKeys(found.dk, found.dv, none)
        for i in tl.range(first, last, tile.BLOCK_Q, num_stages=STAGES):
            found = _key_step(
                found, q, dout, stats, tmas, y, i, at, head, bias_sums, spec, tile, CAREFUL
            )
        if bias_sums is not None:
            keys = at.tile_start + tl.arange(0, tile.BLOCK_K)
            tl.store(line(bias_sums, at, head, at.start_k, keys), found.ds, mask=keys < at.sk)
    return found


@triton.jit
def _key_step(
    found, q, dout, stats, tmas, y, i, at, head, bias_sums, spec, tile, CAREFUL: tl.constexpr
):  # fmt: skip
    if (spec.scores.mask is None) and (spec.key_start is None):
        found = _key_tile(
            found, q, dout, stats, tmas, y, i, None, at, head, bias_sums, spec, tile, CAREFUL
        )
    else:
        allowed = None
        if spec.scores.mask is not None:
            allowed = grid_tile(
                spec.scores.mask, None, at, head, i, at.tile_start, False, tile, True
            )
        seen = seen_of_keys(i, at.tile_start, at, allowed, spec, tile)
        if tl.max(seen.to(tl.int32)) > 0:
            found = _key_tile(
                found, q, dout, stats, tmas, y, i, allowed, at, head, bias_sums, spec, tile, CAREFUL
            )  # fmt: skip
    return found


@triton.jit
def _key_tile(
    found, q, dout, stats, tmas, y, i, allowed, at, head, bias_sums, spec, tile, CAREFUL: tl.constexpr
):  # fmt: skip
    j0 = at.tile_start
    along = (j0 + tl.arange(0, tile.BLOCK_K))[:, None]
    bias = None
    if spec.scores.bias is not None:
        bias = grid_tile(spec.scores.bias, tmas.bias, at, head, i, j0, NEG_INF, tile, True).to(
            found.dk.dtype
        )
    seen = seen_of_keys(i, j0, at, allowed, spec, tile)
    if CAREFUL:
        x = alone(q, dout, stats, at, head, i, spec, tile)
        inside = (along < at.sk) & (x.rows.hi > 0)[None, :]
        if bias is not None:
            inside = inside & (bias != NEG_INF)
        seen = inside if seen is None else seen & inside
        s = product(y.k, tl.trans(x.q), tile.PRECISION)
        dp = product(y.v, tl.trans(x.dout), tile.PRECISION)
    else:
        numbers = i + tl.arange(0, tile.BLOCK_Q)
        of_q = tile_pointers(q, at, head, at.start_q, numbers, tl.arange(0, tile.BLOCK_D))
        of_dout = tile_pointers(dout, at, head, at.start_q, numbers, tl.arange(0, tile.BLOCK_DV))
        inside = numbers < at.sq if tile.RAGGED_Q else None
        q_tile = load_tile(tmas.q, at, head, at.start_q + i, of_q, inside, tile.D)
        dout_tile = load_tile(tmas.dout, at, head, at.start_q + i, of_dout, inside, tile.DV)
        EARLY: tl.constexpr = spec.scores.KEEPS_INF
        s = seen_product(y.k, tl.trans(q_tile), seen if EARLY else None, tile.PRECISION)
        dp = product(y.v, tl.trans(dout_tile), tile.PRECISION)
        # After the products, or they would take registers meanwhile.
        first = first_of(stats, at, spec)
        base = load_lines(stats.base, tmas.base, at, head, first, i, float("inf"), tile)
        delta = load_lines(stats.delta, tmas.delta, at, head, first, i, 0.0, tile)
        low = tl.zeros_like(base)
        if stats.low is not None:
            low = load_lines(stats.low, tmas.low, at, head, at.start_q, i, 0.0, tile)
        x = Queries(q_tile, dout_tile, Rows(numbers, None, None), base, delta, low)
    g = scored(s, dp, x, j0, seen, bias, at, head, spec, tile, CAREFUL, True)
    dv = add_product(found.dv, g.kept.to(x.dout.dtype), x.dout, tile.PRECISION)
    dk = add_product(found.dk, g.draw.to(x.q.dtype), x.q, tile.PRECISION)
    ds = found.ds
    if bias_sums is not None:
        ds += tl.sum(g.ds, 1)
    return OfKeys(dk, dv, ds)


# ------------------------------------------------------------------ d bias: a program owns a tile of it


@triton.jit
def bias_kernel(q, k, v, dout, stats, dbias, batches, heads, spec, tile):
    """The gradient of a bias with rows and columns: the sum over `batches` batch entries and `heads` heads
    that share it. Grid: (tiles of columns · tiles of rows · heads and batch entries of the bias,)."""
    key_tiles = tl.cdiv(dbias.columns, tile.BLOCK_K)
    tiles = tl.cdiv(spec.sizes.sq, tile.BLOCK_Q)
    if spec.packed is not None:
        tiles += spec.packed.count + 1
    program = tl.program_id(0)
    j0 = program % key_tiles * tile.BLOCK_K
    number = program // key_tiles % tiles
    owners = spec.sizes.heads // heads
    owner = program // key_tiles // tiles % owners
    owner_batch = program // key_tiles // tiles // owners
    at = place(number, owner_batch, spec, tile.BLOCK_Q, False)
    if at.tile_start >= at.sq:
        return
    numbers = at.tile_start + tl.arange(0, tile.BLOCK_Q)
    keys = j0 + tl.arange(0, tile.BLOCK_K)
    acc = tl.zeros([tile.BLOCK_Q, tile.BLOCK_K], stats.delta.data.dtype.element_ty)
    for sharer in range(batches * heads):
        head = owner + sharer % heads
        here = place(number, owner_batch + sharer // heads, spec, tile.BLOCK_Q, False)
        acc = _bias_tile(acc, q, k, v, dout, stats, keys, j0, here, head, spec, tile)
    place_in = dbias.data + at.start_q * dbias.row
    place_in += owner_batch.to(tl.int64) * dbias.batch + owner.to(tl.int64) * dbias.head
    offsets = numbers.to(tl.int64)[:, None] * dbias.row + keys.to(tl.int64)[None, :] * dbias.column
    inside = (numbers < at.sq)[:, None] & (keys < dbias.columns)[None, :]
    tl.store(place_in + offsets, acc.to(dbias.data.dtype.element_ty), mask=inside)


@triton.jit
def _bias_tile(acc, q, k, v, dout, stats, keys, j0, at, head, spec, tile):
    numbers = at.tile_start + tl.arange(0, tile.BLOCK_Q)
    i0 = at.tile_start
    allowed = None
    if spec.scores.mask is not None:
        allowed = grid_tile(spec.scores.mask, None, at, head, i0, j0, False, tile, False)
    bias = grid_tile(spec.scores.bias, None, at, head, i0, j0, NEG_INF, tile, False).to(acc.dtype)
    seen = seen_by(rows_inside(numbers, at, spec), j0, allowed, bias, spec, tile, True)
    wanted = tl.max(seen.to(tl.int32), 0) > 0
    if tl.max(wanted.to(tl.int32)) > 0:
        x = alone(q, dout, stats, at, head, i0, spec, tile)
        kv_head = head // spec.sizes.groups
        columns = tl.arange(0, tile.BLOCK_D)
        columns_v = tl.arange(0, tile.BLOCK_DV)
        k_tile = load_rows(tile_pointers(k, at, kv_head, at.start_k, keys, columns), wanted, tile.D)
        v_tile = load_rows(
            tile_pointers(v, at, kv_head, at.start_k, keys, columns_v), wanted, tile.DV
        )
        s = product(x.q, tl.trans(k_tile), tile.PRECISION)
        dp = product(x.dout, tl.trans(v_tile), tile.PRECISION)
        acc += scored(s, dp, x, j0, seen, bias, at, head, spec, tile, True, False).ds
    return acc
