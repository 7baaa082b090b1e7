"""Memory: linear in the length whatever is asked; nothing is left behind or kept without need."""

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dense64 import attention64, check, close, gradients
from inputs import draw, draw_qkv, set_tiles
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import dense, ops
from tilewise.backends import flash

torch.set_num_threads(1)


@pytest.fixture
def little_to_collect() -> Iterator[None]:
    """What is there already is no matter for the collector, which makes it quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(o, Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("how", ["plain", "checkpoint", "no backward", "error", "double"])
def test_b68_nothing_is_left_behind(backend, how, little_to_collect):
    """https://github.com/pytorch/pytorch/issues/161186"""

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        return tilewise.attention(x, x, x, return_lse=True, backend=backend)

    def fail(gradient: Tensor) -> Tensor:
        raise ArithmeticError

    def step() -> None:
        x = draw(1, 8, 2, 4).requires_grad_()
        if how == "checkpoint":
            checkpoint(layer, x, use_reentrant=False)[0].sum().backward()
            return
        out, lse = layer(x)
        if how == "plain":
            (out.sum() + lse.sum()).backward()
        elif how == "double":
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            g.square().sum().backward()
        elif how == "error":
            y = draw(1, 8, 2, 4).requires_grad_()
            z = y * 1
            z.register_hook(fail)
            with contextlib.suppress(ArithmeticError):
                layer(z)[0].sum().backward()

    for _ in range(3):
        step()
    before = live_tensors()
    for _ in range(10):
        step()
    assert live_tensors() <= before


def test_b68_saved_tensors_die_without_the_collector(attend):
    gc.collect()
    gc.disable()
    try:
        leaves = {n: t.requires_grad_() for n, t in draw_qkv(1, 8, 8, 2, 4).items()}
        out, lse = attend(**leaves)
        results = [weakref.ref(out), weakref.ref(lse)]
        inputs = [weakref.ref(t) for t in leaves.values()]
        del out, lse, leaves
        assert not any(r() is not None for r in (*results, *inputs))
    finally:
        gc.enable()


class Ledger(TorchDispatchMode):
    """Records the largest storage that is made, and the most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = self.largest = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tilewise":
            kernel = {"forward": ops._forward, "backward": ops._backward}[func._opname]
            with self:  # look inside
                result = kernel(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                self.record(t.untyped_storage())
        return result

    def record(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known:
            return
        size = storage.nbytes()
        self.known[storage._cdata] = (StorageWeakRef(storage), size)
        self.bytes += size
        self.largest = max(self.largest, size)
        if self.bytes > self.peak:  # what died since is forgotten only where it matters
            self.known = {c: e for c, e in self.known.items() if not e[0].expired()}
            self.bytes = sum(size for _, size in self.known.values())
            self.peak = max(self.peak, self.bytes)


def padding(n: int) -> Tensor:
    return torch.arange(n).view(1, 1, 1, n) < n - 5


FEATURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda n: {},
    "causal": lambda n: {"causal": True},
    "window": lambda n: {"window_size": (30, 10)},
    "range": lambda n: {
        "key_range": (torch.zeros(1, 1).int(), torch.arange(n).int().flip(0)[None])
    },
    "key mask": lambda n: {"mask": padding(n)},
    "row mask": lambda n: {"mask": (torch.arange(n) % 3 > 0).view(1, 1, n, 1)},
    "key bias": lambda n: {"bias": draw(n, seed=5)},
    "row bias": lambda n: {"bias": draw(n, 1, seed=5)},
    "alibi": lambda n: {"alibi_slopes": tilewise.alibi_slopes(2)},
    "softcap": lambda n: {"softcap": 5.0},
    "sinks": lambda n: {"sinks": draw(2, seed=6)},
    "dropout": lambda n: {"dropout_p": 0.2, "dropout_seed": 1},
    "large logits": lambda n: {"scale": 1e6},
    "everything": lambda n: {
        "causal": True,
        "window_size": (n // 2, None),
        "mask": padding(n),
        "bias": draw(2, n, 1, seed=5),
        "alibi_slopes": draw(1, 2, seed=5),
        "softcap": 5.0,
        "sinks": draw(2, seed=6),
        "dropout_p": 0.2,
        "dropout_seed": 1,
    },
}


def spent(n: int, options: dict[str, Any], order: str, packed: bool = False) -> Ledger:
    """What one call and its derivatives of an order need."""
    x = draw_qkv(1, n, n, (2, 1), 4, 3)
    floats = ("bias", "alibi_slopes", "sinks")
    x |= {name: options[name] for name in floats if name in options}
    rest = {name: value for name, value in options.items() if name not in floats}
    if packed:
        x = {name: t[0] for name, t in x.items()}
        rest |= {f"cu_seqlens_{side}": torch.tensor([0, 3, n]) for side in "qk"}
    function = tilewise.attention_varlen if packed else tilewise.attention
    call = functools.partial(function, return_lse=True, **rest)
    leaves = [t.requires_grad_(order != "jvp") for t in x.values()]
    moves = tuple(torch.ones_like(t) for t in leaves)
    with Ledger() as ledger:
        if order == "jvp":
            torch.func.jvp(lambda *t: call(**dict(zip(x, t, strict=True))), tuple(leaves), moves)
            return ledger
        out, lse = call(**dict(zip(x, leaves, strict=True)))
        dout, dlse = torch.ones_like(out), torch.ones_like(lse)
        double = order == "double backward"
        grads = torch.autograd.grad((out, lse), leaves, (dout, dlse), create_graph=double)
        if double:
            torch.autograd.grad(grads, leaves, moves)
    return ledger


FEW = ("plain", "key mask", "row bias", "dropout", "everything", "packed")
MEMORY_CASES = [
    *((feature, "backward") for feature in (*FEATURES, "packed")),
    *((feature, order) for feature in FEW for order in ("double backward", "jvp")),
]


@pytest.mark.parametrize(("feature", "order"), MEMORY_CASES)
def test_b72_memory_is_linear(monkeypatch, feature, order):
    """https://github.com/lucidrains/x-transformers/issues/261"""
    # Tiles and blocks are small beside n × d, so that what grows shows.
    set_tiles(monkeypatch, 32, 32)
    monkeypatch.setattr(dense, "BLOCK_SCORES", 1 << 11)
    packed = feature == "packed"
    options = FEATURES["causal" if packed else feature]
    half, whole = (spent(n, options(n), order, packed) for n in (64, 128))
    assert whole.largest <= 2.2 * half.largest, f"{half.largest} bytes grow to {whole.largest}"
    assert whole.peak <= 2.2 * half.peak, f"{half.peak} bytes grow to {whole.peak}"


