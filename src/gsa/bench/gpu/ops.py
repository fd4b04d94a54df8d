"""`gsa bench ops --device cuda`: the operator on a GPU, beside softmax attention and flash-linear-attention, in bf16.

Shape letters: B batch, T time, H heads, M slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from gsa.bench.ops import SLOTS, forward_or_both

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BATCHES = ((8, 2048), (4, 4096), (2, 8192), (1, 16384))
"""B and T: the paper's, 16384 tokens at a time."""
HEADS = ((4, 512), (16, 128), (32, 64))
"""Number and width: those of the paper's 1.3B model, and narrower ones of the same width in all."""
MATMUL = 8192
"""Size of the matrices whose product is the GPU's rate."""
COPIED = 1 << 28
"""Bytes whose copy is the GPU's bandwidth."""
STEPS = 20
"""Decoded in a row, for one reading of the clock."""
DECODED = (1, 64)
"""Sequences that are decoded together."""
CACHED = 4096
"""Tokens that softmax attention looks back on when it decodes."""

Run: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Entry:
    """One thing to time."""

    B: int
    T: int
    heads: int
    width: int
    """Of a head."""
    backward: bool


@dataclass(frozen=True)
class Row(Entry):
    """What was measured of it: milliseconds, and MiB that a call takes beside its inputs. None: it could not run."""

    ms: float | None
    softmax_ms: float | None
    """Of causal softmax attention with heads of 64 and the same width in all."""
    fla_ms: float | None
    """Of flash-linear-attention's gated slot attention."""
    tokens_per_second: float | None
    matmul_share: float | None
    """Of the rate of a bf16 matmul in the same run, counting 768 * heads * width flops a token; forward only."""
    mib: float | None
    softmax_mib: float | None
    fla_mib: float | None


@dataclass(frozen=True)
class Decoded:
    """Microseconds of one token for each of B sequences, with what the CPU needs to start it."""

    B: int
    heads: int
    width: int
    us: float | None
    softmax_us: float | None
    """With keys and values of 4096 earlier tokens."""
    fla_us: float | None
    copy_share: float | None
    """Of the bandwidth of a large copy in the same run, counting the state read once and written once."""


def run(name: str, quick: bool, backend: str, progress: bool) -> dict[str, Any]:
    """All numbers of the benchmark, on the GPU of this name."""
    from rich.console import Console

    from gsa.bench.gpu.device import find_gpu

    device = find_gpu(name)
    with Console(stderr=True, quiet=not progress).status("measuring") as status:
        return measure(device, quick, backend, status.update)


def measure(device: torch.device, quick: bool, backend: str, tick: Callable[[str], None]) -> dict[str, Any]:
    """All numbers of the benchmark."""
    import torch

    from gsa.bench.gpu.device import describe_gpu

    wide = [Entry(B, T, *HEADS[0], back) for B, T in (BATCHES[:1] if quick else BATCHES) for back in (False, True)]
    narrow = [
        Entry(B, T, *size, back)
        for size in HEADS[1:]
        for B, T in (() if quick else (BATCHES[0], BATCHES[-1]))
        for back in (False, True)
    ]
    rows, decoded, rates, bandwidths = [], [], [], []
    notes: list[str] = []
    with torch.cuda.device(device):
        for entry in wide + narrow:
            tick(f"{entry.heads} heads of {entry.width}, {entry.B} x {entry.T}, {_passes(entry.backward)}")
            row, rate = contest(entry, device, backend, notes)
            rows.append(row)
            rates.append(rate)
        for B in DECODED[:1] if quick else DECODED:
            tick(f"decoding {B} sequences")
            token, bandwidth = decode(B, *HEADS[0], device, backend, notes)
            decoded.append(token)
            bandwidths.append(bandwidth)
    return {
        **describe_gpu(device),
        "backend": backend,
        "matmul_tflops": max(rates) / 1e12,
        "copy_gb_per_second": max(bandwidths) / 1e9,
        "rows": [asdict(row) for row in rows],
        "decode": [asdict(row) for row in decoded],
        "notes": notes,
    }


def _passes(backward: bool) -> str:
    return "forward+backward" if backward else "forward"


def contest(entry: Entry, device: torch.device, backend: str, notes: list[str]) -> tuple[Row, float]:
    """Times an entry and its rivals in turns; and the rate of a matmul (flops a second) on the way."""
    import torch

    from gsa.bench.memory import gpu_peak
    from gsa.bench.timing import gpu_clock, race

    a, b = torch.randn(2, MATMUL, MATMUL, device=device).bfloat16()
    where = f"{entry.B} x {entry.T}, {_passes(entry.backward)}"
    contenders = runnable(sequence_contenders(entry, device, backend), where, notes)
    best = race({"matmul": lambda: a @ b, **contenders}, 2.0, clock=gpu_clock)
    peaks = {name: gpu_peak(run) / 2**20 for name, run in contenders.items()}
    rate = 2 * MATMUL**3 / best["matmul"]
    ours, tokens = best.get("slots"), entry.B * entry.T
    row = Row(
        **asdict(entry),
        ms=_scaled(1e3, ours),
        softmax_ms=_scaled(1e3, best.get("softmax")),
        fla_ms=_scaled(1e3, best.get("fla")),
        tokens_per_second=None if ours is None else tokens / ours,
        matmul_share=None if ours is None or entry.backward else 768 * entry.heads * entry.width * tokens / ours / rate,
        mib=peaks.get("slots"),
        softmax_mib=peaks.get("softmax"),
        fla_mib=peaks.get("fla"),
    )
    return row, rate


