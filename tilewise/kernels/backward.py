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


class Sums(NamedTuple):
    """Per row: the shares of bias, slopes and sinks in their gradients, None where there are none.
    WANTED: there is one at least."""

    bias: Any
    slopes: Any
    sinks: Any
    dlse: Any
    WANTED: Any


class Queries(NamedTuple):
    """A tile of q and dout with its rows; `base` is lse as `probabilities` wants it, +inf where there is
    no probability."""

    q: Any
    dout: Any
    rows: Any
    base: Any
    delta: Any


class Keys(NamedTuple):
    """Pointers to the first tiles of k and v with their row strides, and the bounds of the keys that the
    tile of queries sees. Where a program owns keys: its tiles of k and v alone."""

    k: Any
    v: Any
    k_row: Any
    v_row: Any
    edges: Any


class Scored(NamedTuple):
    """P as dV needs it, dS, and d(raw product) but for the scale."""

    p: Any
    kept: Any
    ds: Any
    draw: Any


@triton.jit
def delta_kernel(out, dout, dlse, delta, rows, heads, DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DV: tl.constexpr):  # fmt: skip
    """delta = rowsum(dout ∘ out) − dlse. Grid: (tiles of rows · heads · batch entries,)."""
    tiles = tl.cdiv(rows, BLOCK)
    program = tl.program_id(0)
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    i = program % tiles * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_DV)
    inside = (i < rows)[:, None] & (columns < DV)[None, :]
    i = i.to(tl.int64)
    at = out.data + batch * out.batch + head * out.head
    o = tl.load(at + i[:, None] * out.row + columns[None, :] * out.column, mask=inside, other=0.0)
    at = dout.data + batch * dout.batch + head * dout.head
    do = tl.load(
        at + i[:, None] * dout.row + columns[None, :] * dout.column, mask=inside, other=0.0
    )
    ACC: tl.constexpr = delta.data.dtype.element_ty
    total = tl.sum(o.to(ACC) * do.to(ACC), 1)
    if dlse is not None:
        at = dlse.data + batch * dlse.batch + head * dlse.head
        total -= tl.load(at + i * dlse.row, mask=i < rows, other=0.0)
    tl.store(
        delta.data + batch * delta.batch + head * delta.head + i * delta.row, total, mask=i < rows
    )


@triton.jit
def queries_of(q, dout, q_tma, dout_tma, lse, delta, at, head, i, spec, tile, EDGE: tl.constexpr):
    """The tile of queries i … of a head. EDGE: it may reach past the last row, and rows that see nothing
    are read as 0."""
    numbers = i + tl.arange(0, tile.BLOCK_Q)
    rows = interval(numbers, at, spec)
    of_lse = line(lse, at, head, at.start_q, numbers)
    of_delta = line(delta, at, head, at.start_q, numbers)
    if EDGE:
        inside = numbers < at.sq
        # A row past the last must not carry the NaN of a key that the others do not see into dk and dv.
        rows = Rows(numbers, rows.lo, tl.where(inside, rows.hi, 0))
        base = tl.load(of_lse, mask=inside, other=NEG_INF)
        alive = (rows.hi > rows.lo) & (base != NEG_INF)
        missing = tl.load(of_delta, mask=inside & alive, other=0.0)
    else:
        base = tl.load(of_lse)
        missing = tl.load(of_delta)
    base = tl.where(base == NEG_INF, float("inf"), base * LOG2E if spec.scores.FOLDED else base)
    of_q = tile_pointers(q, at, head, at.start_q, numbers, tl.arange(0, tile.BLOCK_D))
    of_dout = tile_pointers(dout, at, head, at.start_q, numbers, tl.arange(0, tile.BLOCK_DV))
    if EDGE:
        q_tile = load_rows(of_q, alive, tile.D)
        dout_tile = load_rows(of_dout, alive, tile.DV)
    else:
        q_tile = load_full(q_tma, at, head, i, of_q, tile.D)
        dout_tile = load_full(dout_tma, at, head, i, of_dout, tile.DV)
    return Queries(q_tile, dout_tile, rows, base, missing)


