"""The kernels that flash-linear-attention launches for gated slot attention, to be compiled as ours are.

Its package looks at the GPU when it is imported, and chooses tiles and settings accordingly. So, in a process of its
own, it is shown the target in place of a GPU, and what it would launch is written down instead.

It tries many settings on the GPU and keeps the fastest. Without one, the first in its own order that neither spills nor
needs too much shared memory is taken, and if there is none, the one that spills least: what is best for its figures.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gsa.bench.gpu.launches import BATCH, DTYPES, LENGTH, Case
from gsa.extras import require
from gsa.ops.triton.ahead_of_time import Figures, Source, compiled, source, triton_target
from gsa.ops.triton.launch import Launch, Target

_pretended: list[Target] = []


def require_fla() -> None:
    """Raises if the package is not installed."""
    require("fla", "kernels: a comparison")


def sources(case: Case) -> list[tuple[Source, ...]]:
    """Of each kernel that chunk_gsa launches forward and backward, once: the settings that it would try."""
    import torch

    _pretend(case.target)
    chunk_gsa = import_module("fla.ops.gsa").chunk_gsa

    def made(features: int) -> torch.Tensor:
        dtype = getattr(torch, DTYPES[case.dtype])
        return torch.empty(BATCH, LENGTH, case.heads, features, device="meta", dtype=dtype, requires_grad=True)

    q, k, v = (made(case.width) for _ in range(3))
    with _recorded_launches() as launches:
        o, _ = chunk_gsa(q, k, v, made(case.slots), made(case.slots), scale=1.0)
        o.backward(torch.empty_like(o))
    found = (tuple(source(launch, case.target) for launch in alternatives) for alternatives in launches)
    return list(dict.fromkeys(found))


def compiled_best(alternatives: tuple[Source, ...]) -> tuple[Figures, int]:
    """The figures of the settings taken, and how many had to be tried."""
    _pretend(alternatives[0].target)
    seen: list[Figures] = []
    for place, alternative in enumerate(alternatives):
        try:
            seen.append(compiled(alternative))
        except Exception:  # of Triton's many kinds; on a GPU, too, such settings would be passed over
            if not seen and alternative is alternatives[-1]:
                raise
            continue
        if not seen[-1].spilled_bytes and seen[-1].shared_bytes <= seen[-1].shared_limit:
            return seen[-1], place + 1
    return min(seen, key=lambda x: (x.shared_bytes > x.shared_limit, x.spilled_bytes)), len(alternatives)


def _pretend(target: Target) -> None:
    """Has the package, which is imported here first, find the target in place of a GPU."""
    if _pretended == [target]:
        return
    assert "fla" not in sys.modules, "it looks but once"
    import torch
    from triton.runtime import driver

    _pretended.append(target)
    properties = {"max_shared_mem": target.shared_bytes, "multiprocessor_count": target.processors}
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: triton_target(target),
            get_current_device=lambda: 0,
            get_active_torch_device=lambda: torch.device("cuda", 0),
            utils=SimpleNamespace(get_device_properties=lambda index: properties),
        )
    )
    with (
        mock.patch("torch.cuda.device_count", return_value=1),
        mock.patch("torch.cuda.get_device_name", return_value=target.name),
        mock.patch("torch.cuda.get_device_capability", return_value=_capability(target)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        import_module("fla.ops.gsa")


def _capability(target: Target) -> tuple[int, int]:
    return divmod(target.arch, 10) if isinstance(target.arch, int) else (9, 4)  # what torch says of a gfx942


@contextmanager
def _recorded_launches() -> Iterator[list[list[Launch]]]:
    """Inside, what is launched is listed, with all the settings that would be tried."""
    from triton.compiler import make_backend
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    launches: list[list[Launch]] = []
    alternatives: list[Launch] | None = None

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False)) | given
        usual = make_backend(triton_target(_pretended[0])).parse_options({})
        warps, stages = (arguments.pop(name, None) or getattr(usual, name) for name in ("num_warps", "num_stages"))
        for name in ("num_ctas", "maxnreg", "ir_override"):  # settings that could be, and never are
            assert arguments.pop(name, None) in (None, 1)
        programs = prod(grid(arguments) if callable(grid) else grid)
        launch = Launch(self, programs, arguments, warps, stages)
        launches.append([launch]) if alternatives is None else alternatives.append(launch)

    def try_all(self: Any, *args: Any, **given: Any) -> None:
        nonlocal alternatives
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        alternatives = []
        for config in self.prune_configs(given):
            self.fn.run(*args, **given, **config.all_kwargs())
        launches.append(alternatives)
        alternatives = None

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(Autotuner, "run", try_all):
        yield launches
