"""Runs the Hopper backward kernels on a CPU: its own code, warpgroups as threads, memory as tensors.

Gluon has no interpreter. Here its functions are what they say in PyTorch, in float64: a kernel's Python runs
as it stands, its warpgroups in an order drawn at random wherever they wait for each other. Copies of the TMA
engine land when the dice say so, into memory that holds NaN until then; a product reads its operands when it
is issued and again when it is waited for, and they have to be the same. So a barrier that is passed too early
or never, a buffer that is overwritten while it is read, and a pair that is masked wrongly all show.

What it does not know: layouts, registers, the order in which threads of one warpgroup see memory.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import itertools
import random
import threading
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from tilewise.backends import hopper
from tilewise.backends import triton as triton_backend
from tilewise.kernels import (
    hopper_backward,
    hopper_backward_queries,
    hopper_backward_wide,
    replay,
)
from tilewise.results import Gradients, Result
from tilewise.spec import Problem

F64 = torch.float64
NAN = float("nan")


class Deadlock(AssertionError):
    pass


class Stopped(BaseException):
    """Ends a warpgroup when another one has failed."""


# ------------------------------------------------------------------ warpgroups


class Program:
    """The warpgroups of a program, of which one runs at a time, and the copies that are on their way."""

    def __init__(self, number: int, dice: random.Random) -> None:
        self.number, self.dice = number, dice
        self.copies: list[Callable[[], None]] = []
        self.turns: dict[int, Turn] = {}
        self._runs = threading.Semaphore(0)
        self._groups: list[Group] = []
        self.failure: BaseException | None = None

    def run(self, jobs: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self._groups = [Group(self, function, given) for function, given in jobs]
        while any(not group.done for group in self._groups):
            ready = [group for group in self._groups if not group.done and group.waits_for()]
            choices: list[Any] = [*ready, *self.copies]
            if not choices:
                self.failure = Deadlock("every warpgroup waits for another")
            else:
                chosen = self.dice.choice(choices)
                if chosen in self.copies:
                    self.copies.remove(chosen)
                    chosen()
                else:
                    self._resume(chosen)
            if self.failure:
                for group in self._groups:
                    if not group.done:
                        self._resume(group)
                raise self.failure
        assert not self.copies, "a copy that nobody waited for"

    def _resume(self, group: Group) -> None:
        group.runs.release()
        self._runs.acquire()

    def hand_back(self) -> None:
        self._runs.release()


class Group:
    current: Group

    def __init__(
        self, program: Program, function: Callable[..., None], given: tuple[Any, ...]
    ) -> None:
        self.program, self.runs, self.done = program, threading.Semaphore(0), False
        self.waits_for: Callable[[], bool] = lambda: True
        self.products: list[Product] = []
        self.stores: list[tuple[Tensor, Tensor]] = []
        self._function, self._given = function, given
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self.runs.acquire()
        try:
            self._check()
            with torch.no_grad():  # which a thread does not inherit
                self._function(*self._given)
            assert not self.products, "a product that was not waited for"
            assert not self.stores, "a store that was not waited for"
        except Stopped:
            pass
        except BaseException as error:
            self.program.failure = self.program.failure or error
        self.done = True
        self.program.hand_back()

    def _check(self) -> None:
        if self.program.failure:
            raise Stopped
        Group.current = self

    def pause(self, until: Callable[[], bool] = lambda: True) -> None:
        self.waits_for = until
        self.program.hand_back()
        self.runs.acquire()
        self._check()


class Barrier:
    """An mbarrier."""

    def __init__(self) -> None:
        self.phase, self.bytes = 0, 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self) -> None:
        assert self.pending > 0, "more arrivals than a barrier counts"
        self.pending -= 1
        self._complete()

    def expect(self, number: int) -> None:
        self.bytes += number
        self.arrive()

    def landed(self, number: int) -> None:
        self.bytes -= number
        assert self.bytes >= 0, "more bytes than were expected"
        self._complete()

    def _complete(self) -> None:
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase ^ 1, self.count

    def wait(self, phase: int) -> None:
        Group.current.pause(lambda: self.phase != phase)


class Turn:
    """A named barrier of two warpgroups."""

    def __init__(self) -> None:
        self.here: list[Group] = []
        self.generation = 0

    def arrive(self) -> int:
        mine = self.generation
        assert Group.current not in self.here, "twice at a barrier"
        self.here.append(Group.current)
        if len(self.here) == 2:
            self.here, self.generation = [], mine + 1
        return mine

    def sync(self) -> None:
        mine = self.arrive()
        Group.current.pause(lambda: self.generation > mine)


def named_barrier(kind: str, turn: int) -> None:
    group = Group.current
    barrier = group.program.turns.setdefault(turn, Turn())
    group.pause()
    barrier.sync() if kind == "sync" else barrier.arrive()


# ------------------------------------------------------------------ memory and products


class Memory:
    """Shared memory, or a part of it."""

    def __init__(self, t: Tensor) -> None:
        self.t = t

    shape = property(lambda self: self.t.shape)
    dtype = property(lambda self: self.t.dtype)

    def index(self, i: Any) -> Memory:
        return Memory(self.t[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        return Memory(self.t.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.t.permute(order))

    def load(self, layout: object) -> Tensor:
        Group.current.pause()
        return self.t.clone()

    def store(self, t: Tensor) -> None:
        self.t.fill_(NAN)
        Group.current.pause()
        self.t.copy_(t)


class Barriers:
    def __init__(self, count: int) -> None:
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.barriers[int(i)]


def allocate(dtype: object, shape: list[int], layout: object) -> Memory | Barriers:
    if dtype is torch.int64:
        return Barriers(shape[0])
    return Memory(torch.full(shape, NAN, dtype=F64))


class View:
    """What a descriptor describes."""

    dtype = F64

    def __init__(self, descriptor: Any) -> None:
        d = descriptor
        assert d.base.data_ptr() % 16 == 0
        size = d.base.element_size()
        assert all(step > 0 and step * size % 16 == 0 for step in d.strides[:-1])
        assert d.strides[-1] == 1
        self.shape, self.strides, self.block_shape = d.shape, d.strides, d.block_shape
        self.size, self.layout, self.base = size, d.layout, d.base

    def parts(self, at: Sequence[Any]) -> tuple[Tensor, tuple[slice, ...]]:
        """What lies inside, and where in a block. Addresses have 64 bits."""
        assert len(at) == len(self.shape) == len(self.block_shape)
        sizes, address = [], 0
        for i, n, step, block in zip(
            map(int, at), self.shape, self.strides, self.block_shape, strict=True
        ):
            assert 0 <= i < 2**31
            sizes.append(max(0, min(block, n - i)))
            address += i * step * self.size
        offset = self.base.storage_offset() + address % 2**64 // self.size
        inside = tuple(slice(0, n) for n in sizes)
        if 0 in sizes:
            return self.base.new_empty(sizes), inside
        # The stride of what there is one of means nothing, and may be too large for PyTorch.
        steps = [step if n > 1 else 0 for n, step in zip(sizes, self.strides, strict=True)]
        return self.base.as_strided(sizes, steps, offset), inside


def tma_load(view: View, at: Sequence[Any], full: Barrier, buffer: Memory) -> None:
    buffer.t.fill_(NAN)
    check_begin(view, at)
    part, inside = view.parts(at)

    def land() -> None:
        block = torch.zeros(view.block_shape, dtype=F64)
        block[inside] = part.double()
        buffer.t.copy_(block.view(buffer.t.shape))
        full.landed(block.numel() * view.size)

    group = Group.current
    group.program.copies.append(land)
    group.pause()


def check_begin(view: View, at: Sequence[Any]) -> None:
    """A GPU takes anything else for an illegal instruction."""
    assert at[-1] * view.size % 16 == 0, (
        "copies begin at multiples of 16 bytes along the last dimension"
    )


def tma_store(view: View, at: Sequence[Any], buffer: Memory) -> None:
    check_begin(view, at)
    part, inside = view.parts(at)
    part.copy_(buffer.t.view(view.block_shape)[inside])
    group = Group.current
    group.stores.append((buffer.t, buffer.t.clone()))
    group.pause()


def store_wait(pending: int) -> None:
    stores = Group.current.stores
    for now, then in stores:
        assert same(now, then), "overwritten while it was stored"
    stores.clear()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def held(operand: Memory | Tensor) -> Tensor:
    return operand.t.clone() if isinstance(operand, Memory) else operand


class Product:
    def __init__(self, a: Memory | Tensor, b: Memory | Tensor, sum: Tensor, use_acc: bool) -> None:
        self.operands, self.sum, self.use_acc = (a, b), sum, use_acc
        self.read = [held(operand) for operand in self.operands]
        self.finished = False

    def finish(self) -> None:
        for operand, then in zip(self.operands, self.read, strict=True):
            assert same(held(operand), then), "overwritten while a product read it"
        self.finished = True

    @property
    def value(self) -> Tensor:
        assert self.finished, "not waited for"
        product = self.read[0] @ self.read[1]
        return self.sum + product if self.use_acc else product


def mma(a: Any, b: Any, sum: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    assert isinstance(sum, Tensor), "a sum that is still on its way"
    product = Product(a, b, sum, use_acc)
    Group.current.products.append(product)
    Group.current.pause()
    return product


def mma_wait(pending: int, wanted: list[Product]) -> Tensor:
    group = Group.current
    group.pause()
    while len(group.products) > pending:
        group.products.pop(0).finish()
    (product,) = wanted
    return product.value


# ------------------------------------------------------------------ the language


class _Pointer:
    """To a number of a tensor's, or `at` many."""

    def __init__(self, t: Tensor, at: int | Tensor = 0) -> None:
        self.t, self.at = t, at

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.t, self.at + (offset if isinstance(offset, Tensor) else int(offset)))

    def store(self, numbers: Tensor, mask: Tensor) -> None:
        """Of one that is packed."""
        assert isinstance(self.at, Tensor)
        self.t.view(-1)[self.at[mask]] = numbers[mask].to(self.t.dtype)

    def load(self, mask: bool | Tensor = True, other: int = 0) -> Any:
        """A number; of floats, a tensor without dimensions; or many numbers."""
        strides = zip(self.t.shape, self.t.stride(), strict=True)
        extent = 1 + sum((n - 1) * step for n, step in strides)
        memory = self.t.as_strided((extent,), (1,))
        if isinstance(self.at, Tensor):
            wanted = torch.as_tensor(mask).expand(self.at.shape)
            assert ((self.at >= 0) & (self.at < extent))[wanted].all()
            return torch.where(wanted, memory[torch.where(wanted, self.at, 0)], other)
        assert not mask or 0 <= self.at < extent
        number = memory[self.at] if mask else torch.tensor(other)
        return number if self.t.is_floating_point() else Number(int(number))