@triton.jit
def scored(s, dp, x, j, allowed, bias, at, head, spec, tile, EDGE: tl.constexpr, TRANSPOSED: tl.constexpr):  # fmt: skip
    """From raw products s and dp of a tile to P, dS and the gradient of the raw product."""
    if TRANSPOSED:
        across = x.rows.number[None, :]
        along = (j + tl.arange(0, tile.BLOCK_K))[:, None]
        base = x.base[None, :]
        delta = x.delta[None, :]
    else:
        across = x.rows.number[:, None]
        along = (j + tl.arange(0, tile.BLOCK_K))[None, :]
        base = x.base[:, None]
        delta = x.delta[:, None]
    capped = logits(s, at, head, across, along, bias, spec)
    s = capped.s
    if EDGE:
        seen = seen_by(x.rows, across, along, allowed, bias, TRANSPOSED)
        s = tl.where(seen, s, NEG_INF)
    p = probabilities(s, base, spec)
    kept = p
    if spec.dropout is not None:
        keeps = keep(at, head, x.rows.number, j, spec, tile.BLOCK_K, TRANSPOSED)
        kept = tl.where(keeps, p * spec.dropout.scale, 0.0)
        dp = tl.where(keeps, dp * spec.dropout.scale, 0.0)
    ds = p * (dp - delta)
    if EDGE:
        # A hidden key may hold a NaN, which dp then has: 0 · NaN.
        ds = tl.where(seen, ds, 0.0)
    draw = ds
    if spec.scores.softcap is not None:
        draw = ds * (1.0 - capped.tanh * capped.tanh)
        if EDGE:
            draw = tl.where(seen, draw, 0.0)
    return Scored(p, kept, ds, draw)


# ------------------------------------------------------------------ dQ: a program owns queries


@triton.jit
def queries_kernel(q, k, v, dout, lse, delta, k_tma, v_tma, dq, sums, spec, tile):
    """dq, and per row the shares of bias, slopes and sinks. Grid: (tiles · heads · batch entries,).
    k_tma, v_tma: descriptors of tiles (1, BLOCK_K, 1, width) or None."""
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
    x = queries_of(q, dout, None, None, lse, delta, at, head, i0, spec, tile, True)
    keys = tl.arange(0, tile.BLOCK_K)
    columns = tl.arange(0, tile.BLOCK_D)
    edges = bounds(i0, tl.minimum(i0 + tile.BLOCK_Q, at.sq), numbers, at, spec)
    y = Keys(
        tile_pointers(k, at, kv_head, at.start_k, keys, columns),
        tile_pointers(v, at, kv_head, at.start_k, keys, tl.arange(0, tile.BLOCK_DV)),
        k.row,
        v.row,
        edges,
    )
    edges = walks(edges, tile.BLOCK_K, spec.HIDES)
    acc = tl.zeros([tile.BLOCK_Q, tile.BLOCK_D], x.base.dtype)
    sum_ds = tl.zeros([tile.BLOCK_Q], x.base.dtype)
    sum_p_far = sum_ds
    sum_ds_far = sum_ds
    if spec.HIDES or (spec.band.left is not None) or (spec.key_start is not None):
        for j in range(edges.first, edges.full_first, tile.BLOCK_K):
            acc, sum_ds, sum_p_far, sum_ds_far = _query_step(
                acc,
                sum_ds,
                sum_p_far,
                sum_ds_far,
                x,
                y,
                k_tma,
                v_tma,
                j,
                at,
                head,
                sums,
                spec,
                tile,
                True,
            )
    if not spec.HIDES:
        for j in range(edges.full_first, edges.full_last, tile.BLOCK_K):
            acc, sum_ds, sum_p_far, sum_ds_far = _query_step(
                acc,
                sum_ds,
                sum_p_far,
                sum_ds_far,
                x,
                y,
                k_tma,
                v_tma,
                j,
                at,
                head,
                sums,
                spec,
                tile,
                False,
            )
        if tile.RAGGED_K or (spec.band.right is not None):
            for j in range(edges.full_last, edges.last, tile.BLOCK_K):
                acc, sum_ds, sum_p_far, sum_ds_far = _query_step(
                    acc,
                    sum_ds,
                    sum_p_far,
                    sum_ds_far,
                    x,
                    y,
                    k_tma,
                    v_tma,
                    j,
                    at,
                    head,
                    sums,
                    spec,
                    tile,
                    True,
                )
    inside = numbers < at.sq
    tl.store(
        tile_pointers(dq, at, head, at.start_q, numbers, columns),
        (acc * spec.scores.scale).to(dq.data.dtype.element_ty),
        mask=inside[:, None] & (columns < tile.D)[None, :],
    )
    if sums.WANTED:
        _store_sums(sums, x, sum_ds, sum_p_far, sum_ds_far, inside, at, head, spec)


