"""Kernels launched by the CUDA driver itself, with the parameters that an earlier launch left.

Triton's launcher makes the parameters of every launch anew: it takes tuples apart, encodes descriptors and
looks each argument over. Where launches differ in addresses alone, once is enough. What it hands to the
driver is not derived here but read: it launches into a stream that is being captured, where nothing runs,
on made-up addresses, and the graph that comes of it holds the bytes. Two such launches tell which of them
are addresses.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    addressof,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_uint64,
    c_void_p,
)
from typing import Any, NamedTuple

# Launches a kernel by Triton's launcher: on a stream, and with these addresses of tensors.
Launch = Callable[[int, Sequence[int]], None]

_NON_BLOCKING, _THREAD_LOCAL = 1, 1
_INVALID_VALUE, _INVALID_CONTEXT = 1, 201
# Tensor maps are laid at multiples of it.
_ALIGNMENT = 64


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    )


class _Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("parameters", POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cuGraphGetNodes": (c_void_p, POINTER(c_void_p), POINTER(c_size_t)),
    "cuGraphKernelNodeGetParams_v2": (c_void_p, POINTER(_Node)),
    "cuGraphDestroy": (c_void_p,),
    "cuFuncGetParamInfo": (c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t)),
    "cuLaunchKernelEx": (POINTER(_Config), c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
}


class Driver:
    """Functions of libcuda, called by their names.

    Raises:
        RuntimeError: the library lacks one of them; and from a call, with the driver's words, that failed.
    """

    def __init__(self, library: Any) -> None:
        self.functions = {}
        for name, types in _FUNCTIONS.items():
            function = getattr(library, name, None)
            if function is None:
                raise RuntimeError(f"the CUDA driver has no {name}")
            function.argtypes, function.restype = types, c_int
            self.functions[name] = function
        # What it is given has the right types, and to look each time takes as long as the call.
        self.functions["cuLaunchKernelEx"].argtypes = None

    def __call__(self, name: str, *arguments: Any) -> None:
        self.check(name, self.functions[name](*arguments))

    def check(self, name: str, code: int) -> None:
        if code:
            text = c_char_p()
            self.functions["cuGetErrorString"](code, byref(text))
            words = (text.value or b"unknown error").decode()
            raise RuntimeError(f"{name}: {words} (CUDA error {code})")


@functools.cache
def load() -> Driver:
    """The driver of this machine. Raises a RuntimeError where there is none, or one before CUDA 12.4."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"no CUDA driver: {error}") from error
    return Driver(library)


class Launcher:
    """Launches kernels, one after the other, on a stream of the current device.

    Args:
        stream: its number.
        launches: each of one kernel, which needs nothing but a grid, blocks and shared memory.
        remainders: for each tensor whose address they get, what that is modulo 16.

    Raises:
        RuntimeError: the driver fails, or a launch leaves something else than one kernel whose parameters
            are constants and addresses.
    """

    def __init__(
        self, driver: Driver, stream: int, launches: Sequence[Launch], remainders: Sequence[int]
    ) -> None:
        self._driver = driver
        self._launch = driver.functions["cuLaunchKernelEx"]
        self._context = c_void_p()
        driver("cuCtxGetCurrent", byref(self._context))
        kernels = [_read(driver, launch, remainders) for launch in launches]
        places = {p for kernel in kernels for _, held in kernel.parameters for p in held.values()}
        # What kernels read their parameters from is the same in every call, so calls take turns.
        self._lock = threading.Lock()
        self._places = sorted(places)
        self._addresses: Any = (c_uint64 * len(places))()
        self._words: list[tuple[c_uint64, int]] = []
        self._memory: list[Any] = []
        self._arguments = [self._prepared(kernel, stream) for kernel in kernels]

    def __call__(self, addresses: Sequence[int]) -> None:
        """On tensors at these addresses. Raises a RuntimeError where CUDA fails."""
        filled = [addresses[tensor] + offset for tensor, offset in self._places]
        with self._lock:
            self._addresses[:] = filled
            for word, number in self._words:
                word.value = filled[number]
            for arguments in self._arguments:
                if code := self._launch(*arguments):
                    self._failed(code, arguments)

    def _failed(self, code: int, arguments: tuple[Any, ...]) -> None:
        if code == _INVALID_CONTEXT:  # a thread that has not used the device yet
            self._driver("cuCtxSetCurrent", self._context)
            code = self._launch(*arguments)
        self._driver.check("cuLaunchKernelEx", code)

    def _prepared(self, kernel: _Kernel, stream: int) -> tuple[Any, ...]:
        """The arguments of cuLaunchKernelEx."""
        pointers = (c_void_p * len(kernel.parameters))()
        for i, (value, held) in enumerate(kernel.parameters):
            numbers = {at: self._places.index(place) for at, place in held.items()}
            if len(value) == 8 and numbers:
                pointers[i] = addressof(self._addresses) + 8 * numbers[0]
                continue
            memory = _aligned(value)
            self._memory.append(memory)
            self._words += [(c_uint64.from_buffer(memory, at), n) for at, n in numbers.items()]
            pointers[i] = addressof(memory)
        config = _Config(*kernel.sides, stream)
        return byref(config), c_void_p(kernel.function), pointers, None


