"""Launches made again on other tensors.

A call from Python spends most of its time on what is equal in every call of its shape: tile sizes, strides,
which compiled kernel it is. `recorded` runs a function of tensors and notes what it allocates and launches;
the `Replay` that comes of it allocates and launches, and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
# From the addresses of inputs and allocations to an argument of a kernel.
_Fill = Callable[[list[int]], Any]


class Launch(NamedTuple):
    """A kernel that was launched: as Triton compiled it, how many programs, and its arguments."""

    compiled: Any
    programs: int
    arguments: tuple[Any, ...]


class _Memory(NamedTuple):
    """What is allocated: by torch.empty_strided."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Kernel(NamedTuple):
    """A launch whose arguments at some places are filled in."""

    compiled: Any
    programs: int
    arguments: list[Any]
    fills: list[tuple[int, _Fill]]


class Replay:
    """What a recorded function did, for inputs of the same shapes, strides, dtypes, device and alignment.

    Attributes:
        shares: whether it uses memory that is neither an input's nor allocated by it: a launch that is
            captured in a CUDA graph may not.
    """

    def __init__(self, recorder: _Recorder, results: Sequence[Tensor]) -> None:
        self.shares = False
        self._device = recorder.inputs[0].device
        self._memory = recorder.memory
        self._kernels = [self._kernel(launch, recorder.places) for launch in recorder.launches]
        # Each the number of an input or allocation, or what it always is.
        self._results = [
            recorder.places[id(t)][0] if id(t) in recorder.places else t for t in results
        ]

    def __call__(self, stream: int, *inputs: Tensor) -> list[Tensor]:
        """The results, computed on a stream (its number as CUDA has it) of the current device."""
        tensors = list(inputs)
        for shape, strides, dtype in self._memory:
            tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=self._device))
        addresses = [t.data_ptr() for t in tensors]
        for compiled, programs, fixed, fills in self._kernels:
            arguments = fixed.copy()
            for place, fill in fills:
                arguments[place] = fill(addresses)
            compiled.run(
                *(programs, 1, 1, stream, compiled.function, compiled.packed_metadata),
                *(None, None, None),
                *arguments,
            )
        return [tensors[t] if isinstance(t, int) else t for t in self._results]

    def _kernel(self, launch: Launch, places: dict[int, tuple[int, int]]) -> _Kernel:
        fills = []
        for place, argument in enumerate(launch.arguments):
            fill = self._fill(argument, places)
            if fill is not None:
                fills.append((place, fill))
        return _Kernel(launch.compiled, launch.programs, list(launch.arguments), fills)

    def _fill(self, argument: Any, places: dict[int, tuple[int, int]]) -> _Fill | None:
        """How an argument is made from addresses; None for one that is always the same."""
        if isinstance(argument, tuple):
            return self._fill_tuple([(part, self._fill(part, places)) for part in argument])
        tensor = getattr(argument, "base", argument)
        if not isinstance(tensor, Tensor):
            return None
        if id(tensor) not in places:
            self.shares = True
            return None
        index, offset = places[id(tensor)]
        if tensor is argument:
            return lambda addresses: addresses[index] + offset
        kind, others = type(argument), {**vars(argument), "base": None}

        def descriptor(addresses: list[int]) -> Any:
            new = object.__new__(kind)
            new.__dict__.update(others)
            new.base = _Address(addresses[index] + offset)
            return new

        return descriptor

    @staticmethod
    def _fill_tuple(parts: list[tuple[Any, _Fill | None]]) -> _Fill | None:
        filled = [fill for _, fill in parts if fill is not None]
        if not filled:
            return None
        first = parts[0][1]
        if len(filled) == 1 and first is not None:
            rest = tuple(part for part, _ in parts[1:])
            return lambda addresses: (first(addresses), *rest)
        return lambda addresses: tuple(
            part if fill is None else fill(addresses) for part, fill in parts
        )


class _Address:
    """What a descriptor of the tensor memory accelerator needs of a tensor."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Recorder(TorchDispatchMode):
    """Notes allocations, launches, and which tensors are views of which; anything else makes what is
    recorded `incomplete`."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.memory: list[_Memory] = []
        self.launches: list[Launch] = []
        # Of a tensor: the number of the input or allocation that it lies in, and at which byte.
        self.places = {id(t): (i, 0) for i, t in enumerate(inputs)}
        self.incomplete = False
        self._seen: list[Any] = []  # so that no id is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen.append(result)
        if func.overloadpacket in _ALLOCATIONS and result.device == self.inputs[0].device:
            self.places[id(result)] = (len(self.inputs) + len(self.memory), 0)
            self.memory.append(_Memory(tuple(result.shape), result.stride(), result.dtype))
        elif func.is_view and isinstance(result, Tensor) and id(args[0]) in self.places:
            index, offset = self.places[id(args[0])]
            skipped = result.storage_offset() - args[0].storage_offset()
            self.places[id(result)] = (index, offset + skipped * result.element_size())
        else:
            self.incomplete = True
        return result


_recorder: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


def recorded(
    function: Callable[..., Sequence[Tensor]], *inputs: Tensor
) -> tuple[Sequence[Tensor], Replay | None]:
    """What a function of tensors gives, and its replay; None where it did more than to allocate and launch."""
    inputs = tuple(t.detach() for t in inputs)  # one tensor given twice is two inputs
    recorder = _Recorder(inputs)
    with _recording(recorder), recorder:
        results = function(*inputs)
    known = all(id(t) in recorder.places or not t.numel() for t in results)
    if recorder.incomplete or not recorder.launches or not known:
        return results, None
    return results, Replay(recorder, results)


@contextmanager
def _recording(recorder: _Recorder) -> Iterator[None]:
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def note(compiled: Any, programs: int, arguments: tuple[Any, ...]) -> None:
    """Tells whoever records that a kernel was launched; `compiled` is None where it was interpreted."""
    recorder = _recorder.get()
    if recorder is None:
        return
    if compiled is None:
        recorder.incomplete = True
    else:
        recorder.launches.append(Launch(compiled, programs, arguments))
