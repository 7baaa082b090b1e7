"""Every argument of flash_attn's functions, given badly in every way: a ValueError that names it, and a
cache that is bit for bit what it was."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from inputs import cumulative, draw, draw_qkv, draw_tokens
from torch import Tensor

from tilewise.compat import bert_padding, flash_attn, flash_attn_3, kvcache
from tilewise.compat.course import FlashAttentionTriton

torch.set_num_threads(1)

Arguments = dict[str, Any]
NAN, INF = float("nan"), float("inf")


def lengths(*n: int) -> Tensor:
    return torch.tensor(n, dtype=torch.int32)


def dense() -> Arguments:
    return {**draw_qkv(2, 5, 7, (4, 2), 8), "qv": draw(2, 5, 4, 8)}


def sequences(name: str) -> Arguments:
    return {f"cu_seqlens{name}": cumulative([4, 6]), f"max_seqlen{name}": 6}


def varlen() -> Arguments:
    tokens = draw_tokens(10, 10, (4, 2), 8, 8, torch.float32)
    return {**tokens, "qv": draw(10, 4, 8), **sequences("_q"), **sequences("_k")}


def varlen_used() -> Arguments:
    used = {"seqused_q": lengths(3, 5), "seqused_k": lengths(4, 5), "attention_chunk": 3}
    return {**varlen(), **used}


def varlen_pages() -> Arguments:
    pages = {"k": draw(6, 4, 2, 8), "v": draw(6, 4, 2, 8), "qv": draw(10, 4, 8)}
    where = {"cu_seqlens_k": None, "seqused_k": lengths(4, 6), "block_table": table()}
    return {**varlen(), **pages, **where}


def table() -> Tensor:
    return torch.arange(6, dtype=torch.int32).view(2, 3)


def cache() -> Arguments:
    return {
        **{"q": draw(2, 2, 4, 8), "qv": draw(2, 2, 4, 8)},
        **{"k_cache": draw(2, 8, 2, 8), "v_cache": draw(2, 8, 2, 8, seed=1)},
        **{"k": draw(2, 2, 2, 8, seed=2), "v": draw(2, 2, 2, 8, seed=3)},
        **{"rotary_cos": draw(9, 2), "rotary_sin": draw(9, 2), "rotary_seqlens": lengths(1, 4)},
        **{"cache_seqlens": lengths(1, 4), "cache_leftpad": lengths(0, 1)},
        **{"cache_batch_idx": lengths(1, 0), "attention_chunk": 3},
    }


def pages(name: str) -> Arguments:
    """The tokens that are there lie in pages 0 and 3, the new ones too; the others are nobody's yet."""
    given = cache()
    del given["cache_batch_idx"]
    stored = {"k_cache": draw(6, 4, 2, 8), "v_cache": draw(6, 4, 2, 8, seed=1)}
    return {**given, **stored, name: table()}


def packed_pages() -> Arguments:
    tokens = {"q": draw(4, 4, 8), "qv": draw(4, 4, 8), "k": draw(4, 2, 8), "v": draw(4, 2, 8)}
    cu = {"cu_seqlens_q": lengths(0, 2, 4), "cu_seqlens_k_new": lengths(0, 2, 4)}
    return {**pages("page_table"), **tokens, **cu, "max_seqlen_q": 2}