@triton.jit
def _query_step(
    acc,
    sum_ds,
    sum_p_far,
    sum_ds_far,
    x,
    y,
    k_tma,
    v_tma,
    j,
    at,
    head,
    sums,
    spec,
    tile,
    EDGE: tl.constexpr,
):
    if spec.scores.mask is None:
        acc, sum_ds, sum_p_far, sum_ds_far = _query_tile(
            acc,
            sum_ds,
            sum_p_far,
            sum_ds_far,
            x,
            y,
            k_tma,
            v_tma,
            j,
            None,
            at,
            head,
            sums,
            spec,
            tile,
            EDGE,
        )
    else:
        along = (j + tl.arange(0, tile.BLOCK_K))[None, :]
        allowed = grid_tile(spec.scores.mask, at, head, x.rows.number[:, None], along, False)
        if tl.max(allowed.to(tl.int32)) > 0:
            acc, sum_ds, sum_p_far, sum_ds_far = _query_tile(
                acc,
                sum_ds,
                sum_p_far,
                sum_ds_far,
                x,
                y,
                k_tma,
                v_tma,
                j,
                allowed,
                at,
                head,
                sums,
                spec,
                tile,
                EDGE,
            )
    return acc, sum_ds, sum_p_far, sum_ds_far


@triton.jit
def _query_tile(
    acc,
    sum_ds,
    sum_p_far,
    sum_ds_far,
    x,
    y,
    k_tma,
    v_tma,
    j,
    allowed,
    at,
    head,
    sums,
    spec,
    tile,
    EDGE: tl.constexpr,
):
    across = x.rows.number[:, None]
    along = (j + tl.arange(0, tile.BLOCK_K))[None, :]
    bias = None
    if spec.scores.bias is not None:
        bias = grid_tile(spec.scores.bias, at, head, across, along, NEG_INF).to(acc.dtype)
    start = tl.cast(j, tl.int64)
    kv_head = head // spec.sizes.groups
    if EDGE:
        seen = seen_by(x.rows, across, along, allowed, bias, False)
        wanted = wanted_keys(seen, j + tl.arange(0, tile.BLOCK_K), y.edges, spec)
        k_tile = load_rows(y.k + start * y.k_row, wanted, tile.D)
        v_tile = load_rows(y.v + start * y.v_row, wanted, tile.DV)
    else:
        k_tile = load_full(k_tma, at, kv_head, j, y.k + start * y.k_row, tile.D)
        v_tile = load_full(v_tma, at, kv_head, j, y.v + start * y.v_row, tile.DV)
    s = product(x.q, tl.trans(k_tile), tile.PRECISION)
    dp = product(x.dout, tl.trans(v_tile), tile.PRECISION)
    g = scored(s, dp, x, j, allowed, bias, at, head, spec, tile, EDGE, False)
    acc = add_product(acc, g.draw.to(k_tile.dtype), k_tile, tile.PRECISION)
    if sums.WANTED:
        sum_ds += tl.sum(g.ds, 1)
        if spec.scores.slopes is not None:
            far = distance(at, across, along).to(acc.dtype)
            sum_p_far += tl.sum(g.p * far, 1)
            sum_ds_far += tl.sum(g.ds * far, 1)
    return acc, sum_ds, sum_p_far, sum_ds_far


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
        p_sink = tl.math.exp2((sink - natural) * LOG2E)
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


