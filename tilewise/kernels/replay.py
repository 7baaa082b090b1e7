"""Launches made again on other tensors.

A call from Python spends most of its time on what is equal in every call of its shape: tile sizes, strides,
which compiled kernel it is. `recorded` runs a function of tensors and notes what it allocates and launches;
the `Replay` that comes of it allocates and launches, and does nothing else. At first through Triton's
launcher; from the second replay on the CUDA driver is called itself (driver.py).
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
_Fill = Callable[[Sequence[int]], Any]
# As torch.empty_strided on the current device, in half its time: what torch.compile allocates by.
_guards: Any = torch._C._dynamo.guards
_ALLOCATE = {"cpu": _guards._empty_strided_cpu, "cuda": _guards._empty_strided_cuda}
# Of the metadata of a kernel as Triton compiled it.
_PLAIN = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}


class Launch(NamedTuple):
    """A kernel that was launched: as Triton compiled it, how many programs, and its arguments."""

    compiled: Any
    programs: int
    arguments: tuple[Any, ...]


class _Memory(NamedTuple):
    """What is allocated."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Kernel(NamedTuple):
    """A launch whose arguments at some places are filled in."""

    compiled: Any
    programs: int
    arguments: list[Any]
    fills: list[tuple[int, _Fill]]

    @property
    def plain(self) -> bool:
        """Whether a launch needs nothing but a grid, blocks and shared memory."""
        metadata = self.compiled.metadata
        return all(getattr(metadata, name, None) == value for name, value in _PLAIN.items())

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        """By Triton's launcher."""
        arguments = self.arguments.copy()
        for place, fill in self.fills:
            arguments[place] = fill(addresses)
        self.compiled.run(
            *(self.programs, 1, 1, stream, self.compiled.function, self.compiled.packed_metadata),
            *(None, None, None),
            *arguments,
        )


class Replay:
    """What a recorded function did, for inputs of the same shapes, strides, dtypes, device and alignment,
    on the same stream.

    Attributes:
        shares: whether it uses memory that is neither an input's nor allocated by it: a launch that is
            captured in a CUDA graph may not.
    """

    def __init__(self, recorder: _Recorder, stream: int, results: Sequence[Tensor]) -> None:
        self.shares = False
        self._stream = stream
        self._allocate = _ALLOCATE[recorder.inputs[0].device.type]
        self._memory = recorder.memory
        self._kernels = [self._kernel(launch, recorder.places) for launch in recorder.launches]
        self._remainders = [t.data_ptr() % 16 for t in recorder.inputs] + [0] * len(self._memory)
        self._launch: Callable[[Sequence[int]], None] = self._first_launch
        # Of results that are neither inputs nor allocated, what they always are.
        self._constants = [t for t in results if id(t) not in recorder.places]
        numbers = {id(t): len(self._remainders) + i for i, t in enumerate(self._constants)}
        numbers |= {name: index for name, (index, _) in recorder.places.items()}
        self._results = [numbers[id(t)] for t in results]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The results; the stream's device is the current one."""
        allocate = self._allocate
        tensors = [*inputs, *[allocate(*memory) for memory in self._memory]]
        self._launch([t.data_ptr() for t in tensors])
        tensors += self._constants
        return [tensors[i] for i in self._results]

    def _first_launch(self, addresses: Sequence[int]) -> None:
        """By Triton; where nothing is being captured, it is found out how to do without from then on."""
        self._launch_by_triton(addresses)
        if not torch.cuda.is_current_stream_capturing():
            self._launch = self._launcher()

    def _launch_by_triton(self, addresses: Sequence[int]) -> None:
        for kernel in self._kernels:
            kernel.launch(self._stream, addresses)

    def _launcher(self) -> Callable[[Sequence[int]], None]:
        """The driver's launches, or Triton's of the same kernels where it cannot be told what those are."""
        from tilewise.kernels import driver

        if not all(kernel.plain for kernel in self._kernels):
            return self._launch_by_triton
        launches = [kernel.launch for kernel in self._kernels]
        try:
            return driver.Launcher(driver.load(), self._stream, launches, self._remainders)
        except RuntimeError:
            return self._launch_by_triton

    def _kernel(self, launch: Launch, places: dict[int, tuple[int, int]]) -> _Kernel:
        fills, arguments = [], list(launch.arguments)
        for place, argument in enumerate(launch.arguments):
            fill = self._fill(argument, places)
            if fill is not None:
                fills.append((place, fill))
                arguments[place] = None  # it holds memory of the caller
        return _Kernel(launch.compiled, launch.programs, arguments, fills)

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

        def descriptor(addresses: Sequence[int]) -> Any:
            new = object.__new__(kind)
            new.__dict__.update(others)
            new.base = _Address(addresses[index] + offset)
            return new

        return descriptor

    @staticmethod
    def _fill_tuple(parts: list[tuple[Any, _Fill | None]]) -> _Fill | None:
        if all(fill is None for _, fill in parts):
            return None
        parts = [(part if fill is None else None, fill) for part, fill in parts]
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
    function: Callable[..., Sequence[Tensor]], stream: int, *inputs: Tensor
) -> tuple[Sequence[Tensor], Replay | None]:
    """What a function of tensors gives, and its replay on a stream, which is the current one; None where it
    did more than to allocate and launch."""
    inputs = tuple(t.detach() for t in inputs)  # one tensor given twice is two inputs
    recorder = _Recorder(inputs)
    with _recording(recorder), recorder:
        results = function(*inputs)
    known = all(id(t) in recorder.places or not t.numel() for t in results)
    if recorder.incomplete or not recorder.launches or not known:
        return results, None
    return results, Replay(recorder, stream, results)


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
