"""Bad arguments: a ValueError that names the argument, what came and what is wanted."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import draw, draw_qkv, draw_tokens
from torch import Tensor

import tilewise

torch.set_num_threads(1)

B, SQ, SK, HQ, HKV, D, DV = 2, 3, 5, 4, 2, 8, 6
INF, NAN = math.inf, math.nan


def dense(**changes: Any) -> dict[str, Any]:
    return {**draw_qkv(B, SQ, SK, (HQ, HKV), D, DV), **changes}


def packed(**changes: Any) -> dict[str, Any]:
    return {
        **draw_tokens(7, 9, (HQ, HKV), D, DV, torch.float32),
        "cu_seqlens_q": torch.tensor([0, 3, 7]),
        "cu_seqlens_k": torch.tensor([0, 4, 9]),
        **changes,
    }


def pages(**changes: Any) -> dict[str, Any]:
    return {
        "q": draw(B, SQ, HQ, D),
        "k_pages": draw(6, 4, HKV, D, seed=1),
        "v_pages": draw(6, 4, HKV, DV, seed=2),
        "page_table": torch.arange(6).reshape(2, 3),
        "seqused_k": torch.tensor([12, 5]),
        **changes,
    }


def raises(call: Callable[..., Any], arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        call(**arguments)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


def explained(**arguments: Any) -> Any:
    if "k_pages" in arguments:
        arguments["k"], arguments["v"] = arguments.pop("k_pages"), arguments.pop("v_pages")
    return tilewise.explain(**arguments)


def test_the_good_calls_are_good():
    tilewise.attention(**dense())
    tilewise.attention_varlen(**packed())
    tilewise.attention_paged(**pages())
    for good in (dense(), packed(), pages()):
        assert explained(**good).backend == "tiled"


META = torch.device("meta")
BOOL = torch.ones(1, dtype=torch.bool)

TENSORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # What is wrong with q, k and v, and the words that say so.
    "q no tensor": ({"q": [[1.0]]}, ("q", "tensor", "(B, Sq, Hq, D)", "list")),
    "k no tensor": ({"k": None}, ("k", "tensor", "(B, Sk, Hkv, D)", "NoneType")),
    "v no tensor": ({"v": 1.0}, ("v", "tensor", "(B, Sk, Hkv, Dv)", "float")),
    "q of rank 3": ({"q": draw(SQ, HQ, D)}, ("q", "(B, Sq, Hq, D)", "(3, 4, 8)")),
    "k of rank 5": ({"k": draw(1, B, SK, HKV, D)}, ("k", "(B, Sk, Hkv, D)", "(1, 2, 5, 2, 8)")),
    "v of rank 2": ({"v": draw(SK, DV)}, ("v", "(B, Sk, Hkv, Dv)", "(5, 6)")),
    "integers": (
        {"q": torch.ones(B, SQ, HQ, D, dtype=torch.int32)},
        ("q", "float64, float32, bfloat16, float16", "torch.int32"),
    ),
    "complex": (
        {"v": torch.ones(B, SK, HKV, DV, dtype=torch.complex64)},
        ("v", "bfloat16", "torch.complex64"),
    ),
    "two dtypes": (
        {"k": draw(B, SK, HKV, D, dtype=torch.bfloat16)},
        ("q, k and v", "same dtype", "torch.float32", "torch.bfloat16"),
    ),
    "v in float64": (
        {"v": draw(B, SK, HKV, DV, dtype=torch.float64)},
        ("same dtype", "torch.float32", "torch.float64"),
    ),
    "two devices": (
        {"k": torch.empty(B, SK, HKV, D, device=META)},
        ("q, k and v", "same device", "cpu", "meta"),
    ),
    "v on another device": (
        {"v": torch.empty(B, SK, HKV, DV, device=META)},
        ("same device", "cpu", "meta"),
    ),
    "batches": ({"k": draw(3, SK, HKV, D)}, ("batch", "2", "3")),
    "batch of v": ({"v": draw(1, SK, HKV, DV)}, ("batch", "2", "1")),
    "key and value lengths": (
        {"v": draw(B, SK + 1, HKV, DV)},
        ("k and v", "same tokens", "(2, 5, 2, 8)", "(2, 6, 2, 6)"),
    ),
    "key and value heads": (
        {"v": draw(B, SK, HKV + 1, DV)},
        ("k and v", "heads", "(2, 5, 2, 8)", "(2, 5, 3, 6)"),
    ),
    "head dims": ({"k": draw(B, SK, HKV, D - 1)}, ("q and k", "head dim", "8", "7")),
    "no head dim": (
        {"q": draw(B, SQ, HQ, 0), "k": draw(B, SK, HKV, 0)},
        ("head dim", "at least 1", "0"),
    ),
    "no value dim": ({"v": draw(B, SK, HKV, 0)}, ("v", "at least 1", "0")),
    "no multiple": ({"q": draw(B, SQ, 3, D)}, ("q", "multiple", "2 heads of k", "3")),
    "fewer than key heads": ({"q": draw(B, SQ, 1, D)}, ("q", "multiple", "2 heads", "1")),
    "no key heads": (
        {"k": draw(B, SK, 0, D), "v": draw(B, SK, 0, DV)},
        ("q", "multiple", "0 heads", "4"),
    ),
}


@pytest.mark.parametrize(("hq", "hkv"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(("sq", "sk"), [(1, 9), (5, 9), (9, 5)])
def test_heads_before_tokens(hq, hkv, sq, sk):
    q, k = draw(B, hq, sq, D), draw(B, hkv, sk, D)
    for call in (tilewise.attention, explained):
        raises(call, {"q": q, "k": k, "v": k}, ("multiple", "(B, H, S, D)", "t.transpose(1, 2)"))
    with pytest.raises(ValueError, match="multiple") as error:  # lengths that are no heads either
        tilewise.attention(draw(B, 3, sq, D), draw(B, 2, sk, D), draw(B, 2, sk, D))
    assert "transpose" not in str(error.value)


@pytest.mark.parametrize("case", TENSORS)
def test_operands(case):
    changes, words = TENSORS[case]
    for call in (tilewise.attention, explained):
        raises(call, dense(**changes), words)


PACKED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "q of rank 4": ({"q": draw(1, 7, HQ, D)}, ("q", "(total_q, Hq, D)", "(1, 7, 4, 8)")),
    "k of rank 2": ({"k": draw(9, D)}, ("k", "(total_k, Hkv, D)", "(9, 8)")),
    "value tokens": ({"v": draw(10, HKV, DV)}, ("k and v", "tokens", "(9, 2, 8)", "(10, 2, 6)")),
    "value heads": ({"v": draw(9, 1, DV)}, ("k and v", "heads", "(9, 2, 8)", "(9, 1, 6)")),
    "heads": ({"q": draw(7, 5, D)}, ("q", "multiple", "2 heads of k", "5")),
    "a list": ({"cu_seqlens_q": [0, 3, 7]}, ("cu_seqlens_q", "int32 or int64", "list")),
    "nothing": ({"cu_seqlens_k": None}, ("cu_seqlens_k", "int32 or int64", "NoneType")),
    "floats": (
        {"cu_seqlens_q": torch.tensor([0.0, 3, 7])},
        ("cu_seqlens_q", "int32 or int64", "torch.float32"),
    ),
    "16 bits": (
        {"cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int16)},
        ("cu_seqlens_k", "int32 or int64", "torch.int16"),
    ),
    "of rank 2": (
        {"cu_seqlens_k": torch.tensor([[0, 4, 9]])},
        ("cu_seqlens_k", "(sequences + 1,)", "(1, 3)"),
    ),
    "numbers of sequences": (
        {"cu_seqlens_k": torch.tensor([0, 9])},
        ("cu_seqlens_q and cu_seqlens_k", "3", "2"),
    ),
    "not even one": (
        {f"cu_seqlens_{s}": torch.empty(0, dtype=torch.int64) for s in "qk"},
        ("cu_seqlens_q and cu_seqlens_k", "0"),
    ),
    "device": (
        {"cu_seqlens_k": torch.empty(3, dtype=torch.int64, device=META)},
        ("cu_seqlens_k", "device", "cpu", "meta"),
    ),
    "max_seqlen_q negative": ({"max_seqlen_q": -1}, ("max_seqlen_q", "at least 0", "-1")),
    "max_seqlen_q bool": ({"max_seqlen_q": True}, ("max_seqlen_q", "int", "True")),
    "max_seqlen_k no int": ({"max_seqlen_k": 4.5}, ("max_seqlen_k", "int", "4.5")),
    "key_range rows": (
        {"key_range": (torch.zeros(6).int(), torch.ones(7).int())},
        ("key_range start", "total_q", "7", "(6,)"),
    ),
    "key_range of rank 2": (
        {"key_range": (torch.zeros(1, 7).int(), torch.ones(1, 7).int())},
        ("key_range", "total_q", "(1, 7)"),
    ),
    "mask rows": (
        {"mask": torch.ones(6, 5, dtype=torch.bool)},
        ("mask", "(Hq, total_q, max_seqlen_k)", "(4, 7, any)", "(6, 5)"),
    ),
    "bias heads": ({"bias": draw(2, 7, 5)}, ("bias", "(4, 7, any)", "(2, 7, 5)")),
    "slopes of as many sequences": (
        {"alibi_slopes": draw(3, HQ)},
        ("alibi_slopes", "(2, 4)", "(4,)", "(3, 4)"),
    ),
}


@pytest.mark.parametrize("case", PACKED)
def test_packed(case):
    changes, words = PACKED[case]
    for call in (tilewise.attention_varlen, explained):
        raises(call, packed(**changes), words)


LENGTHS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # What only reading the lengths shows.
    "start": ({"cu_seqlens_q": torch.tensor([1, 3, 7])}, ("cu_seqlens_q", "start at 0", "1")),
    "fall": ({"cu_seqlens_k": torch.tensor([0, 9, 4])}, ("cu_seqlens_k", "fall", "9", "4")),
    "pass the end": (
        {"cu_seqlens_k": torch.tensor([0, 4, 10])},
        ("cu_seqlens_k", "9 tokens", "10"),
    ),
    "negative": ({"cu_seqlens_q": torch.tensor([0, -3, 7])}, ("cu_seqlens_q", "fall", "-3")),
    "mask columns": (
        {"mask": torch.ones(7, 4, dtype=torch.bool)},
        ("mask", "longest sequence, 5", "4"),
    ),
    "bias columns": ({"bias": draw(7, 3)}, ("bias", "longest sequence, 5", "3")),
}


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("gradient", [False, True])
def test_lengths(case, backend, gradient):
    changes, words = LENGTHS[case]
    given = packed(backend=backend, **changes)
    given["q"].requires_grad_(gradient)
    raises(tilewise.attention_varlen, given, words)


PAGES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "q of rank 3": ({"q": draw(SQ, HQ, D)}, ("q", "(B, Sq, Hq, D)", "(3, 4, 8)")),
    "k_pages of rank 3": (
        {"k_pages": draw(6, HKV, D)},
        ("k_pages", "(num_pages, page_size, Hkv, D)", "(6, 2, 8)"),
    ),
    "dtypes": (
        {"k_pages": draw(6, 4, HKV, D, dtype=torch.float16)},
        ("q, k_pages and v_pages", "same dtype", "torch.float16"),
    ),
    "devices": (
        {"v_pages": torch.empty(6, 4, HKV, DV, device=META)},
        ("q, k_pages and v_pages", "same device", "meta"),
    ),
    "numbers of pages": (
        {"v_pages": draw(5, 4, HKV, DV)},
        ("k_pages and v_pages", "(6, 4, 2, 8)", "(5, 4, 2, 6)"),
    ),
    "page sizes": ({"v_pages": draw(6, 5, HKV, DV)}, ("k_pages and v_pages", "4", "5")),
    "empty pages": (
        {"k_pages": draw(6, 0, HKV, D), "v_pages": draw(6, 0, HKV, DV)},
        ("k_pages and v_pages", "at least one slot", "(6, 0, 2, 8)"),
    ),
    "head dims": ({"k_pages": draw(6, 4, HKV, 7)}, ("q and k_pages", "head dim", "8", "7")),
    "heads": ({"q": draw(B, SQ, 5, D)}, ("q", "2 heads of k_pages", "5")),
    "table no tensor": ({"page_table": [[0]]}, ("page_table", "int32 or int64", "list")),
    "table of floats": (
        {"page_table": torch.zeros(2, 3)},
        ("page_table", "int32 or int64", "torch.float32"),
    ),
    "table of rank 1": (
        {"page_table": torch.arange(6)},
        ("page_table", "(B, max_pages)", "(6,)"),
    ),
    "table rows": (
        {"page_table": torch.arange(6).reshape(3, 2)},
        ("page_table", "B = 2", "(3, 2)"),
    ),
    "table device": (
        {"page_table": torch.empty(2, 3, dtype=torch.int32, device=META)},
        ("page_table", "device", "cpu", "meta"),
    ),
    "lengths of floats": (
        {"seqused_k": torch.tensor([1.0, 2.0])},
        ("seqused_k", "int32 or int64", "torch.float32"),
    ),
    "lengths of rank 0": ({"seqused_k": torch.tensor(5)}, ("seqused_k", "(B,)", "()")),
    "as many lengths": ({"seqused_k": torch.tensor([5])}, ("seqused_k", "B = 2", "(1,)")),
    "lengths' device": (
        {"seqused_k": torch.empty(2, dtype=torch.int32, device=META)},
        ("seqused_k", "device", "meta"),
    ),
    "num_splits 0": ({"num_splits": 0}, ("num_splits", "at least 1", "0")),
    "num_splits negative": ({"num_splits": -2}, ("num_splits", "at least 1", "-2")),
    "num_splits bool": ({"num_splits": True}, ("num_splits", "int", "True")),
    "num_splits no int": ({"num_splits": 1.5}, ("num_splits", "int", "1.5")),
    "mask columns": (
        {"mask": torch.ones(SQ, 11, dtype=torch.bool)},
        ("mask", "max_pages · page_size", "12", "(3, 11)"),
    ),
    "bias heads": ({"bias": draw(3, SQ, 12)}, ("bias", "(2, 4, 3, 12)", "(3, 3, 12)")),
}


@pytest.mark.parametrize("case", PAGES)
def test_pages(case):
    changes, words = PAGES[case]
    for call in (tilewise.attention_paged, explained):
        raises(call, pages(**changes), words)


def test_what_only_reading_the_pages_shows(backend):
    call = functools.partial(tilewise.attention_paged, backend=backend)
    lengths = torch.tensor([12, 13])
    raises(call, pages(seqused_k=lengths), ("seqused_k[1]", "from 0 to 12", "13"))
    raises(call, pages(seqused_k=torch.tensor([-1, 5])), ("seqused_k[0]", "from 0 to 12", "-1"))
    for wrong in (6, -1):
        table = torch.arange(6).reshape(2, 3)
        table[1, 1] = wrong
        words = ("page_table[1]", "from 0 to 5", str(wrong))
        raises(call, pages(page_table=table), words)
        # Past the tokens in use nothing is read.
        call(**pages(page_table=table, seqused_k=torch.tensor([12, 4])))


@pytest.mark.parametrize("name", ["q", "k_pages", "v_pages", "bias", "alibi_slopes", "sinks"])
def test_pages_are_for_inference(name):
    extra = {"bias": draw(12), "alibi_slopes": draw(HQ), "sinks": draw(HQ)}
    given = pages(**extra)
    given[name].requires_grad_()
    raises(tilewise.attention_paged, given, (f"{name} requires grad", "torch.no_grad()"))
    with torch.no_grad():
        assert not tilewise.attention_paged(**given).requires_grad
    with torch.inference_mode():
        tilewise.attention_paged(**given)


OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    # What every call takes.
    "align": ({"align": "center"}, ("align", "bottom-right", "top-left", "'center'")),
    "align None": ({"align": None}, ("align", "bottom-right", "None")),
    "window of -1": ({"window_size": (-1, 0)}, ("window_size", "None", "at least 0", "-1")),
    "window right": ({"window_size": (None, -3)}, ("window_size", "-3")),
    "window no pair": ({"window_size": 4}, ("window_size", "(left, right)", "4")),
    "window of three": ({"window_size": (1, 2, 3)}, ("window_size", "pair", "(1, 2, 3)")),
    "window None": ({"window_size": None}, ("window_size", "pair", "None")),
    "window of floats": ({"window_size": (1.5, 0)}, ("window_size", "int", "1.5")),
    "window of bools": ({"window_size": (True, 0)}, ("window_size", "int", "True")),
    "softcap 0": ({"softcap": 0}, ("softcap", "above 0", "0")),
    "softcap 0.0": ({"softcap": 0.0}, ("softcap", "above 0", "0.0")),
    "softcap negative": ({"softcap": -2.0}, ("softcap", "above 0", "-2.0")),
    "softcap NaN": ({"softcap": NAN}, ("softcap", "nan")),
    "softcap infinite": ({"softcap": INF}, ("softcap", "inf")),
    "softcap no number": ({"softcap": "1"}, ("softcap", "number", "'1'")),
    "scale NaN": ({"scale": NAN}, ("scale", "finite", "nan")),
    "scale infinite": ({"scale": -INF}, ("scale", "finite", "-inf")),
    "scale no number": ({"scale": [1.0]}, ("scale", "number", "[1.0]")),
    "dropout_p above 1": ({"dropout_p": 1.01}, ("dropout_p", "from 0 to 1", "1.01")),
    "dropout_p negative": ({"dropout_p": -0.1}, ("dropout_p", "from 0 to 1", "-0.1")),
    "dropout_p NaN": ({"dropout_p": NAN}, ("dropout_p", "from 0 to 1", "nan")),
    "dropout_p None": ({"dropout_p": None}, ("dropout_p", "number", "None")),
    "seed of float": ({"dropout_p": 0.1, "dropout_seed": 1.0}, ("dropout_seed", "int", "1.0")),
    "seed of bool": ({"dropout_p": 0.1, "dropout_seed": True}, ("dropout_seed", "int", "True")),
    "seed of int32": (
        {"dropout_p": 0.1, "dropout_seed": torch.tensor(1, dtype=torch.int32)},
        ("dropout_seed", "int64", "torch.int32"),
    ),
    "seeds": (
        {"dropout_p": 0.1, "dropout_seed": torch.tensor([1, 2])},
        ("dropout_seed", "one element", "(2,)"),
    ),
    "seed past 64 bits": (
        {"dropout_p": 0.1, "dropout_seed": 2**63},
        ("dropout_seed", "int", "9223372036854775808"),
    ),
    "seed far below": ({"dropout_p": 0.1, "dropout_seed": -(2**70)}, ("dropout_seed", "int")),
    "causal no bool": ({"causal": "yes"}, ("causal", "bool", "'yes'")),
    "causal a mask": ({"causal": torch.ones(3, 5, dtype=torch.bool)}, ("causal", "bool")),
    "scale past floats": ({"scale": 10**400}, ("scale", "finite")),
    "seed without dropout": ({"dropout_seed": "x"}, ("dropout_seed", "int", "'x'")),
    "seed's device": (
        {"dropout_p": 0.1, "dropout_seed": torch.empty((), dtype=torch.int64, device=META)},
        ("dropout_seed", "device", "cpu", "meta"),
    ),
    "key_range no pair": ({"key_range": torch.zeros(2)}, ("key_range", "(start, end)", "Tensor")),
    "key_range of three": ({"key_range": (BOOL,) * 3}, ("key_range", "(start, end)")),
    "key_range of floats": (
        {"key_range": (torch.zeros(1), torch.ones(1).int())},
        ("key_range start", "int", "torch.float32"),
    ),
    "key_range of numbers": (
        {"key_range": (0, 5.0)},
        ("key_range end", "an int or a tensor", "5.0"),
    ),
    "key_range end": (
        {"key_range": (torch.zeros(1).int(), torch.ones(1, dtype=torch.int16))},
        ("key_range end", "int", "torch.int16"),
    ),
    "key_range device": (
        {"key_range": (torch.zeros(1).int(), torch.empty(1, dtype=torch.int32, device=META))},
        ("key_range end", "device", "meta"),
    ),
    "mask of floats": ({"mask": torch.zeros(1)}, ("mask", "bool", "torch.float32", "bias")),
    "mask of bytes": ({"mask": BOOL.byte()}, ("mask", "bool", "torch.uint8")),
    "mask no tensor": ({"mask": True}, ("mask", "tensor", "bool")),
    "mask of rank 5": (
        {"mask": BOOL.view(1, 1, 1, 1, 1)},
        ("mask", "broadcast", "(1, 1, 1, 1, 1)"),
    ),
    "mask device": (
        {"mask": torch.empty(1, dtype=torch.bool, device=META)},
        ("mask", "device", "cpu", "meta"),
    ),
    "bias of bools": ({"bias": BOOL}, ("bias", "float32", "torch.bool")),
    "bias of float16": ({"bias": draw(1).half()}, ("bias", "float32", "torch.float16")),
    "bias of float64": ({"bias": draw(1).double()}, ("bias", "float32", "torch.float64")),
    "bias no tensor": ({"bias": 0.5}, ("bias", "tensor", "float")),
    "bias device": ({"bias": torch.empty(1, device=META)}, ("bias", "device", "meta")),
    "slopes": ({"alibi_slopes": draw(3)}, ("alibi_slopes", "Hq", "4", "(3,)")),
    "slopes do not broadcast": ({"alibi_slopes": draw(1)}, ("alibi_slopes", "Hq", "4", "(1,)")),
    "slopes of integers": (
        {"alibi_slopes": torch.ones(HQ).int()},
        ("alibi_slopes", "float32", "torch.int32"),
    ),
    "slopes batch": ({"alibi_slopes": draw(3, HQ)}, ("alibi_slopes", "(2, 4)", "(3, 4)")),
    "slopes' device": (
        {"alibi_slopes": torch.empty(HQ, device=META)},
        ("alibi_slopes", "device", "meta"),
    ),
    "sinks": ({"sinks": draw(HKV)}, ("sinks", "(Hq,) = (4,)", "(2,)")),
    "sinks of rank 2": ({"sinks": draw(B, HQ)}, ("sinks", "Hq", "(2, 4)")),
    "sinks of float64": ({"sinks": draw(HQ).double()}, ("sinks", "float32", "torch.float64")),
    "sinks' device": ({"sinks": torch.empty(HQ, device=META)}, ("sinks", "device", "meta")),
}
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "attention": (tilewise.attention, dense),
    "attention_varlen": (tilewise.attention_varlen, packed),
    "attention_paged": (tilewise.attention_paged, pages),
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("entry", CALLS)
def test_options(case, entry):
    changes, words = OPTIONS[case]
    call, arguments = CALLS[entry]
    raises(call, arguments(**changes), words)
    raises(explained, arguments(**changes), words)


SHAPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mask of padding": (
        {"mask": torch.ones(B, SK, dtype=torch.bool)},
        ("mask", "(2, 4, 3, 5)", "(2, 5)", "mask[:, None, None, :]"),
    ),
    "bias of padding": ({"bias": draw(B, SK)}, ("bias", "(2, 5)", "bias[:, None, None, :]")),
    "mask": ({"mask": torch.ones(SQ, 4, dtype=torch.bool)}, ("(2, 4, 3, 5)", "(3, 4)")),
    "mask heads": ({"mask": torch.ones(2, 1, 1, dtype=torch.bool)}, ("(2, 4, 3, 5)", "(2, 1, 1)")),
    "bias": ({"bias": draw(5, 3)}, ("bias", "(B, Hq, Sq, Sk)", "(2, 4, 3, 5)", "(5, 3)")),
    "bias of key heads": ({"bias": draw(HKV, SQ, SK)}, ("bias", "(2, 4, 3, 5)", "(2, 3, 5)")),
    "key_range": (
        {"key_range": (torch.zeros(B, SQ).int(), torch.zeros(B, SK).int())},
        ("key_range end", "(B, Sq)", "(2, 3)", "(2, 5)"),
    ),
    "key_range of rank 3": (
        {"key_range": (torch.zeros(1, B, SQ).int(), torch.zeros(B, SQ).int())},
        ("key_range start", "(2, 3)", "(1, 2, 3)"),
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(case):
    changes, words = SHAPES[case]
    raises(tilewise.attention, dense(**changes), (next(iter(changes)), *words))


@pytest.mark.parametrize("entry", CALLS)
def test_backends(entry):
    call, arguments = CALLS[entry]
    for wrong in ("cuda", "", "Tiled"):
        words = ("backend", *map(repr, tilewise.dispatch.BACKENDS), repr(wrong))
        raises(call, arguments(backend=wrong), words)
        raises(explained, arguments(backend=wrong), words)


def test_a_backend_that_cannot_serve_says_every_reason(monkeypatch):
    reasons = ["head dim 8 is not to its taste", "it is Sunday"]
    tiled = tilewise.dispatch.BACKENDS["tiled"]
    monkeypatch.setattr(tiled, "unsupported", lambda problem: reasons)
    raises(tilewise.attention, dense(backend="tiled"), ("backend='tiled'", *reasons))
    # Nothing falls back to what needs n² memory.
    raises(tilewise.attention, dense(), ("backend", *reasons))
    tilewise.attention(**dense(backend="reference"))


def test_unknown_options_are_type_errors():
    for call, arguments in CALLS.values():
        with pytest.raises(TypeError, match="softmax_scale"):
            call(**arguments(softmax_scale=1.0))


@pytest.mark.parametrize("heads", [0, -3])
def test_alibi_slopes(heads):
    with pytest.raises(ValueError, match=f"heads must be at least 1, got {heads}"):
        tilewise.alibi_slopes(heads)


MERGE: dict[str, tuple[list[Tensor], tuple[str, ...]]] = {
    "outs": (
        [draw(1, 3, 2, 4), draw(1, 2, 3), draw(1, 4, 2, 4), draw(1, 2, 4)],
        ("out_b", "(1, 3, 2, 4)", "(1, 4, 2, 4)"),
    ),
    "lse_a": (
        [draw(1, 3, 2, 4), draw(1, 3, 2), draw(1, 3, 2, 4), draw(1, 2, 3)],
        ("lse_a", "(1, 2, 3)", "(1, 3, 2)"),
    ),
    "lse_b": (
        [draw(1, 3, 2, 4), draw(1, 2, 3), draw(1, 3, 2, 4), draw(2, 3)],
        ("lse_b", "(1, 2, 3)", "(2, 3)"),
    ),
    "number": (
        [draw(3, 4), draw(3), draw(3, 4), torch.tensor(1.0)],
        ("lse_b", "(3,)", "()"),
    ),
}


@pytest.mark.parametrize("case", MERGE)
def test_merge(case):
    tensors, words = MERGE[case]
    names = ("out_a", "lse_a", "out_b", "lse_b")
    raises(tilewise.merge, dict(zip(names, tensors, strict=True)), words)


def test_everything_may_be_on_the_meta_device():
    for call, arguments in CALLS.values():
        given = {n: t.to(META) if isinstance(t, Tensor) else t for n, t in arguments().items()}
        out, lse = call(**given, return_lse=True)
        real, real_lse = call(**arguments(), return_lse=True)
        assert out.device == lse.device == META
        assert (out.shape, out.dtype) == (real.shape, real.dtype)
        assert (lse.shape, lse.dtype) == (real_lse.shape, real_lse.dtype)
        assert explained(**given).backend


def test_an_argument_that_there_is_not() -> None:
    q, cu = torch.randn(6, 2, 8), torch.tensor([0, 6])
    for call in (
        lambda: tilewise.attention(q[None], q[None], q[None], casual=True),
        lambda: tilewise.attention_varlen(q, q, q, cu, cu, casual=True),
        lambda: tilewise.explain(q[None], q[None], q[None], casual=True),
        lambda: tilewise.cost(q[None], q[None], q[None], casual=True),
    ):
        with pytest.raises(
            TypeError, match=r"got an unexpected keyword argument 'casual'"
        ) as error:
            call()
        assert "_with_options" not in str(error.value)
