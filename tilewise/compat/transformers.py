"""transformers' models on tilewise: `register()`, then `attn_implementation="tilewise"`.

transformers 5 asks two functions of an attention implementation. The mask function is called once per
forward pass and kind of layer, and what it returns reaches the attention function of every layer. Here
it is one interval of keys per row, shape (B or 1, 1, Sq, 2): O(n) where a mask has n×n entries. It is never
None, with which other implementations say that a layer knows by itself whether it is causal: some do not.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.api import attention

# start and end; how many keys to the left and right, None without bound.
KeyRange = tuple[Tensor, Tensor]
Sides = tuple[int | None, int | None]
NAME = "tilewise"
# Entries of a mask that are looked at together while its intervals are found.
_MASK_ENTRIES = 2**20
# The attribute of intervals that says that they are those of all keys, or of a causal mask.
_PLAIN = "_tilewise_plain"
# Whose decoders take their attention from the interface, and whose encoders do not.
_PARTLY = {"BigBirdPegasusConfig"}
# What a model would pass to have another attention than this one: it must not be ignored.
_REFUSED = {
    "output_attentions": "the probabilities are never all there",
    "indices": "a choice of keys per row is no attention of tilewise",
    "block_indices": "a choice of keys per row is no attention of tilewise",
    "sinks": "sinks per row are no attention of tilewise",
}


def register() -> None:
    """Makes the attention implementation "tilewise" known to transformers (5 or newer).

    It serves every model of transformers that takes its attention from the AttentionInterface:
    causal, bidirectional and cross attention, GQA, sliding windows, chunks, softcaps, sinks (s_aux),
    additive position biases, dropout, padding on either side, packed sequences (position_ids or
    cu_seq_lens), training and generate, dynamic and static caches. Masks become intervals of keys per
    row; a mask that has a row with a gap stays the boolean n×n mask that transformers would build. Models
    that compute on their masks (Doge, DeepSeek-V4) fail on intervals. As with flash_attention_2,
    position_ids that begin anew are sequences only in a batch of one.
    Rows that see no key (queries at padding) give 0.

    Calling it again changes nothing.

    Raises:
        ImportError: transformers is missing or older than 5.
        ValueError: when a model runs: it asks for what tilewise does not compute, such as
            `output_attentions`.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> tilewise.compat.transformers.register()
        >>> size = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
        >>> config = LlamaConfig(vocab_size=50, num_hidden_layers=1, **size)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="tilewise")
        >>> model(torch.arange(7)[None]).logits.shape
        torch.Size([1, 7, 50])
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("register() needs transformers 5 or newer") from error

    AttentionInterface.register(NAME, attention_of_module)
    AttentionMaskInterface.register(NAME, key_intervals)


def key_intervals(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **rest: Any,
) -> Tensor:
    """The mask function: what each row sees, in the form that `attention_of_module` takes.

    The arguments are those of `transformers.masking_utils.sdpa_mask`, whose mask this is, and the model's
    config.

    Returns:
        int32 (B or 1, 1, Sq, 2): start ≤ j < end of each row.
        bool (B, 1, Sq, Sk): the mask itself, if a row of it has a gap.

    Raises:
        ValueError: the model computes its attention itself, and would take intervals for a mask.
    """
    from transformers.masking_utils import sdpa_mask

    tracing = torch.compiler.is_compiling()
    if config is not None and not tracing:
        kind: type = type(config)
        _refuse_other_models(kind)
    end = kv_offset + kv_length
    padding = None
    if attention_mask is not None:
        padding = F.pad(attention_mask, (0, max(0, end - attention_mask.shape[1])))
        padding = padding[:, kv_offset:end]
    # A static cache keeps the offset in a tensor: it has room behind the last row's key.
    at_the_end = not isinstance(q_offset, Tensor) and q_offset + q_length == end
    if (
        (allow_is_bidirectional_skip or (allow_is_causal_skip and at_the_end))
        and (local_size is None or kv_length < local_size)
        and (padding is None or (not tracing and bool(padding.all())))
    ):
        right = None if allow_is_bidirectional_skip else 0
        last = torch.arange(kv_length - q_length, kv_length, device=device)
        plain = torch.stack(_around(last[None, None], None, right, kv_length), -1).int()
        setattr(plain, _PLAIN, "all" if allow_is_bidirectional_skip else "causal")
        return plain

    mask: Any = partial(
        sdpa_mask,
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        allow_is_causal_skip=False,
        device=device,
        config=config,
        **rest,
    )
    rows: KeyRange | None
    if not tracing and (band := _band_of(mask_function)) is not None:
        position = torch.arange(q_length, device=device) + (q_offset - kv_offset)
        rows = _around(position[None, None], *band, kv_length)
    else:
        rows = _of_rows(mask, q_length, q_offset, batch_size * kv_length)
    keys = None if padding is None else _of_mask(padding[:, None, None])
    if rows is None or (padding is not None and keys is None):
        return mask(q_length=q_length, q_offset=q_offset, attention_mask=attention_mask)
    return torch.stack(rows if keys is None else _both(rows, keys), -1).int()