def test_b72_the_ledger_sees_a_matrix():
    # The reference is O(n²), and that shows.
    def quadratic(n: int) -> Ledger:
        x = [t.requires_grad_() for t in draw_qkv(1, n, n, (2, 1), 4, 3).values()]
        with Ledger() as ledger:
            out = tilewise.attention(*x, backend="reference")
            torch.autograd.grad(out.sum(), x)
        return ledger

    half, whole = quadratic(128), quadratic(256)
    assert whole.largest == 4 * half.largest
    assert whole.peak > 3 * half.peak


def test_b72_a_mask_is_read_where_it_lies(monkeypatch):
    monkeypatch.setattr(flash, "serves", lambda problem: False)  # tiles beside tiles
    b, h, n = 3, 4, 300
    leaves = draw_qkv(b, n, n, h, 8)
    mask = (torch.arange(n) < n - 20).expand(b, n)
    with Ledger() as ledger, torch.no_grad():
        tilewise.attention(**leaves, mask=mask[:, None, None])
    with Ledger() as plain, torch.no_grad():
        tilewise.attention(**leaves)
    assert ledger.peak < plain.peak + 4 * b * h * n * 8


def test_b73_inference_saves_nothing(attend):
    """https://github.com/Dao-AILab/flash-attention/pull/1383"""
    leaves = draw_qkv(1, 9, 9, 2, 8)
    want = attend(**leaves)

    def freed(requires_grad: bool) -> bool:
        x = {n: t.clone().requires_grad_(requires_grad) for n, t in leaves.items()}
        references = [weakref.ref(t) for t in x.values()]
        out, lse = attend(**x)
        del x
        gc.collect()
        assert not out.requires_grad
        assert not lse.requires_grad
        assert torch.equal(out, want[0])
        return all(r() is None for r in references)

    assert freed(False)
    with torch.no_grad():
        assert freed(True)
    with torch.inference_mode():
        assert freed(False)
        inference = {n: t.clone() for n, t in leaves.items()}
    close(attend(**inference)[0], want[0])
    check(attend, attention64, leaves)


def test_b73_only_what_needs_a_gradient_gets_one(attend):
    leaves = {**draw_qkv(1, 9, 9, 2, 8), "bias": draw(9, 9, seed=5), "sinks": draw(2, seed=6)}
    for name in leaves:
        x = {n: t.clone().requires_grad_(n == name) for n, t in leaves.items()}
        attend(**x)[0].sum().backward()
        assert [n for n, t in x.items() if t.grad is not None] == [name]
    want = gradients(attend, leaves, torch.ones(1, 9, 2, 8), None)[2]
    x = {n: t.clone().requires_grad_(n != "bias") for n, t in leaves.items()}
    attend(**x)[0].sum().backward()
    assert all(torch.equal(x[n].grad, want[n]) for n in ("q", "k", "v", "sinks"))
