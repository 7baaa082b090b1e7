"""compat.flash_attn and flash_attn_3: published signatures, exact meaning, nothing dropped."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense64 import INF, attention64, check, close, gradients, varlen64, visible
from inputs import cumulative, draw, draw_qkv, draw_tokens
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.compat import flash_attn, flash_attn_3, flash_calls
from tilewise.compat.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
)

torch.set_num_threads(1)

NAN = float("nan")
REQUIRED = inspect.Parameter.empty
SHARED = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


def required(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, REQUIRED)


SEQUENCES = required("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
# What flash_attn 2.8 publishes: names, order, defaults.
FA2: dict[str, dict[str, Any]] = {
    "flash_attn_func": {**required("q", "k", "v"), **SHARED},
    "flash_attn_kvpacked_func": {**required("q", "kv"), **SHARED},
    "flash_attn_qkvpacked_func": {**required("qkv"), **SHARED},
    "flash_attn_varlen_func": {
        **required("q", "k", "v"),
        **SEQUENCES,
        **SHARED,
        "block_table": None,
    },
    "flash_attn_varlen_kvpacked_func": {**required("q", "kv"), **SEQUENCES, **SHARED},
    "flash_attn_varlen_qkvpacked_func": {**required("qkv", "cu_seqlens", "max_seqlen"), **SHARED},
    "flash_attn_with_kvcache": {
        **required("q", "k_cache", "v_cache"),
        "k": None,
        "v": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "block_table": None,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
}
DESCALES = {"q_descale": None, "k_descale": None, "v_descale": None}
TUNING = {"num_splits": 1, "pack_gqa": None, "deterministic": False, "sm_margin": 0}
# What FlashAttention-3 publishes in hopper/flash_attn_interface.py.
FA3: dict[str, dict[str, Any]] = {
    "flash_attn_func": {
        **required("q", "k", "v"),
        "softmax_scale": None,
        "causal": False,
        "qv": None,
        **DESCALES,
        "window_size": (-1, -1),
        "attention_chunk": 0,
        "softcap": 0.0,
        **TUNING,
        "return_attn_probs": False,
    },
    "flash_attn_qkvpacked_func": {
        **required("qkv"),
        "softmax_scale": None,
        "causal": False,
        **DESCALES,
        "window_size": (-1, -1),
        "attention_chunk": 0,
        "softcap": 0.0,
        "deterministic": False,
        "num_heads_q": None,
        "sm_margin": 0,
        "return_attn_probs": False,
    },
    "flash_attn_varlen_func": {
        **required("q", "k", "v"),
        **SEQUENCES,
        "seqused_q": None,
        "seqused_k": None,
        "softmax_scale": None,
        "causal": False,
        "qv": None,
        **DESCALES,
        "window_size": (-1, -1),
        "attention_chunk": 0,
        "softcap": 0.0,
        **TUNING,
        "return_attn_probs": False,
    },
    "flash_attn_with_kvcache": {
        **required("q", "k_cache", "v_cache"),
        "k": None,
        "v": None,
        "qv": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "page_table": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k_new": None,
        "max_seqlen_q": None,
        "rotary_seqlens": None,
        **DESCALES,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "attention_chunk": 0,
        "softcap": 0.0,
        "rotary_interleaved": True,
        "scheduler_metadata": None,
        "num_splits": 0,
        "pack_gqa": None,
        "sm_margin": 0,
        "return_softmax_lse": False,
    },
}
SINKS = ("learnable_sink", "s_aux")


def parameters(function: Callable[..., Any], keyword_only: bool) -> dict[str, Any]:
    kind = inspect.Parameter.KEYWORD_ONLY
    items = inspect.signature(function).parameters.items()
    return {n: p.default for n, p in items if (p.kind == kind) == keyword_only}


@pytest.mark.parametrize("name", FA2)
def test_signature_of_flash_attn_2(name):
    function = getattr(flash_attn, name)
    own = parameters(function, keyword_only=False)
    assert list(own.items()) == list(FA2[name].items())
    # What FA3 and others add comes by keyword, and can be looked up.
    more = parameters(function, keyword_only=True)
    assert set(SINKS) <= set(more)
    assert set(FA3.get(name, {})) <= {*own, *more}
    assert set(flash_attn.__all__) == {*FA2, "install", "uninstall"}


@pytest.mark.parametrize("name", FA3)
def test_signature_of_flash_attn_3(name):
    function = getattr(flash_attn_3, name)
    assert list(parameters(function, False).items()) == list(FA3[name].items())
    assert parameters(function, True) == dict.fromkeys(SINKS)
    assert set(flash_attn_3.__all__) == set(FA3)


@pytest.mark.parametrize("name", FA2)
def test_unknown_arguments_are_type_errors(name):
    lead = (7,) if "varlen" in name else (2, 7)
    given: dict[str, Any] = {n: draw(*lead, 2, 4) for n, d in FA2[name].items() if d is REQUIRED}
    given |= {n: draw(*lead, len(n), 2, 4) for n in given if n in ("qkv", "kv")}
    with pytest.raises(TypeError, match="attn_bias"):
        getattr(flash_attn, name)(**given, attn_bias=None)


def with_lse(function: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    return lambda **given: function(**given, **fixed, return_softmax_lse=True)


SLOPES = tilewise.alibi_slopes(4)
# flash_attn's options, and what they are by definition.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "scale": ({"softmax_scale": 0.4}, {"scale": 0.4}),
    "no window": ({"window_size": (-1, -1)}, {}),
    "window": ({"window_size": (3, 1)}, {"window_size": (3, 1)}),
    "window of itself": ({"window_size": (0, 0)}, {"window_size": (0, 0)}),
    "window on the left": ({"window_size": (3, -1)}, {"window_size": (3, None)}),
    "window on the right": ({"window_size": [-1, 2]}, {"window_size": (None, 2)}),
    "window of FA4": ({"window_size": (None, 2)}, {"window_size": (None, 2)}),
    "causal window": (
        {"window_size": (3, 3), "causal": True},
        {"window_size": (3, None), "causal": True},
    ),
    "no cap": ({"softcap": 0.0}, {}),
    "cap below 0": ({"softcap": -1.0}, {}),
    "cap": ({"softcap": 0.7, "causal": True}, {"softcap": 0.7, "causal": True}),
    "alibi": (
        {"alibi_slopes": SLOPES, "causal": True},
        {"alibi_slopes": SLOPES, "causal": True},
    ),
    "alibi of entries": (
        {"alibi_slopes": torch.stack((SLOPES, 2 * SLOPES))},
        {"alibi_slopes": torch.stack((SLOPES, 2 * SLOPES))},
    ),
    "deterministic": ({"deterministic": True}, {}),
    "FA3's tuning": ({"num_splits": 3, "pack_gqa": True, "sm_margin": 4}, {}),
}
LENGTHS = [(7, 7), (5, 11), (11, 5), (1, 9)]


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_dense(case, lengths):
    """Out, lse (B, Hq, Sq) and all gradients; rows without a key too."""
    leaves = draw_qkv(2, *lengths, (4, 2), 8, 6, torch.float64)
    ours, theirs = OPTIONS[case]
    check(
        with_lse(flash_attn.flash_attn_func),
        attention64,
        leaves,
        our_options=ours,
        their_options=theirs,
    )


@pytest.mark.parametrize("case", OPTIONS)
def test_packed(case):
    lengths_q, lengths_k = [4, 0, 7], [6, 3, 2]
    leaves = draw_tokens(13, 12, (4, 2), 8, 6, torch.float64)
    ours, theirs = OPTIONS[case]
    if case == "alibi of entries":
        slopes = torch.stack((SLOPES, 2 * SLOPES, 0 * SLOPES))
        ours, theirs = {"alibi_slopes": slopes}, {"alibi_slopes": slopes}
    cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
    sequences = {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": 7,
        "max_seqlen_k": torch.tensor(6),
    }
    check(
        with_lse(flash_attn.flash_attn_varlen_func),
        varlen64,
        leaves,
        our_options={**ours, **sequences},
        their_options={**theirs, "cu_q": cu_q.tolist(), "cu_k": cu_k.tolist()},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    leaves = draw_qkv(2, 33, 40, (4, 2), 16, 16, dtype)
    check(with_lse(flash_attn.flash_attn_func), attention64, leaves, causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_like_torch(causal):
    """Equal lengths, where torch's triangle is the same."""
    leaves = draw_qkv(2, 9, 9, 4, 8, 8, torch.float64, head_major=True)
    heads_first = [t.transpose(1, 2) for t in leaves.values()]
    with sdpa_kernel(SDPBackend.MATH):
        want = scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)
    close(flash_attn.flash_attn_func(**leaves, causal=causal), want)


