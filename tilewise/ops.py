"""Attention as PyTorch operators: schemas, shapes of fakes, autograd, vmap. Imports no kernel.

Two operators run a backend by name, `tilewise::forward` and `tilewise::backward`. Each has an
autograd.Function as its rule for autograd and for the transforms of torch.func, since the rules that
torch.library generates know no forward mode and refuse torch.func.grad. torch.compile and
torch.export, which cannot trace a Function with a forward mode, see the operator alone.

`wanted` of the second names the scores whose gradients are, between spaces: transforms map what is in lists.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import dispatch
from tilewise.derivatives import Rowwise, derive
from tilewise.results import (
    SCORE_NAMES,
    Result,
    accumulation_dtype,
    result_shapes,
    without_autocast,
)
from tilewise.spec import Band, Dropout, KeyRange, Packed, Paged, Problem, Scores

_PROXY = torch._C._TorchDispatchModeKey.PROXY  # what make_fx traces with
_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_DIFFERENTIABLE = 6
_TENSORS = 14
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? mask, Tensor? key_start, Tensor? key_end, Tensor? dropout_seed, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? page_table, Tensor? seqused_k, "
    "float scale, float? softcap, float dropout_p, SymInt? window_left, SymInt? window_right, "
    "str align, SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool deterministic, str backend"
)


def attend(problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    """out and lse of a problem, differentiable."""
    if numbers_only(problem.q, problem.k, problem.v, *_score_tensors(problem)):
        out, lse, _ = _compute(problem, backend)
    else:
        out, lse, _ = torch.ops.tilewise.forward(*_flatten(problem, backend))
    return out, lse


def numbers_only(*tensors: Tensor | None) -> bool:
    """Whether no gradient, tangent, transform or tracing is at work: a backend may be called itself."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active() or torch._C._get_dispatch_mode(_PROXY):
        return False
    grad, duals = torch.is_grad_enabled(), forward_ad._current_level >= 0
    return all(
        t is None
        or (
            holds_numbers(t)
            and not (grad and t.requires_grad)
            and not (duals and forward_ad.unpack_dual(t).tangent is not None)
        )
        for t in tensors
    )


def holds_numbers(t: Tensor) -> bool:
    """Whether t's memory holds its numbers: no subclass, fake, meta or (as in is_grads_batched) batched
    tensor, none with a pending minus sign."""
    return (
        type(t) in (Tensor, torch.nn.Parameter)
        and (t.is_cpu or t.is_cuda)
        and not (t.is_neg() or t._is_zerotensor() or _legacy_batched(t))
    )


def gradients(
    problem: Problem, backend: str, result: Result, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, ...]:
    """dq, dk and dv, differentiable."""
    arguments = _flatten(problem, backend)
    return torch.ops.tilewise.backward(dout, dlse, *result, "", *arguments)[:3]


def _score_tensors(problem: Problem) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    s = problem.scores
    return s.bias, s.alibi_slopes, s.sinks


def _flatten(p: Problem, backend: str) -> tuple[Any, ...]:
    s, packed, paged, dropout = p.scores, p.packed, p.paged, p.dropout
    cu_seqlens: tuple[Tensor | None, ...] = (None, None)
    if packed:
        # To backends one tensor says more than two that are equal, which is what hooks of saved tensors
        # (offloading, say) would make of it.
        cu_q, cu_k, _, _ = packed
        cu_seqlens = (cu_q, None if cu_k is cu_q else cu_k)
    return (
        *(p.q, p.k, p.v, s.bias, s.alibi_slopes, s.sinks, s.mask),
        *(p.key_range or (None, None)),
        dropout.seed if dropout else None,
        *cu_seqlens,
        *(paged or (None, None)),
        *(s.scale, s.softcap, dropout.p if dropout else 0.0),
        *p.band,
        *(packed[2:] if packed else (None, None)),
        p.deterministic,
        backend,
    )


def _unflatten(arguments: Sequence[Any]) -> Problem:
    (q, k, v, bias, slopes, sinks, mask, start, end, seed, cu_q, cu_k, table, used) = arguments[
        :_TENSORS
    ]
    (scale, softcap, p, left, right, align, max_q, max_k, deterministic, _) = arguments[_TENSORS:]
    return Problem(
        q,
        k,
        v,
        Band(left, right, align),
        Scores(scale, softcap, slopes, bias, mask, sinks),
        None if start is None else KeyRange(start, end),
        None if seed is None else Dropout(p, seed),
        None if cu_q is None else Packed(cu_q, cu_q if cu_k is None else cu_k, max_q, max_k),
        None if table is None else Paged(table, used),
        deterministic,
    )


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _compute(_unflatten(arguments), arguments[-1])


