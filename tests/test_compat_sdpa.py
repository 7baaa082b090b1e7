"""compat.sdpa has the signature, meaning and refusals of torch's scaled_dot_product_attention."""

import inspect
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense64 import TOLERANCE, close
from inputs import draw
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise.compat import sdpa
from tilewise.compat.sdpa import scaled_dot_product_attention as ours

torch.set_num_threads(1)

TORCHS = F.scaled_dot_product_attention
B, HQ, SQ, SK, D, DV = 2, 4, 5, 7, 8, 6
INF = float("inf")


def theirs(*tensors: Tensor, **options: Any) -> Tensor:
    """torch's formula: its fused kernels forget some checks and give NaN for some masks."""
    with sdpa_kernel(SDPBackend.MATH):
        return TORCHS(*tensors, **options)


def compare(
    shapes: tuple[tuple[int, ...], ...], mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Asserts that results and all gradients are torch's in float64; returns both results."""
    results = []
    for function in (ours, theirs):
        leaves = [
            draw(*s, dtype=torch.float64, seed=i).requires_grad_() for i, s in enumerate(shapes)
        ]
        given = mask
        if mask is not None and mask.is_floating_point():
            given = mask.detach().clone().requires_grad_()
            leaves.append(given)
        out = function(*leaves[:3], attn_mask=given, **options)
        dout = draw(*out.shape, dtype=torch.float64, seed=9)
        results.append((out, torch.autograd.grad((out * dout).sum(), leaves)))
    (out, grads), (want, want_grads) = results
    close(out, want)
    for got, wanted in zip(grads, want_grads, strict=True):
        close(got, wanted, factor=4)
    return out, want


def operands(*lead: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = ((SQ, D), (SK, D), (SK, DV))
    return [draw(*lead, *size, dtype=dtype, seed=i) for i, size in enumerate(sizes)]


def test_signature_is_that_of_the_operator():
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    kinds = inspect.Parameter
    published = [
        (a.name, a.default_value if a.has_default_value() else kinds.empty, a.kwarg_only)
        for a in schema.arguments
    ]
    own = [
        (p.name, p.default, p.kind == kinds.KEYWORD_ONLY)
        for p in inspect.signature(ours).parameters.values()
    ]
    assert own == published
    override = torch.overrides.get_testing_overrides()[TORCHS]
    names = list(inspect.signature(override).parameters)
    assert names == [name for name, *_ in own[: len(names)]]


def test_scale_is_keyword_only_as_in_torch():
    q, k, v = operands(B, HQ)
    for function in (ours, TORCHS):
        with pytest.raises(TypeError, match="positional arguments"):
            function(q, k, v, None, 0.0, False, 1.0)


LEADS: dict[str, tuple[tuple[int, ...], ...]] = {
    # The dimensions before (S, D) of query, key and value.
    "none": ((), (), ()),
    "heads": ((3,), (3,), (3,)),
    "batch and heads": ((2, 3), (2, 3), (2, 3)),
    "two batch dimensions": ((2, 2, 3), (2, 2, 3), (2, 2, 3)),
    "three batch dimensions": ((1, 2, 2, 3), (1, 2, 2, 3), (1, 2, 2, 3)),
    "batch of keys broadcasts": ((2, 3), (1, 3), (1, 3)),
    "batch of queries broadcasts": ((1, 3), (2, 3), (2, 3)),
    "one key head": ((2, 3), (2, 1), (2, 1)),
    "one query head": ((2, 1), (2, 3), (2, 3)),
    "one value head": ((2, 3), (2, 3), (2, 1)),
    "ranks": ((2, 3), (3,), ()),
    "ranks, the other way": ((), (3,), (2, 3)),
    "criss-cross": ((2, 1, 3), (1, 2, 3), (2, 2, 1)),
    "no batch": ((0, 3), (0, 3), (0, 3)),
}


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_leading_dimensions(lead, is_causal):
    q, k, v = LEADS[lead]
    compare(((*q, SQ, D), (*k, SK, D), (*v, SK, DV)), is_causal=is_causal)


GROUPS: dict[str, tuple[tuple[int, ...], ...]] = {
    "two": ((2, 4), (2, 2), (2, 2)),
    "three": ((1, 9), (1, 3), (1, 3)),
    "one head": ((2, 6), (2, 1), (2, 1)),
    "no groups": ((2, 4), (2, 4), (2, 4)),
    "heads alone": ((4,), (2,), (2,)),
    "key and value differ": ((2, 8), (2, 4), (2, 2)),
    "batch broadcasts": ((2, 4), (1, 2), (1, 2)),
    "two batch dimensions": ((2, 3, 4), (2, 3, 2), (2, 3, 2)),
    "ranks": ((2, 4), (2,), (2,)),
}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("sq", [1, 5])
def test_enable_gqa(groups, sq):
    """https://github.com/pytorch/pytorch/issues/143117"""
    q, k, v = GROUPS[groups]
    shapes = ((*q, sq, D), (*k, SK, D), (*v, SK, DV))
    compare(shapes, enable_gqa=True)
    mask = draw(sq, SK, seed=5) < 0.5
    compare(shapes, mask, enable_gqa=True)


MASKS = [
    (SQ, SK),
    (1, SK),
    (SQ, 1),
    (1, 1),
    (HQ, SQ, SK),
    (HQ, 1, SK),
    (1, 1, SK),
    (B, HQ, SQ, SK),
    (B, 1, 1, SK),
    (1, HQ, 1, 1),
    (B, 1, SQ, 1),
]


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "float with -inf"])
def test_masks(shape, kind):
    """With rows that see no key: torch gives 0 there, and so do we; gradients too."""
    hidden = draw(*shape, seed=3) > 0.3
    hidden[..., 0, :] = True
    mask = draw(*shape, dtype=torch.float64, seed=4)
    if kind == "bool":
        mask = ~hidden
    elif kind == "float with -inf":
        mask = mask.masked_fill(hidden, -INF)
    out, _ = compare(((B, HQ, SQ, D), (B, HQ, SK, D), (B, HQ, SK, DV)), mask)
    assert (out[..., 0, :] == 0).all() == (kind != "float")


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (2, 1, 3)])
def test_masks_of_any_rank(lead):
    for rank in range(2, len(lead) + 3):
        for ones in itertools.product((False, True), repeat=max(0, rank - 2)):
            whole = (*lead, SQ, SK)[-rank:]
            shape = [1 if i < rank - 2 and ones[i] else n for i, n in enumerate(whole)]
            mask = draw(*shape, dtype=torch.float64, seed=rank)
            compare(((*lead, SQ, D), (*lead, SK, D), (*lead, SK, DV)), mask)


