"""What ``tilewise bench gpu`` compares: tilewise's backends and their peers, each on a case's inputs."""

from __future__ import annotations

import ctypes
import functools
import importlib
import lzma
import shutil
import tempfile
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention

import tilewise
from tilewise.cli.gpu_cases import Case, Inputs
from tilewise.dispatch import BACKENDS

# Backends that are no kernels of ours, but plain PyTorch.
PLAIN = ("tiled", "reference")
FA3_FILES = ("fa3.so.xz", "libcudart.so.12")


class Side(NamedTuple):
    """An implementation on a case's inputs.

    Attributes:
        attend: a differentiable function of q, k, v, and of the bias where there is one.
        heads_first: whether it takes and gives (B, H, S, D), as PyTorch's own does.
        within: what holds while it is called.
        compiled: asked after a call; False if the call fell back to something uncompiled.
    """

    attend: Callable[..., Tensor]
    heads_first: bool = False
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiled: Callable[[], bool] = lambda: True


Make = Callable[[Case, Inputs], Side]


# ------------------------------------------------------------------ ours


def serving(case: Case, inputs: Inputs) -> list[str]:
    """The names of tilewise's backends with kernels for the case."""
    problem = inputs.problem(case)
    return [
        name
        for name, backend in BACKENDS.items()
        if name not in PLAIN and not backend.unsupported(problem)
    ]


def ours(name: str) -> Make:
    def make(case: Case, inputs: Inputs) -> Side:
        function = tilewise.attention_varlen if case.lengths else tilewise.attention
        call = functools.partial(function, **inputs.options(case), backend=name)
        if case.bias:
            return Side(lambda q, k, v, bias: call(q, k, v, bias=bias))
        return Side(call)

    return make


# ------------------------------------------------------------------ PyTorch


def _sdpa(case: Case, inputs: Inputs, backend: SDPBackend | None = None) -> Side:
    """F.scaled_dot_product_attention as PyTorch chooses its backend, or by that one."""
    if case.lengths:
        return _torch_varlen(case, inputs)
    attend = functools.partial(
        F.scaled_dot_product_attention,
        is_causal=case.mask == "causal",
        enable_gqa=case.heads != case.kv_heads,
    )
    if backend is None:
        return Side(attend, heads_first=True)
    return Side(attend, heads_first=True, within=lambda: sdpa_kernel(backend))


def _torch_varlen(case: Case, inputs: Inputs) -> Side:
    """PyTorch's flash kernel on packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if case.mask == "causal" else (-1, -1)
    call: Callable[..., Any] = varlen_attn
    cu, longest = inputs.cu_seqlens, max(case.lengths)
    return Side(lambda q, k, v: call(q, k, v, cu, cu, longest, longest, window_size=window))


def _flex(case: Case, inputs: Inputs) -> Side:
    """FlexAttention, compiled for this case alone: by the ninth shape it would give up compiling."""
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # or the graph could not be kept for more passes
    blocks = _block_mask(case, inputs)
    slopes, cap, grouped = inputs.alibi_slopes, case.softcap, case.heads != case.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if cap is not None:
                s = cap * torch.tanh(s / cap)
            if slopes is not None:
                s = s - slopes[h] * (i - j).abs()
            return s if bias is None else s + bias[b, h, i, j]

        plain = cap is None and slopes is None and bias is None
        modified = None if plain else score
        return flex_attention(q, k, v, modified, block_mask=blocks, enable_gqa=grouped)

    graphs: list[Any] = []

    def inductor(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("inductor")(graph, example_inputs)

    # fullgraph raises where what cannot be compiled would silently run as it is.
    compiled = torch.compile(attend, backend=inductor, dynamic=False, fullgraph=True)
    call = _packed_as_batch(compiled) if case.lengths else compiled
    return Side(call, heads_first=not case.lengths, compiled=lambda: bool(graphs))


def _packed_as_batch(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of (1, H, total, D) as one of (total, H, D)."""

    def call(*packed: Tensor) -> Tensor:
        return attend(*(t.transpose(0, 1).unsqueeze(0) for t in packed)).squeeze(0).transpose(0, 1)

    return call


def _block_mask(case: Case, inputs: Inputs) -> Any:
    tests: list[Any] = []
    if case.mask != "full":
        tests.append(lambda b, h, i, j: i >= j)
    if isinstance(case.mask, int):
        window = case.mask
        tests.append(lambda b, h, i, j: i - j < window)
    if case.lengths:
        lengths = torch.tensor(case.lengths, device=inputs.q.device)
        document = torch.arange(case.batch, device=inputs.q.device).repeat_interleave(lengths)
        tests.append(lambda b, h, i, j: document[i] == document[j])
    if not tests:
        return None
    size, device = case.length, str(inputs.q.device)
    return create_block_mask(and_masks(*tests), None, None, size, size, device)