@functools.cache
def _refuse_other_models(config: type) -> None:
    """Raises a ValueError if no model of this config takes its attention from the AttentionInterface, or not
    all of its layers do: they would add what they get for a mask to scores, or leave it out."""
    from transformers import PreTrainedModel

    models, found = [PreTrainedModel], []
    while models:
        model = models.pop()
        models += model.__subclasses__()
        if model.config_class is config:
            found.append(model)
    served = any(
        model._supports_attention_backend
        or hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS")
        for model in found
    )
    if (found and not served) or config.__name__ in _PARTLY:
        raise ValueError(
            f'attn_implementation="{NAME}" would be ignored: {found[0].__name__} does not take its attention '
            "from transformers' AttentionInterface (if it does, set its _supports_attention_backend)"
        )


def _band_of(function: Callable[..., Any]) -> Sides | None:
    """How far a row sees to the left and right if the mask function says so, else None.

    transformers makes windows of closures, which their code tells apart. Functions that are not known
    here are evaluated, which gives the same in O(n²) time.
    """
    from transformers import masking_utils as masking

    if function is masking.causal_mask_function:
        return None, 0
    if function is masking.bidirectional_mask_function:
        return None, None
    if not inspect.isfunction(function):
        return None
    code, values = function.__code__, inspect.getclosurevars(function).nonlocals
    if code is masking.sliding_window_overlay(1).__code__:
        return values["sliding_window"] - 1, None
    if code is masking.sliding_window_bidirectional_overlay(1).__code__:
        return values["sliding_window"], values["sliding_window"]
    if code is not masking.and_masks().__code__:
        return None
    bands = [_band_of(part) for part in values["mask_functions"]]
    known = [band for band in bands if band is not None]
    if len(known) < len(bands):
        return None
    left, right = (
        min((side for side in sides if side is not None), default=None)
        for sides in zip(*known, strict=True)
    )
    return left, right


def _around(position: Tensor, left: int | None, right: int | None, kv_length: int) -> KeyRange:
    """From position − left to position + right; past the ends there are no keys."""
    start = torch.zeros_like(position) if left is None else position - left
    end = torch.full_like(position, kv_length) if right is None else position + right + 1
    return start, end