def sequence_contenders(entry: Entry, device: torch.device, backend: str) -> dict[str, Run]:
    """Ours; softmax attention; flash-linear-attention if it is installed. Gates are in the dtype layers pass on."""
    import torch

    from gsa.bench.gpu.device import fla_functions
    from gsa.ops import gated_slot_attention

    q, k, v, g = tensors((entry.B, entry.T, entry.heads), entry.width, device)
    heads = entry.heads * entry.width // 64
    sq, sk, sv = (x.view(entry.B, entry.T, heads, 64).transpose(1, 2).contiguous() for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    found = {
        "slots": forward_or_both(
            lambda: gated_slot_attention(q, k, v, g, scale=1.0, backend=backend)[0], (q, k, v, g), entry.backward
        ),
        "softmax": forward_or_both(lambda: attend(sq, sk, sv, is_causal=True), (sq, sk, sv), entry.backward),
    }
    other = fla_functions()
    if other is not None:
        chunk_gsa, gates = other[0], g.detach().bfloat16()
        inputs = (q.detach(), k.detach(), v.detach(), (1 - gates.exp()).to(gates.dtype), gates)
        found["fla"] = forward_or_both(lambda: chunk_gsa(*inputs, scale=1.0)[0], inputs, entry.backward)
    return found


def tensors(lead: tuple[int, ...], width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v in bf16 and g in fp32, gates as the paper's layers begin with."""
    import torch

    random = torch.Generator(device).manual_seed(0)

    def normal(features: int) -> Tensor:
        return torch.randn(*lead, features, generator=random, device=device)

    q, k, v = (normal(width).bfloat16() for _ in range(3))
    return q, k, v, torch.nn.functional.logsigmoid(normal(SLOTS)) / 8


def decode(
    B: int, heads: int, width: int, device: torch.device, backend: str, notes: list[str]
) -> tuple[Decoded, float]:
    """Times single tokens of ours and of others in turns; and the bandwidth (bytes a second) on the way."""
    import torch

    from gsa.bench.timing import gpu_clock, race

    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    contenders = runnable(token_contenders(B, heads, width, device, backend), f"decoding {B}", notes)
    with torch.inference_mode():
        best = race({"copy": lambda: target.copy_(source), **contenders}, 2.0, clock=gpu_clock)
    bandwidth = 2 * COPIED / best["copy"]
    ours = best.get("slots")
    moved = 2 * 2 * 4 * B * heads * width * SLOTS  # two memories in fp32, read and written
    row = Decoded(
        B,
        heads,
        width,
        us=_scaled(1e6 / STEPS, ours),
        softmax_us=_scaled(1e6 / STEPS, best.get("softmax")),
        fla_us=_scaled(1e6 / STEPS, best.get("fla")),
        copy_share=None if ours is None else STEPS * moved / ours / bandwidth,
    )
    return row, bandwidth


def token_contenders(B: int, heads: int, width: int, device: torch.device, backend: str) -> dict[str, Run]:
    """What decodes `STEPS` tokens, by name."""
    import torch

    from gsa.bench.gpu.device import fla_functions
    from gsa.ops import SlotState, gated_slot_attention_step, use_backend

    q, k, v, g = tensors((B, heads), width, device)
    state = SlotState(
        torch.zeros(B, heads, width, SLOTS, device=device), torch.zeros(B, heads, SLOTS, width, device=device)
    )
    cache = torch.zeros(2, B, heads * width // 64, CACHED, 64, dtype=q.dtype, device=device)
    attend = torch.nn.functional.scaled_dot_product_attention

    def slots() -> None:
        with use_backend(backend):
            for _ in range(STEPS):
                gated_slot_attention_step(q, k, v, g, state=state, scale=1.0, inplace=True)

    def softmax() -> None:
        for _ in range(STEPS):
            attend(q.view(B, -1, 1, 64), cache[0], cache[1])

    found: dict[str, Run] = {"slots": slots, "softmax": softmax}
    other = fla_functions()
    if other is not None:
        fused_recurrent_gsa, gates = other[1], g.bfloat16()
        token = [x[:, None] for x in (q, k, v, (1 - gates.exp()).to(gates.dtype), gates)]

        def recurrent() -> None:
            for _ in range(STEPS):
                fused_recurrent_gsa(*token, scale=1.0, initial_state=tuple(state), output_final_state=True)

        found["fla"] = recurrent
    return found


def runnable(contenders: dict[str, Run], where: str, notes: list[str]) -> dict[str, Run]:
    """Those that run once without an error. What became of the others goes to the notes; ours may only lack memory."""
    import torch

    from gsa.errors import OutOfMemory

    able = {}
    for name, run in contenders.items():
        try:
            run()
            torch.cuda.synchronize()
        except (OutOfMemory, torch.OutOfMemoryError):  # of ours, and of the others
            notes.append(f"{name}, {where}: out of memory")
        except Exception as error:
            if name == "slots":
                raise
            notes.append(f"{name}, {where}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        else:
            able[name] = run
    return able


def _scaled(factor: float, x: float | None) -> float | None:
    return None if x is None else factor * x
