"""Replays launched by the CUDA driver: on a stand-in for it, to which C's types and pointers are passed."""

import ctypes
import gc
import itertools
import threading
import time
import weakref
from ctypes import CFUNCTYPE, addressof, c_char_p, c_float, c_int, c_uint8, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tilewise.kernels import driver, replay

STREAM, FUNCTION = 0x7F00_0000_0011, 0x7F00_0000_0022
MAP_BYTES = 128


class Launched(NamedTuple):
    """What the driver was asked for."""

    stream: int
    function: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    parameters: list[bytes]


class Library:
    """Has the functions of libcuda that are used; launches are noted, or captured."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.sizes: dict[int, list[int]] = {}
        self.failing: dict[str, int] = {}  # codes by the name of a function
        self.nodes: dict[int, Launched] = {}
        self.graphs: dict[int, list[int]] = {}
        self.capturing: dict[int, list[int]] = {}
        self.context = threading.local()
        self.numbers = itertools.count(0x7F00_1000_0000, 16)
        self.streams: set[int] = set()
        self._kept: list[Any] = []
        self._current = 0xC
        self._words = ctypes.create_string_buffer(b"what went wrong")
        for name, types in driver._FUNCTIONS.items():
            setattr(self, name, CFUNCTYPE(c_int, *types)(self._function(name)))

    def _function(self, name: str) -> Any:
        does = getattr(self, f"_{name}")
        return lambda *arguments: self.failing.get(name) or does(*arguments) or 0

    def nothing_is_left(self) -> bool:
        return not (self.graphs or self.capturing or self.streams)

    def launch(self, launched: Launched) -> None:
        """What both launchers end in."""
        if launched.stream in self.capturing:
            number = next(self.numbers)
            self.nodes[number] = launched
            self.capturing[launched.stream].append(number)
        else:
            self.launched.append(launched)

    def _cuGetErrorString(self, code: int, text: Any) -> None:
        text[0] = c_char_p(addressof(self._words)) if code < 1000 else None

    def _cuCtxGetCurrent(self, context: Any) -> None:
        context[0] = self._current

    def _cuCtxSetCurrent(self, context: int) -> None:
        assert context == self._current
        self.context.is_set = True

    def _cuStreamCreate(self, stream: Any, flags: int) -> None:
        assert flags == 1
        stream[0] = next(self.numbers)
        self.streams.add(stream[0])

    def _cuStreamDestroy_v2(self, stream: int) -> None:
        self.streams.remove(stream)

    def _cuStreamBeginCapture_v2(self, stream: int, mode: int) -> None:
        assert mode == 1
        assert stream in self.streams
        self.capturing[stream] = []

    def _cuStreamEndCapture(self, stream: int, graph: Any) -> None:
        graph[0] = next(self.numbers)
        self.graphs[graph[0]] = self.capturing.pop(stream)

    def _cuGraphGetNodes(self, graph: int, nodes: Any, count: Any) -> None:
        found = self.graphs[graph][: count[0]]
        count[0] = len(found)
        for i, number in enumerate(found):
            nodes[i] = number

    def _cuGraphKernelNodeGetParams_v2(self, number: int, node: Any) -> None:
        launched = self.nodes[number]
        memory = [ctypes.create_string_buffer(p, len(p)) for p in launched.parameters]
        pointers = (c_void_p * len(memory))(*map(addressof, memory))
        self._kept += [memory, pointers]
        node[0].function = launched.function
        node[0].grid, node[0].block = launched.grid, launched.block
        node[0].shared_bytes = launched.shared_bytes
        node[0].parameters = pointers

    def _cuGraphDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    def _cuFuncGetParamInfo(self, function: int, index: int, offset: Any, size: Any) -> int:
        sizes = self.sizes[function]
        if index >= len(sizes):
            return 1
        offset[0], size[0] = 0, sizes[index]
        return 0

    def _cuLaunchKernelEx(self, config: Any, function: int, pointers: Any, extra: Any) -> int:
        if threading.current_thread() is not threading.main_thread() and not hasattr(
            self.context, "is_set"
        ):
            return 201
        c = config[0]
        if c.attribute_count or c.attributes or extra:
            return 1
        parameters = []
        for i, size in enumerate(self.sizes[function]):
            assert size != MAP_BYTES or pointers[i] % 64 == 0
            parameters.append(ctypes.string_at(pointers[i], size))
            time.sleep(0)  # other threads may write now, if they may
        sides = (tuple(c.grid), tuple(c.block), c.shared_bytes)
        self.launch(Launched(c.stream or 0, function, *sides, parameters))
        return 0


class Descriptor:
    def __init__(self, base: Any, rank: int) -> None:
        self.base, self.rank = base, rank


class Kernel:
    """As Triton compiles one: tuples are taken apart, descriptors encoded."""

    packed_metadata = (4, 1, 100_000)

    def __init__(self, library: Library, number: int = 0, **metadata: Any) -> None:
        self.library, self.function = library, FUNCTION + number
        self.metadata = SimpleNamespace(**(replay._PLAIN | metadata))
        self.by_triton = 0

    def run(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any
    ) -> None:
        self.by_triton += 1
        assert (function, packed) == (self.function, self.packed_metadata)
        parameters = [*self.parameters(rest[3:]), bytes(8), bytes(8)]
        self.library.sizes[function] = [len(p) for p in parameters]
        self.library.launch(
            Launched(stream, function, (x, y, z), (32 * packed[0], 1, 1), packed[2], parameters)
        )

    def parameters(self, argument: Any) -> list[bytes]:
        if isinstance(argument, tuple):
            return [p for part in argument for p in self.parameters(part)]
        if isinstance(argument, Descriptor):
            return [*self.map(argument), bytes(4) * argument.rank]
        if argument is None:
            return []
        if hasattr(argument, "data_ptr"):
            argument = argument.data_ptr()
        return [bytes(c_uint8(argument)) if argument < 256 else bytes(c_uint64(argument))]

    def map(self, descriptor: Descriptor) -> list[bytes]:
        address = bytes(c_uint64(descriptor.base.data_ptr()))
        return [bytes([7] * 16) + address + bytes([9] * (MAP_BYTES - 24))]


class Struct(NamedTuple):
    data: Any
    stride: int
    other: Any = None


@pytest.fixture
def library(monkeypatch):
    library = Library()
    driver.load.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield library
    driver.load.cache_clear()


def attention_like(*kernels):
    """Launches as backends do: structs, descriptors, views, an address that is always the same."""
    counter = torch.zeros(1)

    def function(q, k):
        out, sums = torch.empty_like(q), q.new_empty(7, dtype=torch.float64)
        for i, kernel in enumerate(kernels):
            arguments = (
                Struct(q, 7),
                Descriptor(k[4:], 4),
                Struct(Struct(out, 1), 2, Struct(sums, 3)),
                Descriptor(q, 3),
                (counter, 12345678901 + i),
                k,
            )
            replay.note(kernel, 13 + i, arguments)
        return out, sums, q.new_empty(0)

    return function


def operands():
    return torch.randn(8), torch.randn(9)


def replayed(kernels):
    _, again = replay.recorded(attention_like(*kernels), STREAM, *operands())
    again(*operands())
    return again


def test_the_driver_is_given_what_triton_gives_it(library):
    kernels = [Kernel(library, i) for i in range(3)]
    again = replayed(kernels)
    assert library.nothing_is_left()
    done = [kernel.by_triton for kernel in kernels]
    assert done == [3, 3, 3]  # the replay, and twice into a graph
    for _ in range(3):
        given = operands()
        library.launched.clear()
        out, sums, nothing = again(*given)
        assert [kernel.by_triton for kernel in kernels] == done
        direct = library.launched.copy()
        library.launched.clear()
        again._launch_by_triton([t.data_ptr() for t in (*given, out, sums)])
        done = [kernel.by_triton for kernel in kernels]
        assert direct == library.launched
        assert [launch.grid for launch in direct] == [(13 + i, 1, 1) for i in range(3)]
        assert all(launch.stream == STREAM for launch in direct)
        assert out.shape == given[0].shape
        assert (sums.shape, sums.dtype, nothing.numel()) == ((7,), torch.float64, 0)


def test_threads_do_not_mix_their_addresses(library):
    kernels = [Kernel(library, i) for i in range(2)]
    again = replayed(kernels)
    library.launched.clear()
    calls: list[set[int]] = []

    def work():
        for _ in range(30):
            given = operands()
            out, sums, _ = again(*given)
            calls.append((given, out, sums))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    direct = library.launched.copy()
    assert len(direct) == 2 * len(calls) == 240
    library.launched.clear()
    for (q, k), out, sums in calls:
        again._launch_by_triton([t.data_ptr() for t in (q, k, out, sums)])
    assert sorted(direct) == sorted(library.launched)
    # A call's kernels come one after the other.
    assert all(
        a.parameters[:1] == b.parameters[:1] for a, b in zip(*[iter(direct)] * 2, strict=True)
    )


@pytest.mark.parametrize(("code", "words"), [(700, "what went wrong"), (1234, "unknown error")])
def test_an_error_of_a_launch_is_raised(library, code, words):
    kernel = Kernel(library)
    again = replayed([kernel])
    library.failing["cuLaunchKernelEx"] = code
    with pytest.raises(RuntimeError, match=f"cuLaunchKernelEx: {words} .CUDA error {code}"):
        again(*operands())
    library.failing.clear()
    library.launched.clear()
    again(*operands())
    assert len(library.launched) == 1
    assert kernel.by_triton == 3


class Scrambled(Kernel):
    def map(self, descriptor):
        (value,) = super().map(descriptor)
        return [value[:16] + bytes(b ^ 0x55 for b in value[16:])]


class Counting(Kernel):
    """A parameter that is neither a constant nor an address."""

    def parameters(self, argument):
        found = super().parameters(argument)
        return [*found, bytes(c_uint8(self.by_triton))] if argument is None else found


class Twice(Kernel):
    def run(self, *arguments):
        super().run(*arguments)
        super().run(*arguments)


class Failing(Kernel):
    def run(self, *arguments):
        if arguments[3] != STREAM:
            raise RuntimeError("no memory at this address")
        super().run(*arguments)


class Silent(Kernel):
    def run(self, *arguments):
        if arguments[3] == STREAM:
            super().run(*arguments)


@pytest.mark.parametrize(
    "kernel",
    [
        Scrambled,
        Counting,
        Twice,
        Failing,
        Silent,
        *(lambda library, name=name: Kernel(library, **{name: 2}) for name in replay._PLAIN),
    ],
)
def test_what_is_not_understood_is_left_to_triton(library, kernel):
    kernels = [Kernel(library, 1), kernel(library)]
    again = replayed(kernels)
    assert library.nothing_is_left()
    before = [k.by_triton for k in kernels]
    library.launched.clear()
    again(*operands())
    assert all(k.by_triton > n for k, n in zip(kernels, before, strict=True))
    assert {launch.stream for launch in library.launched} == {STREAM}


@pytest.mark.parametrize("name", sorted(driver._FUNCTIONS))
def test_a_driver_that_lacks_a_function_is_left_alone(library, name):
    delattr(library, name)
    check_left_to_triton(library)


# Of those that are called before anything is launched.
@pytest.mark.parametrize(
    "name",
    sorted({*driver._FUNCTIONS} - {"cuGetErrorString", "cuCtxSetCurrent", "cuLaunchKernelEx"}),
)
def test_a_driver_that_fails_is_left_alone(library, name):
    library.failing[name] = 999
    check_left_to_triton(library)


def test_a_driver_that_knows_of_no_parameters_is_left_alone(library):
    library.failing["cuFuncGetParamInfo"] = 1  # as for a number that there is none of
    check_left_to_triton(library)


def check_left_to_triton(library):
    kernel = Kernel(library)
    again = replayed([kernel])
    before = kernel.by_triton
    library.launched.clear()
    again(*operands())
    assert kernel.by_triton == before + 1
    assert len(library.launched) == 1


def test_without_a_driver_triton_launches(library, monkeypatch):
    def missing(name):
        raise OSError(f"{name}: no such file")

    driver.load.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    kernel = Kernel(library)
    again = replayed([kernel])
    again(*operands())
    assert kernel.by_triton == 2


def test_nothing_is_found_out_while_a_graph_is_captured(library, monkeypatch):
    kernel = Kernel(library)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    again = replayed([kernel])
    assert kernel.by_triton == 1
    again(*operands())
    assert kernel.by_triton == 2
    capturing[0] = False
    again(*operands())
    assert kernel.by_triton == 5
    capturing[0] = True
    again(*operands())
    assert kernel.by_triton == 5


def test_no_memory_of_the_recorded_call_is_kept(library):
    memory = [(c_float * n)() for n in (8, 9)]
    tensors = [torch.frombuffer(m, dtype=torch.float32) for m in memory]
    kept = [weakref.ref(m) for m in memory]
    _, again = replay.recorded(attention_like(Kernel(library)), STREAM, *tensors)
    again(*tensors)
    again(*operands())
    del memory, tensors
    gc.collect()
    assert [m() for m in kept] == [None, None]
