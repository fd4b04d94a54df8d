"""What kernels do to memory and with arithmetic, counted while Triton's interpreter runs them.

Only where TRITON_INTERPRET was on before the kernels were defined. Loads and stores are counted in bytes of the lanes
whose mask is true, an address that several lanes of one load share once; matrix products in flops, by their operands.
Operations of torch between kernels are counted as the kernels that they would be on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

# One flop per number that comes out. What a compiler makes of it (a product and a sum can be one instruction) is not
# known here; rates of processors are given in flops, too.
ARITHMETIC = ("fadd", "fsub", "fmul", "fdiv", "precise_divf", "fma", "minimumf", "maximumf", "minnumf", "maxnumf")
EXPONENTIALS = ("exp", "exp2", "log", "log2", "sqrt", "precise_sqrt", "rsqrt")
MAX_ADDRESSES = 1 << 22  # addresses held before doubles are dropped


@dataclass
class Work:
    """What one kernel did."""

    name: str
    programs: int = 0
    read: int = 0
    """Bytes that programs asked for."""
    written: int = 0
    read_once: int = 0
    """Bytes if every address were fetched once: from memory, behind a cache that programs share and that holds all."""
    written_once: int = 0
    products: dict[str, int] = field(default_factory=dict)
    """Flops of matrix products, by operands: bf16, fp16, fp64, or how fp32 goes in (tf32, tf32x3, ieee)."""
    flops: int = 0
    """Of all other arithmetic."""
    exponentials: int = 0
    """Numbers through exp, log or a root, which processors have few units for."""


@dataclass
class Saved:
    """Bytes that autograd holds from forward to backward."""

    inputs: int = 0
    """Of the tensors that the caller passed in, which are there anyway."""
    extra: int = 0


@dataclass(frozen=True)
class Counted:
    """What a call did."""

    forward: list[Work]
    backward: list[Work]
    saved: Saved


def slot_inputs(T: int, width: int, slots: int, gate_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v [1, T, 1, width] in bf16 and g [1, T, 1, slots] for one head, with the paper's gates (tau = 8)."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 1, width, generator=random).bfloat16() for _ in range(3))
    logits = torch.randn(1, T, 1, slots, generator=random)
    return q, k, v, (torch.nn.functional.logsigmoid(logits) / 8).to(gate_dtype)


def _storage(x: Tensor) -> int:
    """What identifies the memory of a tensor, which views of it share; meta tensors have one, too."""
    return x.untyped_storage()._cdata


@contextmanager
def saved_for_backward(inputs: Iterable[Tensor]) -> Iterator[Saved]:
    """Inside, what autograd saves is added up, each tensor once."""
    saved, passed_in, seen = Saved(), {_storage(x) for x in inputs}, set()

    def pack(x: Tensor) -> Tensor:
        storage = _storage(x)
        if storage not in seen:
            seen.add(storage)
            saved.inputs += x.nbytes if storage in passed_in else 0
            saved.extra += 0 if storage in passed_in else x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


@contextmanager
def counting() -> Iterator[list[Work]]:
    """Inside, every kernel that runs in the interpreter and every operation of torch adds to the list."""
    counter, builder = _Counter(), interpreter.interpreter_builder
    with ExitStack() as stack:
        for owner, name, hook in counter.hooks(builder):
            stack.enter_context(patch.object(owner, name, hook))
        # Counts do not depend on the numbers, and those that the interpreter makes of bf16 can overflow.
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(_TorchOperations(counter))
        yield counter.works


class _Addresses:
    """Addresses of elements, each once."""

    def __init__(self) -> None:
        self._parts: list[Any] = []
        self._held = 0

    def add(self, addresses: Any) -> None:
        self._parts.append(addresses)
        self._held += addresses.size
        if self._held > MAX_ADDRESSES:
            self._parts = [np.unique(np.concatenate(self._parts))]
            # What is left may be close to the limit; the next round begins from there.
            self._held = 0

    def count(self) -> int:
        return int(np.unique(np.concatenate(self._parts)).size) if self._parts else 0


class _Counter:
    def __init__(self) -> None:
        self.works: list[Work] = []
        self.running: Work | None = None
        self._seen: dict[tuple[str, int], _Addresses] = {}

    def hooks(self, builder: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """What is replaced where."""
        yield interpreter.GridExecutor, "__call__", self._kernel(interpreter.GridExecutor.__call__)
        yield builder, "set_grid_dim", self._before(builder.set_grid_dim, self._grid)
        # Every other load and store of the builder goes through these.
        yield builder, "create_masked_load", self._before(builder.create_masked_load, self._load)
        yield builder, "create_masked_store", self._before(builder.create_masked_store, self._store)
        yield builder, "create_atomic_rmw", self._before(builder.create_atomic_rmw, self._atomic)
        yield builder, "create_atomic_cas", self._before(builder.create_atomic_cas, self._exchange)
        yield builder, "create_dot", self._before(builder.create_dot, self._product)
        for names, add in ((ARITHMETIC, self._arithmetic), (EXPONENTIALS, self._exponential)):
            for name in names:
                yield builder, f"create_{name}", self._after(getattr(builder, f"create_{name}"), add)
        for kind in (interpreter.ReduceOps, interpreter.ScanOps):
            yield kind, "apply_impl", self._reduction(kind.apply_impl)

    def _kernel(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.running, self._seen = Work(executor.fn.__name__), {}
            try:
                run(executor, *args, **kwargs)
                for (kind, size), addresses in self._seen.items():
                    name = f"{kind}_once"
                    setattr(self.running, name, getattr(self.running, name) + size * addresses.count())
                self.works.append(self.running)
            finally:
                self.running = None

        return counted

    @staticmethod
    def _before(run: Callable[..., Any], add: Callable[..., None]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            add(*args)
            return run(*args, **kwargs)

        return counted

    @staticmethod
    def _after(run: Callable[..., Any], add: Callable[[int], None]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            result = run(*args)
            add(result.data.size)
            return result

        return counted

    def _reduction(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(reduction: Any, input: Any) -> Any:
            self._arithmetic(input[0].handle.data.size)
            return run(reduction, input)

        return counted

    @property
    def _work(self) -> Work:
        assert self.running is not None
        return self.running

    def _grid(self, *sides: int) -> None:
        self._work.programs = prod(sides)

    def _load(self, pointers: Any, mask: Any, *_: Any) -> None:
        self._work.read += self._touch("read", pointers, mask)

    def _store(self, pointers: Any, value: Any, mask: Any, *_: Any) -> None:
        self._work.written += self._touch("written", pointers, mask)

    def _atomic(self, operation: Any, pointers: Any, value: Any, mask: Any, *_: Any) -> None:
        self._load(pointers, mask)
        self._store(pointers, value, mask)

    def _exchange(self, pointers: Any, expected: Any, value: Any, *_: Any) -> None:
        self._atomic(None, pointers, value, None)

    def _touch(self, kind: str, pointers: Any, mask: Any) -> int:
        """Bytes of the distinct addresses behind a mask."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        data = pointers.data
        if mask is not None:
            data, asked = np.broadcast_arrays(data, getattr(mask, "data", mask))
            data = data[asked.astype(bool)]
        addresses = np.unique(data)
        self._seen.setdefault((kind, size), _Addresses()).add(addresses)
        return size * int(addresses.size)

    def _product(self, a: Any, b: Any, d: Any, precision: Any, *_: Any) -> None:
        kind = precision.name.lower() if a.dtype.name == "fp32" else a.dtype.name
        done = self._work.products
        done[kind] = done.get(kind, 0) + 2 * a.data.size * b.data.shape[-1]

    def _arithmetic(self, numbers: int) -> None:
        self._work.flops += numbers

    def _exponential(self, numbers: int) -> None:
        self._work.exponentials += numbers


class _TorchOperations(TorchDispatchMode):
    """Reads and writes of torch's operations that are not views and not fresh memory."""

    ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach")
    WRITE_ONLY = ("fill_", "zero_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")

    def __init__(self, counter: _Counter):
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, schema = func.overloadpacket.__name__, func._schema
        view = any(x.alias_info is not None and not x.alias_info.is_write for x in schema.returns)
        # The interpreter's own handling of arguments is not the kernel's.
        if self._counter.running is None and not view and name not in self.ALLOCATIONS:
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            inputs = [] if name in self.WRITE_ONLY else inputs[1:] if name == "copy_" else inputs
            read = sum(_bytes(x) for x in inputs)
            written = sum(_bytes(x) for x in tree_leaves(result) if isinstance(x, Tensor))
            if read + written:
                self._counter.works.append(Work(f"torch.{name}", 0, read, written, read, written))
        return result


def _bytes(x: Tensor) -> int:
    """Of the numbers that there are: an expanded axis is one."""
    return x.element_size() * prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size)
