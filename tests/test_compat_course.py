"""The functions of courses: by the usual test of such an assignment, on both of its sides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tilewise.compat.course import FlashAttentionPyTorch, FlashAttentionTriton
from tilewise.textbook import standard_attention

ROOT = Path(__file__).parent.parent


def check(function, is_causal, dv=32):
    """Forward and backward against the standard form; what is saved."""
    torch.manual_seed(0)
    Q, K, V = (torch.randn(2, n, d, requires_grad=True) for n, d in ((70, 32), (90, 32), (90, dv)))
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        O = function.apply(Q, K, V, is_causal)
    want = standard_attention(Q, K, V, is_causal)
    assert torch.allclose(O, want, atol=1e-5)
    dO = torch.randn_like(O)
    for got, expected in zip(
        torch.autograd.grad(O, (Q, K, V), dO), torch.autograd.grad(want, (Q, K, V), dO), strict=True
    ):
        assert torch.allclose(got, expected, atol=1e-4)
    (L,) = [t for t in saved if t.shape == (2, 70)]
    scores = Q @ K.transpose(-1, -2) / 32**0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(70, 90).triu(1).bool(), float("-inf"))
    assert torch.allclose(L, scores.logsumexp(-1), atol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
def test_in_pytorch(is_causal):
    check(FlashAttentionPyTorch, is_causal)


def check_refusals_and_autocast(function):
    Q, K, V = (torch.randn(2, 5, 16, requires_grad=True) for _ in range(3))
    (dQ,) = torch.autograd.grad(function.apply(Q, K, V, True).pow(2).sum(), Q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dQ.pow(2).sum().backward()
    with torch.autocast(Q.device.type, dtype=torch.float16):
        O = function.apply(Q, K, V, True)
    O.float().pow(2).sum().backward()
    assert Q.grad.isfinite().all()
    assert Q.grad.dtype == Q.dtype


def test_refusals_and_autocast():
    check_refusals_and_autocast(FlashAttentionPyTorch)


def test_in_triton():
    """Where there is no GPU, by Triton's interpreter, which a process chooses at its start."""
    interpreter = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "import torch, test_compat_course as t\n"
        "torch.set_default_device('cuda' if torch.cuda.is_available() else 'cpu')\n"
        "for is_causal in (False, True): t.check(t.FlashAttentionTriton, is_causal)\n"
        "t.check(t.FlashAttentionTriton, True, dv=48)\n"
        "t.check_refusals_and_autocast(t.FlashAttentionTriton)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **interpreter},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_a_gpu_it_says_so():
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="Triton's kernels run on a GPU"):
            FlashAttentionTriton.apply(*(torch.zeros(1, 3, 4) for _ in range(3)), False)