@triton.jit
def keys_kernel(q, k, v, dout, lse, delta, q_tma, dout_tma, dk, dv, bias_sums, spec, tile):
    """dk and dv, and per key and query head the shares of a bias. Grid: (tiles · key heads · batch,).
    q_tma, dout_tma: descriptors of tiles (1, BLOCK_Q, 1, width) or None."""
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
    k_pointers = tile_pointers(k, at, kv_head, at.start_k, keys, tl.arange(0, tile.BLOCK_D))
    v_pointers = tile_pointers(v, at, kv_head, at.start_k, keys, tl.arange(0, tile.BLOCK_DV))
    y = Keys(
        load_rows(k_pointers, inside, tile.D),
        load_rows(v_pointers, inside, tile.DV),
        None,
        None,
        None,
    )
    ALL_EDGE: tl.constexpr = spec.HIDES or (spec.key_start is not None)
    edges = bounds_of_keys(j0, tl.minimum(j0 + tile.BLOCK_K, at.sk), at, spec)
    edges = walks(edges, tile.BLOCK_Q, ALL_EDGE)
    ACC: tl.constexpr = delta.data.dtype.element_ty
    dk_acc = tl.zeros([tile.BLOCK_K, tile.BLOCK_D], ACC)
    dv_acc = tl.zeros([tile.BLOCK_K, tile.BLOCK_DV], ACC)
    for member in range(spec.sizes.groups):
        head = kv_head * spec.sizes.groups + member
        sum_ds = tl.zeros([tile.BLOCK_K], ACC)
        if ALL_EDGE or (spec.band.right is not None):
            for i in range(edges.first, edges.full_first, tile.BLOCK_Q):
                dk_acc, dv_acc, sum_ds = _key_step(
                    dk_acc,
                    dv_acc,
                    sum_ds,
                    q,
                    dout,
                    q_tma,
                    dout_tma,
                    lse,
                    delta,
                    y,
                    i,
                    j0,
                    at,
                    head,
                    bias_sums,
                    spec,
                    tile,
                    True,
                )
        if not ALL_EDGE:
            for i in range(edges.full_first, edges.full_last, tile.BLOCK_Q):
                dk_acc, dv_acc, sum_ds = _key_step(
                    dk_acc,
                    dv_acc,
                    sum_ds,
                    q,
                    dout,
                    q_tma,
                    dout_tma,
                    lse,
                    delta,
                    y,
                    i,
                    j0,
                    at,
                    head,
                    bias_sums,
                    spec,
                    tile,
                    False,
                )
            if tile.RAGGED_Q or (spec.band.left is not None):
                for i in range(edges.full_last, edges.last, tile.BLOCK_Q):
                    dk_acc, dv_acc, sum_ds = _key_step(
                        dk_acc,
                        dv_acc,
                        sum_ds,
                        q,
                        dout,
                        q_tma,
                        dout_tma,
                        lse,
                        delta,
                        y,
                        i,
                        j0,
                        at,
                        head,
                        bias_sums,
                        spec,
                        tile,
                        True,
                    )
        if bias_sums is not None:
            tl.store(line(bias_sums, at, head, at.start_k, keys), sum_ds, mask=inside)
    columns = tl.arange(0, tile.BLOCK_D)
    tl.store(
        tile_pointers(dk, at, kv_head, at.start_k, keys, columns),
        (dk_acc * spec.scores.scale).to(dk.data.dtype.element_ty),
        mask=inside[:, None] & (columns < tile.D)[None, :],
    )
    columns = tl.arange(0, tile.BLOCK_DV)
    tl.store(
        tile_pointers(dv, at, kv_head, at.start_k, keys, columns),
        dv_acc.to(dv.data.dtype.element_ty),
        mask=inside[:, None] & (columns < tile.DV)[None, :],
    )


@triton.jit
def _key_step(
    dk_acc, dv_acc, sum_ds, q, dout, q_tma, dout_tma, lse, delta, y, i, j0, at, head, bias_sums, spec, tile, EDGE: tl.constexpr
):  # fmt: skip
    numbers = i + tl.arange(0, tile.BLOCK_Q)
    if (spec.scores.mask is None) and (spec.key_start is None):
        dk_acc, dv_acc, sum_ds = _key_tile(
            dk_acc, dv_acc, sum_ds, q, dout, q_tma, dout_tma, lse, delta, y, i, j0, None, at, head, bias_sums, spec, tile, EDGE
        )  # fmt: skip
    else:
        across = numbers[None, :]
        along = (j0 + tl.arange(0, tile.BLOCK_K))[:, None]
        allowed = None
        if spec.scores.mask is not None:
            allowed = grid_tile(spec.scores.mask, at, head, across, along, False)
        seen = seen_by(interval(numbers, at, spec), across, along, allowed, None, True)
        if tl.max(seen.to(tl.int32)) > 0:
            dk_acc, dv_acc, sum_ds = _key_tile(
                dk_acc, dv_acc, sum_ds, q, dout, q_tma, dout_tma, lse, delta, y, i, j0, allowed, at, head, bias_sums, spec,
                tile, EDGE,
            )  # fmt: skip
    return dk_acc, dv_acc, sum_ds


