"""The five demonstrations of ``tilewise demo``, in order."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise import textbook
from tilewise.cli import measure, model
from tilewise.cli.demo import Screen
from tilewise.cli.measure import Usage

EXACT = 1e-12  # float64


class Outcome(NamedTuple):
    verdict: Literal["passed", "failed", "not run"]
    measured: Sequence[Usage] = ()


# ------------------------------------------------------------------ 1. online softmax


def online_softmax(screen: Screen, number: int) -> Outcome:
    screen.heading(number, "online.title")
    screen.say("online.intro")
    values = [0.5, 1.2, -0.3, 2.0, 0.1, -1.0, 3.1, 0.4, 2.2, 1.0]
    block = 3
    x = torch.tensor(values, dtype=torch.float64, device=measure.device_here())

    rows, m_old = [], -float("inf")
    for start in range(0, len(x), block):
        # The state after a block is the result for what was read so far.
        m, l = textbook.online_softmax_stats(x[: start + block], block)
        elements = ", ".join(f"{value:.1f}" for value in values[start : start + block])
        rebase = torch.exp(m_old - m).item()
        rows.append([elements, f"{m.item():.1f}", f"{rebase:.4f}", f"{l.item():.4f}"])
        m_old = m.item()
    screen.table([screen.text("online.elements"), "m", screen.text("online.rebase"), "l"], rows)

    m, l = textbook.online_softmax_stats(x, block)
    online, expected = m + torch.log(l), torch.logsumexp(x, dim=0)
    screen.say("online.lse", online=f"{online.item():.12f}", torch=f"{expected.item():.12f}")
    screen.say("online.check")
    difference = max(
        largest_difference(torch.exp(x - m) / l, torch.softmax(x, dim=0)),
        largest_difference(online, expected),
    )
    return judged(screen, [difference])


# ------------------------------------------------------------------ 2. forward


def forward(screen: Screen, number: int) -> Outcome:
    n, d, block_q, block_k = 100, 32, 16, 24
    screen.heading(number, "forward.title")
    screen.say("forward.intro", n=n, d=d, block_q=block_q, block_k=block_k)
    Q, K, V = draw(n, d)

    differences, rows = [], []
    for causal in (False, True):
        standard = textbook.standard_attention(Q, K, V, causal)
        sdpa = F.scaled_dot_product_attention(Q, K, V, is_causal=causal)
        outputs = {
            "textbook": textbook.flash_attention_forward(Q, K, V, causal, block_q, block_k)[0],
            "tilewise": attention_of_one_head(Q, K, V, causal),
        }
        for name, output in outputs.items():
            found = [largest_difference(output, other) for other in (standard, sdpa)]
            differences += found
            rows.append([name_of(screen, name), yes_no(screen, causal), *map(scientific, found)])
    columns = ("algorithm", "causal", "forward.standard", "forward.sdpa")
    screen.table([screen.text(column) for column in columns], rows)
    return judged(screen, differences)


# ------------------------------------------------------------------ 3. backward


def backward(screen: Screen, number: int) -> Outcome:
    n, d = 70, 16
    screen.heading(number, "backward.title")
    screen.say("backward.intro", n=n, d=d)
    inputs = [x.requires_grad_() for x in draw(n, d)]

    def gradients(attention: Callable[..., Tensor], causal: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*inputs, causal).square().sum(), inputs)

    differences, rows = [], []
    for causal in (False, True):
        expected = gradients(textbook.standard_attention, causal)
        found = {
            "textbook": gradients(textbook.FlashAttention.apply, causal),
            "tilewise": gradients(attention_of_one_head, causal),
        }
        for name, grads in found.items():
            each = [largest_difference(a, b) for a, b in zip(grads, expected, strict=True)]
            differences += each
            rows.append([name_of(screen, name), yes_no(screen, causal), *map(scientific, each)])
    screen.table(
        [screen.text("algorithm"), screen.text("causal"), "dQ", "dK", "dV"],
        rows,
    )
    return judged(screen, differences)


# ------------------------------------------------------------------ 4. memory and traffic

LENGTHS = (1024, 4096, 16384, 65536)
HEAD_DIM = 128
ON_CHIP_KB = 100
SECONDS_AT_MOST = 20.0
MEMORY_ORDER = {"standard": 2, "tilewise": 1}  # peak ∝ n to this power; time ∝ n² for both


def cost_of(n: int) -> tilewise.Cost:
    """Of one head of that length in BF16."""
    q = torch.empty(1, n, 1, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    return tilewise.cost(q, q, q, sram_bytes=1024 * ON_CHIP_KB)


def elements(count_of_bytes: int) -> int:
    return count_of_bytes // torch.bfloat16.itemsize


def memory(screen: Screen, number: int) -> Outcome:
    device = measure.device_here()
    screen.heading(number, "memory.title")
    screen.say(
        "memory.intro",
        d=HEAD_DIM,
        M=elements(1024 * ON_CHIP_KB),
        on_chip=ON_CHIP_KB,
        device=device_name(device),
        dtype=str(measure.dtype_on(device)).removeprefix("torch."),
    )
    results = measure_all(screen, device)

    columns = ["n", screen.text("memory.keeps"), "L", "4nd + 4n²", "n²d²/M"]
    for algorithm in MEMORY_ORDER:
        name = name_of(screen, algorithm)
        columns.append(screen.text("memory.peak", algorithm=name))
        columns.append(screen.text("memory.time", algorithm=name))
    rows = []
    for n in LENGTHS:
        cost = cost_of(n)
        row = [str(n), size(cost.extra_bytes_standard), size(cost.extra_bytes_tiled)]
        moved = cost.hbm_bytes_standard, cost.hbm_bytes_io_model
        row += [scientific(elements(count)) for count in moved]
        for algorithm in MEMORY_ORDER:
            result = results[algorithm, n]
            if isinstance(result, Usage):
                row += [size(result.peak_bytes), time_of(result.seconds)]
            else:
                row += ["—", "—"]
        rows.append(row)
    screen.table(columns, rows)
    for result in results.values():
        if isinstance(result, str):
            screen.line(result)

    usages = [result for result in results.values() if isinstance(result, Usage)]
    if any(usage.peak_bytes is None for usage in usages):
        screen.say("memory.no_counter")
        return Outcome("not run", usages)
    ours = [usage for usage in usages if usage.algorithm == "tilewise"]
    passed = bool(ours) and all(
        (usage.peak_bytes or 0) <= linear_allowance(usage.n, device) for usage in ours
    )
    screen.check(passed, "memory.check")
    return Outcome("passed" if passed else "failed", usages)


def measure_all(screen: Screen, device: str) -> dict[tuple[str, int], Usage | str]:
    """Every length that this machine can afford; for the others the reason why not."""
    results: dict[tuple[str, int], Usage | str] = {}
    with screen.progress() as progress:
        task = progress.add_task("", total=len(MEMORY_ORDER) * len(LENGTHS))
        for algorithm in MEMORY_ORDER:
            last: Usage | None = None
            for n in LENGTHS:
                named = {"algorithm": name_of(screen, algorithm), "n": n}
                progress.update(task, description=screen.text("memory.progress", **named))
                reason = unaffordable(last, n, device)
                if reason is not None:
                    needed, limit = reason
                    results[algorithm, n] = screen.text(
                        "memory.unaffordable", needed=needed, limit=limit, **named
                    )
                else:
                    try:
                        last = results[algorithm, n] = measure.measure(
                            algorithm, n, HEAD_DIM, device
                        )
                    except RuntimeError as error:  # no memory, or the system ended the process
                        results[algorithm, n] = screen.text("memory.died", error=error, **named)
                progress.advance(task)
    return results


def unaffordable(last: Usage | None, n: int, device: str) -> tuple[str, str] | None:
    """What n would take, judged by the last measurement, and the limit that this passes."""
    if last is None:
        return None
    bytes_needed = (last.peak_bytes or 0) * (n // last.n) ** MEMORY_ORDER[last.algorithm]
    seconds_needed = last.seconds * (n / last.n) ** 2
    bytes_at_most = measure.memory_here(device)
    if bytes_needed > bytes_at_most:
        return size(bytes_needed), size(bytes_at_most)
    if seconds_needed > SECONDS_AT_MOST:
        return time_of(seconds_needed), time_of(SECONDS_AT_MOST)
    return None


def linear_allowance(n: int, device: str) -> int:
    """Outputs, gradients and what is kept are n×d each; the workspace of a tile is constant."""
    return 64 * 2**20 + 16 * n * HEAD_DIM * measure.dtype_on(device).itemsize


# ------------------------------------------------------------------ 5. a language model

PROMPT_TOKENS = 2000
NEW_TOKENS = 40
LOGIT_TOLERANCE = 1e-3  # float32, thirty layers


def language_model(screen: Screen, number: int) -> Outcome:
    screen.heading(number, "model.title")
    missing = model.missing_packages()
    if missing:
        packages = ", ".join(missing).replace("_", "-")
        screen.say("model.missing", missing=packages, install=model.INSTALL)
        return Outcome("not run")

    from pydoc_data.topics import topics  # the text of Python's help(), on every installation

    device = measure.device_here()
    names = ("tilewise", "eager")
    screen.announce("model.starts")
    with screen.progress() as progress:
        task = progress.add_task(screen.text("model.loading"), total=None)
        lm = model.LanguageModel(device)
        prompt = lm.read(topics["typesseq"], PROMPT_TOKENS)
        written = {}
        for name in names:
            described = screen.text("model.progress", algorithm=name)
            progress.update(task, description=described, total=NEW_TOKENS + 1, completed=0)
            written[name] = lm.continue_greedily(
                prompt, NEW_TOKENS, name, on_token=lambda: progress.advance(task)
            )

    screen.say("model.intro", prompt=prompt.shape[1], new=NEW_TOKENS, device=device_name(device))
    rows = [
        [name, size(written[name].peak_bytes), time_of(written[name].seconds)] for name in names
    ]
    columns = ("model.attention", "model.peak", "model.time")
    screen.table([screen.text(column) for column in columns], rows)
    ours, standard = written["tilewise"], written["eager"]
    screen.say("model.prompt")
    screen.line(lm.text_of(prompt[0, -24:]))
    screen.say("model.continuation")
    screen.line(ours.text)

    difference = largest_difference(ours.logits, standard.logits)
    passed = ours.tokens == standard.tokens and difference <= LOGIT_TOLERANCE
    screen.check(
        passed,
        "model.check",
        new=NEW_TOKENS,
        difference=scientific(difference),
        tolerance=scientific(LOGIT_TOLERANCE),
    )
    return Outcome("passed" if passed else "failed")


DEMONSTRATIONS = (online_softmax, forward, backward, memory, language_model)


# ------------------------------------------------------------------ shared by the above


def draw(n: int, d: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    device = measure.device_here()
    return [
        torch.randn(n, d, generator=generator, dtype=torch.float64).to(device) for _ in range(3)
    ]


def attention_of_one_head(Q: Tensor, K: Tensor, V: Tensor, causal: bool) -> Tensor:
    """tilewise.attention on (n, d): a batch of one with one head in its layout (B, S, H, D)."""
    q, k, v = (x[None, :, None] for x in (Q, K, V))
    return tilewise.attention(q, k, v, causal=causal)[0, :, 0]


def largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def judged(screen: Screen, differences: list[float]) -> Outcome:
    # A NaN must not pass, and max() may lose one.
    passed = all(difference <= EXACT for difference in differences)
    screen.check(
        passed,
        "check",
        difference=scientific(max(differences)),
        tolerance=scientific(EXACT),
    )
    return Outcome("passed" if passed else "failed")


def name_of(screen: Screen, algorithm: str) -> str:
    return algorithm if algorithm == "tilewise" else screen.text(algorithm)


def yes_no(screen: Screen, answer: bool) -> str:
    return screen.text("yes" if answer else "no")


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def scientific(x: float) -> str:
    return f"{x:.1e}"


def size(count: int | None) -> str:
    """4096 → 4 KiB."""
    if count is None:
        return "—"
    value, units = float(max(count, 0)), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.0f} {units[0]}"


def time_of(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
