"""Derivatives of any order, forward and reverse, a block of query rows at a time: O(n) in memory.

The backends know attention and its gradient. Everything beyond — double backward, forward mode,
Hessians — is a derivative of the formula in `dense.py`, which PyTorch can take for one block of rows.
A function that works row block by row block stays one when it is differentiated: what follows the
rows is cut and joined, what every row shares is summed. So a `Rowwise` function has a `vjp` and a
`jvp` that are `Rowwise` again, and one autograd.Function serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import dense, spec
from tilewise.results import SCORE_NAMES, accumulation_dtype, result_shapes, without_autocast
from tilewise.spec import Problem, sequences

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Rowwise:
    """A function of tensors that is computed for a block of rows at a time.

    `function(block, constants, *inputs)` takes the (first, last) row of the block. A tensor's entry
    in `in_dims`, `out_dims` or `constant_dims` is the dimension that follows the rows, or None for
    what all rows share. Constants (masks, ranges, seeds) are not differentiated.
    """

    function: Callable[..., Tensors]
    rows: int
    step: int
    in_dims: tuple[int | None, ...]
    out_dims: tuple[int | None, ...]
    constant_dims: tuple[int | None, ...]

    def __call__(self, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensors:
        """Runs all blocks; a shared output is the sum of its blocks."""
        rowwise: list[list[Tensor]] = [[] for _ in self.out_dims]
        shared: list[Any] = [None] * len(self.out_dims)
        # Without rows there is one empty block, for its shapes.
        for i0, i1 in dense.row_blocks(0, max(1, self.rows), self.step):
            i1 = min(i1, self.rows)
            fixed = _cut(constants, self.constant_dims, i0, i1)
            with without_autocast(inputs[0].device):
                parts = self.function((i0, i1), fixed, *_cut(inputs, self.in_dims, i0, i1))
            for n, (part, dim) in enumerate(zip(parts, self.out_dims, strict=True)):
                if dim is not None:
                    rowwise[n].append(part)
                else:
                    total = shared[n]
                    shared[n] = part if total is None else total + part
        return tuple(
            torch.cat(blocks, dim) if dim is not None else total
            for blocks, total, dim in zip(rowwise, shared, self.out_dims, strict=True)
        )

    def vjp(self) -> Rowwise:
        """(*inputs, *cotangents) ↦ cotangents of the inputs."""
        count, function = len(self.in_dims), self.function

        def pull(block: tuple[int, int], constants: Tensors, *tensors: Tensor) -> Tensors:
            inputs, cotangents = tensors[:count], tensors[count:]
            return torch.func.vjp(lambda *x: function(block, constants, *x), *inputs)[1](cotangents)

        return replace(
            self, function=pull, in_dims=self.in_dims + self.out_dims, out_dims=self.in_dims
        )

    def jvp(self) -> Rowwise:
        """(*inputs, *tangents) ↦ tangents of the outputs.

        The vjp is linear in its cotangents and its transpose is the jvp, so reverse mode serves: it
        nests, where forward mode inside forward mode does not.
        """
        count, function = len(self.in_dims), self.function

        def push(block: tuple[int, int], constants: Tensors, *tensors: Tensor) -> Tensors:
            inputs, tangents = tensors[:count], tensors[count:]
            outputs, back = torch.func.vjp(lambda *x: function(block, constants, *x), *inputs)[:2]
            zeros = tuple(torch.zeros_like(t) for t in outputs)
            return torch.func.vjp(back, zeros)[1](tangents)[0]

        return replace(self, function=push, in_dims=self.in_dims * 2)


def _cut(tensors: Sequence[Tensor], dims: Sequence[int | None], i0: int, i1: int) -> Tensors:
    return tuple(
        t if dim is None else t.narrow(dim, i0, i1 - i0)
        for t, dim in zip(tensors, dims, strict=True)
    )


class _Blockwise(torch.autograd.Function):
    """A Rowwise function under autograd; differentiable as often as one likes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(program: Rowwise, constants: int, *tensors: Tensor) -> Tensors:
        return program(tensors[:constants], tensors[constants:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        program, constants, *tensors = inputs
        ctx.program, ctx.constants = program, constants
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grads = _Blockwise.apply(ctx.program.vjp(), ctx.constants, *ctx.saved_tensors, *cotangents)
        return (None, None, *[None] * ctx.constants, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensors:
        tensors = ctx.saved_tensors
        inputs = tensors[ctx.constants :]
        moves = [
            torch.zeros_like(x) if t is None else t
            for x, t in zip(inputs, tangents[2 + ctx.constants :], strict=True)
        ]
        return _Blockwise.apply(ctx.program.jvp(), ctx.constants, *tensors, *moves)


def run(program: Rowwise, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensors:
    """The program's outputs, differentiable to any order."""
    return _Blockwise.apply(program, len(constants), *constants, *inputs)


class Attention(NamedTuple):
    """Dense attention as a Rowwise function of its `inputs`, in the dtype of its arithmetic."""

    program: Rowwise
    constants: Tensors
    inputs: Tensors
    names: tuple[str, ...]


def attention(problem: Problem) -> Attention:
    """A dense problem as a Rowwise function from `inputs` to out and lse.

    The inputs are the problem's floating tensors that there are, `names` in the order of
    `dense.Operands`, cast (differentiably) to the dtype of the arithmetic.
    """
    dtype = accumulation_dtype(problem.q.dtype)
    b, sq, hq, _ = problem.q.shape
    sk, groups, s = problem.k.shape[1], problem.groups, problem.scores

    def row_dim(t: Tensor, dim: int) -> int | None:
        return None if t.shape[dim] == 1 and sq != 1 else dim

    given = {
        "q": (problem.q, 1),
        "k": (problem.k, None),
        "v": (problem.v, None),
        "bias": (s.bias, None if s.bias is None else row_dim(s.bias, 2)),
        "alibi_slopes": (s.alibi_slopes, None),
        "sinks": (s.sinks, None),
    }
    names = tuple(name for name, (t, _) in given.items() if t is not None)
    in_dims = tuple(given[name][1] for name in names)
    inputs = tuple(given[name][0].to(dtype) for name in names)  # type: ignore[union-attr]

    lo, hi = problem.interval(0, sq)
    constants = [lo, hi]
    constant_dims: list[int | None] = [1, 1]
    if s.mask is not None:
        constants.append(s.mask)
        constant_dims.append(row_dim(s.mask, 2))
    dropout = problem.dropout
    if dropout is not None:
        constants.append(dropout.seed)
        constant_dims.append(None)
    formula = dense.formula_of(problem)
    masked = s.mask is not None

    def function(block: tuple[int, int], fixed: Tensors, *tensors: Tensor) -> Tensors:
        x = dict(zip(names, tensors, strict=True))
        rows = dense.Rows(
            fixed[0],
            fixed[1],
            torch.arange(*block, device=fixed[0].device),
            fixed[2] if masked else None,
        )
        here = (
            formula
            if dropout is None
            else formula._replace(dropout=dropout._replace(seed=fixed[-1]))
        )
        # What nothing in the block sees is cleared: there a NaN is not even a factor.
        seen = dense.in_interval(rows, sk).unsqueeze(1)
        if rows.mask is not None:
            seen = seen & rows.mask
        if "bias" in x:
            seen = seen & (x["bias"] != dense.NEG_INF)
        seen_keys, seeing = seen.any(-2).unsqueeze(-1), seen.any(-1).unsqueeze(-1)
        q = x["q"].transpose(1, 2).where(seeing, 0)
        k, v = (
            x[name].transpose(1, 2).repeat_interleave(groups, 1).where(seen_keys, 0)
            for name in ("k", "v")
        )
        operands = dense.Operands(**{**x, "q": q, "k": k, "v": v})
        out, lse = dense.forward(operands, rows, here)
        return out.transpose(1, 2), lse

    program = Rowwise(
        function,
        sq,
        dense.rows_at_once(b * hq, sk),
        in_dims,
        (1, 2),
        tuple(constant_dims),
    )
    return Attention(program, tuple(constants), inputs, names)


def derive(
    problem: Problem,
    order: Callable[[Rowwise], Rowwise],
    extra: Sequence[tuple[str, Tensor]],
    outputs: Sequence[str],
) -> list[Tensor]:
    """Derivatives of attention, dense or packed, differentiable to any order.

    `order` says which, as vjp and jvp of the function from the problem's tensors to out and lse.
    `extra` holds the cotangents and tangents it takes besides, each with the name of what it belongs
    to ("q", …, "out", "lse"); `outputs` names what comes out.
    """
    dtype = accumulation_dtype(problem.q.dtype)
    if problem.packed is None:
        whole = attention(problem)
        inputs = (*whole.inputs, *(t.to(dtype) for _, t in extra))
        return list(run(order(whole.program), whole.constants, inputs))
    pieces: list[list[Tensor]] = [[] for _ in outputs]
    for sequence in sequences(problem):
        part = attention(sequence.problem)
        moves = (_view(sequence, name, t).to(dtype) for name, t in extra)
        results = run(order(part.program), part.constants, (*part.inputs, *moves))
        for found, piece in zip(pieces, results, strict=True):
            found.append(piece)
    shapes = _shapes(problem)
    return [
        _joined(name, found, shapes[name])
        if found
        else problem.q.new_zeros(shapes[name], dtype=dtype)
        for name, found in zip(outputs, pieces, strict=True)
    ]


def _shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """The shape of the whole, by name."""
    given = {"q": problem.q, "k": problem.k, "v": problem.v}
    given |= {name: getattr(problem.scores, name) for name in SCORE_NAMES}
    out, lse = result_shapes(problem)
    shapes = {name: tuple(t.shape) for name, t in given.items() if t is not None}
    return shapes | {"out": out, "lse": lse}


def _joined(name: str, pieces: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """A packed tensor from its sequences' pieces, zero past the last; what they share is summed."""
    if name == "sinks" or (name == "alibi_slopes" and len(shape) == 1):
        return torch.stack(pieces).sum(0)
    if name == "alibi_slopes":
        return torch.stack(pieces)
    pieces = [piece.squeeze(0) for piece in pieces]  # a dense batch of one each
    dim = {"lse": 1, "bias": 1}.get(name, 0)
    if name == "bias":
        pieces = [F.pad(piece, (0, shape[2] - piece.shape[2])) for piece in pieces]
        if shape[1] == 1:
            return torch.stack(pieces).sum(0)
    whole = torch.cat(pieces, dim)
    behind = [0, 0] * (whole.ndim - 1 - dim) + [0, shape[dim] - whole.shape[dim]]
    return F.pad(whole, behind)


def _view(sequence: spec.Sequence, name: str, t: Tensor) -> Tensor:
    """The sequence's view of what belongs to `name`."""
    if name in ("q", "out"):
        return sequence.of_q(t)
    if name in ("k", "v"):
        return sequence.of_k(t)
    if name == "lse":
        return sequence.of_lse(t)
    alone: dict[str, Any] = {name: t}
    scores = spec.Scores(1.0, **alone)
    return getattr(sequence.of_scores(scores), name)
