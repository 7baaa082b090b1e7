"""Self-attention as a module: projections, rotary positions, a cache of keys, and `attention`.

>>> layer = tilewise.nn.Attention(64, num_heads=8, num_kv_heads=2, rotary="half", causal=True)
>>> layer(torch.randn(2, 10, 64)).shape
torch.Size([2, 10, 64])
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from typing_extensions import Unpack

from tilewise.api import Options, attention, attention_varlen
from tilewise.arguments import checked_index
from tilewise.results import accumulation_dtype


class Attention(torch.nn.Module):
    """Multi-head self-attention, with as few key heads as one likes (GQA, MQA).

    x is projected to queries, keys and values (q_proj, k_proj, v_proj), heads are normalised
    (`qk_norm`) and rotated (`rotary`) if asked for, `tilewise.attention` joins them, o_proj projects
    back. The parameters are named and laid out as in transformers' Llama; q_norm and k_norm as in its
    Qwen3.

    What `tilewise.attention` can be asked for, can be asked for here: in the constructor, for what
    belongs to the model (causal, window_size, softcap, scale, dropout_p), or with a call, for what
    belongs to the data (key_range, mask, bias, sinks, …). A call's options come before the
    constructor's. There is no align: the last row stands at the last key.

    Args:
        embed_dim: width of x and of the result.
        num_heads: query heads.
        num_kv_heads: key heads, a divisor of num_heads; the default is num_heads.
        head_dim: the default is embed_dim / num_heads.
        bias: whether the projections have one.
        qk_norm: RMSNorm of each query and key head (arXiv 2010.04245), before the rotation.
        rotary: None, or which numbers of a head are a pair (RoPE, arXiv 2104.09864): "half", number i
            and number i + D/2, as in Llama and GPT-NeoX; "interleaved", numbers 2i and 2i + 1, as in
            the paper and GPT-J.
        rotary_base: the angle of pair i at position p is p · base^(−2i/D).
        backend: as in `tilewise.attention`.
        device, dtype: of the parameters.
        **options: of `tilewise.attention`, but no tensors. dropout_p counts in training only.

    Raises:
        ValueError: sizes that do not divide, an option that does not exist or is a tensor.

    Example:
        >>> layer = tilewise.nn.Attention(64, 8, 2, rotary="half", causal=True, window_size=(99, None))
        >>> x = torch.randn(2, 10, 64)
        >>> lengths = torch.tensor([[10], [7]])  # the second row has three tokens of padding
        >>> out = layer(x, key_range=(torch.zeros_like(lengths), lengths))
        >>> with torch.no_grad():  # token by token, the same numbers
        ...     cache = layer.new_cache(batch=2, capacity=10)
        ...     steps = torch.cat([layer(x[:, i : i + 1], cache=cache) for i in range(10)], dim=1)
        >>> torch.allclose(steps, layer(x), atol=1e-5)
        True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        rotary: Literal["half", "interleaved"] | None = None,
        rotary_base: float = 10000.0,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        _check_sizes(sizes if head_dim is None else {**sizes, "head_dim": head_dim}, least=1)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads = {num_heads}, got {num_kv_heads}"
            )
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    f"num_heads must divide embed_dim = {embed_dim} where there is no head_dim, "
                    f"got {num_heads}"
                )
            head_dim = embed_dim // num_heads
        if rotary not in (None, "half", "interleaved"):
            raise ValueError(f'rotary must be None, "half" or "interleaved", got {rotary!r}')
        if rotary and head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")
        _check_options(options)
        if tensors := [name for name, value in options.items() if _holds_tensors(value)]:
            raise ValueError(f"{tensors[0]} is a tensor: give it to the call, not to the module")
        self.embed_dim, self.head_dim = embed_dim, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.rotary, self.rotary_base = rotary, rotary_base
        self.backend, self.options = backend, cast(Options, options)

        def linear(inputs: int, outputs: int) -> torch.nn.Linear:
            return torch.nn.Linear(inputs, outputs, bias, device, dtype)

        def norm() -> torch.nn.Module:
            if not qk_norm:
                return torch.nn.Identity()
            return torch.nn.RMSNorm(head_dim, eps=1e-6, device=device, dtype=dtype)

        self.q_proj = linear(embed_dim, num_heads * head_dim)
        self.k_proj = linear(embed_dim, num_kv_heads * head_dim)
        self.v_proj = linear(embed_dim, num_kv_heads * head_dim)
        self.o_proj = linear(num_heads * head_dim, embed_dim)
        self.q_norm, self.k_norm = norm(), norm()

    def forward(
        self,
        x: Tensor,
        *,
        cache: KVCache | None = None,
        cu_seqlens: Tensor | None = None,
        **options: Unpack[Options],
    ) -> Tensor:
        """Each token's part of what its row, or its own sequence, holds.

        Args:
            x: (B, S, embed_dim); with cu_seqlens (total, embed_dim).
            cache: the tokens before x, to which those of x are appended; keys are counted from the
                first token in the cache. For inference.
            cu_seqlens: (sequences + 1,), int32 or int64: x holds sequences laid end to end.
            **options: of `tilewise.attention`, or with cu_seqlens of `attention_varlen`.

        Returns:
            The shape of x.

        Raises:
            ValueError: x, cache or an option does not fit; the cache is full; a cache under grad mode.
        """
        _check_options(options)
        ndim = 3 if cu_seqlens is None else 2
        if not isinstance(x, Tensor) or x.ndim != ndim or x.shape[-1] != self.embed_dim:
            wanted = "(B, S, embed_dim)" if ndim == 3 else "(total, embed_dim) with cu_seqlens"
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x must have shape {wanted}, embed_dim = {self.embed_dim}, got {got}")
        if cu_seqlens is not None:
            checked_index("cu_seqlens", cu_seqlens, x.device, 1, "(sequences + 1,)")
            if not cu_seqlens.shape[0]:
                raise ValueError("cu_seqlens must begin with 0, got no entries")
        if cache is not None and not isinstance(cache, KVCache):
            raise ValueError(f"cache must be a KVCache (new_cache), got {type(cache).__name__}")
        if cache is not None and cu_seqlens is not None:
            raise ValueError("cache serves rows of one sequence each: it cannot have cu_seqlens")
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)))
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        if self.rotary:
            start = 0 if cache is None else cache.length
            positions = torch.arange(start, start + x.shape[-2], device=x.device)
            if cu_seqlens is not None:
                sequence = torch.searchsorted(
                    cu_seqlens, positions.to(cu_seqlens.dtype), right=True
                )
                positions = positions - cu_seqlens[sequence - 1]
            q, k = (rotate(t, positions, self.rotary_base, self.rotary) for t in (q, k))

        off: Options = {} if self.training else {"dropout_p": 0.0}
        fixed: Options = {**self.options, **off, **options}
        if cu_seqlens is not None:
            out = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, backend=self.backend, **fixed)
        else:
            before = 0 if cache is None else cache.length
            try:
                if cache is not None:
                    k, v = cache.append(k, v)
                out = attention(q, k, v, backend=self.backend, **fixed)
            except ValueError:
                if cache is not None:
                    cache.length = before  # a call that was refused leaves no tokens
                raise
        return self.o_proj(out.flatten(-2))

    def new_cache(self, batch: int, capacity: int, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for rows of up to `capacity` tokens; dtype None is the parameters'."""
        _check_sizes({"batch": batch, "capacity": capacity}, least=0)
        weight = self.k_proj.weight
        shape = (batch, capacity, self.num_kv_heads, self.head_dim)
        k, v = (weight.detach().new_zeros(shape, dtype=dtype) for _ in range(2))
        return KVCache(k, v)

    def extra_repr(self) -> str:
        options = ({"rotary": self.rotary} if self.rotary else {}) | dict(self.options)
        listed = "".join(f", {name}={value!r}" for name, value in options.items())
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}{listed}"


