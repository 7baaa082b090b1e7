"""Calls that repeat earlier ones: nothing but numbers may be taken for the same, and replays are launches."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tilewise import repeated
from tilewise.backends import tiled
from tilewise.kernels import replay


def operands(*shape, **options):
    return (torch.randn(*shape, **options) for _ in range(3))


# ------------------------------------------------------------------ signatures


@pytest.mark.parametrize("requires_grad", [False, True])
def test_repeated_calls_give_their_own_numbers(requires_grad):
    for _ in range(4):
        q, k, v = (t.requires_grad_(requires_grad) for t in operands(2, 9, 4, 8))
        got = tilewise.attention(q, k, v, causal=True, return_lse=True)
        want = tilewise.attention(q, k, v, causal=True, return_lse=True, backend="reference")
        torch.testing.assert_close(got, want)
        if requires_grad:
            loss, same = (sum((t.sin()).sum() for t in pair) for pair in (got, want))
            grads = torch.autograd.grad(loss, (q, k, v), create_graph=True)
            torch.testing.assert_close(grads, torch.autograd.grad(same, (q, k, v)))
            second = torch.autograd.grad(sum(g.cos().sum() for g in grads), (q, k, v))
            assert all(t.isfinite().all() and t.any() for t in second)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"window_size": (1, 0)}, {"window_size": (True, 0)}),
        ({"window_size": (1, 0)}, {"window_size": (1.0, 0)}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1}, {"softcap": True}),
        ({"deterministic": False}, {"deterministic": 0}),
        ({}, {"dropout_p": False}),
        ({}, {"backend": "nothing"}),
    ],
)
def test_what_is_equal_and_wrong_is_refused_after_what_is_right(good, bad):
    q, k, v = operands(1, 5, 2, 8)
    tilewise.attention(q, k, v, **good)
    with pytest.raises(ValueError, match=next(iter(bad)).partition("_")[0]):
        tilewise.attention(q, k, v, **bad)


def test_a_wrong_tensor_is_refused_after_a_right_one():
    q, k, v = operands(1, 5, 2, 8)
    tilewise.attention(q, k, v)
    for wrong in (k.double(), k[:, :4], k[..., :4], k[0], k.numpy(), k.to("meta")):
        with pytest.raises(ValueError, match="k"):
            tilewise.attention(q, wrong, v)


def test_calls_that_differ_have_signatures_that_differ():
    q, k, v = operands(2, 6, 2, 8)
    options = {"causal": True, "align": "top-left", "softcap": None, "scale": None}
    options |= {"deterministic": None, "backend": None}

    def signature(q=q, k=k, v=v, p=0.0, window=(None, None), **changes):
        return repeated.signature(q, k, v, p, window, *(options | changes).values())

    different = [
        signature(),
        signature(causal=False),
        signature(align="bottom-right"),
        signature(softcap=2.0),
        signature(scale=2.0),
        signature(deterministic=True),
        signature(backend="tiled"),
        signature(window=(1, None)),
        signature(window=(None, 1)),
        signature(q=q.half()),
        signature(q=q[:1]),
        signature(k=k[:, :3]),
        signature(v=v[..., :4]),
        signature(q=q.transpose(1, 2).contiguous().transpose(1, 2)),
    ]
    torch.use_deterministic_algorithms(True)
    different.append(signature())
    torch.use_deterministic_algorithms(False)
    assert None not in different
    assert len(set(different)) == len(different)
    assert signature() == signature(q=torch.randn_like(q))


def test_calls_under_transforms_and_the_like_have_none():
    q, k, v = operands(2, 6, 2, 8)
    seen = []

    def note(q):
        seen.append(repeated.signature(q, k, v, 0.0, (None, None)))
        return q

    torch.vmap(note)(q.unsqueeze(0))
    torch.func.jvp(note, (q,), (q,))
    with torch.autocast("cpu"):
        note(q)
    with FlopCounterMode(display=False):
        note(q)
    note(q.to("meta"))
    assert seen == [None] * 5


def test_calls_under_autocast_that_casts_nothing_are_repeated():
    """As in most training: q, k and v come from layers that autocast has cast."""
    q, k, v = operands(2, 6, 2, 8)
    low = [t.bfloat16().requires_grad_() for t in (q, k, v)]

    def gradients():
        out = tilewise.attention(*low, causal=True)
        return out, *torch.autograd.grad(out.float().square().sum(), low)

    plain = gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert repeated.signature(*low, 0.0, (None, None)) is not None
        found = gradients()
        assert repeated.signature(q, k, v, 0.0, (None, None)) is None
    with torch.autocast("cpu", dtype=torch.float16):
        assert repeated.signature(*low, 0.0, (None, None)) is None
        assert tilewise.attention(*low).dtype == torch.float16
    for got, want in zip(found, plain, strict=True):
        assert torch.equal(got, want)


def test_no_memory_of_a_call_is_kept():
    q, k, v = operands(1, 64, 2, 8)
    tilewise.attention(q, k, v)
    (settled,) = repeated._settled.values()
    assert settled._problem[:3] == (None, None, None)


def test_the_cache_of_signatures_is_bounded(monkeypatch):
    monkeypatch.setattr(repeated, "_MOST", 8)
    for length in range(1, 20):
        tilewise.attention(*operands(1, length, 1, 8))
        assert len(repeated._settled) <= 8


def test_a_settled_call_is_not_checked_again(monkeypatch):
    q, k, v = operands(1, 5, 2, 8)
    want = tilewise.attention(q, k, v)
    monkeypatch.setattr(tiled, "unsupported", None)
    torch.testing.assert_close(tilewise.attention(q, k, v), want)


def test_a_backward_pass_is_told_from_one_whose_saved_tensors_lie_otherwise(monkeypatch):
    seen, run = [], repeated.Settled._run

    def noted(self, what, *rest):
        seen.append(what)
        return run(self, what, *rest)

    monkeypatch.setattr(repeated.Settled, "_run", noted)
    kinds = [
        lambda t: t,
        torch.Tensor.contiguous,
        lambda t: torch.cat((t, t[..., :1]), -1)[..., :-1],
    ]
    for unpacked in (*kinds, *kinds):
        q, k, v = (t.transpose(1, 2).requires_grad_() for t in operands(2, 3, 9, 8))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked):
            got = tilewise.attention(q, k, v)
        want = tilewise.attention(q, k, v, backend="reference")
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (got, want)]
        torch.testing.assert_close(*grads)
    backward = [what for what in seen if what != "forward"][::2]  # not the reference's
    assert backward[:3] == backward[3:]
    assert len(set(backward)) == 3


# ------------------------------------------------------------------ replays


class Struct(NamedTuple):
    data: Any
    stride: int
    other: Any = None


@dataclasses.dataclass
class Descriptor:
    base: Any
    shape: list[int]


class Kernel:
    """As Triton compiles one; notes what it is launched on."""

    function, packed_metadata = "function", "metadata"
    metadata = None

    def __init__(self):
        self.launches = []

    def run(self, *arguments):
        self.launches.append(arguments)


@pytest.fixture
def no_graph(monkeypatch):
    """Of what is captured torch knows nothing without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def address(argument):
    return argument if isinstance(argument, int) else argument.data_ptr()