def _aligned(value: bytes) -> Any:
    memory = (c_char * (len(value) + _ALIGNMENT - 1))()
    copy = (c_char * len(value)).from_buffer(memory, -addressof(memory) % _ALIGNMENT)
    copy.raw = value
    return copy


# ------------------------------------------------------------------ what a launch leaves


class _Kernel(NamedTuple):
    """A launch: the function's number; its grid, block and bytes of shared memory; and the bytes of each
    parameter, with the tensor and the byte in it that an 8-byte word at some byte is the address of."""

    function: int
    sides: tuple[Any, ...]
    parameters: list[tuple[bytes, dict[int, tuple[int, int]]]]


def _read(driver: Driver, launch: Launch, remainders: Sequence[int]) -> _Kernel:
    made_up = _made_up(remainders)
    kernels = [_captured(driver, launch, addresses) for addresses in made_up]
    values = zip(*([value for value, _ in kernel.parameters] for kernel in kernels), strict=True)
    parameters = [(one, _addresses_in((one, other), made_up)) for one, other in values]
    if not any(held for _, held in parameters):
        raise RuntimeError("no parameter of a kernel is an address")
    return kernels[0]._replace(parameters=parameters)


# Of made-up addresses, the bits up to here are alike, and those above number the tensor.
_NUMBERED = 40
_MOST = 126


def _made_up(remainders: Sequence[int]) -> tuple[list[int], list[int]]:
    """Addresses of 48 bits, twice: those of one tensor differ in every bit but the last four."""
    if len(remainders) > _MOST:
        raise RuntimeError(f"more than {_MOST} tensors: {len(remainders)}")
    one = [(i + 1 << _NUMBERED) + 0x55_5555_5550 for i in range(len(remainders))]
    other = [address ^ 0xFFFF_FFFF_FFF0 for address in one]
    return (
        [address + r for address, r in zip(one, remainders, strict=True)],
        [address + r for address, r in zip(other, remainders, strict=True)],
    )


def _addresses_in(
    values: tuple[bytes, bytes], made_up: tuple[list[int], list[int]]
) -> dict[int, tuple[int, int]]:
    """Of a parameter, as two launches left it: at which bytes there is an address of what."""
    held = {}
    for at in range(0, len(values[0]), 8):
        one, other = (int.from_bytes(value[at : at + 8], sys.byteorder) for value in values)
        if one == other:
            continue
        tensor = (one >> _NUMBERED) - 1
        offset = one - made_up[0][tensor] if 0 <= tensor < len(made_up[0]) else -1
        if offset < 0 or other != made_up[1][tensor] + offset:
            raise RuntimeError(f"neither a constant nor an address: {one:#x} and {other:#x}")
        held[at] = (tensor, offset)
    return held


def _captured(driver: Driver, launch: Launch, addresses: Sequence[int]) -> _Kernel:
    stream, graph = c_void_p(), c_void_p()
    driver("cuStreamCreate", byref(stream), _NON_BLOCKING)
    try:
        driver("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
        try:
            launch(stream.value or 0, addresses)
        finally:
            driver("cuStreamEndCapture", stream, byref(graph))
        return _only_kernel(driver, graph)
    finally:
        if graph:
            driver("cuGraphDestroy", graph)
        driver("cuStreamDestroy_v2", stream)


def _only_kernel(driver: Driver, graph: c_void_p) -> _Kernel:
    count, nodes, node = c_size_t(2), (c_void_p * 2)(), _Node()
    driver("cuGraphGetNodes", graph, nodes, byref(count))
    if count.value != 1:
        raise RuntimeError("a launch left no kernel, or more than one node")
    driver("cuGraphKernelNodeGetParams_v2", nodes[0], byref(node))
    if not (node.function and node.parameters):
        raise RuntimeError("a launch left a kernel without a function or parameters")
    sizes = _parameter_sizes(driver, node.function)
    values = [ctypes.string_at(node.parameters[i], size) for i, size in enumerate(sizes)]
    sides = (tuple(node.grid), tuple(node.block), node.shared_bytes)
    return _Kernel(node.function, sides, [(value, {}) for value in values])


def _parameter_sizes(driver: Driver, function: int) -> list[int]:
    sizes: list[int] = []
    offset, size = c_size_t(), c_size_t()
    query = driver.functions["cuFuncGetParamInfo"]
    while not (code := query(function, len(sizes), byref(offset), byref(size))):
        sizes.append(size.value)
    if code != _INVALID_VALUE:  # there is none of that number
        driver.check("cuFuncGetParamInfo", code)
    return sizes