def pointed(value: Any) -> Any:
    """A value whose tensors are pointers to them."""
    if isinstance(value, Tensor):
        return _Pointer(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(pointed, value))
    return value


def emulated_argument(value: Any) -> Any:
    return View(value) if isinstance(value, TensorDescriptor) else pointed(unwrapped(value))


def add_to(start: _Pointer, product: Tensor) -> None:
    """Into numbers that lie row by row, not as registers hold them."""
    start.t[start.at : start.at + product.numel()] += product.flatten()


def split_columns(product: Tensor) -> tuple[Tensor, Tensor]:
    columns = torch.arange(product.shape[1])
    return (columns & 6)[None, :], (columns & ~6)[None, :]


class Number(int):
    """A 32-bit number: one that does not fit is an error, and division rounds towards 0."""

    def __new__(cls, value: Any) -> Number:
        assert -(2**31) <= value < 2**31, f"{value} has more than 32 bits"
        return super().__new__(cls, value)

    def to(self, dtype: object) -> int:
        return int(self) if dtype is torch.int64 else self

    def __floordiv__(self, other: int) -> Number:
        quotient = abs(self) // abs(other)
        return Number(quotient if (self < 0) == (other < 0) else -quotient)

    def __mod__(self, other: int) -> Number:
        return Number(int(self) - int(self // other) * int(other))


def _closed(operation: str) -> None:
    """Makes an operation of two numbers give another."""
    plain = getattr(int, operation)

    def method(self: Number, other: Any) -> Any:
        result = plain(self, other)
        return result if result is NotImplemented else Number(result)

    setattr(Number, operation, method)


for _operation in ("add", "radd", "sub", "rsub", "mul", "rmul"):
    _closed(f"__{_operation}__")


def language(program: Callable[[], Program]) -> Any:
    def pick(condition: Any, a: Any, b: Any) -> Any:
        if isinstance(condition, Tensor):
            return torch.where(condition, a, b)
        return a if condition else b

    def least(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor):
            return a.clamp(max=b) if isinstance(b, int) else torch.minimum(a, b)
        return Number(min(a, b))

    def most(a: Any, b: Any) -> Any:
        if isinstance(a, Tensor):
            return a.clamp(min=b) if isinstance(b, int) else torch.maximum(a, b)
        return Number(max(a, b))

    return types.SimpleNamespace(
        constexpr=lambda x: x,
        program_id=lambda axis: Number(program().number),
        arange=lambda first, last, layout=None: torch.arange(first, last),
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=F64),
        where=pick,
        minimum=least,
        maximum=most,
        cdiv=lambda a, b: Number((a + b - 1) // b),
        abs=torch.abs,
        cast=lambda x, dtype: Number(x).to(dtype),
        load=lambda pointer, mask=True, other=0: pointer.load(mask, other),
        store=lambda pointer, numbers, mask: pointer.store(numbers, mask),
        sum=lambda x, axis: x.sum(axis),
        reshape=torch.reshape,
        expand_dims=torch.unsqueeze,
        zeros_like=torch.zeros_like,
        min=lambda x, axis: Number(int(x.min())),
        max=lambda x, axis: Number(int(x.max())),
        exp2=torch.exp2,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        allocate_shared_memory=allocate,
        static_range=range,
        warp_specialize=lambda jobs, warps, registers: program().run(jobs),
        math=types.SimpleNamespace(exp2=torch.exp2),
        **dict.fromkeys(("SliceLayout", "NVMMASharedLayout", "BlockedLayout"), lambda *given: None),
        **{"int32": torch.int32, "int64": torch.int64, "float32": torch.float32},
    )


def emulated(function: Any, given: dict[str, Any], known: dict[str, dict[str, Any]]) -> Any:
    """A kernel's function as one of Python's, what it calls likewise, but for what is `given`."""
    plain = function.fn
    if plain.__module__ not in known:
        names = known[plain.__module__] = {}
        for name, value in plain.__globals__.items():
            if name in given:
                value = given[name]
            elif isinstance(value, JITFunction):
                value = emulated(value, given, known)
            elif isinstance(value, tl.constexpr):
                value = value.value
            names[name] = value
    names = known[plain.__module__]
    return types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__)


def unwrapped(value: Any) -> Any:
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(unwrapped, value))
    return value


