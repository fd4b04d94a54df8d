"""Kernels compiled ahead of time, without a GPU: their registers, spills, shared memory and instructions.

A launch is specialised as Triton does when it starts a kernel (pointers and sizes divisible by 16, sizes of one,
missing tensors), by Triton's own code, so that what is compiled here is what would run on the GPU.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from gsa.ops.triton.launch import Launch, Target


@dataclass(frozen=True)
class Source:
    """A kernel with all that decides its machine code. Equal sources give equal code. It can be pickled."""

    module: str
    name: str
    target: Target
    signature: tuple[tuple[str, Any], ...]
    """Types by parameter."""
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    """Values by place of the parameter."""
    attributes: tuple[tuple[tuple[int, ...], tuple[tuple[str, int], ...]], ...]
    """What is known about values, by place of the parameter."""
    warps: int
    stages: int


@dataclass(frozen=True)
class Figures:
    """What the compiler says about a kernel on a target."""

    kernel: str
    target: str
    warps: int
    stages: int
    registers: int
    """Of a thread. On AMD, vector registers including those for accumulation."""
    spilled_bytes: int
    """Of a thread: bytes that go to memory for want of registers (NVIDIA: and those that come back)."""
    stack_bytes: int
    """Of a thread: local memory (NVIDIA) or scratch (AMD), which is where spills go."""
    lane_spills: int
    """AMD: scalar registers that are kept in lanes of vector registers. That costs instructions, but no memory."""
    shared_bytes: int
    """Of a program."""
    shared_limit: int
    dots: int
    """Matrix products in the kernel."""
    fma_dots: int
    """Those among them that no matrix instruction computes."""
    matrix_instructions: dict[str, int]
    """How often each kind stands in the machine code."""
    code_bytes: int
    seconds: float
    """That it took to compile; almost none if Triton had it in its cache."""

    @property
    def faults(self) -> list[str]:
        """What is wrong with the kernel, in words."""
        found = []
        if self.spilled_bytes:
            found.append(f"spills {self.spilled_bytes} bytes a thread")
        if self.shared_bytes > self.shared_limit:
            found.append(f"needs {self.shared_bytes} bytes of shared memory, {self.target} has {self.shared_limit}")
        if self.fma_dots:
            found.append(f"{self.fma_dots} of {self.dots} matrix products without matrix instructions")
        elif self.dots and not self.matrix_instructions:
            found.append("no matrix instruction for its matrix products")
        return found


def figures(launch: Launch, target: Target) -> Figures:
    """What the compiler makes of a launch on a target."""
    return compiled(source(launch, target))


def source(launch: Launch, target: Target) -> Source:
    """The launch, specialised for a target as Triton does it when it runs."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel = launch.kernel
    backend = make_backend(triton_target(target))
    bound, special, _ = create_function_from_signature(kernel.signature, kernel.params, backend)(**launch.arguments)
    # What JITFunction.run does with the same arguments where there is a device.
    options = _options(launch.warps, launch.stages)
    _, signature, constants, attributes = kernel._pack_args(backend, options, bound, special, None)
    return Source(
        kernel.module,
        kernel.fn.__qualname__,
        target,
        tuple(signature.items()),
        tuple(constants.items()),
        tuple((place, tuple(map(tuple, known))) for place, known in attributes.items()),
        launch.warps,
        launch.stages,
    )