def test_masks_of_less_than_two_dimensions_broadcast_too():
    q, k, v = operands(B, HQ)
    for mask in (torch.arange(SK) < 3, draw(SK), torch.tensor(True), draw().squeeze()):
        close(ours(q, k, v, mask), ours(q, k, v, mask.expand(SQ, SK)))


def test_finfo_min_is_a_number():
    """A row of it is uniform, as in torch; only -inf hides."""
    low = torch.zeros(SQ, SK, dtype=torch.float64)
    low[1] = torch.finfo(torch.float64).min
    out, _ = compare(((B, HQ, SQ, D), (B, HQ, SK, D), (B, HQ, SK, DV)), low)
    v = draw(B, HQ, SK, DV, dtype=torch.float64, seed=2)
    close(out[:, :, 1], v.mean(2))


@pytest.mark.parametrize("lengths", [(1, 16), (2, 4), (4, 2), (16, 16), (1, 1), (130, 65)], ids=str)
def test_b02_is_causal_is_top_left(lengths):
    """https://github.com/pytorch/executorch/issues/22426"""
    sq, sk = lengths
    out, _ = compare(((1, 4, sq, D), (1, 4, sk, D), (1, 4, sk, DV)), is_causal=True)
    v = draw(1, 4, sk, DV, dtype=torch.float64, seed=2)
    close(out[:, :, 0], v[:, :, 0])


@pytest.mark.parametrize("scale", [None, 0.3, 2, 0.0, -1.5])
def test_scale(scale):
    shapes = ((B, HQ, SQ, D), (B, HQ, SK, D), (B, HQ, SK, DV))
    out, _ = compare(shapes, scale=scale)
    if scale is not None:
        q, k, v = (draw(*s, dtype=torch.float64, seed=i) for i, s in enumerate(shapes))
        assert torch.equal(ours(q, k, v, scale=torch.tensor(scale, dtype=torch.float64)), out)


SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "no queries": ((B, HQ, 0, D), (B, HQ, SK, D), (B, HQ, SK, DV)),
    "no keys": ((B, HQ, SQ, D), (B, HQ, 0, D), (B, HQ, 0, DV)),
    "neither": ((B, HQ, 0, D), (B, HQ, 0, D), (B, HQ, 0, DV)),
    "no heads": ((B, 0, SQ, D), (B, 0, SK, D), (B, 0, SK, DV)),
    "no batch": ((0, HQ, SQ, D), (0, HQ, SK, D), (0, HQ, SK, DV)),
    "no outer batch": ((0, 2, HQ, SQ, D), (0, 2, HQ, SK, D), (0, 2, HQ, SK, DV)),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_b35_zero_sizes(sizes, is_causal):
    """https://github.com/pytorch/pytorch/issues/141219"""
    compare(SIZES[sizes], is_causal=is_causal)
    if not is_causal:
        compare(SIZES[sizes], torch.ones(1, 1, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["plain", "causal", "bool", "float32", "own dtype"])
def test_dtypes(dtype, case):
    q, k, v = operands(B, HQ, dtype=dtype)
    masks = {
        "bool": draw(B, 1, SQ, SK, seed=7) > 0,
        "float32": draw(HQ, SQ, SK, seed=7),
        "own dtype": draw(SQ, SK, dtype=dtype, seed=7),
    }
    mask = masks.get(case)
    out = ours(q, k, v, mask, is_causal=case == "causal")
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    want = theirs(*(t.double() for t in (q, k, v)), attn_mask=wide, is_causal=case == "causal")
    assert out.dtype == dtype
    close(out, want)


@pytest.mark.parametrize("view", ["transposed", "expanded", "sliced", "fused"])
def test_b44_views(view):
    """https://github.com/pytorch/pytorch/issues/112577"""
    q, k, v = (draw(B, HQ, SK, D, dtype=torch.float64, seed=i) for i in range(3))
    if view == "transposed":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif view == "expanded":
        k, v = (t[:, :1].expand(B, HQ, SK, D) for t in (k, v))
    elif view == "sliced":
        q, k, v = (torch.stack((t, t), -1)[..., 1] for t in (q, k, v))
    else:
        q, k, v = torch.stack((q, k, v), 3).transpose(1, 2).unbind(3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = draw(1, 1, 1, SK, seed=8) > 0
    close(ours(q, k, v, mask), theirs(*(t.contiguous() for t in (q, k, v)), attn_mask=mask))


@pytest.mark.parametrize("value", [float("nan"), INF])
def test_b16_hidden_keys_and_values_do_not_matter(value):
    """https://github.com/pytorch/pytorch/issues/101967"""
    q, k, v = operands(B, HQ)
    mask = (torch.arange(SK) < 4).expand(SQ, SK)
    clean = ours(q, k, v, mask)
    k[:, :, 4:], v[:, :, 4:] = value, value
    for given in (mask, torch.zeros(SQ, SK).masked_fill(~mask, -INF)):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = ours(*leaves, given)
        close(out, clean)
        out.sum().backward()
        assert all(t.grad.isfinite().all() for t in leaves)
        assert all((t.grad[:, :, 4:] == 0).all() for t in leaves[1:])


def test_b21_rows_without_a_key():
    """https://github.com/Xilinx/brevitas/pull/1591"""
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = True
    whole = [draw(1, 1, 8, 8, seed=i).requires_grad_() for i in range(3)]
    part = [t.detach()[:, :, :4].requires_grad_() for t in whole]
    out = ours(*whole, mask)
    out.sum().backward()
    ours(*part).sum().backward()
    assert (out[:, :, 4:] == 0).all()
    for t, small in zip(whole, part, strict=True):
        close(t.grad[:, :, :4], small.grad)
        assert (t.grad[:, :, 4:] == 0).all()


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return result


def test_b72_a_key_padding_mask_costs_no_n_by_n():
    """https://github.com/lucidrains/x-transformers/issues/261"""
    n = 4000
    q, k, v = (draw(1, 2, n, 8, seed=i).requires_grad_() for i in range(3))
    mask = (torch.arange(n) < n - 100)[None, None, None]
    with Largest() as largest:
        ours(q, k, v, mask).sum().backward()
    assert largest.elements < n * n / 4


def test_dropout():
    n = 64
    q, k = torch.zeros(1, 2, n, 1), torch.zeros(1, 2, n, 1)
    v = torch.eye(n).expand(1, 2, n, n)
    torch.manual_seed(3)
    out = ours(q, k, v, dropout_p=0.25)
    kept = out * n  # 0, or 1 / (1 - p)
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs((kept > 0).double().mean() - 0.75) < 0.03
    torch.manual_seed(3)
    assert torch.equal(out, ours(q, k, v, dropout_p=0.25))
    assert not torch.equal(out, ours(q, k, v, dropout_p=0.25))
    assert torch.equal(ours(q, k, v, dropout_p=0), ours(q, k, v))
    assert (ours(q, k, v, dropout_p=1.0) == 0).all()


TORCH_ERRORS = (RuntimeError, IndexError, TypeError, ValueError)
MASK = torch.ones(SQ, SK, dtype=torch.bool)
META = torch.device("meta")
# Changes to a good call, the words of our message, and whether torch's formula refuses it too.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], bool]] = {
    "mask and causal": ({"attn_mask": MASK, "is_causal": True}, ("attn_mask", "is_causal"), True),
    "query of rank 1": ({"query": draw(D)}, ("query", "(8,)"), True),
    "no tensor": ({"key": [[1.0]]}, ("key", "tensor", "list"), True),
    "nested": (
        {"value": torch.nested.nested_tensor([draw(HQ, SK, DV)] * B, layout=torch.jagged)},
        ("value", "nested"),
        True,
    ),
    "head dims": ({"key": draw(B, HQ, SK, D - 1)}, ("query and key", "8", "7"), True),
    "lengths": ({"value": draw(B, HQ, SK + 1, DV)}, ("key and value", "length", "8", "7"), True),
    "batches": ({"key": draw(3, HQ, SK, D)}, ("broadcast", "(3, 4, 7, 8)"), True),
    "heads": (
        {"key": draw(B, 2, SK, D), "value": draw(B, 2, SK, DV)},
        ("broadcast", "enable_gqa", "(2, 2, 7, 8)"),
        True,
    ),
    "groups": (
        {"key": draw(B, 3, SK, D), "value": draw(B, 3, SK, DV), "enable_gqa": True},
        ("enable_gqa", "multiple", "4, 3 and 3"),
        True,
    ),
    "more key heads": (
        {"key": draw(B, 8, SK, D), "value": draw(B, 8, SK, DV), "enable_gqa": True},
        ("enable_gqa", "multiple", "4, 8 and 8"),
        True,
    ),
    "no key heads": (
        {"key": draw(B, 0, SK, D), "enable_gqa": True},
        ("enable_gqa", "multiple", "4, 0 and 4"),
        False,  # it divides by zero, which ends the process
    ),
    "groups of nothing": (
        {"query": draw(SQ, D), "key": draw(SK, D), "value": draw(SK, D), "enable_gqa": True},
        ("enable_gqa", "heads", "(5, 8)"),
        True,
    ),
    "batches of groups": (
        {"key": draw(3, 2, SK, D), "value": draw(3, 2, SK, DV), "enable_gqa": True},
        ("broadcast", "3 dimensions"),
        True,
    ),
    "mask rows": (
        {"attn_mask": torch.ones(6, SK) > 0},
        ("attn_mask", "(2, 4, 5, 7)", "(6, 7)"),
        True,
    ),
    "mask of padding": ({"attn_mask": torch.ones(B, SK) > 0}, ("attn_mask", "(2, 7)"), True),
    "mask of rank 5": (
        {"attn_mask": MASK.expand(1, 1, 1, SQ, SK)},
        ("attn_mask", "(1, 1, 1"),
        True,
    ),
    "mask of more batches": (
        {"query": draw(1, HQ, SQ, D), "attn_mask": MASK.expand(3, 1, SQ, SK)},
        ("attn_mask", "(3, 1, 5, 7)"),
        True,
    ),
    "mask of more keys": (
        {"key": draw(B, HQ, 1, D), "value": draw(B, HQ, 1, DV), "attn_mask": MASK},
        ("attn_mask", "(5, 7)"),
        True,
    ),
    "mask of integers": ({"attn_mask": MASK.int()}, ("attn_mask", "bool", "torch.int32"), True),
    "mask of float64": ({"attn_mask": MASK.double()}, ("attn_mask", "float32", "float64"), True),
    "mask of float16": ({"attn_mask": MASK.half()}, ("attn_mask", "float32", "float16"), True),
    "mask no tensor": ({"attn_mask": True}, ("attn_mask", "tensor", "bool"), True),
    "mask elsewhere": ({"attn_mask": MASK.to(META)}, ("device", "meta"), True),
    "dtypes": ({"key": draw(B, HQ, SK, D).bfloat16()}, ("dtype", "float32", "bfloat16"), True),
    "integers": ({n: MASK.int() for n in ("query", "key", "value")}, ("torch.int32",), True),
    "devices": ({"key": torch.empty(B, HQ, SK, D, device=META)}, ("device", "cpu", "meta"), True),
    "dropout above 1": ({"dropout_p": 1.5}, ("dropout_p", "1.5"), True),
    "dropout below 0": ({"dropout_p": -0.5}, ("dropout_p", "-0.5"), False),
    "causal no bool": ({"is_causal": 1}, ("causal", "bool", "1"), True),
    "scale infinite": ({"scale": INF}, ("scale", "inf"), False),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    changes, words, refused_by_torch = REFUSED[case]
    good = dict(zip(("query", "key", "value"), operands(B, HQ), strict=True))
    with pytest.raises(ValueError, match=words[0]) as error:
        ours(**{**good, **changes})
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"
    if refused_by_torch:
        with sdpa_kernel(SDPBackend.MATH), pytest.raises(TORCH_ERRORS):
            TORCHS(**{**good, **changes})


def test_autocast_casts_as_torch_does():
    q, k, v = operands(B, HQ)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for mask in (None, draw(SQ, SK), draw(SQ, SK).half()):
            out, want = ours(q, k, v, mask), TORCHS(q, k, v, mask)
            assert out.dtype == want.dtype == torch.bfloat16
            close(out, want, factor=2)
        with pytest.raises(ValueError, match="attn_mask"):
            ours(q, k, v, draw(SQ, SK).double())


def test_compile_in_one_graph():
    torch.compiler.reset()
    run = torch.compile(ours, backend="aot_eager", fullgraph=True)
    q, k, v = operands(B, HQ)
    for options in ({"is_causal": True}, {"attn_mask": MASK}, {"attn_mask": draw(SQ, SK)}):
        close(run(q, k, v, **options), ours(q, k, v, **options))


def test_vmap_and_jvp():
    q, k, v = operands(3, B, HQ, dtype=torch.float64)
    close(torch.vmap(ours)(q, k, v), ours(q, k, v))
    close(torch.vmap(ours, in_dims=(0, None, None))(q, k[0], v[0]), ours(q, k[:1], v[:1]))
    _, moved = torch.func.jvp(lambda q: ours(q, k, v), (q,), (torch.ones_like(q),))
    _, wanted = torch.func.jvp(lambda q: theirs(q, k, v), (q,), (torch.ones_like(q),))
    close(moved, wanted, factor=4)


def is_replaced() -> bool:
    return F.scaled_dot_product_attention is ours


def test_replace_and_what_it_undoes():
    assert F.scaled_dot_product_attention is TORCHS
    with sdpa.replace():
        assert is_replaced()
        with sdpa.replace():
            assert is_replaced()
        assert is_replaced()
    assert F.scaled_dot_product_attention is TORCHS
    with pytest.raises(ArithmeticError), sdpa.replace(), sdpa.replace():
        raise ArithmeticError
    assert F.scaled_dot_product_attention is TORCHS


def test_replace_puts_back_what_was_there(monkeypatch):
    def another(*arguments: Any) -> None: ...

    monkeypatch.setattr(F, "scaled_dot_product_attention", another)
    with sdpa.replace():
        assert is_replaced()
    assert F.scaled_dot_product_attention is another


def test_replace_in_threads_that_overlap():
    """The first to enter leaves first; the last to leave undoes it."""
    inside, leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with sdpa.replace():
            inside.set()
            leave.wait(10)
            seen.append(is_replaced())

    thread = threading.Thread(target=other)
    with sdpa.replace():
        thread.start()
        assert inside.wait(10)
    assert is_replaced()
    leave.set()
    thread.join()
    assert seen == [True]
    assert F.scaled_dot_product_attention is TORCHS


def test_replace_in_many_threads():
    wrong = []

    def enter_and_leave() -> None:
        for depth in range(200):
            with sdpa.replace():
                if depth % 3 == 0:
                    with sdpa.replace():
                        pass
                if not is_replaced():
                    wrong.append(depth)

    threads = [threading.Thread(target=enter_and_leave) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert F.scaled_dot_product_attention is TORCHS


def calls_of(patch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each call that reaches tilewise."""
    calls: list[str] = []
    attention: Callable[..., Tensor] = sdpa.attention

    def counted(*arguments: Any, **options: Any) -> Tensor:
        calls.append("attention")
        return attention(*arguments, **options)

    patch.setattr(sdpa, "attention", counted)
    return calls


@pytest.mark.parametrize("masked", [False, True])
def test_replace_reaches_code_that_one_cannot_edit(masked, monkeypatch):
    torch.manual_seed(0)
    module = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
    x, memory = (draw(2, n, 16, dtype=torch.float64, seed=n).requires_grad_() for n in (6, 9))
    mask = (
        nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64) if masked else None
    )
    padding = torch.arange(9).expand(2, 9) >= torch.tensor([[9], [4]])

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        out = module(x, memory, tgt_mask=mask, memory_key_padding_mask=padding)
        return out, torch.autograd.grad(out.square().sum(), (x, memory))

    want, want_grads = run()
    calls = calls_of(monkeypatch)
    with sdpa.replace():
        got, grads = run()
    assert len(calls) == 2
    close(got, want)
    for ours_, theirs_ in zip(grads, want_grads, strict=True):
        close(ours_, theirs_, factor=10)
    run()
    assert len(calls) == 2


def test_replace_under_compile(monkeypatch):
    calls = calls_of(monkeypatch)
    q, k, v = operands(B, HQ)

    def layer(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.compiler.reset()
    with sdpa.replace():
        close(torch.compile(layer, backend="eager")(q), layer(q), factor=2)
    assert calls


def test_tolerances_are_those_of_the_dtypes():
    """The rule above is a rule: an error of a percent is seen in every dtype."""
    for dtype in TOLERANCE:
        q, k, v = operands(B, HQ, dtype=dtype)
        with pytest.raises(AssertionError, match="off by"):
            close(ours(q, k, v, scale=1.1 / D**0.5) * 1.02, theirs(q, k, v))


# ------------------------------------------------------------------ overrides


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("sq", "sk"), [(5, 5), (3, 7), (7, 3)])
def test_a_causal_bias_holds_no_numbers(make: Any, sq: int, sk: int) -> None:
    """It is a float tensor of numbers that nobody wrote."""
    q, k, v = draw(B, HQ, sq, D), draw(B, HQ, sk, D, seed=1), draw(B, HQ, sk, DV, seed=2)
    bias = make(sq, sk)
    offset = sk - sq if make is causal_lower_right else 0
    mask = torch.ones(sq, sk, dtype=torch.bool).tril(offset)
    want = ours(q, k, v, mask)
    torch.testing.assert_close(ours(q, k, v, bias), want)
    with sdpa.replace():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, attn_mask=bias), want)
    with pytest.raises(ValueError, match="attn_mask must be a CausalBias of the lengths"):
        ours(q, k, v, make(sq, sk + 1))
    with pytest.raises(ValueError, match="attn_mask and is_causal"):
        ours(q, k, v, bias, is_causal=True)


class Tagged(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return "the subclass's own"
        return super().__torch_function__(func, types, args, kwargs)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return "the mode's own"
        return func(*args, **(kwargs or {}))


def test_subclasses_and_modes_override_it() -> None:
    q = draw(B, HQ, SQ, D)
    with sdpa.replace():
        assert F.scaled_dot_product_attention(q, q.as_subclass(Tagged), q) == "the subclass's own"
        with Mode():
            assert F.scaled_dot_product_attention(q, q, q) == "the mode's own"
    plain = ours(q, q, q)
    with torch.device("cpu"), Mode():  # of another function than this one
        assert torch.equal(ours(q, q, q), plain)
    assert torch.equal(torch.as_tensor(ours(q.as_subclass(Tagged), q, q)), plain)


def test_a_scale_gets_no_gradient() -> None:
    q = draw(B, HQ, SQ, D)
    with pytest.raises(ValueError, match="scale must be a number, got a tensor that requires"):
        ours(q, q, q, scale=torch.tensor(0.5, requires_grad=True))
