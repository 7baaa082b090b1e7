"""The Hopper backend without a GPU: its reasons, its plans, the walk of its tiles, what it compiles to."""

import itertools
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import triton

import tilewise
from tilewise import dispatch
from tilewise.arguments import problem_of
from tilewise.backends import hidden, hopper
from tilewise.tuning import compiling

BF16 = torch.bfloat16


def tensors(b=2, sq=200, sk=300, hq=4, hkv=2, d=128, dv=None, dtype=BF16):
    shapes = ((b, sq, hq, d), (b, sk, hkv, d), (b, sk, hkv, dv or d))
    return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)


def reasons(q, k, v, **options):
    """Why not, besides that there is no such GPU here."""
    problem = problem_of(q, k, v, **options)
    found = hopper.unsupported(problem)
    machine = hopper._wrong_machine(q.device)
    assert found[: len(machine)] == machine
    return found[len(machine) :]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "align": "top-left"},
        {"window_size": (5, 2)},
        {"key_range": (torch.zeros(2, 1).int(), torch.ones(2, 1).int())},
        {"alibi_slopes": torch.ones(2, 4), "softcap": 3.0, "sinks": torch.ones(4), "scale": -2.0},
    ],
)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_serves(options, dtype):
    assert not reasons(*tensors(dtype=dtype), **options)
    for d, dv in ((8, 8), (64, 256), (96, 40), (192, 128), (256, 256)):
        assert not reasons(*tensors(d=d, dv=dv, dtype=dtype), **options)


def test_serves_strides_as_they_are():
    q, k, v = tensors()
    assert not reasons(*(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)))
    assert not reasons(*torch.zeros(2, 100, 3, 4, 64, dtype=BF16).unbind(2))
    cache = torch.zeros(2, 500, 4, 160, dtype=BF16)[:, 8:308, :, 16:144]
    assert not reasons(cache, cache, cache)
    one = torch.zeros(1, 1, 1, 40, dtype=BF16).as_strided((1, 1, 1, 40), (3, 5, 7, 1))
    assert not reasons(one, one, one)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": torch.ones(200, 300).bool()}, "mask: not served"),
        ({"bias": torch.ones(200, 300)}, "bias: not served"),
        ({"dropout_p": 0.5, "dropout_seed": 1}, "dropout: not served"),
        ({"window_size": (0, 0), "align": "bottom-right"}, "no row sees a key"),
    ],
)
def test_reason_of_option(options, reason):
    sk = 300 if reason != "no row sees a key" else 0
    assert reasons(*tensors(sk=sk), **options) == [reason]


def test_reasons_of_operands():
    assert reasons(*tensors(dtype=torch.float32)) == [
        "the dtype must be bfloat16 or float16, got float32"
    ]
    assert reasons(*tensors(d=264)) == ["head dims go up to 256, got 264"]
    assert reasons(*tensors(dv=36))[0] == "the head dim of v must be a multiple of 8, got 36"
    q, k, v = tensors()
    odd = torch.zeros(2, 300, 2, 132, dtype=BF16)[..., :128]
    (reason,) = reasons(q, odd, v)
    assert reason == (
        "k must have strides that are positive multiples of 16 bytes, 8 elements, got (79200, 264, 132, 1)"
    )
    (reason,) = reasons(q, k, v[:, :, :1].expand(v.shape))
    assert "v must have strides that are positive" in reason
    reason, _ = reasons(q, k, torch.zeros(2, 2, 128, 300, dtype=BF16).permute(0, 3, 1, 2))
    assert reason.startswith("v must have stride 1 along the head dim, got 300")
    (reason,) = reasons(torch.zeros(2, 200, 4, 136, dtype=BF16)[..., 4:132], k, v)
    assert reason == "q must start at a multiple of 16 bytes, got 8 in its storage"


def test_every_reason_at_once():
    q, k, v = tensors(dtype=torch.float32, d=300)
    found = reasons(q, k, v, mask=torch.ones(200, 300).bool(), dropout_p=0.1, dropout_seed=0)
    assert len(found) == 4
    with pytest.raises(ValueError, match="cannot serve") as error:
        tilewise.attention(q, k, v, dropout_p=0.1, dropout_seed=0, backend="hopper")
    assert "compute capability 9.0" in str(error.value)