@pytest.mark.parametrize("name", SINKS)
def test_sinks(name):
    sinks = draw(4, seed=5)
    for leaves, ours, theirs, sizes in (
        (draw_qkv(2, 6, 9, (4, 2), 8, 8, torch.float64), "flash_attn_func", attention64, {}),
        (
            draw_tokens(10, 10, (4, 2), 8, 8, torch.float64),
            "flash_attn_varlen_func",
            varlen64,
            {"cu": [0, 3, 10]},
        ),
    ):
        ours_too = their_too = {}
        if sizes:
            cu = torch.tensor(sizes["cu"])
            ours_too = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
            ours_too |= {"max_seqlen_q": 7, "max_seqlen_k": 7}
            their_too = {"cu_q": sizes["cu"], "cu_k": sizes["cu"]}
        for module in (flash_attn, flash_attn_3):
            function = getattr(module, ours)
            lse = "return_softmax_lse" if module is flash_attn else "return_attn_probs"

            def run(sinks: Tensor, function: Any = function, lse: str = lse, **given: Any) -> Any:
                return function(**given, **{name: sinks, lse: True})

            check(
                run,
                theirs,
                {**leaves, "sinks": sinks.double()},
                causal=True,
                our_options=ours_too,
                their_options=their_too,
            )


EXTRAS: list[dict[str, Any]] = [
    {},
    {"causal": True, "window_size": (4, 0), "softmax_scale": 0.3, "softcap": 2.0},
    {"alibi_slopes": SLOPES, "s_aux": draw(4), "return_softmax_lse": True},
    {"attention_chunk": 3, "causal": True},
    {"return_attn_probs": True, "deterministic": True},
]


@pytest.mark.parametrize("extra", range(len(EXTRAS)))
@pytest.mark.parametrize("varlen", [False, True])
def test_packed_tensors(extra, varlen):
    """qkv and kv give what q, k and v do, results and gradients; nothing on the way gets lost."""
    options = EXTRAS[extra]
    lead = (10,) if varlen else (2, 10)
    cu, kind = torch.tensor([0, 4, 10]), "varlen_" if varlen else ""
    sequences = (cu, cu, 6, 6) if varlen else ()

    def run(function: str, *tensors: Tensor, before: tuple[Any, ...]) -> tuple[Any, ...]:
        out = getattr(flash_attn, f"flash_attn_{kind}{function}")(*tensors, *before, **options)
        return out if isinstance(out, tuple) else (out,)

    qkv = draw(*lead, 3, 4, 8, dtype=torch.float64).requires_grad_()
    want = run("func", *qkv.unbind(-3), before=sequences)
    (wanted,) = torch.autograd.grad(want[0].square().sum(), qkv)
    for name, tensors, before in (
        ("qkvpacked_func", (qkv,), (cu, 6) if varlen else ()),
        ("kvpacked_func", (qkv.select(-3, 0), qkv.narrow(-3, 1, 2)), sequences),
    ):
        got = run(name, *tensors, before=before)
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        (gradient,) = torch.autograd.grad(got[0].square().sum(), qkv)
        close(gradient, wanted)


@pytest.mark.parametrize("name", [n for n in FA2 if "packed" in n])
def test_packed_tensors_take_arguments_in_order(name):
    """Each of the shared arguments by position, and the same by keyword."""
    varlen = "varlen" in name
    packed = draw(*((10,) if varlen else (2, 10)), 3 if "qkv" in name else 2, 4, 8)
    cu = torch.tensor([0, 4, 10])
    tensors = (packed,) if "qkv" in name else (draw(*packed.shape[:-3], 4, 8, seed=1), packed)
    if varlen:
        tensors += (cu, 6) if "qkv" in name else (cu, cu, 6, 6)
    values = (0.0, 0.3, True, (4, 1), 2.0, SLOPES, True, True)
    function = getattr(flash_attn, name)
    by_position = function(*tensors, *values)
    by_keyword = function(*tensors, **dict(zip(SHARED, values, strict=True)))
    for a, b in zip(by_position, by_keyword, strict=True):
        assert torch.equal(a, b)
    for i, other in enumerate((0.5, 0.1, False, (0, 0), 0.1, 9 * SLOPES)):  # each one matters
        changed = [*values[:i], other, *values[i + 1 :]]
        assert not torch.equal(function(*tensors, *changed)[0], by_position[0]), i


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3])
def test_qkv_of_grouped_heads(module):
    qkv = draw(2, 9, 4 + 2 * 2, 8)
    out = module.flash_attn_qkvpacked_func(qkv, num_heads_q=4, causal=True)
    q, k, v = qkv.split([4, 2, 2], 2)
    close(out, flash_attn.flash_attn_func(q, k, v, causal=True))
    for wrong in (3, 8, 9):
        with pytest.raises(ValueError, match="num_heads_q"):
            module.flash_attn_qkvpacked_func(qkv, num_heads_q=wrong)
    side_by_side = draw(2, 9, 3, 4, 8)
    out = module.flash_attn_qkvpacked_func(side_by_side, num_heads_q=4)
    close(out, module.flash_attn_qkvpacked_func(side_by_side))
    with pytest.raises(ValueError, match="num_heads_q"):
        module.flash_attn_qkvpacked_func(side_by_side, num_heads_q=2)


