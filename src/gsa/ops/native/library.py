"""The compiled library: found, checked and loaded, once.

It is built when the package is installed; without a C++ compiler the package works all the same, without this engine.
GSA_NATIVE_LIBRARY names another build to load, GSA_NATIVE_ISA an instruction set to use instead of the best.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gsa.errors import BackendUnavailable, GSAError, OutOfMemory
from gsa.ops import native
from gsa.ops.forks import has_gnu_openmp
from gsa.ops.native import structs

ABI = 12
"""Of csrc/native.h: a library with another number is a leftover of another version."""

_FUNCTIONS = (
    "gsa_layout",
    "gsa_isas",
    "gsa_isa",
    "gsa_use_isa",
    "gsa_use_openmp",
    "gsa_watch_crowd",
    "gsa_crowded",
    "gsa_assume_crowd",
    "gsa_believe",
    "gsa_use_every_thread",
    "gsa_threads_asked",
    "gsa_linear_attention",
    "gsa_slot_attention",
    "gsa_slot_attention_step",
    "gsa_window_attention",
    "gsa_joined_slots",
    "gsa_selective_scan",
    "gsa_rows",
    "gsa_cross_entropy",
    "gsa_draw",
    "gsa_convolution",
    "gsa_matvec",
    "gsa_has_unit",
    "gsa_exercise",
    "gsa_matmul",
    "gsa_products",
    "gsa_decode",
    "gsa_unpack",
    "gsa_read",
)

_NOT_BUILT = (
    "its library is not built; that happens when the package is installed, and needs CMake and a C++17 compiler "
    "(GCC or Clang): install one and run `pip install` again"
)


def unavailable(device: torch.device | None) -> str | None:
    """Why the engine cannot run (on the device), or None if it can."""
    if device is not None and device.type != "cpu":
        return f"it runs on the CPU, not on {device.type}"
    return _MISSING


def library() -> ctypes.CDLL:
    if _LIBRARY is None:
        raise BackendUnavailable(f"the native engine cannot run here: {_MISSING}")
    return _LIBRARY


def check_memory(code: int, operation: str = "") -> None:
    """Raises OutOfMemory unless a function of the library returned 0: it could not get its working memory."""
    if code:
        said = "the native engine could not get its working memory"
        raise OutOfMemory(f"{operation}: {said}" if operation else said)


def declare(name: str, *arguments: Any) -> Any:
    """A function of the library, with the types of its arguments."""
    function = getattr(library(), name)
    function.argtypes = arguments
    return function


def isa() -> str:
    """The instruction set in use."""
    return str(library().gsa_isa().decode())


def isas() -> tuple[str, ...]:
    """The instruction sets that were compiled, best first; not every machine has them all."""
    return tuple(library().gsa_isas().decode().split())


def use_isa(name: str) -> None:
    """Uses another instruction set from now on, in this process."""
    if name not in isas():
        raise GSAError(f"use_isa: unknown instruction set {name!r}; expected one of {', '.join(isas())}")
    if library().gsa_use_isa(name.encode()):
        raise GSAError(f"use_isa: this machine has no {name}")


def use_every_thread(yes: bool) -> None:
    """Whether calls use all of torch's threads, however little they have to do; for tests."""
    library().gsa_use_every_thread(int(yes))


def watch_crowd() -> None:
    """Notices from now on when other processes want the cores, and has waiting threads, torch's too, sleep soon then.

    Calls of the engine with several threads do so by themselves; this is for those who compute with torch alone.
    """
    if torch.get_num_threads() > 1:
        library().gsa_watch_crowd(torch.get_num_threads())


def crowded() -> bool:
    """Whether other processes want the cores, as far as it is watched."""
    return bool(library().gsa_crowded())


def assume_crowd(crowd: bool | None) -> None:
    """What to believe of that instead of what is noticed; None goes on watching."""
    library().gsa_assume_crowd(-1 if crowd is None else int(crowd))


def believed(shares: Sequence[float]) -> list[bool]:
    """Whether there is a crowd, after windows of 50 ms in which threads waited such shares of the time for a core."""
    count, crowd = len(shares), (ctypes.c_int * len(shares))()
    library().gsa_believe((ctypes.c_double * count)(*shares), count, crowd)
    return [bool(value) for value in crowd]


def threads_asked() -> int:
    """How many threads the last call from this thread found worth its work, of torch's."""
    return int(library().gsa_threads_asked())


def _load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    path = os.environ.get("GSA_NATIVE_LIBRARY") or _find()
    if path is None:
        return _NOT_BUILT
    try:
        lib = ctypes.CDLL(path)
        abi = lib.gsa_abi()
        if abi != ABI:
            return f"its library is of another version (interface {abi}, expected {ABI}): run `pip install` again"
        for name in _FUNCTIONS:
            getattr(lib, name)
    except (OSError, AttributeError) as error:
        return f"its library does not load: {error}"
    lib.gsa_layout.restype = ctypes.POINTER(structs.GsaNumber)
    difference = structs.difference(structs.listed(lib.gsa_layout()))
    if difference is not None:
        return f"its library was built from other sources: {difference}; run `pip install` again"
    for name in ("gsa_isa", "gsa_isas"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.gsa_use_isa.argtypes = [ctypes.c_char_p]
    lib.gsa_use_openmp.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int]
    _share_threads(lib)
    wanted = os.environ.get("GSA_NATIVE_ISA")
    if wanted and lib.gsa_use_isa(wanted.encode()):
        return f"GSA_NATIVE_ISA asks for {wanted!r}, which this machine or build does not have"
    return lib


def _find() -> str | None:
    for folder in native.__path__:
        for name in ("libgsa_native.so", "libgsa_native.dylib"):
            if (Path(folder) / name).exists():
                return str(Path(folder) / name)
    return None


def _share_threads(lib: ctypes.CDLL) -> None:
    """Hands over torch's OpenMP library, so that both work on the same threads."""
    process = ctypes.CDLL(None)
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    if all(hasattr(process, name) for name in names):
        addresses = (ctypes.cast(getattr(process, name), ctypes.c_void_p) for name in names)
        lib.gsa_use_openmp(*addresses, has_gnu_openmp(process))


# Once, when this module is imported, and in plain variables: torch.compile reads those, and not what a cache hides.
_loaded = _load()
if isinstance(_loaded, str) and {"GSA_NATIVE_LIBRARY", "GSA_NATIVE_ISA"} & os.environ.keys():
    warnings.warn(f"gsa: the native engine is not what the environment asks for: {_loaded}", stacklevel=2)
_LIBRARY = None if isinstance(_loaded, str) else _loaded
_MISSING = _loaded if isinstance(_loaded, str) else None