class KVCache:
    """Keys and values of the tokens so far, at the beginning of memory for all that may come.

    Set `length` back to forget tokens. See `Attention.new_cache`.

    Attributes:
        k, v: (B, capacity, Hkv, D).
        length: how many tokens there are.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v, self.length = k, v, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Takes (B, S, Hkv, D) more, and returns views of all keys and values so far.

        Raises:
            ValueError: they do not fit, or require grad under grad mode.
        """
        capacity = self.k.shape[1]
        end = self.length + k.shape[1]
        if end > capacity:
            raise ValueError(
                f"cache has room for {capacity} tokens, got {k.shape[1]} more than {self.length}"
            )
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError("cache is for inference: call the module under torch.no_grad()")
        for name, room, new in (("keys", self.k, k), ("values", self.v, v)):
            if new.shape[::2] != room.shape[::2] or new.shape[3] != room.shape[3]:
                raise ValueError(
                    f"{name} must have shape (B, S, Hkv, D) like the cache's {tuple(room.shape)}, "
                    f"got {tuple(new.shape)}"
                )
            room[:, self.length : end] = new
        self.length = end
        return self.k[:, :end], self.v[:, :end]


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0, pairs: str = "half") -> Tensor:
    """Rotary positions (RoPE, arXiv 2104.09864): each pair of a head turned by an angle.

    The angle of pair i at position p is p · base^(−2i/D), so q · k depends on the difference of their
    positions alone. Computed in float32 (float64 for float64).

    Args:
        x: (..., S, H, D), D even.
        positions: broadcastable to (..., S).
        base: of the angles.
        pairs: "half", number i and i + D/2, or "interleaved", numbers 2i and 2i + 1.

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: D is odd.

    Example:
        >>> x = torch.randn(1, 4, 2, 8)
        >>> turned = tilewise.nn.rotate(x, torch.arange(4))
        >>> torch.equal(turned[:, 0], x[:, 0]), torch.equal(turned[:, 1], x[:, 1])
        (True, False)
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x must have an even head dim, got {tuple(x.shape)}")
    dtype = accumulation_dtype(x.dtype)
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=dtype) / half
    angles = positions.to(dtype)[..., None, None] * base**-exponents
    cos, sin = angles.cos(), angles.sin()
    if pairs == "interleaved":
        a, b = x.to(dtype).unflatten(-1, (half, 2)).unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = x.to(dtype).chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return turned.to(x.dtype)


def _check_sizes(sizes: dict[str, Any], least: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool) or size < least:
            raise ValueError(f"{name} must be an int of at least {least}, got {size!r}")


def _check_options(options: Any) -> None:
    for name in options:
        if name == "align" or name not in Options.__annotations__:
            known = ", ".join(n for n in Options.__annotations__ if n != "align")
            raise ValueError(f"{name} is no option of this module; there are {known}")


def _holds_tensors(value: object) -> bool:
    return any(isinstance(v, Tensor) for v in (value if isinstance(value, tuple) else (value,)))