def _globals(program: Callable[[], Program]) -> dict[str, Any]:
    gl = language(program)
    return {
        "gl": gl,
        "tl": gl,
        "mbarrier": types.SimpleNamespace(
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, number: barrier.expect(number),
            arrive=lambda barrier: barrier.arrive(),
            wait=lambda barrier, phase: barrier.wait(int(phase)),
            MBarrierLayout=lambda: None,
        ),
        "tma": types.SimpleNamespace(store_wait=store_wait),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": mma,
        "warpgroup_mma_wait": mma_wait,
        "_tma_load": tma_load,
        "_tma_store": tma_store,
        "_viewed": lambda buffer, view: buffer,
        "_named_barrier": named_barrier,
        "product_layout": lambda columns: None,
        "shared_layout": lambda rank: None,
        "split_columns": split_columns,
        "pack": lambda p, dtype: p,
        "unpack": lambda pairs, dtype, layout: pairs,
        "marked": lambda chosen, like: chosen,
        "unmarked": lambda marks, like: marks,
        "partial_row_sums": lambda p: p.sum(1, keepdim=True),
        "load_pairs": lambda buffer, group: buffer.slice(64 * group, 64).load(None),
        "keep": lambda x: x,
        "computed": lambda x: x,
        "add_to": add_to,
    }


