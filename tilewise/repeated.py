"""Calls like earlier ones.

Checks, the choice of a backend and what it launches depend on shapes, strides, dtypes and options, not on
numbers. Where q, k and v are the only tensors, all of that is settled once, and found by a signature.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise import dispatch, ops
from tilewise.arguments import autocast_changes
from tilewise.backends import triton
from tilewise.kernels.replay import Replay, recorded
from tilewise.results import Result, without_autocast
from tilewise.spec import Problem
from tilewise.tuning.config import overridden

_MOST = 4096
_SIMPLE = frozenset((bool, int, float, str, NoneType))


class _State(Enum):
    """Of a function that is not replayed: it ran once, or it does more than to launch kernels."""

    RAN = 0
    COMPUTES = 1


class Settled:
    """What is settled about the calls of a signature.

    What runs for the second time is recorded, and replayed from then on. Not at the first time: where
    lengths change with every call, recording would not pay.
    """

    def __init__(self, problem: Problem, backend: str) -> None:
        # Without its tensors, whose memory is the caller's.
        nothing: Any = None
        self._problem = problem._replace(q=nothing, k=nothing, v=nothing)
        self.backend = backend
        self._known: dict[Hashable, Replay | _State] = {}

    def problem(self, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        return self._problem._replace(q=q, k=k, v=v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """out, lse and lse_low."""
        return self._run("forward", self._forward, q, k, v)

    def backward(self, *tensors: Tensor) -> Sequence[Tensor]:
        """dq, dk and dv from q, k, v, what `forward` gave, dout, and dlse where there is one."""
        # What was saved for the backward pass may come back laid out anew: from a CPU, or decompressed.
        layout = tuple([(t.stride(), t.data_ptr() % 16) for t in tensors])
        return self._run(layout, self._backward, *tensors)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        with without_autocast(q.device):
            return dispatch.backend(self.backend).forward(self.problem(q, k, v))

    def _backward(self, *tensors: Tensor) -> Sequence[Tensor]:
        q, k, v, out, lse, lse_low, dout, *dlse = tensors
        result, backward = Result(out, lse, lse_low), dispatch.backend(self.backend).backward
        with without_autocast(q.device):
            g = backward(self.problem(q, k, v), result, dout, dlse[0] if dlse else None)
        return g.q, g.k, g.v

    def _run(
        self, what: Hashable, function: Callable[..., Sequence[Tensor]], *tensors: Tensor
    ) -> Sequence[Tensor]:
        if not tensors[0].is_cuda:
            return function(*tensors)
        device = tensors[0].get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self._run(what, function, *tensors)
        stream = torch._C._cuda_getCurrentRawStream(device)
        known = self._known.get((what, stream))
        if isinstance(known, Replay):
            if not (known.shares and torch.cuda.is_current_stream_capturing()):
                return known(*tensors)
        elif known is None:
            self._known[what, stream] = _State.RAN
        elif known is _State.RAN:
            results, replay = recorded(function, stream, *tensors)
            self._known[what, stream] = _State.COMPUTES if replay is None else replay
            return results
        return function(*tensors)


_settled: dict[Hashable, Settled] = {}


def find(signature: Hashable) -> Settled | None:
    return None if signature is None else _settled.get(signature)


def settle(signature: Hashable, problem: Problem, backend: str) -> Settled:
    if len(_settled) >= _MOST:
        _settled.clear()
    _settled[signature] = settled = Settled(problem, backend)
    return settled


def forget() -> None:
    """Forgets every call: for who changes what backends do."""
    _settled.clear()


def signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    window_size: tuple[int | None, int | None],
    *options: Any,
) -> Hashable:
    """What the checks and the plan of a call depend on, but for numbers; None where more may matter."""
    if _something_is_at_work() or not (
        ops.holds_numbers(q) and ops.holds_numbers(k) and ops.holds_numbers(v)
    ):
        return None
    if torch._C._is_any_autocast_enabled() and autocast_changes(q, k, v):
        return None
    # True equals 1 and is no number to the checks, so types matter. Other types than these may not be
    # hashed, or be kept.
    if type(window_size) is not tuple or type(dropout_p) not in (float, int) or dropout_p != 0:
        return None
    values = (*window_size, *options)
    types = tuple(map(type, values))
    if not _SIMPLE.issuperset(types):
        return None
    return (
        *(q.dtype, q.get_device(), q.shape, q.stride()),
        *(k.dtype, k.get_device(), k.shape, k.stride()),
        *(v.dtype, v.get_device(), v.shape, v.stride()),
        *(values, types, torch.are_deterministic_algorithms_enabled()),
        _circumstances(q, k, v),
    )


def _something_is_at_work() -> bool:
    """Whether tracing, a transform, forward mode, a dispatch mode or an override of tiles is."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
        or overridden()
    )


def _circumstances(q: Tensor, k: Tensor, v: Tensor) -> Hashable:
    """What else backends look at."""
    if not q.is_cuda:
        return triton.interpreted()
    if q.dtype != torch.float32 and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0:
        return None
    remainders = (q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16)
    return remainders, torch.backends.cuda.matmul.allow_tf32


def attend(settled: Settled, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, differentiable."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse, _ = _Attention.apply(q, k, v, settled)
    else:
        out, lse, _ = settled.forward(q, k, v)
    return out, lse


class _Attention(torch.autograd.Function):
    """Of q, k and v alone, by what is settled: what ops.py's operators do with all arguments."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, settled: Settled
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, lse_low = settled.forward(q, k, v)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse_low)  # it may be shared by all calls
        ctx.save_for_backward(q, k, v, out, lse, lse_low)
        ctx.settled = settled
        return out, lse, lse_low

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None
        saved, settled = ctx.saved_tensors, ctx.settled
        q, k, v, *result = saved
        if dout is None:
            dout = torch.zeros_like(result[0])
        if ops.numbers_only(dout, dlse, q, k, v):
            # Of a sum or a mean it is one number, expanded, which some kernels would lay out in every call.
            dout = dout.contiguous() if 0 in dout.stride() else dout
            cotangents = (dout,) if dlse is None else (dout, dlse)
            grads = settled.backward(*saved, *cotangents)
        else:
            problem = settled.problem(q, k, v)
            grads = ops.gradients(problem, settled.backend, Result(*result), dout, dlse)
        needed = ctx.needs_input_grad
        return (*(g if need else None for g, need in zip(grads, needed[:3], strict=True)), None)