def _of_rows(
    mask: Callable[..., Tensor], q_length: int, q_offset: int | Tensor, row_entries: int
) -> KeyRange | None:
    """The intervals of a mask that is made for a few rows at a time; None if there is a gap."""
    step = q_length if torch.compiler.is_compiling() else max(1, _MASK_ENTRIES // row_entries)
    blocks = []
    for row in range(0, q_length, step):
        block = _of_mask(mask(q_length=min(step, q_length - row), q_offset=q_offset + row))
        if block is None:
            return None
        blocks.append(block)
    start, end = (torch.cat(parts, -1) for parts in zip(*blocks, strict=True))
    return start, end


def _of_mask(seen: Tensor) -> KeyRange | None:
    """The interval of keys of each row, (B or 1, 1, rows) twice; None if a row has a gap."""
    if seen.stride(0) == 0:  # the same for all entries of the batch
        seen = seen[:1]
    keys = torch.arange(seen.shape[-1], dtype=torch.int32, device=seen.device)
    start = torch.where(seen, keys, seen.shape[-1]).amin(-1)
    end = torch.where(seen, keys + 1, 0).amax(-1)
    whole = (seen.sum(-1) == (end - start).clamp(min=0)).all()
    if torch.compiler.is_compiling():
        _require(whole, "a row's keys have a gap: under torch.compile give the 4D mask yourself")
    elif not whole:
        return None
    return start, end


def _both(a: KeyRange, b: KeyRange) -> KeyRange:
    return torch.maximum(a[0], b[0]), torch.minimum(a[1], b[1])


def attention_of_module(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function, called by each layer of a model.

    Args:
        module: the layer; its is_causal counts where the argument is None.
        query, key, value: (B, H, S, D).
        attention_mask: what `key_intervals` returned, or a mask that the user gave to the model: bool,
            True may attend, or floating, to be added; each broadcastable to (B, Hq, Sq, Sk). Where it
            is None, as of vision encoders, is_causal and sliding_window say what a row sees.
        position_bias: added to the logits; broadcastable to (B, Hq, Sq, Sk).
        **rest: softcap; s_aux, which are sinks; for packed sequences cu_seq_lens_q and cu_seq_lens_k,
            or position_ids, whose least is where each sequence begins. The others change nothing.

    Returns:
        out (B, Sq, Hq, Dv), and None for the probabilities.
    """
    for name, reason in _REFUSED.items():
        if rest.get(name) is not None and rest[name] is not False:
            raise ValueError(
                f"{name} cannot be honoured: {reason}; use another attn_implementation"
            )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": rest.get("softcap"),
        "sinks": rest.get("s_aux"),
        "dropout_p": dropout,
        "bias": position_bias,
    }
    plain = getattr(attention_mask, _PLAIN, None)
    if attention_mask is None or plain:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if plain:
            causal = plain == "causal"
        options |= {"causal": causal, "key_range": _own_sequence(q, k, **rest)}
        if sliding_window is not None and not plain:
            options["window_size"] = (sliding_window - 1, None if causal else sliding_window - 1)
    elif attention_mask.dtype == torch.int32 and attention_mask.shape[1:] == (1, q.shape[1], 2):
        interval = (attention_mask[:, 0, :, 0], attention_mask[:, 0, :, 1])
        options["key_range"] = _together(interval, _own_sequence(q, k, **rest), module)
    elif attention_mask.dtype == torch.bool and attention_mask.ndim == 4:
        options["mask"] = attention_mask
    elif attention_mask.is_floating_point() and attention_mask.ndim == 4:
        options["bias"] = (
            attention_mask if position_bias is None else attention_mask + position_bias
        )
    else:
        raise ValueError(
            "attention_mask must be what transformers' mask interface returned, or a bool or floating "
            f"tensor (B, Hq, Sq, Sk), got {attention_mask.dtype} {tuple(attention_mask.shape)}"
        )
    return attention(q, k, v, **options), None


def _own_sequence(
    q: Tensor,
    k: Tensor,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> KeyRange | None:
    """The keys of each row's own sequence, where a batch of one holds many sequences end to end."""
    tokens = k.shape[1]
    alone = q.shape[:2] == (1, tokens)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if not alone or cu_seq_lens_q.shape != cu_seq_lens_k.shape:
            raise ValueError(
                "cu_seq_lens_q and cu_seq_lens_k must describe a batch of one that attends to itself, "
                f"got {tuple(q.shape[:2])} queries, {tuple(k.shape[:2])} keys and as many entries as "
                f"{tuple(cu_seq_lens_q.shape)} and {tuple(cu_seq_lens_k.shape)}"
            )
        _require(
            (cu_seq_lens_q == cu_seq_lens_k).all(),
            "cu_seq_lens_q and cu_seq_lens_k must be the same: each sequence attends to itself",
        )
        row = torch.arange(tokens, device=q.device, dtype=cu_seq_lens_q.dtype)
        number = torch.searchsorted(cu_seq_lens_q, row, right=True).unsqueeze(0)
    elif alone and position_ids is not None and position_ids.shape == (1, tokens):
        number = (position_ids == position_ids.min()).cumsum(-1)
        if not torch.compiler.is_compiling() and bool((number == number[0, 0]).all()):
            return None
    else:
        return None
    return torch.searchsorted(number, number), torch.searchsorted(number, number, right=True)


def _together(interval: KeyRange, sequence: KeyRange | None, module: torch.nn.Module) -> KeyRange:
    """The keys in both. transformers makes masks for packed sequences only where it keeps no cache."""
    if sequence is None:
        return interval
    (start, end), (first, last) = interval, sequence
    if getattr(getattr(module, "config", None), "attention_chunk_size", None) is not None:
        # A window is one wherever a sequence begins, but a chunk counts from there.
        inside = (start >= first) & (end <= last) | (start >= end)
        _require(inside.all(), "packed sequences in chunks need use_cache=False")
    return _both(interval, sequence)


def _require(condition: Tensor, message: str) -> None:
    """A check of values; under torch.compile it is part of the graph and a RuntimeError."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)