# ------------------------------------------------------------------ launches


def backward(
    problem: Problem,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None,
    seed: int = 0,
    wanted: Collection[str] = (),
    **instead: Callable[..., Any],
) -> Gradients:
    """hopper.backward, its kernels emulated. `seed` of what is left to chance; `instead` of functions that
    the kernel calls by these names."""
    with emulating(seed, **instead):
        return hopper.backward(problem, result, dout, dlse, wanted)


@contextlib.contextmanager
def emulating(seed: int = 0, **instead: Callable[..., Any]) -> Iterator[None]:
    """Within the block hopper.backward's kernels are emulated, and new memory holds NaN."""
    dice = random.Random(seed)
    running: list[Program] = []
    names = {**_globals(lambda: running[-1]), **instead}
    known: dict[str, dict[str, Any]] = {}

    def backward_kernel(kernel: Callable[..., None], programs: int, *given: Any) -> None:
        arguments = [emulated_argument(argument) for argument in given]
        numbers = list(range(programs))
        dice.shuffle(numbers)
        for number in numbers:
            running[:] = [Program(number, dice)]
            kernel(*arguments)

    kernels = {
        **{
            kernel.__name__: functools.partial(backward_kernel, emulated(kernel, names, known))
            for kernel in (
                hopper_backward._backward_kernel,
                hopper_backward_wide._wide_keys_kernel,
                hopper_backward_queries._queries_kernel,
            )
        },
        "delta_kernel": delta_kernel,
        "rows_kernel": rows_kernel,
        "schedule_kernel": schedule_kernel,
        "ranges_kernel": ranges_kernel,
    }

    def launch(kernel: Any, programs: int, device: Any, *given: Any, **options: Any) -> None:
        with _disable_current_modes():
            kernels[kernel.__name__](programs, *given)
        replay.note(Compiled(kernels[kernel.__name__], given), programs, given)

    with contextlib.ExitStack() as stack:
        for module in (hopper, triton_backend):
            stack.enter_context(mock.patch.object(module, "launch", launch))
        allocate = {"cpu": lambda *memory: torch.empty_strided(*memory[:2], dtype=memory[2])}
        stack.enter_context(mock.patch.object(replay, "_ALLOCATE", allocate))
        # So that launches go on to be made as if by Triton.
        stack.enter_context(
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
        )
        stack.enter_context(poisoned())
        yield