def _compute(problem: Problem, backend: str) -> Result:
    with without_autocast(problem.q.device):
        return dispatch.backend(backend).forward(problem)


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = _unflatten(arguments)
    out, lse = result_shapes(problem)
    q, dtype = problem.q, accumulation_dtype(problem.q.dtype)
    low = lse if q.dtype in dispatch.backend(arguments[-1]).SPLITS_LSE else (0,)
    return q.new_empty(out), q.new_empty(lse, dtype=dtype), q.new_empty(low, dtype=dtype)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    wanted: str,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    problem = _unflatten(arguments)
    backward = dispatch.backend(arguments[-1]).backward
    with without_autocast(dout.device):
        g = backward(problem, Result(out, lse, lse_low), dout, dlse, wanted.split())
    scores = [getattr(g.scores, name) for name in SCORE_NAMES]
    return (g.q, g.k, g.v, *(problem.q.new_empty(0) if t is None else t for t in scores))


def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    lse_low: Tensor,
    wanted: str,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    q, k, v, *scores = arguments[:_DIFFERENTIABLE]
    return (
        *(t.new_empty(t.shape) for t in (q, k, v)),
        *(
            t.new_empty(t.shape) if t is not None and name in wanted.split() else q.new_empty(0)
            for name, t in zip(SCORE_NAMES, scores, strict=True)
        ),
    )


def _forward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])  # lse_low may be shared by all calls
    ctx.save_for_backward(*inputs[:_TENSORS], *output)
    # The same tensors, as torch.func wants it. The outputs without their graph: where checkpointing
    # stops early, they would keep each other alive for good.
    ctx.save_for_forward(*inputs[:_TENSORS], *(t.detach() for t in output))
    ctx.options = inputs[_TENSORS:]


def _forward_vjp(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, lse_low = ctx.saved_tensors
    needed = ctx.needs_input_grad[:_DIFFERENTIABLE]
    rest = (None,) * (_TENSORS - _DIFFERENTIABLE + len(ctx.options))
    if dout is None and dlse is None:
        return (*(None,) * _DIFFERENTIABLE, *rest)
    if dout is None:
        dout = torch.zeros_like(out)
    wanted = " ".join(itertools.compress(SCORE_NAMES, needed[3:]))
    arguments = (dout, dlse, out, lse, lse_low, wanted, *tensors, *ctx.options)
    if numbers_only(dout, dlse, *tensors[:_DIFFERENTIABLE]):
        grads = _backward(*arguments)
    else:
        grads = torch.ops.tilewise.backward(*arguments)
    return (*(g if need else None for g, need in zip(grads, needed, strict=True)), *rest)


def _forward_jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor, None]:
    *tensors, _, _, _ = ctx.saved_tensors
    problem = _unflatten((*tensors, *ctx.options))
    moves = _present(problem, tangents[:_DIFFERENTIABLE])
    out, lse = derive(problem, Rowwise.jvp, moves, ("out", "lse"))
    return out.to(problem.q.dtype), lse, None


def _backward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    dout, dlse, _, _, _, wanted, *arguments = inputs
    tensors = (dout, dlse, *arguments[:_TENSORS])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.options = tuple(arguments[_TENSORS:])
    ctx.wanted = ("q", "k", "v", *wanted.split())


def _saved_backward(ctx: Any) -> tuple[Problem, list[tuple[str, Tensor]]]:
    """The problem, and the cotangents (zeros where there was none) by name."""
    dout, dlse, *tensors = ctx.saved_tensors
    problem = _unflatten((*tensors, *ctx.options))
    if dlse is None:
        shape = result_shapes(problem)[1]
        dlse = dout.new_zeros(shape, dtype=accumulation_dtype(dout.dtype))
    return problem, [("out", dout), ("lse", dlse)]