def test_packed_is_served_and_pages_are_not():
    q, k, v = (torch.zeros(10, 2, 64, dtype=BF16) for _ in range(3))
    cu = torch.tensor([0, 4, 10])
    assert not reasons(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    ranges = (torch.zeros(10).int(), torch.ones(10).int())
    (reason,) = reasons(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, key_range=ranges)
    assert reason == "key_range of packed sequences: not served"
    (reason,) = reasons(q, k[:0], v[:0], cu_seqlens_q=cu, cu_seqlens_k=cu * 0)
    assert reason == "no row sees a key"
    pages = torch.zeros(4, 8, 2, 64, dtype=BF16)
    table, used = torch.zeros(1, 2).int(), torch.ones(1).int()
    paged = problem_of(q[None], pages, pages, page_table=table, seqused_k=used)
    assert hopper.unsupported(paged)[1:] == ["pages: not served"]


def test_what_a_key_range_hides_is_known():
    q, k = torch.ones(2, 5, 2, 8), torch.ones(2, 9, 2, 8)
    start = torch.tensor([[0, 0, 7, 3, 8], [4, 4, 4, 9, 20]])
    end = torch.tensor([[2, 1, 9, 3, 8], [6, 5, 3, 99, 30]])
    problem = problem_of(q, k, k, key_range=(start, end))
    lo, hi = problem.interval(0, 5)
    pairs = (lo[..., None] <= torch.arange(9)) & (torch.arange(9) < hi[..., None])
    rows, keys = hidden.seen_tokens(problem)
    assert torch.equal(rows, pairs.any(2))
    assert torch.equal(keys, pairs.any(1))
    assert (rows.sum(1).tolist(), keys.sum(1).tolist()) == ([3, 2], [4, 2])
    problem = problem_of(q, k, k, key_range=(start[:1, :1], end[:1, :1]), causal=True)
    rows, keys = hidden.seen_tokens(problem)
    assert rows.all()
    assert keys.tolist() == [[True, True] + 7 * [False]] * 2


def test_a_clipped_view_begins_and_ends_anywhere():
    """Its coordinates of row r of a sequence: the address is that of the row, and the end is at the end."""
    end = 2**30
    for t in (torch.zeros(700, 4, 64, dtype=BF16), torch.zeros(700, 3, 4, 72, dtype=BF16)[:, 1]):
        view = hopper._clipped(t, 64, 1, 64)
        assert view.block_shape == [1, 1, 64, 1, 64]
        for start, length, row in ((0, 700, 0), (0, 1, 0), (100, 30, 29), (699, 1, 0), (5, 90, 64)):
            at = [end, start + length, end - length + row, 3, 0]
            offset = sum(i * step for i, step in zip(at, view.strides, strict=True))
            assert (
                2 * offset % 2**64
                == 2 * t[start + row, 3].storage_offset() - 2 * t.storage_offset()
            )
            assert at[2] < view.shape[2] <= at[2] + length - row
            assert all(i < n for i, n in zip(at, view.shape, strict=True))
        assert all(step % 8 == 0 and 2 * step < 2**40 for step in view.strides[:-1])
        assert all(n <= 2**31 for n in view.shape)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0+git1"])
def test_triton_that_is_known(version):
    assert not hopper._wrong_triton(version)


@pytest.mark.parametrize("version", [None, "3.5.1", "3.10.0", "4.0"])
def test_triton_that_is_not(version):
    (reason,) = hopper._wrong_triton(version)
    assert "from 3.6 to 3.9" in reason
    assert (version or "not installed") in reason


def test_explained_where_there_is_no_such_gpu():
    assert list(dispatch.BACKENDS)[:2] == ["hopper", "triton"]
    choice = tilewise.explain(*tensors(), causal=True)
    assert choice.rejected["hopper"][0].startswith("Hopper's kernels run on a GPU")


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ({"d": 60, "dv": 64}, {}, "the head dim of q must be a multiple of 8, got 60"),
        ({"dv": 252}, {}, "the head dim of v must be a multiple of 8, got 252"),
    ],
)
def test_gradients_left_to_triton(shape, options, reason):
    problem = problem_of(*tensors(**shape), **options)
    assert hopper._backward_unsupported(problem) == [reason]
    assert hopper.config(problem)["gradients"] == f"by triton ({reason})"


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
def test_gradients_of_scores_take_a_kernel_of_their_own_only_if_wanted(name):
    """Of the backward pass it is known which are."""
    problem = problem_of(*tensors(), **{name: torch.ones(4, requires_grad=True)})
    assert hopper.config(problem)["gradients"] == "by hopper"
    assert not hopper._backward_plan(problem).summed
    assert not hopper._backward_plan(problem, (name,)).summed
    assert hopper._backward_plan(problem, ()).summed
    assert hopper._backward_plan(problem_of(*tensors(), **{name: torch.ones(4)})).summed


