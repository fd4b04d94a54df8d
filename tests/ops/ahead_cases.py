"""Kernels that go wrong, each in its way, and what runs in processes where kernels are compiled."""

from types import SimpleNamespace
from unittest import mock

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from gsa.bench.gpu.launches import Case
from gsa.ops.triton.ahead_of_time import Figures, Source, figures, source, triton_target
from gsa.ops.triton.launch import TARGETS, Launch, launch, recording


@triton.jit
def multiply(a, b, c, n, scale, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    rows, inner = tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + rows[:, None] * n + inner[None, :])
    y = tl.load(b + inner[:, None] * n + rows[None, :])
    tl.store(c + rows[:, None] * n + rows[None, :], tl.dot(x, y, input_precision=PRECISION) * scale)


@triton.jit
def double(a, c, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(c + i, 2 * tl.load(a + i, mask=i < n), mask=i < n)


@triton.jit
def broken(a, N: tl.constexpr):
    tl.store(a + tl.arange(0, N), tl.arange(0, 2 * N))


@triton.jit
def specialised(a, b, missing, one, sixteens, odd, large, number, flag, WIDTH: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, WIDTH)
    x = tl.load(a + i * one + sixteens + odd + large) * number
    if missing is not None:
        x += tl.load(missing + i)
    tl.store(b + i, x, mask=i < flag)


def _tensor(dtype: torch.dtype = torch.bfloat16, size: int = 4096) -> torch.Tensor:
    return torch.empty(size, size, dtype=dtype, device="meta")


def _product(N: int, K: int, warps: int, dtype: torch.dtype, precision: str) -> Launch:
    x = _tensor(dtype)
    sizes = {"n": 4096, "scale": 0.5, "N": N, "K": K, "PRECISION": precision}
    return Launch(multiply, 1, {"a": x, "b": x, "c": x, **sizes}, warps, 1)


CASES = {
    "good": lambda: _product(64, 64, 4, torch.bfloat16, "ieee"),
    "spills": lambda: _product(128, 32, 1, torch.bfloat16, "ieee"),
    "too large": lambda: _product(32, 2048, 4, torch.bfloat16, "ieee"),
    "fma": lambda: _product(16, 16, 1, torch.float32, "ieee"),
    "tf32x3": lambda: _product(16, 16, 1, torch.float32, "tf32x3"),
    "no product": lambda: Launch(double, 1, {"a": _tensor(), "c": _tensor(), "n": 1000, "N": 1024}, 4, 1),
}
BROKEN = {"broken": lambda: Launch(broken, 1, {"a": _tensor(), "N": 16}, 4, 1)}


def listed(names: tuple[str, ...], case: Case) -> list[tuple[str, Source]]:
    """In place of gsa.bench.gpu.launches.sources."""
    return [(name, source((CASES | BROKEN)[name](), case.target)) for name in names]


def compiled_case(name: str, target: str) -> Figures:
    return figures(CASES[name](), TARGETS[target])


ARGUMENTS = {
    "missing": None,
    "one": 1,
    "sixteens": 48,
    "odd": 7,
    "large": 1 << 40,
    "number": 0.5,
    "flag": True,
    "WIDTH": 16,
    "KIND": "softmax",
}


def recorded_source(target: str) -> Source:
    """Of a kernel with every kind of argument, launched as the engine launches."""
    with recording(TARGETS[target]) as launches:
        # b begins off the grid of 16 bytes, which meta tensors know, too.
        launch(specialised, 1, 2, 3, a=_tensor(), b=_tensor().flatten()[1:], **ARGUMENTS)
    (only,) = launches
    return source(only, TARGETS[target])


def what_triton_compiles(target: str) -> tuple:
    """What Triton itself would compile for the same call, with the target in place of a GPU."""
    seen = []

    def compiling(*, compile, **_):
        seen.append(compile)
        return True  # which ends it there

    device = SimpleNamespace(
        get_current_target=lambda: triton_target(TARGETS[target]),
        get_current_device=lambda: target,
        get_current_stream=lambda device: 0,
    )
    with (
        mock.patch.object(driver, "_active", device),
        mock.patch.object(knobs.runtime, "jit_cache_hook", compiling),
    ):
        launch(specialised, 1, 2, 3, a=_tensor(), b=_tensor().flatten()[1:], **ARGUMENTS)
    (only,) = seen
    (attributes,) = only["configs"]
    return only["signature"], only["constants"], attributes, only["num_warps"], only["num_stages"]