# ------------------------------------------------------------------ other packages


def _flash_attn(case: Case, inputs: Inputs) -> Side:
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    options: dict[str, Any] = {"causal": case.mask == "causal"}
    if isinstance(case.mask, int):
        options["window_size"] = (case.mask - 1, 0)
    if case.softcap is not None:
        options["softcap"] = case.softcap
    if inputs.alibi_slopes is not None:
        options["alibi_slopes"] = inputs.alibi_slopes
    if not case.lengths:
        return Side(functools.partial(flash_attn_func, **options))
    cu, longest = inputs.cu_seqlens, max(case.lengths)
    return Side(
        lambda q, k, v: flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options)
    )


def _fa4(case: Case, inputs: Inputs) -> Side:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options: dict[str, Any] = {"causal": case.mask == "causal"}
    if isinstance(case.mask, int):
        options["window_size"] = (case.mask - 1, 0)
    if case.softcap is not None:
        options["softcap"] = case.softcap
    function = flash_attn_func
    if case.lengths:
        function = flash_attn_varlen_func
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), inputs.cu_seqlens)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = function(q, k, v, **options)
        return result[0] if isinstance(result, tuple) else result  # some versions add lse

    return Side(attend)


class _FA3(torch.autograd.Function):
    """FlashAttention-3 by its operators, which its package and a folder with its binary both have."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, num_splits=1, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = [torch.empty_like(t) for t in (q, k, v)]
        torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, *gradients, **ctx.options)
        return *gradients, None


def _fa3(case: Case, inputs: Inputs) -> Side:
    options: dict[str, Any] = {
        "softmax_scale": case.head_dim**-0.5,
        "is_causal": case.mask == "causal",
    }
    if isinstance(case.mask, int):
        options |= {"window_size_left": case.mask - 1, "window_size_right": 0}
    if case.softcap is not None:
        options["softcap"] = case.softcap
    if case.lengths:
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), inputs.cu_seqlens)
        options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(case.lengths))
    return Side(lambda q, k, v: _FA3.apply(q, k, v, options))


def _load_fa3(folder: Path | None) -> None:
    """The package flash_attn_interface, or its binary and the CUDA runtime that it wants from a folder."""
    if folder is None:
        importlib.import_module("flash_attn_interface")
        return
    packed, runtime = (folder / name for name in FA3_FILES)
    ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    with tempfile.TemporaryDirectory() as unpacked:
        library = Path(unpacked) / "fa3.so"
        with lzma.open(packed) as source, library.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)
        torch.ops.load_library(str(library))


def _xformers(case: Case, inputs: Inputs) -> Side:
    from xformers.ops import fmha, memory_efficient_attention

    masks = fmha.attn_bias
    mask: Any = None
    if case.lengths:
        mask = masks.BlockDiagonalMask.from_seqlens(list(case.lengths))
        if case.mask == "causal":
            mask = mask.make_causal()
    elif isinstance(case.mask, int):
        mask = masks.LocalAttentionFromBottomRightMask(window_left=case.mask - 1, window_right=0)
    elif case.mask == "causal":
        mask = masks.LowerTriangularMask()

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return memory_efficient_attention(q, k, v, attn_bias=mask if bias is None else bias)

    if not case.lengths:
        return Side(attend)
    return Side(lambda *packed: attend(*(t.unsqueeze(0) for t in packed)).squeeze(0))


# ------------------------------------------------------------------ which there are


PEERS: dict[str, Make] = {
    "SDPA": _sdpa,
    "cuDNN": functools.partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "flash": functools.partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "efficient": functools.partial(_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "math": functools.partial(_sdpa, backend=SDPBackend.MATH),
    "Flex": _flex,
    "flash-attn": _flash_attn,
    "FA3": _fa3,
    "FA4": _fa4,
    "xformers": _xformers,
}


def missing_peers(fa3: Path | None = None, wanted: Container[str] = tuple(PEERS)) -> dict[str, str]:
    """Loads the packages that the wanted peers are in; why each that is not here is not.

    Args:
        fa3: a folder with FlashAttention-3's binary, in place of its package.
    """
    loading: dict[str, Callable[[], object]] = {
        "flash-attn": lambda: importlib.import_module("flash_attn"),
        "FA3": lambda: _load_fa3(fa3),
        "FA4": lambda: importlib.import_module("flash_attn.cute"),
        "xformers": lambda: importlib.import_module("xformers.ops"),
    }
    missing = {}
    for name, load in loading.items():
        if name not in wanted:
            continue
        try:
            load()
        except ModuleNotFoundError:
            missing[name] = "not installed"
        except Exception as error:  # installed and broken
            missing[name] = reason(error)
    return missing


def reason(error: Exception) -> str:
    """An error in a line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".removesuffix(": ")