def qkv(*lead: int) -> Arguments:
    return {"qkv": draw(*lead, 3, 4, 8)}


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "2, dense": (flash_attn.flash_attn_func, dense),
    "2, varlen": (flash_attn.flash_attn_varlen_func, varlen),
    "2, varlen, used": (flash_attn.flash_attn_varlen_func, varlen_used),
    "2, varlen, pages": (flash_attn.flash_attn_varlen_func, varlen_pages),
    "2, qkv": (flash_attn.flash_attn_qkvpacked_func, lambda: qkv(2, 5)),
    "2, kv": (
        flash_attn.flash_attn_kvpacked_func,
        lambda: {"q": draw(2, 5, 4, 8), "kv": draw(2, 7, 2, 2, 8)},
    ),
    "2, varlen qkv": (
        flash_attn.flash_attn_varlen_qkvpacked_func,
        lambda: {**qkv(10), **sequences("")},
    ),
    "2, varlen kv": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        lambda: {
            **{"q": draw(10, 4, 8), "kv": draw(10, 2, 2, 8)},
            **{**sequences("_q"), **sequences("_k")},
        },
    ),
    "2, cache": (flash_attn.flash_attn_with_kvcache, cache),
    "2, pages": (flash_attn.flash_attn_with_kvcache, lambda: pages("block_table")),
    "2, packed pages": (flash_attn.flash_attn_with_kvcache, packed_pages),
    "3, dense": (flash_attn_3.flash_attn_func, dense),
    "3, varlen": (flash_attn_3.flash_attn_varlen_func, varlen_used),
    "3, heads of qkv": (
        flash_attn_3.flash_attn_qkvpacked_func,
        lambda: {"qkv": draw(2, 5, 8, 8), "num_heads_q": 4},
    ),
    "3, cache": (flash_attn_3.flash_attn_with_kvcache, cache),
    "3, pages": (flash_attn_3.flash_attn_with_kvcache, lambda: pages("page_table")),
    "3, packed pages": (flash_attn_3.flash_attn_with_kvcache, packed_pages),
}
# Arguments that a call does not need, as they would be.
ASIDE: dict[str, Tensor] = {
    "alibi_slopes": draw(4),
    "learnable_sink": draw(4),
    "s_aux": draw(4),
}
COUNTS = (-1, 2.5, True, "3", torch.tensor([3, 4]))
VALUES: dict[str, tuple[Any, ...]] = {
    "dropout_p": (-0.1, 2, "x", NAN, None, True),
    "softmax_scale": (INF, NAN, "x", True),
    "causal": (1, None, "yes", torch.tensor(True)),
    "window_size": ((1,), (1, 2, 3), 3, "ab", (-2, 0), (1.5, 0), (True, 0), None),
    "softcap": (NAN, INF, "x", True, torch.tensor(1.0)),
    "deterministic": ("x",),
    "attention_chunk": (*COUNTS, None),
    "num_splits": COUNTS,
    "num_heads_q": (*COUNTS, 0, 3, 8, 9),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "max_seqlen"), (*COUNTS, torch.tensor(2.5))),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), (torch.ones(1), 1.0)),
}
# Any value is taken: these only schedule or are asked whether they are true.
FREE = {"pack_gqa", "sm_margin", "scheduler_metadata", "rotary_interleaved", "extras"}
FREE |= {"return_attn_probs", "return_softmax_lse"}
# How `attention` calls them, where a check of its own speaks.
OTHER_NAMES = {
    "softmax_scale": "scale",
    "s_aux": "sinks",
    "learnable_sink": "sinks",
    "k_cache": "k_pages",
    "v_cache": "v_pages",
    "qkv": "q",
    "kv": "k",
}


def kinds(name: str, t: Tensor) -> Iterator[Any]:
    """What is no such tensor at all."""
    yield from ([1.0], "x", 1.5, True, t.to(torch.complex64), t.unsqueeze(0), torch.tensor(1.0))
    yield from (t.bool(), t.long() if t.is_floating_point() else t.float())
    yield t.flatten(0, 1) if t.ndim > 1 else t.unsqueeze(1)
    if name != "qkv":  # alone, it may be anywhere
        yield t.to("meta")


def sizes(name: str, t: Tensor) -> Iterator[Tensor]:
    """Too many for the others, or none."""
    if name == "v" or name.startswith("rotary_"):
        yield torch.cat((t, t[:1]))
    elif t.is_floating_point() and name not in ("qkv", "kv"):
        yield torch.cat((t, t[..., :1]), -1)
        yield torch.cat((t, t[..., :1, :]), -2) if t.ndim > 1 else t[1:]
    elif not t.is_floating_point() and name != "cache_leftpad":  # which may hide all or nothing
        yield from (t - 100, t + 100, t[:0])
        yield torch.cat((t, t[-1:] - 1))


def wrong(name: str, right: Any) -> Iterator[tuple[Any, bool]]:
    """Bad values of an argument, and whether the message has to name it."""
    yield from ((value, True) for value in VALUES.get(name, ()))
    if isinstance(right, Tensor):
        yield from ((value, True) for value in kinds(name, right))
        yield from ((value, False) for value in sizes(name, right))


def refusal(function: Callable[..., Any], given: Arguments) -> str | None:
    """What a ValueError says; None if there is none."""
    try:
        function(**given)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("call", CALLS)