@pytest.mark.parametrize(
    ("shape", "options", "keys"),
    [
        ({"b": 83, "sk": 1024}, {}, 256),
        ({"b": 82, "sk": 1024}, {}, 128),  # too few tiles for 132 multiprocessors
        ({"b": 500, "sk": 768}, {}, 128),
        ({"b": 500, "sk": 1100}, {}, 128),
        ({"b": 83, "sk": 1024}, {"scale": -0.3}, 128),
        ({"b": 83, "sk": 1024}, {"causal": True, "sinks": torch.ones(4)}, 256),
        ({"b": 83, "sk": 1024}, {"window_size": (900, 5)}, 128),
        ({"b": 83, "sk": 1024}, {"deterministic": True}, 128),
        ({"b": 83, "sk": 1024}, {"softcap": 9.0}, 128),
        ({"b": 83, "sk": 1024}, {"alibi_slopes": torch.ones(4)}, 128),
        ({"b": 83, "sk": 1024}, {"key_range": (0, torch.full((83, 1), 9))}, 128),
        ({"b": 83, "sk": 1024, "d": 128}, {}, 128),
        ({"b": 83, "sk": 1024, "dv": 72}, {}, 128),
        ({"b": 83, "sk": 1024, "d": 256}, {}, 64),
    ],
)
def test_keys_of_a_tile_in_the_backward_pass(shape, options, keys):
    b, sk, d = shape["b"], shape["sk"], shape.get("d", 64)
    q, k = (torch.empty(b, n, heads, d, dtype=BF16) for n, heads in ((1, 4), (sk, 2)))
    v = torch.empty(b, sk, 2, shape.get("dv", d), dtype=BF16)
    problem = problem_of(q, k, v, **options)
    assert hopper._backward_plan(problem, ()).keys == keys


@pytest.mark.parametrize("d", [8, 64, 128, 136, 256])
def test_gradients_are_deterministic_on_request(d):
    """By kernels that add up nothing in memory."""
    q, k, v = tensors(d=d, sq=300)
    problem = problem_of(q, k, v, deterministic=True)
    assert hopper._backward_unsupported(problem) == []
    problem = problem_of(q[0], k[0], v[0], deterministic=True, **PACKED)
    assert hopper._backward_unsupported(problem) == []


def test_gradients_of_packed_sequences():
    """Without copies where each row and key is known to be seen."""
    q, k, v = (t[0] for t in tensors(sq=300))
    for lengths in (PACKED, UNEQUAL):
        problem = problem_of(q, k, v, causal=True, **lengths)
        assert hopper.config(problem)["gradients"] == "by hopper"
        assert (hidden.seen_tokens(problem) is None) == (lengths is PACKED)


def test_the_backward_pass_left_to_triton_is_triton_s(monkeypatch):
    problem = problem_of(*tensors(d=60, dv=64))
    told = []
    monkeypatch.setattr(hopper.triton, "backward", lambda *given: told.append(given))
    given = (problem, object(), torch.ones(1), None, ())
    hopper.backward(*given)
    assert told == [given]


