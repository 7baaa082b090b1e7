"""How ``tilewise bench train`` measures training steps of GPT-2 with different attentions.

At each length one model is trained by all of them in turn, so what a step takes differs by the attention
alone. At the shortest length each also trains a model of its own, from the same weights on the same
tokens, and its losses must be those of the standard form.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise.cli.bench_cpu import one_thread
from tilewise.cli.gpt2 import GPT2, SMALL, Attention, Shape
from tilewise.cli.gpu_cases import Case, make_inputs
from tilewise.cli.gpu_sides import PEERS, Side, missing_peers, reason
from tilewise.cli.measure import dtype_on, peak_memory, standard
from tilewise.tuning.timing import host_medians

# The order in which they are shown.
STANDARD, OURS = "standard", "tilewise"
COMPARED = (STANDARD, "SDPA", "FA3", OURS)
SEED = 0
# Losses that are compared.
STEPS = 20
LEARNING_RATE = 1e-3
# Largest |loss − standard's| / standard's of a step.
TOLERANCE = {torch.bfloat16: 1e-3, torch.float32: 1e-5}
OUT_OF_MEMORY = "out of memory"

Step = Callable[[], object]


class Sizes(NamedTuple):
    """What is trained: a step has that many tokens at each length, and is timed for about that long."""

    shape: Shape
    tokens: int
    lengths: tuple[int, ...]
    milliseconds: float

    def batch(self, length: int) -> int:
        return max(1, self.tokens // length)


USUAL = Sizes(SMALL, tokens=16384, lengths=(1024, 4096, 16384), milliseconds=3000.0)
QUICK = Sizes(Shape(2, 2, 64, 256), tokens=256, lengths=(64, 128), milliseconds=100.0)


class Outcome(NamedTuple):
    """What came of an attention at a length.

    Attributes:
        batch: sequences of a step; 0 if there was no room for one.
        peak_bytes: the most that a step had in memory, weights and the optimizer's state included; None
            where the system does not say.
        losses: of the first steps, where they are compared.
        difference: the largest relative difference to the standard form's.
        wrong: whether that is more than rounding makes.
        reason: why there is no figure.
    """

    attention: str
    length: int
    batch: int
    milliseconds: float | None = None
    peak_bytes: int | None = None
    losses: tuple[float, ...] = ()
    difference: float | None = None
    wrong: bool = False
    reason: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        if self.milliseconds is None:
            return None
        return 1e3 * self.batch * self.length / self.milliseconds


def run_all(
    sizes: Sizes, device: torch.device, fa3: Path | None, say: Callable[[str], object]
) -> Iterator[list[Outcome]]:
    """The outcomes at each length.

    Args:
        fa3: a folder with FlashAttention-3's binary.
        say: is told what is missing and what is done.
    """
    missing = missing_peers(fa3, COMPARED)
    for name, why in missing.items():
        say(f"without {name}: {why}")
    with one_thread() if device.type == "cpu" else nullcontext():
        for length in sizes.lengths:
            attentions = make_attentions(sizes, length, missing)
            say(f"n = {length}: {', '.join(attentions)}")
            outcomes = measured(sizes, length, attentions, device)
            if length == min(sizes.lengths):
                say(f"n = {length}: losses of {STEPS} steps")
                outcomes = compared(sizes, outcomes, attentions, device)
            yield outcomes


def make_attentions(
    sizes: Sizes, length: int, missing: Collection[str] = ()
) -> dict[str, Attention]:
    """Causal attention by each name that is not missing."""
    heads = sizes.shape.heads
    case = Case(
        *("train", sizes.batch(length), length, heads, heads, sizes.shape.width // heads), "causal"
    )
    inputs = make_inputs(case, lambda *shape: torch.empty(shape, device="meta"))  # shapes, no more
    return {
        STANDARD: functools.partial(standard, causal=True),
        **{
            name: batch_first(PEERS[name](case, inputs))
            for name in COMPARED
            if name in PEERS and name not in missing
        },
        OURS: functools.partial(tilewise.attention, causal=True),
    }


def batch_first(side: Side) -> Attention:
    """A side as a function of (B, S, H, D)."""
    if not side.heads_first:
        return side.attend

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return side.attend(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    return attend


# ------------------------------------------------------------------ a step


class Training:
    """A model and its optimizer."""

    def __init__(self, sizes: Sizes, length: int, device: torch.device) -> None:
        self._model = GPT2(sizes.shape, length, device, SEED)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), fused=True
        )
        self._device = device

    def step(self, tokens: Tensor, attention: Attention) -> Tensor:
        """The loss on tokens (B, S + 1) before the step."""
        bfloat16 = dtype_on(self._device.type) == torch.bfloat16
        try:
            with torch.autocast(self._device.type, torch.bfloat16, enabled=bfloat16):
                logits = self._model(tokens[:, :-1], attention)
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            self._optimizer.step()
            return loss.detach()
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    @property
    def bytes(self) -> int:
        """Of the weights and the optimizer's state."""
        weights = list(self._model.parameters())
        state = (t for kept in self._optimizer.state.values() for t in kept.values())
        return sum(t.nbytes for t in (*weights, *state))