def chunk_mask(sq: int, sk: int, size: int) -> Tensor:
    """Keys of the chunk that a row's position (bottom right) lies in, (Sq, Sk)."""
    rows = [i + sk - sq for i in range(sq)]
    seen = [[p // size == j // size for j in range(sk)] for p in rows]
    return torch.tensor(seen, dtype=torch.bool).view(sq, sk)


@pytest.mark.parametrize("size", [1, 3, 4, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_chunk(size, causal):
    for sq, sk in LENGTHS:
        leaves = draw_qkv(2, sq, sk, (4, 2), 8, 8, torch.float64)
        check(
            with_lse(flash_attn.flash_attn_func),
            attention64,
            leaves,
            causal=causal,
            our_options={"attention_chunk": size},
            their_options={"mask": chunk_mask(sq, sk, size)},
        )
    cu_q, cu_k = cumulative([5, 0, 3]), cumulative([11, 3, 2])
    tokens = draw_tokens(10, 17, (4, 2), 8, 8, torch.float64)  # the last ones are in no sequence
    sequences = (cu_q, cu_k, 5, 11)
    out = flash_attn.flash_attn_varlen_func(
        *tokens.values(), *sequences, causal=causal, attention_chunk=size
    )
    for s in range(3):
        rows, keys = (slice(*cu[s : s + 2].tolist()) for cu in (cu_q, cu_k))
        q, (k, v) = tokens["q"][None, rows], (tokens[n][None, keys] for n in ("k", "v"))
        mask = chunk_mask(q.shape[1], k.shape[1], size)
        close(out[None, rows], attention64(q, k, v, causal=causal, mask=mask)[0])
    assert (out[8:] == 0).all()


def test_qv_adds_to_the_logits():
    q, k, v = draw_qkv(2, 6, 9, (4, 2), 8, 12, torch.float64).values()
    qv = draw(2, 6, 4, 12, dtype=torch.float64, seed=7)
    head = torch.arange(4) // 2
    s = torch.einsum("bihd,bjhd->bhij", qv, v[:, :, head]) * (8 + 12) ** -0.5
    want, want_lse = attention64(q, k, v, scale=(8 + 12) ** -0.5, bias=s, causal=True)
    out, lse = flash_attn.flash_attn_func(q, k, v, causal=True, qv=qv, return_softmax_lse=True)
    close(out, want)
    close(lse, want_lse)
    cu_q, cu_k = torch.tensor([0, 6]), torch.tensor([0, 9])
    packed = flash_attn_3.flash_attn_varlen_func(
        q[0], k[0], v[0], cu_q, cu_k, 6, 9, causal=True, qv=qv[0]
    )
    close(packed, want[0])
    cached = flash_attn.flash_attn_with_kvcache(q, k, v, causal=True, qv=qv)
    close(cached, want)


# What return_attn_probs returns.


def test_attn_probs_without_dropout():
    """(out, softmax_lse, S_dmask), S_dmask empty; FA3 gives the first two."""
    leaves = draw_qkv(2, 6, 9, (4, 2), 8, 8)
    out, lse, nothing = flash_attn.flash_attn_func(**leaves, return_attn_probs=True)
    assert (out.shape, lse.shape, nothing.shape) == ((2, 6, 4, 8), (2, 4, 6), (0,))
    assert nothing.dtype == out.dtype
    for a, b in zip(
        (out, lse), flash_attn_3.flash_attn_func(**leaves, return_attn_probs=True), strict=True
    ):
        assert torch.equal(a, b)
    assert torch.equal(out, flash_attn.flash_attn_func(**leaves))
    cu = torch.tensor([0, 2, 6])
    tokens = draw_tokens(6, 6, (4, 2), 8, 8, torch.float32)
    out, lse, nothing = flash_attn.flash_attn_varlen_func(
        **tokens,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=4,
        max_seqlen_k=4,
        return_attn_probs=True,
    )
    assert (out.shape, lse.shape, nothing.shape) == ((6, 4, 8), (4, 6), (0,))


@pytest.mark.parametrize("causal", [False, True])
def test_attn_probs_with_dropout(causal):
    """S_dmask: the probabilities, negative where dropped; out follows from it."""
    q, k, v = (t.requires_grad_() for t in draw_qkv(2, 7, 9, (4, 2), 8, 6, torch.float64).values())
    options = {"dropout_p": 0.4, "causal": causal, "softcap": 3.0}
    torch.manual_seed(1)
    out, lse, s = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    torch.manual_seed(1)
    assert torch.equal(out, flash_attn.flash_attn_func(q, k, v, **options))
    assert s.shape == (2, 4, 7, 9)
    seen = visible(7, 9, causal)
    close(s.abs().sum(-1), torch.ones(2, 4, 7, dtype=torch.float64))
    assert (s[..., ~seen] == 0).all()
    assert 0.2 < (s[..., seen] < 0).double().mean() < 0.6
    kept = torch.where(s >= 0, s, 0) / (1 - 0.4)
    close(out, torch.einsum("bhij,bjhd->bihd", kept, v.repeat_interleave(2, 2)))
    _, want_lse = attention64(q, k, v, causal=causal, softcap=3.0)
    close(lse, want_lse)
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_attn_probs_of_packed_sequences():
    lengths_q, lengths_k = [3, 0, 5], [4, 2, 6]
    cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
    q, k, v = draw_tokens(9, 13, (4, 2), 8, 6, torch.float64).values()  # one token too many of each
    torch.manual_seed(2)
    out, _, s = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 5, 8, dropout_p=0.4, causal=True, return_attn_probs=True
    )
    assert s.shape == (3, 4, 5, 8)
    assert (s < 0).any()
    kept = torch.where(s >= 0, s, 0) / (1 - 0.4)
    for b, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, keys = slice(cu_q[b], cu_q[b] + n), slice(cu_k[b], cu_k[b] + m)
        own = torch.einsum("hij,jhd->ihd", kept[b, :, :n, :m], v[keys].repeat_interleave(2, 1))
        close(out[rows], own)
        close(
            s[b, :, :n, :m].abs().sum(-1), (visible(n, m, True).any(1) * 1.0).double().expand(4, n)
        )
        assert (s[b, :, n:] == 0).all()
        assert (s[b, :, :, m:] == 0).all()


def test_attn_probs_without_keys():
    q, k = draw(1, 3, 2, 4), draw(1, 0, 2, 4)
    _, _, s = flash_attn.flash_attn_func(q, k, k, dropout_p=0.5, return_attn_probs=True)
    assert s.shape == (1, 2, 3, 0)


def test_dropout_of_flash_attn():
    n = 64
    q, k, v = torch.zeros(1, n, 2, 1), torch.zeros(1, n, 2, 1), torch.eye(n).view(1, n, 1, n)
    out = flash_attn.flash_attn_func(q, k, v.expand(1, n, 2, n), 0.25) * n
    assert out.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert abs((out > 0).double().mean() - 0.75) < 0.03


# FlashAttention-3's order: the same by position, and each argument matters.

CHUNKY: dict[str, Any] = {"softmax_scale": 0.3, "causal": True, "window_size": (1, 1)}
CHUNKY |= {"attention_chunk": 3, "softcap": 2.0, "deterministic": True, "sm_margin": 2}
THREES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # The tensors that are required, and a value of each argument that is served.
    "flash_attn_func": (
        draw_qkv(2, 6, 9, (4, 2), 8),
        {**CHUNKY, "qv": draw(2, 6, 4, 8, seed=4), "num_splits": 2, "pack_gqa": True},
    ),
    "flash_attn_qkvpacked_func": ({"qkv": draw(2, 9, 8, 8)}, {**CHUNKY, "num_heads_q": 4}),
    "flash_attn_varlen_func": (
        {
            **draw_tokens(10, 10, (4, 2), 8, 8, torch.float32),
            "cu_seqlens_q": cumulative([4, 6]),
            "cu_seqlens_k": cumulative([4, 6]),
            "max_seqlen_q": 6,
            "max_seqlen_k": 6,
        },
        {
            **CHUNKY,
            "seqused_q": torch.tensor([4, 5]),
            "seqused_k": torch.tensor([3, 6]),
            "qv": draw(10, 4, 8, seed=4),
        },
    ),
    "flash_attn_with_kvcache": (
        {"q": draw(2, 2, 4, 8), "k_cache": draw(7, 4, 2, 8), "v_cache": draw(7, 4, 2, 8, seed=1)},
        {
            **{n: t for n, t in CHUNKY.items() if n != "deterministic"},
            "k": draw(2, 2, 2, 8, seed=2),
            "v": draw(2, 2, 2, 8, seed=3),
            "qv": draw(2, 2, 4, 8, seed=4),
            "rotary_cos": draw(12, 2, seed=5).cos(),
            "rotary_sin": draw(12, 2, seed=5).sin(),
            "cache_seqlens": torch.tensor([5, 7]),
            "cache_leftpad": torch.tensor([1, 2]),
            "page_table": torch.tensor([[4, 2, 1], [5, 3, 6]]),
            "rotary_seqlens": torch.tensor([2, 4]),
            "rotary_interleaved": False,
            "num_splits": 2,
        },
    ),
}
SCHEDULE_ONLY = ("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "deterministic")
PARTNERS = {"k": "v", "v": "k", "rotary_cos": "rotary_sin", "rotary_sin": "rotary_cos"}


@pytest.mark.parametrize("name", THREES)
def test_flash_attn_3_by_position(name):
    given, values = THREES[name]
    order = {n: values.get(n, d) for n, d in FA3[name].items() if n not in given}

    def run(function: Callable[..., Any], *more: Any, **options: Any) -> Tensor:
        fresh = {n: t.clone() if "cache" in n else t for n, t in given.items()}
        return function(*fresh.values(), *more, **options)

    function = getattr(flash_attn_3, name)
    out = run(function, *order.values())
    assert torch.equal(out, run(getattr(flash_attn, name), **values))
    for n in values:
        if n in SCHEDULE_ONLY or n == "num_heads_q" or n in PARTNERS:
            continue
        default = 9 if n == "cache_seqlens" else FA3[name][n]
        if n in ("cache_seqlens", "page_table"):
            default = values[n].flip(0)
        assert not torch.equal(out, run(function, **{**values, n: default})), n


# Packed sequences: what FA3 and pages add.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_seqused(which, causal):
    """Tokens past those in use may hold anything, and positions do not count them."""
    lengths_q, lengths_k = [5, 0, 7, 2], [6, 3, 9, 4]
    used_q = [3, 0, 7, 0] if which != "k" else lengths_q
    used_k = [6, 0, 5, 3] if which != "q" else lengths_k
    cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
    tokens = draw_tokens(14, 22, (4, 2), 8, 6, torch.float64)
    for name, cu, used in (("q", cu_q, used_q), ("k", cu_k, used_k), ("v", cu_k, used_k)):
        for s, n in enumerate(used):
            tokens[name][cu[s] + n : cu[s + 1]] = NAN
    leaves = {n: t.requires_grad_() for n, t in tokens.items()}
    given = {} if which == "k" else {"seqused_q": torch.tensor(used_q, dtype=torch.int32)}
    given |= {} if which == "q" else {"seqused_k": torch.tensor(used_k)}
    sequences = (cu_q, cu_k, 7, 9)
    out, lse = flash_attn.flash_attn_varlen_func(
        *leaves.values(), *sequences, causal=causal, return_softmax_lse=True, **given
    )
    assert out.shape == (14, 4, 6)
    assert lse.shape == (4, 14)
    want_out, want_lse = torch.zeros_like(out), torch.full_like(lse, -INF)
    for s in range(4):
        rows = slice(cu_q[s], cu_q[s] + used_q[s])
        keys = slice(cu_k[s], cu_k[s] + used_k[s])
        q, (k, v) = leaves["q"][None, rows], (leaves[n][None, keys] for n in ("k", "v"))
        o, own_lse = attention64(q, k, v, causal=causal)
        want_out[rows], want_lse[:, rows] = o[0], own_lse[0]
    close(out, want_out)
    close(lse, want_lse)
    dout = draw(*out.shape, dtype=torch.float64, seed=4)
    grads = torch.autograd.grad((out * dout).sum(), list(leaves.values()))
    wanted = torch.autograd.grad((want_out * dout).sum(), list(leaves.values()))
    for a, b in zip(grads, wanted, strict=True):
        close(a, b.nan_to_num(0.0), factor=4)


def pages_of(
    lengths: list[int],
    size: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    filler: float,
    seed: int,
) -> tuple[Tensor, list[Tensor]]:
    """Pages whose unused slots hold `filler`, and the tokens of each entry; see `table_of`."""
    per_entry = -(-max(lengths) // size) + 1
    pages = torch.full((len(lengths) * per_entry + 2, size, heads, width), filler, dtype=dtype)
    tokens = []
    for b, n in enumerate(lengths):
        tokens.append(draw(n, heads, width, dtype=dtype, seed=seed + b))
        for j in range(n):
            pages[table_of(lengths, size)[b, j // size], j % size] = tokens[-1][j]
    return pages, tokens


def table_of(lengths: list[int], size: int) -> Tensor:
    """A page table in disorder; pages 0 and the last are nobody's."""
    per_entry = -(-max(lengths) // size) + 1
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(lengths) * per_entry, generator=generator) + 1
    return order.view(len(lengths), per_entry).int()


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("by", ["cu_seqlens_k", "seqused_k"])
def test_varlen_over_pages(case, by):
    lengths_q, lengths_k = [3, 0, 5], [7, 4, 5]
    k, k_tokens = pages_of(lengths_k, 4, 2, 8, torch.float64, NAN, 10)
    v, v_tokens = pages_of(lengths_k, 4, 2, 6, torch.float64, NAN, 20)
    q = draw(9, 4, 8, dtype=torch.float64)
    ours, theirs = OPTIONS[case]
    if case == "alibi of entries":
        slopes = torch.stack((SLOPES, 2 * SLOPES, 3 * SLOPES))
        ours, theirs = {"alibi_slopes": slopes}, {"alibi_slopes": slopes}
    cu_q, cu_k = cumulative(lengths_q), cumulative(lengths_k)
    lengths = {by: cu_k if by == "cu_seqlens_k" else torch.tensor(lengths_k)}
    out, lse = flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_q,
        **{"cu_seqlens_k": None, **lengths},
        max_seqlen_q=5,
        max_seqlen_k=7,
        block_table=table_of(lengths_k, 4),
        return_softmax_lse=True,
        **ours,
    )
    want, want_lse = varlen64(
        q, torch.cat(k_tokens), torch.cat(v_tokens), cu_q.tolist(), cu_k.tolist(), **theirs
    )
    close(out, want)
    close(lse, want_lse)


# The cache.


def turned(x: Tensor, cos: Tensor, sin: Tensor, position: int, interleaved: bool) -> Tensor:
    """One token (H, D) turned, pair by pair."""
    x, width = x.clone().double(), cos.shape[1]
    for i in range(width):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + width)
        c, s = cos[position, i].double(), sin[position, i].double()
        x[:, a], x[:, b] = x[:, a] * c - x[:, b] * s, x[:, a] * s + x[:, b] * c
    return x


def angles(rows: int, width: int) -> tuple[Tensor, Tensor]:
    angle = draw(rows, width, dtype=torch.float64, seed=30)
    return angle.cos(), angle.sin()


LOCAL: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "everything": {},
}


@pytest.mark.parametrize("layout", ["dense", "batch idx", "pages"])
@pytest.mark.parametrize("rotary", [None, "interleaved", "half"])
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (2, 4), (4, 2), (3, 0)], ids=str)
def test_kvcache(layout, rotary, local, sizes):
    """New tokens turned, written in place, seen: out, lse and every slot of the cache."""
    sq, new = sizes
    lengths, room, dtype = [5, 0, 9], 16, torch.float64
    if layout == "pages":
        table = table_of([room - 4] * 3, 4)
        k_cache, _ = pages_of([room - 4] * 3, 4, 2, 8, dtype, NAN, 10)
        v_cache, _ = pages_of([room - 4] * 3, 4, 2, 6, dtype, NAN, 20)
        where = {"block_table": table}

        def slot(b: int, j: int) -> tuple[int, int]:
            return int(table[b, j // 4]), j % 4

    else:
        rows = [4, 0, 3] if layout == "batch idx" else [0, 1, 2]
        k_cache, v_cache = draw(5, room, 2, 8, dtype=dtype), draw(5, room, 2, 6, dtype=dtype)
        where = {"cache_batch_idx": torch.tensor(rows)} if layout == "batch idx" else {}

        def slot(b: int, j: int) -> tuple[int, int]:
            return rows[b], j

    q = draw(3, sq, 4, 8, dtype=dtype, seed=1)
    k, v = draw(3, new, 2, 8, dtype=dtype, seed=2), draw(3, new, 2, 6, dtype=dtype, seed=3)
    for b, n in enumerate(lengths):  # what is stale must not matter
        for j in range(n, room - 4):
            k_cache[slot(b, j)] = v_cache[slot(b, j)] = NAN
    cos, sin = angles(20, 3)
    options = dict(LOCAL[local])
    if rotary is not None:
        options |= {"rotary_cos": cos, "rotary_sin": sin}
        options |= {"rotary_interleaved": rotary == "interleaved"}

    want_k, want_v, want_q = k_cache.clone(), v_cache.clone(), q.clone()
    for b, n in enumerate(lengths):
        for i in range(new):
            token = k[b, i]
            if rotary is not None:
                token = turned(token, cos, sin, n + i, rotary == "interleaved")
            want_k[slot(b, n + i)], want_v[slot(b, n + i)] = token, v[b, i]
        for i in range(sq if rotary is not None else 0):
            at = n if local == "everything" else n + i
            want_q[b, i] = turned(q[b, i], cos, sin, at, rotary == "interleaved")
    given = (q, k_cache, v_cache, k, v)
    out, lse = flash_attn.flash_attn_with_kvcache(
        *given,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        return_softmax_lse=True,
        **where,
        **options,
    )
    close(k_cache, want_k)
    close(v_cache, want_v)
    for b, n in enumerate(lengths):
        slots = [slot(b, j) for j in range(n + new)]
        keys, values = (
            torch.stack([t[s] for s in slots])[None] if slots else t[:1, :0]
            for t in (want_k, want_v)
        )
        o, own_lse = attention64(want_q[b : b + 1], keys, values, **LOCAL[local])
        close(out[b : b + 1], o)
        close(lse[b : b + 1], own_lse)


def test_kvcache_without_lengths_is_full():
    k, tokens = pages_of([12, 12], 4, 2, 8, torch.float64, NAN, 1)
    q, table = draw(2, 1, 4, 8, dtype=torch.float64), table_of([12, 12], 4)[:, :3]
    out = flash_attn.flash_attn_with_kvcache(q, k, k, block_table=table)
    close(out, attention64(q, torch.stack(tokens), torch.stack(tokens))[0])


@pytest.mark.parametrize("case", OPTIONS)
def test_kvcache_options(case):
    ours, theirs = OPTIONS[case]
    q, k, v = draw_qkv(2, 3, 9, (4, 2), 8, 6, torch.float64).values()
    ours = {n: v for n, v in ours.items() if n != "num_splits"}
    for splits in (0, 1, 3):
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=7, num_splits=splits, return_softmax_lse=True, **ours
        )
        want, want_lse = attention64(q, k[:, :7], v[:, :7], **theirs)
        close(out, want)
        close(lse, want_lse)
    close(
        flash_attn.flash_attn_with_kvcache(q, k, v, **ours),  # all slots
        attention64(q, k, v, **theirs)[0],
    )


@pytest.mark.parametrize("name", SINKS)
def test_kvcache_sinks(name):
    q, k, v = draw_qkv(2, 3, 9, (4, 2), 8, 8, torch.float64).values()
    sinks = draw(4, dtype=torch.float64, seed=8)
    for module in (flash_attn, flash_attn_3):
        out = module.flash_attn_with_kvcache(q, k, v, causal=True, **{name: sinks})
        close(out, attention64(q, k, v, causal=True, sinks=sinks)[0])


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_leftpad(chunk, new, paged, causal):
    """Keys before leftpad are hidden; rotary counts them, chunks do not."""
    lengths, leftpad = [6, 9], [2, 9 if new else 8]
    q = draw(2, 2, 4, 8, dtype=torch.float64, seed=1)
    k, v = (draw(2, new, 2, 8, dtype=torch.float64, seed=i) for i in (2, 3))
    cos, sin = angles(20, 4)
    where: dict[str, Any] = {}
    if paged:
        k_cache, k_tokens = pages_of([12, 12], 4, 2, 8, torch.float64, NAN, 10)
        v_cache, v_tokens = pages_of([12, 12], 4, 2, 8, torch.float64, NAN, 20)
        where["block_table"] = table_of([12, 12], 4)
    else:
        k_cache, v_cache = (draw(2, 12, 2, 8, dtype=torch.float64, seed=i) for i in (4, 5))
        k_tokens, v_tokens = list(k_cache.clone()), list(v_cache.clone())
        for b, n in enumerate(leftpad):
            k_cache[b, :n] = v_cache[b, :n] = NAN
    if new:
        where |= {"rotary_cos": cos, "rotary_sin": sin}
    out, lse = flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *((k, v) if new else ()),
        cache_seqlens=torch.tensor(lengths),
        cache_leftpad=torch.tensor(leftpad),
        causal=causal,
        attention_chunk=chunk,
        return_softmax_lse=True,
        **where,
    )
    for b, (n, pad) in enumerate(zip(lengths, leftpad, strict=True)):
        keys, values, rows = k_tokens[b][:n], v_tokens[b][:n], q[b]
        if new:
            added = [turned(k[b, i], cos, sin, n + i, True) for i in range(new)]
            keys, values = torch.cat((keys, torch.stack(added))), torch.cat((values, v[b]))
            spread = causal or chunk > 0
            at = [n + i if spread else n for i in range(2)]
            rows = torch.stack([turned(q[b, i], cos, sin, at[i], True) for i in range(2)])
        keys, values = keys[None, pad:], values[None, pad:]
        mask = chunk_mask(2, keys.shape[1], chunk) if chunk else None
        want, want_lse = attention64(rows[None], keys, values, causal=causal, mask=mask)
        close(out[b : b + 1], want)
        close(lse[b : b + 1], want_lse)


def test_kvcache_rotary_seqlens():
    """Positions start there, instead of at cache_seqlens; a chunk makes a call local."""
    cos, sin = angles(20, 4)
    q, new = draw(2, 2, 4, 8, dtype=torch.float64), draw(2, 2, 2, 8, dtype=torch.float64, seed=1)
    first = torch.tensor([3, 11])
    cache = draw(2, 12, 2, 8, dtype=torch.float64, seed=2)
    for chunk in (0, 100):
        k_cache = cache.clone()
        out = flash_attn_3.flash_attn_with_kvcache(
            *(q, k_cache, cache.clone(), new, new),
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=torch.tensor([6, 2]),
            rotary_seqlens=first,
            attention_chunk=chunk,
        )
        for b, n in enumerate((6, 2)):
            keys, values = cache[b, : n + 2].clone(), cache[b, : n + 2].clone()
            rows = []
            for i in range(2):
                keys[n + i] = turned(new[b, i], cos, sin, int(first[b]) + i, True)
                values[n + i] = new[b, i]
                rows.append(turned(q[b, i], cos, sin, int(first[b]) + (i if chunk else 0), True))
            close(k_cache[b, : n + 2], keys)
            close(out[b : b + 1], attention64(torch.stack(rows)[None], keys[None], values[None])[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [False, True])
def test_kvcache_packed_queries(causal, paged, new):
    """FA3's cu_seqlens_q and cu_seqlens_k_new: each sequence as in a call of its own."""
    lengths, rows, added = [5, 0, 8], [2, 0, 3], [1, 2, 3]
    cu_q, cu_new = cumulative(rows), cumulative(added)
    q = draw(6, 4, 8, dtype=torch.float64)  # one more than there are in sequences
    k, v = (draw(7, 2, 8, dtype=torch.float64, seed=i) for i in (1, 2))
    k_cache, _ = pages_of([12] * 3, 4, 2, 8, torch.float64, NAN, 10)
    v_cache, _ = pages_of([12] * 3, 4, 2, 8, torch.float64, NAN, 20)
    where: dict[str, Any] = {"page_table": table_of([12] * 3, 4)}
    if not paged:
        k_cache, v_cache = (draw(3, 16, 2, 8, dtype=torch.float64, seed=i) for i in (3, 4))
        where = {"cache_batch_idx": torch.tensor([2, 0, 1])}
    cos, sin = angles(20, 4)
    options = {"causal": causal, "attention_chunk": 4, "return_softmax_lse": True}
    where["cache_leftpad"] = torch.tensor([2, 0, 5])
    if new:
        options |= {"rotary_cos": cos, "rotary_sin": sin}
    alone = (k_cache.clone(), v_cache.clone())
    out, lse = flash_attn_3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *((k, v) if new else ()),
        cache_seqlens=torch.tensor(lengths),
        cu_seqlens_q=cu_q,
        cu_seqlens_k_new=cu_new,
        max_seqlen_q=3,
        **where,
        **options,
    )
    assert out.shape == (6, 4, 8)
    assert lse.shape == (4, 6)
    for b in range(3):
        own = slice(cu_q[b], cu_q[b + 1])
        tokens = (t[None, cu_new[b] : cu_new[b + 1]] for t in (k, v)) if new else ()
        want, want_lse = flash_attn_3.flash_attn_with_kvcache(
            q[None, own],
            *alone,
            *tokens,
            cache_seqlens=lengths[b],
            **{n: t[b : b + 1] for n, t in where.items()},
            **options,
        )
        close(out[None, own], want)
        close(lse[None, :, own], want_lse)
    close(k_cache, alone[0])
    close(v_cache, alone[1])
    assert (out[5:] == 0).all()
    assert (lse[:, 5:] == -INF).all()


def test_kvcache_step_by_step_is_one_call():
    """Token by token from an empty cache gives what all tokens at once give."""
    q, k, v = draw_qkv(2, 11, 11, (4, 2), 8, 8, torch.float64).values()
    cos, sin = angles(11, 4)
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "causal": True}
    caches = [draw(2, 11, 2, 8, dtype=torch.float64, seed=i) for i in (5, 6)]
    steps = [
        flash_attn.flash_attn_with_kvcache(
            q[:, i : i + 1], *caches, k[:, i : i + 1], v[:, i : i + 1], cache_seqlens=i, **rotary
        )
        for i in range(11)
    ]
    fresh = [draw(2, 11, 2, 8, dtype=torch.float64, seed=i) for i in (5, 6)]
    whole = flash_attn.flash_attn_with_kvcache(q, *fresh, k, v, cache_seqlens=0, **rotary)
    close(torch.cat(steps, 1), whole)
    close(caches[0], fresh[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kvcache_in_low_precision(dtype):
    """Rotary is computed in float32: what is written is wrong by one rounding to the cache's dtype."""
    cos, sin = (t.to(dtype) for t in angles(16, 8))
    q, new = draw(2, 1, 4, 16, dtype=dtype), draw(2, 3, 2, 16, dtype=dtype, seed=1)
    cache = draw(2, 12, 2, 16, dtype=dtype, seed=2)
    k_cache = cache.clone()
    out = flash_attn.flash_attn_with_kvcache(
        *(q, k_cache, cache.clone(), new, new),
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=4,
        causal=True,
    )
    assert out.dtype == dtype
    for b, i in itertools.product(range(2), range(3)):
        want = turned(new[b, i], cos, sin, 4 + i, True)
        error = (k_cache[b, 4 + i].double() - want).abs()
        assert (error <= torch.finfo(dtype).eps / 2 * want.abs() + 2**-20).all()
    rows = torch.stack([turned(q[b, 0], cos, sin, 4, True) for b in range(2)])[:, None]
    values = cache.clone()
    values[:, 4:7] = new
    close(out, attention64(rows, k_cache[:, :7], values[:, :7], causal=True)[0], dtype)


def test_kvcache_writes_through_views():
    """A cache that is a slice of a larger one, heads before tokens."""
    whole = torch.zeros(3, 2, 2, 2, 8, 4)  # layer, k or v, B, H, S, D
    k_cache, v_cache = whole[1].transpose(2, 3)
    new = draw(2, 3, 2, 4)
    flash_attn.flash_attn_with_kvcache(
        draw(2, 1, 2, 4), k_cache, v_cache, new, 2 * new, cache_seqlens=4
    )
    assert torch.equal(whole[1, 0, :, :, 4:7], new.transpose(1, 2))
    assert torch.equal(whole[1, 1, :, :, 4:7], 2 * new.transpose(1, 2))
    assert whole.count_nonzero() == 2 * new.numel()


def test_kvcache_under_inference_mode_and_no_grad():
    q, new = draw(2, 1, 2, 4).requires_grad_(), draw(2, 1, 2, 4).requires_grad_()
    cache = torch.zeros(2, 4, 2, 4)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = flash_attn.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=0)
        assert not out.requires_grad


# Bugs that others were reported to have, at these names.


@pytest.mark.parametrize("hq", [16, 17, 48, 128])
@pytest.mark.parametrize("sq", [1, 3])
def test_b13_many_query_heads_of_one_key_head(hq, sq):
    """https://github.com/vllm-project/vllm/pull/23424"""
    q, k, v = draw_qkv(2, sq, 70, (hq, 1), 16).values()
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=67, causal=True)
    close(out, attention64(q, k[:, :67], v[:, :67], causal=True)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("filler", [1e4, NAN])
def test_b53_the_last_page_is_not_full(causal, filler):
    """https://github.com/flashinfer-ai/flashinfer/issues/3716"""
    lengths = [1, 15, 16, 17, 33]
    k, _ = pages_of(lengths, 16, 2, 8, torch.float64, filler, 1)
    v, tokens = pages_of(lengths, 16, 2, 8, torch.float64, filler, 2)
    out, lse = flash_attn.flash_attn_with_kvcache(
        torch.zeros(5, 1, 4, 8, dtype=torch.float64),
        k,
        v,
        cache_seqlens=torch.tensor(lengths),
        block_table=table_of(lengths, 16),
        causal=causal,
        return_softmax_lse=True,
    )
    for b, n in enumerate(lengths):
        close(out[b, 0], tokens[b].mean(0).repeat_interleave(2, 0))
        close(lse[b, :, 0], torch.tensor(float(n), dtype=torch.float64).log().expand(4))


@pytest.mark.parametrize("sink", [False, True])
def test_b54_stale_pages_outside_the_window(sink):
    """https://github.com/vllm-project/vllm/pull/30887"""
    k, k_tokens = pages_of([38], 4, 2, 8, torch.float64, NAN, 1)
    v, v_tokens = pages_of([38], 4, 2, 8, torch.float64, NAN, 2)
    table = table_of([38], 4)
    for j in range(30):
        k[table[0, j // 4], j % 4] = v[table[0, j // 4], j % 4] = NAN
    q = draw(1, 1, 4, 8, dtype=torch.float64)
    sinks = {"s_aux": draw(4, dtype=torch.float64)} if sink else {}
    out = flash_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=38, block_table=table, causal=True, window_size=(7, 0), **sinks
    )
    seen = (t[0][None, 30:] for t in (k_tokens, v_tokens))
    close(out, attention64(q, *seen, sinks=sinks.get("s_aux"))[0])


def test_b46_more_queries_than_keys():
    """https://github.com/Dao-AILab/flash-attention/issues/443"""
    q = (3 * draw(256, 1, 32)).requires_grad_()
    k, v = (3 * draw(3, 1, 32, seed=i) for i in (1, 2))
    v.requires_grad_()
    cu_q, cu_k = torch.tensor([0, 76, 110, 256]), torch.arange(4)
    out = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 256, 3, causal=True)
    out.sum().backward()
    last = torch.tensor([75, 109, 255])
    assert torch.equal(out[last], v)
    assert out.count_nonzero() == v.numel()
    assert q.grad.abs().max() < 1e-5
    close(v.grad, torch.ones_like(v))


def test_b50_max_seqlen_is_a_hint():
    """https://github.com/Dao-AILab/flash-attention/issues/1773"""
    tokens, cu = draw_tokens(40, 40, (4, 2), 8, 8, torch.float32), cumulative([5, 35])
    outs = [
        flash_attn.flash_attn_varlen_func(*tokens.values(), cu, cu, n, n, causal=True)
        for n in (35, 10, 4096, None, torch.tensor(35))
    ]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_b51_cumulative_lengths_of_any_integer_kind():
    """https://github.com/QwenLM/Qwen3-VL/issues/567"""
    tokens, cu = draw_tokens(17, 17, (4, 2), 8, 8, torch.float32), cumulative([5, 3, 9])
    out = flash_attn.flash_attn_varlen_func(*tokens.values(), cu, cu, 9, 9)
    assert torch.equal(
        out, flash_attn.flash_attn_varlen_func(*tokens.values(), cu.long(), cu.long(), 9, 9)
    )
    for wrong in (cu.float(), [0, 5, 8, 17], torch.tensor([0, 9, 5, 17]), torch.tensor([0, 18])):
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            flash_attn.flash_attn_varlen_func(*tokens.values(), wrong, cu[: len(wrong)], 9, 9)


# What is refused, by name.

QKV = draw_qkv(2, 5, 7, (4, 2), 8)
TOKENS = {**draw_tokens(10, 10, (4, 2), 8, 8, torch.float32)}
CU = torch.tensor([0, 4, 10])
VARLEN = {**TOKENS, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 6, "max_seqlen_k": 6}
PAGES, TABLE = draw(6, 4, 2, 8), torch.arange(6).view(2, 3)
CACHE = {"q": draw(2, 1, 4, 8), "k_cache": draw(2, 8, 2, 8), "v_cache": draw(2, 8, 2, 8)}
NEW = {"k": draw(2, 3, 2, 8), "v": draw(2, 3, 2, 8), "cache_seqlens": torch.tensor([1, 4])}
ROTARY = {"rotary_cos": draw(8, 4), "rotary_sin": draw(8, 4)}
IN_PAGES = {"q": CACHE["q"], "k_cache": PAGES, "v_cache": PAGES, "block_table": TABLE}
CALLS = {
    "dense": ("flash_attn_func", QKV),
    "varlen": ("flash_attn_varlen_func", VARLEN),
    "cache": ("flash_attn_with_kvcache", CACHE),
    "new": ("flash_attn_with_kvcache", {**CACHE, **NEW}),
    "pages": ("flash_attn_with_kvcache", {**IN_PAGES, **NEW}),
    "qkv": ("flash_attn_qkvpacked_func", {"qkv": draw(2, 5, 3, 4, 8)}),
    "kv": ("flash_attn_kvpacked_func", {"q": QKV["q"], "kv": draw(2, 5, 2, 2, 8)}),
}
ONE = torch.ones(2, 2)
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    **{
        f"{name}, {call}": (call, {name: ONE}, (name, "float8"))
        for name in DESCALES
        for call in ("dense", "varlen", "cache")
    },
    "two sinks": ("dense", dict.fromkeys(SINKS, draw(4)), SINKS),
    "sink of key heads": ("dense", {"s_aux": draw(2)}, ("sinks", "(4,)", "(2,)")),
    "window of -2": ("dense", {"window_size": (-2, 0)}, ("window_size", "-2")),
    "window no pair": ("varlen", {"window_size": 3}, ("window_size", "3")),
    "chunk": ("dense", {"attention_chunk": -1}, ("attention_chunk", "-1")),
    "chunk, varlen": ("varlen", {"attention_chunk": 2.5}, ("attention_chunk", "2.5")),
    "chunk, cache": ("cache", {"attention_chunk": -3}, ("attention_chunk", "-3")),
    "qv": ("dense", {"qv": draw(2, 5, 4, 7)}, ("qv", "(2, 5, 4, 8)", "(2, 5, 4, 7)")),
    "dropout": ("dense", {"dropout_p": 1.5}, ("dropout_p", "1.5")),
    "scale": ("dense", {"softmax_scale": INF}, ("scale", "inf")),
    "slopes": ("dense", {"alibi_slopes": draw(3)}, ("alibi_slopes", "(3,)")),
    "heads": ("dense", {"q": draw(2, 5, 3, 8)}, ("heads", "3")),
    "qkv": ("qkv", {"qkv": draw(2, 5, 2, 4, 8)}, ("qkv", "(B, S, 3, H, D)", "(2, 5, 2, 4, 8)")),
    "qkv of rank 4": ("qkv", {"qkv": draw(2, 3, 4, 8)}, ("qkv", "(2, 3, 4, 8)")),
    "kv": ("kv", {"kv": draw(2, 5, 3, 2, 8)}, ("kv", "(B, S, 2, H, D)", "(2, 5, 3, 2, 8)")),
    "no cu_seqlens_k": ("varlen", {"cu_seqlens_k": None}, ("cu_seqlens_k", "block_table")),
    "no lengths of pages": (
        "varlen",
        {"k": PAGES, "v": PAGES, "block_table": TABLE, "cu_seqlens_k": None},
        ("cu_seqlens_k", "seqused_k"),
    ),
    "seqused_q of pages": (
        "varlen",
        {"k": PAGES, "v": PAGES, "block_table": TABLE, "seqused_q": torch.ones(2).int()},
        ("seqused_q", "block_table"),
    ),
    "sequences of pages": (
        "varlen",
        {"k": PAGES, "v": PAGES, "block_table": TABLE, "cu_seqlens_q": torch.tensor([0, 10])},
        ("cu_seqlens_q", "(2,)"),
    ),
    "seqused_k too large": ("varlen", {"seqused_k": torch.tensor([4, 7])}, ("seqused_k", "7")),
    "seqused_q negative": ("varlen", {"seqused_q": torch.tensor([-1, 6])}, ("seqused_q", "-1")),
    "seqused_k in a list": ("varlen", {"seqused_k": [1, 2]}, ("seqused_k", "int32", "list")),
    "chunks of a list": (
        "varlen",
        {"attention_chunk": 2, "cu_seqlens_q": [0, 4, 10]},
        ("cu_seqlens_q", "int32", "list"),
    ),
    "seqused_k of three": ("varlen", {"seqused_k": torch.ones(3).int()}, ("seqused_k",)),
    "S_dmask of pages": (
        "varlen",
        {"k": PAGES, "v": PAGES, "block_table": TABLE, "dropout_p": 0.1, "return_attn_probs": True},
        ("return_attn_probs", "dropout", "block_table"),
    ),
    "k alone": ("new", {"v": None}, ("k and v",)),
    "no lengths": ("new", {"cache_seqlens": None}, ("cache_seqlens",)),
    "cos alone": ("new", {"rotary_cos": draw(8, 4)}, ("rotary_cos and rotary_sin",)),
    "rotary without k": ("cache", ROTARY, ("rotary_cos", "k and v")),
    "rotary_seqlens without k": (
        "cache",
        {"rotary_seqlens": torch.ones(2).int()},
        ("rotary_seqlens", "k and v"),
    ),
    "rotary too short": (
        "new",
        {"rotary_cos": draw(6, 4), "rotary_sin": draw(6, 4), "causal": True},
        ("rotary_cos", "from 1 to 6", "6 rows"),
    ),
    "rotary too wide": (
        "new",
        {"rotary_cos": draw(8, 5), "rotary_sin": draw(8, 5)},
        ("rotary_cos", "head_dim = 8", "(8, 5)"),
    ),
    "rotary shapes": (
        "new",
        {"rotary_cos": draw(8, 4), "rotary_sin": draw(8, 3)},
        ("rotary_sin", "(8, 4)", "(8, 3)"),
    ),
    "rotary_seqlens below 0": (
        "new",
        {**ROTARY, "rotary_seqlens": torch.tensor([-1, 2])},
        ("rotary_cos", "from -1 to"),
    ),
    "rotary_seqlens": (
        "new",
        {**ROTARY, "rotary_seqlens": torch.ones(3).int()},
        ("rotary_seqlens", "(2,)", "(3,)"),
    ),
    "no room": ("new", {"cache_seqlens": torch.tensor([1, 6])}, ("cache_seqlens", "8", "6")),
    "no room in pages": ("pages", {"cache_seqlens": 10}, ("cache_seqlens", "12", "10")),
    "below 0": ("new", {"cache_seqlens": torch.tensor([-1, 2])}, ("cache_seqlens", "-1")),
    "q no tensor": ("cache", {"q": [1.0]}, ("q", "(B, Sq, Hq, D)", "list")),
    "cache of rank 3": ("cache", {"v_cache": draw(2, 8, 8)}, ("v_cache", "(2, 8, 8)")),
    "lengths in a list": ("cache", {"cache_seqlens": [1, 2]}, ("cache_seqlens", "int32", "list")),
    "a table in a list": ("pages", {"block_table": [[1, 2]]}, ("block_table", "int32", "list")),
    "cu_seqlens_q in a list": (
        "cache",
        {"q": draw(5, 4, 8), "cu_seqlens_q": [0, 2, 5]},
        ("cu_seqlens_q", "int32", "list"),
    ),
    "cu_seqlens_k in a list": (
        "varlen",
        {"k": PAGES, "v": PAGES, "block_table": TABLE, "cu_seqlens_k": [0, 4, 10]},
        ("cu_seqlens_k", "int32", "list"),
    ),
    "cu_seqlens_k_new of other entries": (
        "new",
        {"k": draw(6, 2, 8), "v": draw(6, 2, 8), "cu_seqlens_k_new": torch.arange(4)},
        ("cu_seqlens_k_new", "3", "4"),
    ),
    "no sequences": (
        "varlen",
        {
            "k": PAGES,
            "v": PAGES,
            "block_table": TABLE[:0],
            "cu_seqlens_q": CU[:1],
            "cu_seqlens_k": CU[:1],
        },
        ("cu_seqlens_q", "B ≥ 1"),
    ),
    "cap": ("dense", {"softcap": NAN}, ("softcap", "nan")),
    "qkv no tensor": ("qkv", {"qkv": None}, ("qkv", "NoneType")),
    "lengths of floats": ("cache", {"cache_seqlens": ONE[0]}, ("cache_seqlens", "float32")),
    "lengths of three": (
        "cache",
        {"cache_seqlens": torch.ones(3).int()},
        ("cache_seqlens", "(3,)"),
    ),
    "leftpad": ("cache", {"cache_leftpad": torch.ones(3).int()}, ("cache_leftpad", "(2,)", "(3,)")),
    "batch idx": (
        "cache",
        {"cache_batch_idx": torch.ones(3).int()},
        ("cache_batch_idx", "(2,)", "(3,)"),
    ),
    "batch idx too large": ("cache", {"cache_batch_idx": torch.tensor([0, 2])}, ("page", "2")),
    "new batch idx too large": (
        "new",
        {"cache_batch_idx": torch.tensor([0, -1])},
        ("cache_batch_idx", "from 0 to 1", "-1"),
    ),
    "more queries than entries": ("cache", {"q": draw(3, 1, 4, 8)}, ("page", "2")),
    "two tables": (
        "pages",
        {"page_table": TABLE},
        ("block_table", "page_table"),
    ),
    "table and batch idx": (
        "pages",
        {"cache_batch_idx": torch.arange(2)},
        ("cache_batch_idx", "block_table"),
    ),
    "table of one": ("pages", {"block_table": TABLE[:1]}, ("block_table", "B = 2")),
    "page too large": ("pages", {"block_table": TABLE + 4}, ("block_table", "from 0 to 5")),
    "page below 0": ("pages", {"block_table": TABLE - 1}, ("block_table", "-1")),
    "new dtype": ("new", {"k": NEW["k"].bfloat16()}, ("k", "float32", "bfloat16")),
    "new heads": ("new", {"v": draw(2, 3, 4, 8)}, ("v", "(2, 8, 2, 8)", "(2, 3, 4, 8)")),
    "new tokens": ("new", {"v": draw(2, 2, 2, 8)}, ("k and v", "same tokens")),
    "new rank": ("new", {"k": draw(6, 2, 8), "v": draw(6, 2, 8)}, ("k", "(6, 2, 8)")),
    "new batch": (
        "new",
        {"k": draw(3, 3, 2, 8), "v": draw(3, 3, 2, 8)},
        ("k", "2", "(3, 3, 2, 8)"),
    ),
    "new requires grad": ("new", {"v": draw(2, 3, 2, 8).requires_grad_()}, ("v", "grad")),
    "q requires grad": ("cache", {"q": draw(2, 1, 4, 8).requires_grad_()}, ("q", "grad")),
    "splits": ("cache", {"num_splits": -1}, ("num_splits", "-1")),
    "q of rank 3": ("cache", {"q": draw(2, 4, 8)}, ("q", "(2, 4, 8)")),
    "packed q of rank 4": ("cache", {"cu_seqlens_q": torch.arange(3)}, ("q", "(2, 1, 4, 8)")),
    "cu_seqlens_q falls": (
        "cache",
        {"q": draw(5, 4, 8), "cu_seqlens_q": torch.tensor([0, 5, 3])},
        ("cu_seqlens_q", "fall"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    call, changes, words = REFUSED[case]
    name, good = CALLS[call]
    function = getattr(flash_attn, name)
    function(
        **{n: t.clone() if "cache" in n and isinstance(t, Tensor) else t for n, t in good.items()}
    )
    before = {n: t.clone() for n, t in good.items() if n in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match=words[0]) as error:
        function(**{**good, **changes})
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"
    assert all(torch.equal(good[n], t) for n, t in before.items())  # nothing was written


# Inside PyTorch.


def test_deterministic_is_passed_on(monkeypatch):
    """True asks for it; False asks for nothing, so that torch's own switch still counts."""
    asked = []
    attention = flash_calls.attention

    def spy(*tensors: Tensor, **options: Any) -> Any:
        asked.append(options["deterministic"])
        return attention(*tensors, **options)

    monkeypatch.setattr(flash_calls, "attention", spy)
    for module in (flash_attn, flash_attn_3):
        for deterministic in (False, True):
            module.flash_attn_func(**QKV, deterministic=deterministic)
    assert asked == [None, True] * 2


def test_compile_in_one_graph():
    torch.compiler.reset()
    leaves = draw_qkv(2, 6, 9, (4, 2), 8)
    options = {"causal": True, "window_size": (4, -1), "softcap": 5.0}
    for function, given in (
        (flash_attn.flash_attn_func, {**leaves, "attention_chunk": 4}),
        (flash_attn_3.flash_attn_func, leaves),
        (flash_attn.flash_attn_varlen_func, VARLEN),
    ):
        run = torch.compile(function, backend="aot_eager", fullgraph=True)
        close(run(**given, **options), function(**given, **options))


def test_double_backward():
    q, k, v = (t.requires_grad_() for t in draw_qkv(1, 3, 4, (2, 1), 4, 4, torch.float64).values())
    assert torch.autograd.gradgradcheck(
        lambda *t: flash_attn.flash_attn_func(*t, causal=True), (q, k, v), fast_mode=True
    )


def test_autocast():
    leaves = draw_qkv(2, 6, 9, (4, 2), 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn.flash_attn_func(**leaves, causal=True)
        cached = flash_attn.flash_attn_with_kvcache(*leaves.values(), causal=True)
        packed = flash_attn_3.flash_attn_with_kvcache(
            leaves["q"].flatten(0, 1),
            *list(leaves.values())[1:],
            cu_seqlens_q=cumulative([6, 6]),
            causal=True,
        )
    assert out.dtype == cached.dtype == packed.dtype == torch.bfloat16
    want, _ = attention64(**leaves, causal=True)
    for got in (out, cached, packed.unflatten(0, (2, 6))):
        close(got, want, factor=2)


# Padding.


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_unpad_and_pad(dtype):
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]).to(dtype)
    x = draw(4, 4, 2, 3).requires_grad_()
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    assert torch.equal(tokens, x[mask.bool()])
    assert indices.tolist() == [1, 2, 3, 4, 12, 14, 15]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3, 4, 4, 7], 3, [3, 1, 0, 3])
    assert cu_seqlens.dtype == used.dtype == torch.int32
    back = pad_input(tokens, indices, 4, 4)
    assert torch.equal(back, torch.where(mask.bool()[..., None, None], x, 0))
    back.sum().backward()
    assert torch.equal(x.grad, mask.bool()[..., None, None].expand_as(x).float())