def _backward_vjp(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    problem, given = _saved_backward(ctx)
    seconds = _present(problem, cotangents)
    names = [name for name, _ in seconds]
    grads = derive(
        problem,
        lambda program: program.vjp().vjp(),
        (*given, *seconds),
        (*names, "out", "lse"),
    )
    by_name = dict(zip((*names, "out", "lse"), grads, strict=True))
    dout = by_name["out"].to(problem.q.dtype)
    dlse = None if ctx.saved_tensors[1] is None else by_name["lse"]
    operands = [
        None if name not in by_name else by_name[name].to(t.dtype) for name, t in _operands(problem)
    ]
    rest = (None,) * (_TENSORS - _DIFFERENTIABLE + len(ctx.options))
    return (dout, dlse, None, None, None, None, *operands, *rest)


def _backward_jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
    problem, given = _saved_backward(ctx)
    moves = [
        (name, torch.zeros_like(t) if move is None else move)
        for (name, t), move in zip(given, tangents[:2], strict=True)
    ]
    seconds = _present(problem, tangents[6 : 6 + _DIFFERENTIABLE])
    names = [name for name, _ in seconds]
    results = derive(
        problem, lambda program: program.vjp().jvp(), (*given, *seconds, *moves), names
    )
    by_name = dict(zip(names, results, strict=True))
    return tuple(
        by_name[name].to(t.dtype)
        if name in by_name and name in ctx.wanted
        else problem.q.new_empty(0)
        for name, t in _operands(problem)
    )


def _operands(problem: Problem) -> list[tuple[str, Tensor]]:
    s = problem.scores
    return [
        ("q", problem.q),
        ("k", problem.k),
        ("v", problem.v),
        *((name, getattr(s, name)) for name in SCORE_NAMES),
    ]


def _present(problem: Problem, moves: Sequence[Tensor | None]) -> list[tuple[str, Tensor]]:
    """Each operand that there is, with its tangent or cotangent; zeros for a missing one."""
    return [
        (name, torch.zeros_like(t) if move is None or move.shape != t.shape else move)
        for (name, t), move in zip(_operands(problem), moves, strict=True)
        if t is not None
    ]


class _Attention(torch.autograd.Function):
    setup_context = staticmethod(_forward_context)
    backward = staticmethod(_forward_vjp)
    jvp = staticmethod(_forward_jvp)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        if numbers_only(*arguments[:_DIFFERENTIABLE]):
            return _forward(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tilewise.forward(*arguments)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return _vmapped(torch.ops.tilewise.forward, 0, info.batch_size, in_dims, arguments)


class _AttentionBackward(torch.autograd.Function):
    setup_context = staticmethod(_backward_context)
    backward = staticmethod(_backward_vjp)
    jvp = staticmethod(_backward_jvp)

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tilewise.backward(*arguments)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        return _vmapped(torch.ops.tilewise.backward, 6, info.batch_size, in_dims, arguments)


def _vmapped(
    op: Any, first: int, count: int, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
) -> tuple[Any, Any]:
    """An operator whose attention arguments begin at `first`, for `count` samples at once.

    Where every tensor has a batch dimension of its own, the mapped one joins it; else samples are
    taken one by one (shared slopes or sinks, dropout, whose bits number the sequences, packing).
    """
    tensors = arguments[first : first + _TENSORS]
    batched = [t for i, t in enumerate(tensors) if i in (0, 1, 2, 6, 7, 8)]
    if sum(t is not None for t in tensors) > sum(t is not None for t in batched):
        samples = [
            op(*(_sample(a, dim, i) for a, dim in zip(arguments, in_dims, strict=True)))
            for i in range(count)
        ]
        outputs = tuple(torch.stack(parts) for parts in zip(*samples, strict=True))
    else:
        q, dim = arguments[first], in_dims[first]
        size = q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]
        folded = (
            _fold(a, dim, count, size) if isinstance(a, Tensor) else a
            for a, dim in zip(arguments, in_dims, strict=True)
        )
        outputs = tuple(
            t.unflatten(0, (count, size)) if t.ndim > 1 else t.expand(count, -1)
            for t in op(*folded)
        )
    return outputs, (0,) * len(outputs)


def _sample(argument: Any, dim: int | None, index: int) -> Any:
    return argument if dim is None else argument.select(dim, index)


def _fold(t: Tensor, dim: int | None, count: int, size: int) -> Tensor:
    """The mapped dimension and the batch, (count, size, …), as one."""
    t = t.unsqueeze(0) if dim is None else t.movedim(dim, 0)
    if t.numel() == 0 and t.ndim == 2:
        return t[0]  # nothing, in the place of a tensor that is not there
    return t.expand(count, size, *t.shape[2:]).flatten(0, 1)


_library = torch.library.Library("tilewise", "DEF")
_library.define(f"forward({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
_library.define(
    "backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor lse_low, str wanted, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("forward", _forward, "CompositeExplicitAutograd")
_library.impl("backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::forward", _forward_fake, lib=_library)
torch.library.register_fake("tilewise::backward", _backward_fake, lib=_library)
# The second key is where torch.func's transforms come in; the Functions handle all of their levels.
for _key in ("Autograd", "FuncTorchDynamicLayerFrontMode"):
    _library.impl("forward", _Attention.apply, _key)
    _library.impl("backward", _AttentionBackward.apply, _key)