def test_a_replay_launches_on_the_tensors_it_gets(no_graph):
    kernel, counter = Kernel(), torch.zeros(1)
    view = slice(2, None)

    def function(q, k):
        out, scratch = torch.empty_like(q), q.new_empty(3, dtype=torch.float64)
        arguments = (
            Struct(q, 7),
            Descriptor(k[view], [1, 2]),
            Struct(Struct(out, 1), 2, Struct(scratch, 3)),
            Struct(counter, 5),
            out,
            11,
        )
        replay.note(kernel, 13, arguments)
        return out, q.new_empty(0)

    first = torch.randn(4), torch.randn(5)
    _, again = replay.recorded(function, 17, *first)
    assert again is not None
    assert again.shares
    for q, k in (first, (torch.randn(4), torch.randn(5))):
        out, nothing = again(q, k)
        assert out.shape == q.shape
        assert nothing.numel() == 0
        programs, y, z, stream, function_, metadata, *hooks = kernel.launches[-1][:9]
        assert (programs, y, z, stream) == (13, 1, 1, 17)
        assert hooks == [None] * 3
        assert (function_, metadata) == (Kernel.function, Kernel.packed_metadata)
        on_q, descriptor, nested, shared, last, number = kernel.launches[-1][9:]
        assert on_q[1:] == (7, None)
        assert address(on_q[0]) == q.data_ptr()
        assert descriptor.shape == [1, 2]
        assert address(descriptor.base) == k[view].data_ptr()
        assert address(nested[0][0]) == out.data_ptr() == address(last)
        assert nested[1] == 2
        assert address(nested[2][0]) not in (q.data_ptr(), k.data_ptr(), out.data_ptr())
        assert address(shared[0]) == counter.data_ptr()
        assert number == 11


def test_one_tensor_given_twice_is_two_inputs(no_graph):
    kernel = Kernel()

    def function(q, k):
        replay.note(kernel, 1, (Struct(q, 1), Struct(k, 1)))
        return (torch.empty_like(q),)

    both = torch.randn(4)
    _, again = replay.recorded(function, 0, both, both)
    q, k = torch.randn(4), torch.randn(4)
    again(q, k)
    assert [a[0] for a in kernel.launches[-1][9:]] == [q.data_ptr(), k.data_ptr()]


@pytest.mark.parametrize(
    "function",
    [
        lambda q: (torch.empty_like(q).copy_(q),),
        lambda q: (torch.zeros_like(q),),
        lambda q: (q + 1,),
        lambda q: (q.contiguous().sum(),),
    ],
)
def test_what_computes_is_not_replayed(function):
    def launching(q):
        replay.note(Kernel(), 1, (Struct(q, 1),))
        return function(q)

    q = torch.randn(3, 4)
    results, again = replay.recorded(launching, 0, q)
    assert again is None
    torch.testing.assert_close(results, function(q), equal_nan=True)


def test_what_launches_nothing_or_in_the_interpreter_is_not_replayed():
    q = torch.randn(3)
    assert replay.recorded(lambda q: (torch.empty_like(q),), 0, q)[1] is None

    def interpreted(q):
        replay.note(None, 1, (Struct(q, 1),))
        return (torch.empty_like(q),)

    assert replay.recorded(interpreted, 0, q)[1] is None