def test_unpad_with_tokens_that_do_not_count():
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]])
    x = draw(2, 4, 3)
    tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask, unused)
    assert torch.equal(tokens, torch.cat((x[0, :3], x[1, :3])))
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3, 6], 3, [2, 1])
    assert indices.tolist() == [0, 1, 2, 4, 5, 6]


def test_index_first_axis():
    x = draw(5, 2, 3, dtype=torch.float64).requires_grad_()
    rows = torch.tensor([3, 0, 4])
    assert torch.equal(index_first_axis(x, rows), x[rows])
    put = index_put_first_axis(x[:3], rows, 6)
    assert torch.equal(put[rows], x[:3])
    assert put.count_nonzero() == 3 * 6
    assert torch.autograd.gradcheck(
        lambda x: index_put_first_axis(index_first_axis(x, rows), rows, 6), x
    )


def test_a_padded_batch_through_packed_attention():
    """unpad, attend, pad: each entry as if it were alone."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 0, 0, 0, 0]])
    leaves = draw_qkv(3, 5, 5, (4, 2), 8, 8, torch.float64)

    def padded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        unpadded = [unpad_input(t, mask) for t in (q, k, v)]
        _, indices, cu, longest, _ = unpadded[0]
        out = flash_attn.flash_attn_varlen_func(
            *(t for t, *_ in unpadded), cu, cu, longest, longest, **options
        )
        return pad_input(out, indices, 3, 5), out.new_zeros(3, 4, 5)

    dout = draw(3, 5, 4, 8, dtype=torch.float64, seed=9)
    out, _, grads = gradients(padded, leaves, dout, None, causal=True)
    own = mask.bool()[:, None, None, :] & mask.bool()[:, None, :, None]
    want, _, want_grads = gradients(attention64, leaves, dout, None, causal=True, mask=own)
    close(out, want)
    for name, g in grads.items():
        close(g, want_grads[name], factor=4)