def draw_tokens(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Sequences (batch, length + 1), each a phrase of 8 tokens said over and over.

    The phrases' tokens are 64 of the vocabulary. So there is something to learn within a few steps: which
    tokens there are, and which of them a sequence has, for which it takes attention.
    """
    phrases = torch.randint(64, (batch, 8), generator=generator)
    return phrases.repeat(1, length // 8 + 1)[:, : length + 1]


# ------------------------------------------------------------------ time and memory


def measured(
    sizes: Sizes, length: int, attentions: Mapping[str, Attention], device: torch.device
) -> list[Outcome]:
    """Memory of each attention's step, then the time of all that run, in turn."""
    training = Training(sizes, length, device)
    generator = torch.Generator().manual_seed(SEED)
    tokens = draw_tokens(sizes.batch(length), length, generator).to(device)
    outcomes = {name: fitted(training, tokens, name, attentions[name]) for name in attentions}
    ready: dict[str, Step] = {
        name: functools.partial(training.step, tokens[: outcome.batch], attentions[name])
        for name, outcome in outcomes.items()
        if not outcome.reason
    }
    try:
        times = host_medians(list(ready.values()), sizes.milliseconds)
    except Exception as error:  # what a driver says
        outcomes |= {name: outcomes[name]._replace(reason=reason(error)) for name in ready}
    else:
        for name, milliseconds in zip(ready, times, strict=True):
            outcomes[name] = outcomes[name]._replace(milliseconds=milliseconds)
    return list(outcomes.values())


def fitted(training: Training, tokens: Tensor, name: str, attention: Attention) -> Outcome:
    """The memory of a step on all sequences, or as many as there is room for: half, a quarter, …"""
    batch, length = tokens.shape[0], tokens.shape[1] - 1
    while batch > 0:
        step = functools.partial(training.step, tokens[:batch], attention)
        try:
            step()  # compiles, and makes the optimizer's state
            with peak_memory(tokens.device.type) as peak:
                step()
            total = None if peak.bytes is None else training.bytes + peak.bytes
            return Outcome(name, length, batch, peak_bytes=total)
        except torch.OutOfMemoryError:
            batch //= 2
        except Exception as error:  # whatever a kernel or a compiler comes up with
            return Outcome(name, length, batch, reason=reason(error))
        gc.collect()  # what the step had made is held by nothing now but, perhaps, by cycles
    return Outcome(name, length, 0, reason=OUT_OF_MEMORY)


# ------------------------------------------------------------------ losses


def compared(
    sizes: Sizes,
    outcomes: Sequence[Outcome],
    attentions: Mapping[str, Attention],
    device: torch.device,
) -> list[Outcome]:
    """The outcomes with losses, of as large a batch as there is room for with each that runs."""
    batch = min((outcome.batch for outcome in outcomes if not outcome.reason), default=0)
    found: list[Outcome] = []
    for outcome in outcomes:
        if not outcome.reason:
            attention = attentions[outcome.attention]
            try:
                losses = first_losses(sizes, outcome.length, batch, attention, device)
                outcome = outcome._replace(losses=losses)
            except Exception as error:
                outcome = outcome._replace(reason=reason(error))
        found.append(outcome)
    right = next(outcome.losses for outcome in found if outcome.attention == STANDARD)
    return [judged(outcome, right, device) for outcome in found]


def first_losses(
    sizes: Sizes, length: int, batch: int, attention: Attention, device: torch.device
) -> tuple[float, ...]:
    """The losses of a new model's first steps, each on new tokens."""
    training = Training(sizes, length, device)
    generator = torch.Generator().manual_seed(SEED)
    steps = (draw_tokens(batch, length, generator).to(device) for _ in range(STEPS))
    return tuple(float(training.step(tokens, attention)) for tokens in steps)


def judged(outcome: Outcome, right: Sequence[float], device: torch.device) -> Outcome:
    """The outcome with its difference to the right losses, if there are both."""
    if not outcome.losses or not right:
        return outcome
    pairs = zip(outcome.losses, right, strict=True)
    differences = [abs(loss - expected) / expected for loss, expected in pairs]
    # max() of numbers with a NaN among them is any of them.
    difference = max(differences) if all(map(math.isfinite, differences)) else math.inf
    wrong = difference > TOLERANCE[dtype_on(device.type)]
    return outcome._replace(difference=difference, wrong=wrong)