class Compiled:
    """What a recorder takes for a compiled kernel; it runs on what lies at the addresses it is given."""

    metadata = function = packed_metadata = None

    def __init__(self, kernel: Callable[..., None], given: tuple[Any, ...]) -> None:
        self._kernel, self._given = kernel, given

    def run(self, programs: int, *given: Any) -> None:
        arguments = given[8:]
        self._kernel(programs, *map(_placed, self._given, arguments))


def _placed(then: Any, now: Any) -> Any:
    """An argument as it was, with what it is now."""
    if isinstance(now, int) and isinstance(then, Tensor):
        extent = 1 + sum((n - 1) * step for n, step in zip(then.shape, then.stride(), strict=True))
        memory = (ctypes.c_char * (extent * then.element_size())).from_address(now)
        return torch.frombuffer(memory, dtype=then.dtype).as_strided(then.shape, then.stride())
    if isinstance(then, tuple) and hasattr(then, "_fields"):
        return type(then)(*map(_placed, then, now))
    if isinstance(now, TensorDescriptor):
        placed = copy.copy(now)
        placed.base = _placed(then.base, now.base.data_ptr())
        return placed
    return now


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Within the block new memory holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def delta_kernel(
    programs: int,
    out: Any,
    dout: Any,
    dlse: Any,
    lse: Any,
    base: Any,
    delta: Any,
    cleared: Tensor | None,
    *sides: Any,
) -> None:
    spec, folded, _, block, _, share, padded = sides
    assert padded
    if cleared is not None:
        assert cleared.numel() == programs * share
        assert share.bit_count() == 1
        cleared.zero_()
    total = (out.data.double() * dout.data.double()).sum(-1).transpose(-2, -1)
    if dlse is not None:
        total = total - dlse.data
    unit = lse.data * 1.4426950408889634 if folded else lse.data
    unit = unit.where(lse.data != -torch.inf, torch.inf)
    places = torch.arange(total.shape[-1])
    if spec.packed is not None:
        cu = [*spec.packed.cu_seqlens_q.tolist(), spec.sizes.sq]
        starts = [(start // block + number) * block for number, start in enumerate(cu[:-1])]
        parts = zip(starts, itertools.pairwise(cu), strict=True)
        places = torch.cat([at + torch.arange(b - a) for at, (a, b) in parts])
    for line, found, past in ((delta, total, 0.0), (base, unit, torch.inf)):
        line.data.fill_(past)
        line.data[..., places] = found.to(line.data.dtype)


def rows_kernel(
    programs: int, sums: Tensor, dq: Any, spec: Any, d: int, block_q: int, block_d: int
) -> None:
    """From numbers as add_to leaves them here."""
    if spec.packed is not None:
        packed_rows(sums, dq, spec, d, block_q, block_d)
        return
    b, rows, heads, _ = dq.data.shape
    assert rows == spec.sizes.sq
    tiles = sums.view(b, heads, -1, 2, block_q, block_d // 2).permute(0, 2, 4, 1, 3, 5)
    whole = tiles.flatten(4).flatten(1, 2)[:, :rows, :, :d]
    assert programs * block_q * block_d == sums.numel()
    dq.data.copy_(whole * spec.scores.scale)


def packed_rows(sums: Tensor, dq: Any, spec: Any, d: int, block_q: int, block_d: int) -> None:
    total, heads, _ = dq.data.shape
    cu, count = spec.packed.cu_seqlens_q.tolist(), spec.packed.count
    tiles = sums.view(heads, -(-total // block_q) + count + 1, 2, block_q, block_d // 2)
    tiles = tiles.transpose(2, 3).flatten(3)
    for number, (start, end) in enumerate(itertools.pairwise([*cu, total])):
        first, n = start // block_q + number, end - start
        rows = tiles[:, first : first + -(-n // block_q)].flatten(1, 2)[:, :n, :d]
        dq.data[start:end] = rows.transpose(0, 1) * spec.scores.scale


def schedule_kernel(
    programs: int,
    schedule: Tensor,
    tiled: Tensor,
    walked: Tensor,
    count: int,
    total: int,
    other: int,
    rows: int,
    block: int,
) -> None:
    """Sequences of which many tokens are walked over first; what belongs to none last."""
    lengths = [b - a for a, b in itertools.pairwise([*tiled.tolist(), total])]
    walks = [b - a for a, b in itertools.pairwise(walked.tolist())] + [0]
    order = sorted(range(count + 1), key=lambda number: (-walks[number], number))
    tiles = [-(-lengths[number] // rows) for number in order]
    schedule.copy_(torch.tensor([0, *itertools.accumulate(tiles), *order]))


def ranges_kernel(
    programs: int,
    ranges: Tensor,
    ends: Tensor,
    rows: int,
    keys: int,
    block_q: int,
    block_k: int,
    chunk: int,
) -> None:
    """The last blocks one after the other that see all of a tile, of those that see some."""
    assert programs == ranges.shape[0] * ranges.shape[1]
    for batch, tile in itertools.product(*map(range, ranges.shape[:2])):
        lo, hi = ends[batch]
        start, end = tile * block_k, (tile + 1) * block_k
        past = torch.arange(len(lo)) >= rows
        some = ~past & (lo < hi.clamp(max=end)) & (hi > start)
        some = some.view(-1, block_q).any(1).nonzero().flatten().tolist() or [
            len(lo) // block_q - 1
        ]
        all = (past | ((lo <= start) & (hi >= end))).view(-1, block_q).all(1).tolist()
        full_last = max((n + 1 for n in range(len(all)) if all[n]), default=some[0])
        full_first = full_last
        while full_first > some[0] and all[full_first - 1]:
            full_first -= 1
        found = (some[0], full_first, full_last, some[-1] + 1)
        ranges[batch, tile] = torch.tensor(found) * block_q
