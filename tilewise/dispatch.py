"""Which backend serves a problem, and why the ones before it do not."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

from tilewise.backends import hopper, reference, tiled, triton
from tilewise.spec import Problem

# The order is the policy: the first that can serve does. The last is O(n²) in memory and serves only
# when it is asked for by name.
BACKENDS: dict[str, ModuleType] = {
    "hopper": hopper,
    "triton": triton,
    "tiled": tiled,
    "reference": reference,
}
ON_REQUEST = "reference"


class Choice(NamedTuple):
    """The backend chosen for a call. Prints as a table.

    Attributes:
        backend: its name.
        config: how it will work: tile sizes and the like.
        rejected: name → reasons, of each backend that comes before it.
    """

    backend: str
    config: dict[str, Any]
    rejected: dict[str, list[str]]

    def __str__(self) -> str:
        config = ", ".join(f"{key}={value}" for key, value in self.config.items())
        lines = [("backend", self.backend), ("config", config or "—")]
        for name, reasons in self.rejected.items():
            lines += [(f"not {name}" if i == 0 else "", r) for i, r in enumerate(reasons)]
        width = max(len(left) for left, _ in lines)
        return "\n".join(f"{left:<{width}}  {right}" for left, right in lines)

    def __repr__(self) -> str:
        return str(self)


def backend(name: str) -> ModuleType:
    return BACKENDS[name]


def gradients_by(name: str, problem: Problem) -> str:
    """The backend whose kernels give the gradients of a problem that one serves: it may leave them to
    another."""
    left_to = getattr(BACKENDS[name], "gradients_left_to", None)
    return name if left_to is None else left_to(problem) or name


def explain(problem: Problem, requested: str | None = None) -> Choice:
    """`choose`, with the chosen backend's configuration."""
    choice = choose(problem, requested)
    return choice._replace(config=BACKENDS[choice.backend].config(problem))


def choose(problem: Problem, requested: str | None = None) -> Choice:
    """The backend asked for, or the first that can serve.

    Raises:
        ValueError: `requested` is unknown, or cannot serve: then with all of its reasons.
    """
    if requested is not None:
        if not isinstance(requested, str) or requested not in BACKENDS:
            known = ", ".join(map(repr, BACKENDS))
            raise ValueError(f"backend must be None or one of {known}, got {requested!r}")
        reasons = BACKENDS[requested].unsupported(problem)
        if reasons:
            listed = "".join(f"\n  - {reason}" for reason in reasons)
            raise ValueError(f"backend={requested!r} cannot serve this call:{listed}")
        return Choice(requested, {}, {})
    rejected: dict[str, list[str]] = {}
    for name, module in BACKENDS.items():
        reasons = module.unsupported(problem) or _declined(name, problem)
        if not reasons:
            return Choice(name, {}, rejected)
        rejected[name] = reasons
    raise ValueError(f"no backend can serve this call: {rejected}")


def _declined(name: str, problem: Problem) -> list[str]:
    """Why a backend that could serve leaves it to another unless it is asked for by name."""
    if name == ON_REQUEST:
        return ["serves only when asked for by name: it is O(n²) in memory"]
    declined = getattr(BACKENDS[name], "declined", None)
    return [] if declined is None else declined(problem)