def compiled(source: Source) -> Figures:
    """What the compiler makes of a specialised kernel."""
    from triton.compiler import ASTSource, compile

    kernel = _kernel(source)
    ast = ASTSource(
        kernel,
        dict(source.signature),
        dict(source.constants),
        {place: [list(pair) for pair in known] for place, known in source.attributes},
    )
    start = time.perf_counter()
    made = compile(ast, target=triton_target(source.target), options=_options(source.warps, source.stages))
    seconds = time.perf_counter() - start
    layouts = re.findall(_DOT, made.asm["ttgir"], re.MULTILINE)
    assembly, machine = ("ptx", "cubin") if source.target.backend == "cuda" else ("amdgcn", "hsaco")
    usage = _nvidia(made.asm) if source.target.backend == "cuda" else _amd(made.asm["amdgcn"])
    return Figures(
        source.name,
        source.target.name,
        source.warps,
        source.stages,
        *usage,
        made.metadata.shared,
        source.target.shared_bytes,
        dots=len(layouts),
        fma_dots=sum(not layout.startswith("mma") for layout in layouts),
        matrix_instructions=dict(Counter(re.findall(_MATRIX, made.asm[assembly]))),
        code_bytes=_code_bytes(made.asm[machine]),
        seconds=seconds,
    )


# The layout of what a matrix product gives: one of #mma where matrix instructions compute it, else of #blocked.
_DOT = r"(?:tt\.dot|ttng\.warp_group_dot) .*-> tensor<[^#]*#(\w+)"
_MATRIX = r"\b(wgmma\.mma_async|mma\.sync|v_mfma)"


def triton_target(target: Target) -> Any:
    """The target as Triton names it."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(target.backend, target.arch, target.warp_size)


def _options(warps: int, stages: int) -> dict[str, Any]:
    """As JITFunction.run passes them."""
    return {"num_warps": warps, "num_stages": stages, "debug": False, "instrumentation_mode": ""}


def _kernel(source: Source) -> Any:
    """The function decorated with triton.jit, without the decorators that choose settings around it."""
    from triton.runtime.jit import JITFunction

    kernel = getattr(import_module(source.module), source.name)
    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn
    return kernel


def _nvidia(asm: dict[str, Any]) -> tuple[int, int, int, int]:
    """Registers, spilled bytes and stack of a thread; and 0 for scalar registers in lanes, which only AMD has."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        binary, text = Path(folder) / "kernel.cubin", Path(folder) / "kernel.ptx"
        binary.write_bytes(asm["cubin"])
        usage = _output_of(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary))
        registers, stack = (_number(rf"\b{name}:(\d+)", usage) for name in ("REG", "STACK"))
        if not stack:  # spilled registers would be on the stack
            return registers, 0, 0, 0
        # The assembler reports how much is spilled only while it runs, so it is run again with Triton's options.
        arch = re.search(r"^\.target (\w+)", asm["ptx"], re.MULTILINE)
        assert arch is not None
        text.write_text(asm["ptx"])
        flags = ("-v", "-lineinfo", "--regAllocOptLevel=2", f"--gpu-name={arch[1]}", "-o", str(binary))
        log = _output_of(knobs.nvidia.ptxas.path, *flags, str(text))
    assert _number(r"Used (\d+) registers", log) == registers, "assembled with other options than Triton's"
    return registers, sum(_number(rf"(\d+) bytes spill {way}", log) for way in ("stores", "loads")), stack, 0


def _amd(assembly: str) -> tuple[int, int, int, int]:
    """Registers, spilled bytes and scratch of a thread; and scalar registers in lanes of others."""
    registers, vector, scalar, stack = (
        _number(rf"^\s*\.{name}:\s+(\d+)", assembly)
        for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    )
    # Vector registers may be moved to those for accumulation and scalar ones to lanes, which takes no scratch.
    return registers, max(4 * vector, stack) if stack else 0, stack, scalar


def _output_of(*command: str) -> str:
    """What a command prints."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, f"no {pattern} in what the compiler says"
    return int(found[1])


def _code_bytes(elf: bytes) -> int:
    """The size of what can be executed in an ELF file of 64 bits: sections with the flag SHF_EXECINSTR."""
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    each, count = struct.unpack_from("<HH", elf, 0x3A)
    # Of a section's header: name, type, flags, address, offset, size.
    headers = [struct.unpack_from("<IIQQQQ", elf, start + each * i) for i in range(count)]
    return sum(header[5] for header in headers if header[2] & 4)