@triton.jit
def _key_tile(
    dk_acc, dv_acc, sum_ds, q, dout, q_tma, dout_tma, lse, delta, y, i, j0, allowed, at, head, bias_sums, spec, tile,
    EDGE: tl.constexpr,
):  # fmt: skip
    x = queries_of(q, dout, q_tma, dout_tma, lse, delta, at, head, i, spec, tile, EDGE)
    bias = None
    if spec.scores.bias is not None:
        across = (i + tl.arange(0, tile.BLOCK_Q))[None, :]
        along = (j0 + tl.arange(0, tile.BLOCK_K))[:, None]
        bias = grid_tile(spec.scores.bias, at, head, across, along, NEG_INF).to(dk_acc.dtype)
    s = product(y.k, tl.trans(x.q), tile.PRECISION)
    dp = product(y.v, tl.trans(x.dout), tile.PRECISION)
    g = scored(s, dp, x, j0, allowed, bias, at, head, spec, tile, EDGE, True)
    dv_acc = add_product(dv_acc, g.kept.to(x.dout.dtype), x.dout, tile.PRECISION)
    dk_acc = add_product(dk_acc, g.draw.to(x.q.dtype), x.q, tile.PRECISION)
    if bias_sums is not None:
        sum_ds += tl.sum(g.ds, 1)
    return dk_acc, dv_acc, sum_ds


# ------------------------------------------------------------------ d bias: a program owns a tile of it


@triton.jit
def bias_kernel(q, k, v, dout, lse, delta, dbias, batches, heads, spec, tile):
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
    acc = tl.zeros([tile.BLOCK_Q, tile.BLOCK_K], delta.data.dtype.element_ty)
    for sharer in range(batches * heads):
        head = owner + sharer % heads
        here = place(number, owner_batch + sharer // heads, spec, tile.BLOCK_Q, False)
        acc = _bias_tile(acc, q, k, v, dout, lse, delta, keys, j0, here, head, spec, tile)
    base = dbias.data + at.start_q * dbias.row
    base += owner_batch.to(tl.int64) * dbias.batch + owner.to(tl.int64) * dbias.head
    offsets = numbers.to(tl.int64)[:, None] * dbias.row + keys.to(tl.int64)[None, :] * dbias.column
    inside = (numbers < at.sq)[:, None] & (keys < dbias.columns)[None, :]
    tl.store(base + offsets, acc.to(dbias.data.dtype.element_ty), mask=inside)


@triton.jit
def _bias_tile(acc, q, k, v, dout, lse, delta, keys, j0, at, head, spec, tile):
    numbers = at.tile_start + tl.arange(0, tile.BLOCK_Q)
    across = numbers[:, None]
    along = keys[None, :]
    allowed = None
    if spec.scores.mask is not None:
        allowed = grid_tile(spec.scores.mask, at, head, across, along, False)
    seen = seen_by(interval(numbers, at, spec), across, along, allowed, None, False)
    wanted = tl.max(seen.to(tl.int32), 0) > 0
    if tl.max(wanted.to(tl.int32)) > 0:
        bias = grid_tile(spec.scores.bias, at, head, across, along, NEG_INF).to(acc.dtype)
        x = queries_of(q, dout, None, None, lse, delta, at, head, at.tile_start, spec, tile, True)
        kv_head = head // spec.sizes.groups
        columns = tl.arange(0, tile.BLOCK_D)
        columns_v = tl.arange(0, tile.BLOCK_DV)
        k_tile = load_rows(tile_pointers(k, at, kv_head, at.start_k, keys, columns), wanted, tile.D)
        v_tile = load_rows(
            tile_pointers(v, at, kv_head, at.start_k, keys, columns_v), wanted, tile.DV
        )
        s = product(x.q, tl.trans(k_tile), tile.PRECISION)
        dp = product(x.dout, tl.trans(v_tile), tile.PRECISION)
        acc += scored(s, dp, x, j0, allowed, bias, at, head, spec, tile, True, False).ds
    return acc