def test_refused_by_name_and_without_a_trace(call: str) -> None:
    function, make = CALLS[call]
    function(**make())
    good, asked = make(), inspect.signature(function).parameters
    for name in asked.keys() - FREE:
        right = good.get(name, ASIDE.get(name))
        bad = list(wrong(name, right))
        if isinstance(right, Tensor) and asked[name].default is inspect.Parameter.empty:
            bad.append((None, True))
        if "cache" in call and isinstance(right, Tensor) and right.is_floating_point():
            bad.append((right.clone().requires_grad_(), True))
        assert bad or right is None, name
        for value, named in bad:
            given = {**make(), name: value}
            caches = [given[n] for n in {"k_cache", "v_cache"} & given.keys() - {name}]
            before = [t.clone() for t in caches]
            said = refusal(function, given)
            assert said is not None, (name, value)
            words = (name, OTHER_NAMES.get(name, name))
            assert not named or any(word in said for word in words), (name, value, said)
            assert all(map(torch.equal, caches, before)), (name, value)


@pytest.mark.parametrize("call", [call for call in CALLS if "pages" in call or "cache" in call][1:])
def test_what_fails_late_leaves_no_trace(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of an earlier token, which only the attention reads, or an error of any kind in it."""
    function, make = CALLS[call]
    given = make()
    table = next((given[n] for n in ("block_table", "page_table") if n in given), None)
    if table is not None:
        given |= {"cache_seqlens": lengths(5, 5), "attention_chunk": 0}
        table[1, 0] = 99
    else:
        monkeypatch.setattr(kvcache, "in_pages", refuse)
    before = [given[n].clone() for n in ("k_cache", "v_cache")]
    with pytest.raises((ValueError, MemoryError), match=r"from 0 to 5 where tokens are|no memory"):
        function(**given)
    assert all(map(torch.equal, (given["k_cache"], given["v_cache"]), before))


def refuse(*_: Any, **__: Any) -> Any:
    raise MemoryError("no memory")


# Padding, and the course's Triton function.

BATCH, MASK = draw(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
TOKENS, INDICES = draw(3, 4), torch.tensor([0, 1, 3])
MASKS: tuple[Any, ...] = (MASK.tolist(), MASK[0], MASK[:1], MASK[:, :2], MASK[None], 2 * MASK)
MASKS += (MASK - 1, MASK * 0.5, MASK.to("meta"))
PADDING: dict[str, tuple[Arguments, dict[str, tuple[Any, ...]]]] = {
    "unpad_input": (
        {"hidden_states": BATCH, "attention_mask": MASK},
        {
            "hidden_states": (BATCH.tolist(), None, BATCH[0, 0], BATCH[:1], BATCH[:, :2]),
            "attention_mask": (*MASKS, None),
            "unused_mask": (*MASKS, MASK),
        },
    ),
    "pad_input": (
        {"hidden_states": TOKENS, "indices": INDICES, "batch": 2, "seqlen": 3},
        {
            "hidden_states": (TOKENS.tolist(), None, TOKENS[0, 0], TOKENS[:2]),
            "indices": (
                *(INDICES.tolist(), None, INDICES[:2], INDICES.double(), INDICES[None]),
                *(INDICES + 3, INDICES - 5, INDICES.to("meta")),
            ),
            "batch": (-1, "2", 2.0, True, 0),
            "seqlen": (-1, "3", 3.0, 1),
        },
    ),
}
# Where it is only seen that they do not go together.
OF_BOTH = {"hidden_states": "_mask|indices", "batch": "indices", "seqlen": "indices"}


@pytest.mark.parametrize("name", PADDING)
def test_padding(name: str) -> None:
    good, wrong_ones = PADDING[name]
    function = getattr(bert_padding, name)
    function(**good)
    for argument, values in wrong_ones.items():
        for value in values:
            match = f"{argument}|values|{OF_BOTH.get(argument, argument)}"
            with pytest.raises(ValueError, match=match):
                function(**{**good, argument: value})


def test_operands_of_a_course() -> None:
    good = draw(2, 5, 16)
    for place, name in enumerate("QKV"):
        for value in ([1.0], None, good[0], good[None], torch.tensor(1.0)):
            given = [good, good, good]
            given[place] = value
            with pytest.raises(ValueError, match=rf"{name} must be a tensor \(batch, n, d\), got"):
                FlashAttentionTriton.apply(*given, True)