@pytest.mark.parametrize("d", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dv", [8, 64, 96, 128, 192, 256])
def test_every_plan_fits(d, dv):
    for sq, sk, causal in (
        (64, 64, False),
        (1024, 1024, True),
        (5000, 5000, False),
        (5000, 5000, True),
    ):
        q, k, v = (
            torch.empty(1, n, 1, w, dtype=BF16, device="meta")
            for n, w in ((sq, d), (sk, d), (sk, dv))
        )
        problem = problem_of(q, k, v, causal=causal)
        plan = hopper._plan(problem)
        assert plan.shared_bytes <= hopper._SHARED_BYTES
        assert plan.groups in hopper._REGISTERS
        assert hopper.config(problem)["rows"] == 64 * plan.groups
        assert hopper.config(problem)["heads"] == plan.heads == 1


def test_products_of_three_quarters():
    """Not of all columns that memory has to have."""
    wanted = {40: (64, 64), 64: (64, 64), 72: (128, 96), 96: (128, 96), 104: (128, 128)}
    wanted |= {136: (256, 192), 192: (256, 192), 200: (256, 256), 256: (256, 256)}
    for width, (held, used) in wanted.items():
        q, v = torch.empty(1, 70, 1, 128, dtype=BF16), torch.empty(1, 70, 1, width, dtype=BF16)
        plan = hopper._plan(problem_of(q, q, v))
        assert (plan.block_d, plan.d, plan.block_dv, plan.dv) == (128, 128, held, used)
        plan = hopper._plan(problem_of(v, v, q))
        assert (plan.block_d, plan.d, plan.block_dv, plan.dv) == (held, used, 128, 128)
    kernels = pytest.importorskip("tilewise.kernels.hopper_pipeline")
    assert [kernels.parts_of(n) for n in (64, 96, 128, 192, 256)] == [1, 2, 1, 2, 1]
    for columns in (64, 96, 128, 192, 256):
        parts = range(kernels.parts_of(columns))
        widths = [kernels.part_width(columns, i) for i in parts]
        assert [kernels.part_start(columns, i) for i in parts] == [0, *widths[:-1]]
        assert sum(widths) == columns


def test_heads_share_tiles_where_there_are_few_rows():
    def heads(b, sq, hq, hkv, **options):
        q, k = (
            torch.empty(b, n, h, 128, dtype=BF16, device="meta") for n, h in ((sq, hq), (5000, hkv))
        )
        plan = hopper._plan(problem_of(q, k, k, **options))
        assert plan.rows * plan.heads == 64 * plan.groups
        return plan.heads

    assert heads(16, 1, 32, 8) == 4
    assert heads(16, 60, 32, 8, causal=True) == 4
    assert heads(16, 1, 64, 1) == 64
    assert heads(16, 1, 24, 8) == heads(16, 1, 128, 1) == 1, "64 rows are not of so many heads"
    assert heads(16, 100, 32, 8) == heads(16, 1, 32, 32) == 1
    assert heads(4, 1, 32, 8) == 1, "all are worked on at once, as they are"


def test_sections_hold_all_heads_evenly():
    for b, hq, hkv, s in ((1, 1, 1, 100), (4, 16, 16, 4096), (2, 48, 8, 32768), (300, 8, 1, 512)):
        q, k = (torch.empty(b, s, h, 128, dtype=BF16, device="meta") for h in (hq, hkv))
        problem = problem_of(q, k, k, causal=True)
        walk = hopper._order(problem, hopper._plan(problem)._replace(dynamic=False))[1]
        assert (walk.per_head, walk.heads, walk.section) == (-(-s // 128), b * hq, 1)
        assert hopper._most_tiles(problem, hopper._plan(problem)) == walk.per_head * walk.heads
        _, walk = hopper._order(problem, hopper._plan(problem))
        sections = -(-walk.heads // walk.section)
        assert walk.heads - (sections - 1) * walk.section > walk.section // 2
        kv_bytes = s * 2 * 128 * 2
        assert walk.section == 1 or walk.section // (hq // hkv) * kv_bytes <= hopper._L2_SHARE
        assert walk.drawn.tolist() == [0]


def test_the_last_heads_are_worked_on_together_where_tiles_differ_in_length():
    for s, d, kv_heads, masks, together in (
        (4096, 128, 16, {"causal": True}, 4),
        (1000, 64, 4, {"causal": True}, 8),
        (4096, 256, 16, {"window_size": (100, 0)}, 2),
        (65536, 128, 16, {"causal": True}, 1),
        (4096, 128, 16, {}, 1),
    ):
        q, k = (torch.empty(2, s, h, d, dtype=BF16, device="meta") for h in (16, kv_heads))
        problem = problem_of(q, k, k, **masks)
        walk = hopper._walk_of_keys(problem, hopper._backward_plan(problem))[3]
        assert (walk.heads, walk.together) == (2 * kv_heads, together)


def test_a_tensor_that_starts_anywhere_is_moved():
    t = torch.randn(2 * 30 * 4 * 64 + 3).bfloat16()[3:].view(2, 30, 4, 64)
    view = hopper._view(t, 64, 1, 64)
    assert view.base.data_ptr() % 16 == 0
    assert torch.equal(view.base, t)
    assert (view.shape, view.strides) == ([2, 30, 4, 64], [30 * 4 * 64, 4 * 64, 64, 1])
    same = torch.zeros(1, 30, 4, 64, dtype=BF16)
    assert hopper._view(same, 64, 1, 64).base is same
    assert (
        hopper._view(same.as_strided((1, 30, 4, 64), (3, 256, 64, 1)), 64, 1, 64).strides[0] % 8
        == 0
    )


@pytest.mark.parametrize(
    "t",
    [
        torch.randn(2, 30, 1, 64).bfloat16().expand(2, 30, 4, 64),
        torch.randn(1, 30, 4, 64).bfloat16().expand(2, 30, 4, 64),
        torch.randn(2, 30, 64, 4).bfloat16().transpose(2, 3),
        torch.randn(2, 30, 4, 68).bfloat16()[..., :60],
        torch.randn(2, 1, 4, 60).bfloat16(),
        torch.randn(1, 1, 1, 16).bfloat16()[..., ::2],
    ],
)
def test_a_tensor_that_lies_anyhow_is_moved(t):
    """As transforms of torch.func and hooks of saved tensors may lay it out after `unsupported` was asked."""
    assert hopper._unaligned("t", t)
    view = hopper._view(t, 64, 1, 64)
    as_seen = view.base.as_strided(view.shape, view.strides, view.base.storage_offset())
    assert torch.equal(as_seen, t)
    assert not hopper._unaligned("t", view.base)
    assert torch.equal(hopper._clipped(t[0], 64, 1, 64).base, t[0])


@pytest.mark.parametrize("keys", [16, 8])
def test_walk(keys):
    """Each tile once, every key that is seen in a block, no mask only where all is seen. Blocks as long as a
    tile of 16 rows, or half as long."""
    tests = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{tests.parent}:{tests}"}
    command = [sys.executable, str(tests / "walk_probe.py"), str(keys)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr[-2000:]


CU = torch.tensor([0, 100, 300])
PACKED = {"cu_seqlens_q": CU, "cu_seqlens_k": CU}
UNEQUAL = {"cu_seqlens_q": CU, "cu_seqlens_k": CU.clone()}
RANGES = (torch.zeros(4, 1).int(), torch.full((4, 1), 150).int())


@pytest.mark.parametrize(
    ("shape", "options", "registers", "spilled"),
    [
        ({"sq": 4096, "sk": 4096}, {"causal": True}, 168, 0),
        ({"sq": 4096, "sk": 4099, "d": 64, "dtype": torch.float16}, {}, 128, 0),
        ({"sq": 200, "sk": 300}, {"causal": True}, 168, 0),
        ({"sq": 4096, "sk": 4096, "d": 64}, {"causal": True}, 128, 0),
        ({"sq": 4096, "sk": 4096, "d": 96, "dtype": torch.float16}, {"causal": True}, 168, 0),
        ({"sq": 4096, "sk": 4096, "d": 192}, {}, 168, 0),
        ({"sq": 4096, "sk": 4096}, {"window_size": (1023, 0)}, 168, 0),
        ({"d": 256}, {"window_size": (100, 20)}, 168, 40),  # none of it in a loop
        ({"sq": 4096, "sk": 4096, "d": 256}, {"causal": True}, 168, 0),
        (
            {"d": 192, "dv": 96},
            {"alibi_slopes": torch.ones(4), "sinks": torch.ones(4), "softcap": 9.0},
            168,
            0,
        ),
        ({"sq": 20, "hq": 64, "hkv": 8}, {"causal": True, "sinks": torch.ones(64)}, 168, 0),
        ({"sq": 300}, {"causal": True, "sinks": torch.ones(4), **PACKED}, 168, 0),
        ({"sq": 300}, {"causal": True, **UNEQUAL}, 168, 0),
    ],
)
def test_compiles(shape, options, registers, spilled):
    """Without notes on matrix products that run one by one (C75xx), or more spills than were found good."""
    q, k, v = tensors(**{"b": 4, **shape})
    if "cu_seqlens_q" in options:
        q, k, v = q[0], k[0], v[0]
    problem = problem_of(q, k, v, **options)
    target = compiling.cuda_target(90)
    *_, kernel = compiling.compile_problem(problem, target, backward=False, backend="hopper")
    found = compiling.report(kernel, target)
    assert (found.registers, found.notes) == (registers, ())
    assert found.spilled <= spilled
    assert found.shared <= hopper._plan(problem).shared_bytes


def sass(kernel) -> list[str]:
    """The instructions of a compiled kernel, and labels."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "cubin"
        binary.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(binary)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.strip() for line in re.sub(r"/\*.*?\*/", "", text).splitlines() if line.strip()]


def overwritten(lines: list[str]) -> list[str]:
    """What writes registers that tiles were loaded to, while products still read them as a first operand."""
    plain = [re.sub(r"^@!?U?P\d+ +", "", line) for line in lines]
    labels = {line[:-1]: n for n, line in enumerate(plain) if re.fullmatch(r"\.L\w+:", line)}
    loads, products = defaultdict(list), defaultdict(list)
    for n, line in enumerate(plain):
        if found := re.match(r"LDSM\S* R(\d+),", line):
            loads[int(found[1])].append(n)
        elif found := re.match(r"HGMMA\S* R\d+, R(\d+),", line):
            products[int(found[1])].append(n)
    wrong = []
    for register, begins in loads.items():
        for begin, end in zip(begins, [*begins[1:], len(plain)], strict=True):
            last = max((n for n in products[register] if begin < n < end), default=begin)
            # A loop around the last product goes on reading.
            for n in range(last, end):
                found = re.search(r"BRA `\((\.L\w+)\)", plain[n])
                if found and begin < labels[found[1]] <= last:
                    last = n
            held = range(register, register + 4)
            wrong += [x for x in plain[begin + 1 : last] if any(r in held for r in written(x))]
    return wrong


def written(line: str) -> range:
    """The registers that an instruction writes, but for a product's sums."""
    found = re.match(r"(\S+) R(\d+),", line)
    if found is None or line.startswith("HGMMA"):
        return range(0)
    name, first = found[1], int(found[2])
    count = (
        4 if re.search(r"\.M88\.4|\.128", name) else 1 + bool(re.search(r"\.64|WIDE|CS2R", name))
    )
    return range(first, first + count)


def test_overwritten_registers_are_found():
    loop = [
        "LDSM.16.M88.4 R180, [R3+UR8+0xc000] ;",
        ".L_x_9:",
        "HGMMA.64x64x16.F32.BF16 R24, R180, gdesc[UR16], RZ, !UPT ;",
        "FFMA R20, R33, UR20, -R23 ;",
        "@!P4 BRA `(.L_x_9) ;",
        "F2FP.BF16.F32.PACK_AB R181, R1, R2 ;",
    ]
    assert overwritten(loop) == []
    assert overwritten([*loop[:3], loop[-1], *loop[3:5]]) == [loop[-1]]
    assert overwritten([*loop[:2], "@P1 MOV R183, R1 ;", *loop[2:]]) == ["MOV R183, R1 ;"]
    assert overwritten([*loop[:2], "LDS.64 R178, [R1] ;", "CS2R R183, SRZ ;", *loop[2:]]) == [
        "CS2R R183, SRZ ;"
    ]


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("options", [{"causal": True}, {"deterministic": True}, PACKED])
def test_barriers_have_memory_of_their_own(d, options):
    """Triton gives that of a barrier on which no one waits to tiles, and on a GPU that other processes use,
    too, what its initialisation left there came after what was loaded."""
    q, k, v = tensors(b=4, sq=300, d=d)
    if "cu_seqlens_q" in options:
        q, k, v = q[0], k[0], v[0]
    problem = problem_of(q, k, v, **options)
    target = compiling.cuda_target(90)
    kernels = compiling.compile_problem(problem, target, backend="hopper", wanted=())
    gaps = []
    for kernel in kernels:
        found = re.findall(r"SYNCS\.EXCH\.64 URZ, \[UR\d+\+(0x\w+)\]", "\n".join(sass(kernel)))
        places = sorted(int(place, 16) for place in found)
        gaps += [b - a for a, b in itertools.pairwise(places)]
    # One after the other, they lie beside the tiles.
    assert gaps
    assert set(gaps) <= {8, 16}


@pytest.mark.parametrize(
    ("dtype", "options", "spilled"),
    [(BF16, {}, 80), (BF16, {"causal": True}, 128), (torch.float16, {"causal": True}, 128)],
)
def test_tiles_of_many_keys_compile(monkeypatch, dtype, options, spilled):
    monkeypatch.setattr(hopper, "_FEWEST_TILES", 0)
    problem = problem_of(*tensors(sq=1024, sk=1024, d=64, dtype=dtype), **options)
    target = compiling.cuda_target(90)
    kernels = compiling.compile_problem(problem, target, backend="hopper", wanted=())
    (kernel,) = (kernel for kernel in kernels if kernel.name == "_backward_kernel")
    assert overwritten(sass(kernel)) == []
    found = compiling.report(kernel, target)
    assert (found.registers, found.notes) == (168, ())
    assert found.spilled <= spilled
    assert 190 * 1024 < found.shared <= 227 * 1024


@pytest.mark.parametrize(
    ("shape", "options", "spilled"),
    [
        ({"sq": 512, "sk": 512}, {}, 24),
        ({"sq": 512, "sk": 512}, {"causal": True}, 96),
        ({"sq": 500, "sk": 700, "dtype": torch.float16}, {"causal": True}, 160),
        ({"sq": 512, "sk": 512, "d": 64}, {}, 0),
        ({"sq": 200, "sk": 300, "d": 64}, {"causal": True, "window_size": (100, None)}, 0),
        ({"sq": 512, "sk": 512, "d": 64}, {"causal": True, "softcap": 9.0}, 0),
        ({"d": 96, "dv": 40}, {}, 24),
        # 148, 204 or 260: the compiler does not always come to the same.
        ({"sq": 300}, {"causal": True, **PACKED}, 320),
        ({"sq": 300, "d": 64}, PACKED, 0),
        ({"sq": 300, "d": 64}, {"causal": True, **UNEQUAL}, 0),
        ({"sq": 512, "sk": 512}, {"causal": True, "alibi_slopes": torch.ones(4)}, 200),
        ({"sq": 512, "sk": 512, "d": 64}, {"alibi_slopes": torch.ones(4, 4)}, 0),
        ({"sq": 300}, {"causal": True, "alibi_slopes": torch.ones(2, 4), **PACKED}, 480),
        # Where each row has a range, most of it in the loops for edges.
        ({}, {"key_range": RANGES}, 600),
        ({"d": 64, "dtype": torch.float16}, {"key_range": RANGES, "causal": True}, 24),
    ],
)
def test_the_backward_pass_compiles(shape, options, spilled):
    q, k, v = tensors(**{"b": 4, **shape})
    if "cu_seqlens_q" in options:
        q, k, v = q[0], k[0], v[0]
    problem = problem_of(q, k, v, **options)
    assert not hopper._backward_unsupported(problem)
    target = compiling.cuda_target(90)
    *_, kernel, rows = compiling.compile_problem(problem, target, backend="hopper", wanted=())
    assert overwritten(sass(kernel)) == []
    found = compiling.report(kernel, target)
    assert (found.registers, found.notes) == (168, ())
    assert found.spilled <= spilled
    assert found.shared <= 227 * 1024
    assert compiling.report(rows, target).spilled == 0


@pytest.mark.parametrize(
    ("shape", "options", "spilled"),
    [
        ({"sq": 512, "sk": 512}, {}, 0),
        ({"sq": 512, "sk": 512}, {"causal": True}, 0),
        ({"sq": 512, "sk": 512, "d": 64}, {}, 0),
        ({"sq": 512, "sk": 512, "d": 64}, {"causal": True}, 0),
        ({"sq": 500, "sk": 700, "dtype": torch.float16}, {"window_size": (100, 20)}, 24),
        ({"sq": 512, "sk": 512, "d": 64}, {"window_size": (100, 20), "softcap": 9.0}, 0),
        ({"sq": 512, "sk": 512}, {"alibi_slopes": torch.ones(4)}, 24),
        # All of it in the block of keys that is cut short, once a tile.
        ({"d": 96, "dv": 40}, {"alibi_slopes": torch.ones(4)}, 1024),
        ({"sq": 300}, {"causal": True, **PACKED}, 24),
        ({}, {"key_range": RANGES, "causal": True}, 24),
    ],
)
def test_the_deterministic_backward_pass_compiles(shape, options, spilled):
    compiled_by_two_kernels("_backward_kernel", shape, {**options, "deterministic": True}, spilled)


@pytest.mark.parametrize(
    ("of_keys", "shape", "options", "spilled"),
    [
        ("_backward_kernel", {"sq": 512, "sk": 512}, {"causal": True}, 0),
        ("_backward_kernel", {"d": 64}, {"causal": True, "window_size": (127, None)}, 0),
        ("_backward_kernel", {"sq": 300}, {"causal": True, **UNEQUAL}, 24),
        # Most of it in the block of keys that is cut short, once a tile.
        ("_backward_kernel", {}, {"softcap": 9.0, "alibi_slopes": torch.ones(4)}, 640),
        ("_wide_keys_kernel", {"sq": 512, "sk": 512, "d": 256}, {"causal": True}, 24),
    ],
)
def test_the_backward_pass_with_a_gradient_of_sinks_compiles(of_keys, shape, options, spilled):
    options = {**options, "sinks": torch.ones(4)}
    compiled_by_two_kernels(of_keys, shape, options, spilled, wanted=("sinks",))


@pytest.mark.parametrize(
    ("of_keys", "shape", "options", "spilled"),
    [
        ("_backward_kernel", {"sq": 512, "sk": 512}, {"causal": True}, 128),
        ("_backward_kernel", {"d": 64}, {"sinks": torch.ones(4)}, 128),
        ("_wide_keys_kernel", {"d": 256}, {"key_range": RANGES, "softcap": 9.0}, 400),
    ],
)
def test_the_backward_pass_with_a_gradient_of_slopes_compiles(of_keys, shape, options, spilled):
    options = {**options, "alibi_slopes": torch.ones(4)}
    wanted = tuple(options.keys() & {"alibi_slopes", "sinks"})
    compiled_by_two_kernels(of_keys, shape, options, spilled, wanted=wanted)


@pytest.mark.parametrize(
    ("shape", "options", "spilled"),
    [
        ({"sq": 512, "sk": 512, "d": 256}, {"causal": True}, 0),
        ({"d": 256, "dtype": torch.float16}, {"window_size": (100, 20), "softcap": 9.0}, 128),
        ({"sq": 500, "sk": 700, "d": 192, "dv": 128}, {}, 32),
        ({"sq": 300, "d": 256}, {"causal": True, **PACKED}, 32),
    ],
)
def test_the_backward_pass_of_wide_heads_compiles(shape, options, spilled):
    compiled_by_two_kernels("_wide_keys_kernel", shape, options, spilled)


def compiled_by_two_kernels(of_keys, shape, options, spilled, wanted=()):
    """One for gradients of keys and values, one for those of queries."""
    q, k, v = tensors(**{"b": 4, **shape})
    if "cu_seqlens_q" in options:
        q, k, v = q[0], k[0], v[0]
    problem = problem_of(q, k, v, **options)
    target = compiling.cuda_target(90)
    every = compiling.compile_problem(problem, target, backend="hopper", wanted=wanted)
    both = [kernel for kernel in every if kernel.name in (of_keys, "_queries_kernel")]
    assert len(both) == 2
    assert not any(kernel.name == "rows_kernel" for kernel in every)
    for kernel in both:
        assert overwritten(sass(kernel)) == []
        found = compiling.report(kernel, target)
        assert (found.registers, found.notes) == (168, ())
        assert found.spilled <= spilled
        assert found.shared <= 227 * 1024


@pytest.mark.parametrize("packed", [False, True])
def test_an_aligned_band_needs_little_code(packed):
    """What does not fit the instruction cache, some 64 KB, waits for instructions in every tile."""
    q, k, v = tensors(sq=4096, sk=4096)
    if packed:
        q, k, v = q[0], k[0], v[0]
    problem = problem_of(q, k, v, causal=True, **(PACKED if packed else {}))
    target = compiling.cuda_target(90)
    *_, kernel = compiling.compile_problem(problem, target, backward=False, backend="hopper")
    assert 16 * 1024 < code_bytes(kernel.asm["cubin"]) <= 64 * 1024


def code_bytes(cubin: bytes) -> int:
    """Of the sections of an ELF file that hold instructions."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    start = sections[names][4]
    named = ((cubin[start + section[0] :], section[5]) for section in sections)
    return sum(length for name, length in named if name.startswith(b".text."))


def test_one_kernel_for_all_lengths():
    """Numbers of a struct that are 1 or multiples of 16 would be compiled in."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    from tilewise.kernels.general import _general

    found = set()
    for b, sq, sk, hq in ((1, 16, 17, 2), (3, 17, 16, 4), (16, 2048, 4096, 32)):
        q, k = (torch.empty(b, n, hq, 64, dtype=BF16, device="meta") for n in (sq, sk))
        problem = problem_of(q, k, k, window_size=(sq // 2, 0))
        spec, walk = hopper._order(problem, hopper._plan(problem))
        given = _general((spec, walk._replace(drawn=None), sq * 2**31))
        assert type(given[0]) is type(spec)
        assert type(given[0].sizes) is type(spec.sizes)
        found.add(repr(native_specialize_impl(BaseBackend, given, False, True, True)))
    assert len(found) == 1
    assert "'D'" not in found.pop()


def test_short_calls_are_left_to_triton():
    long, short = (problem_of(*tensors(b=4, sq=s, sk=s), causal=True) for s in (4096, 128))
    assert hopper.declined(long) == []
    (reason,) = hopper.declined(short)
    assert "too little to do" in reason
