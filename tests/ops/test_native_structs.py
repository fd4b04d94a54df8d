"""What Python and C++ must agree on is compared when the library is loaded: every field, every code, every constant."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gsa.ops.native import library, structs
from gsa.ops.readout import READOUTS
from gsa.ops.weights import FORMATS
from tests.ops.isas import needs_native

HEADER = (Path(__file__).parents[2] / "csrc" / "native.h").read_text()


def declared() -> dict[str, list[str]]:
    """The fields of each structure of the header, in their order."""
    found = {}
    plain = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", plain, re.DOTALL):
        found[name] = re.findall(r"(\w+)(?=[,;])", body)
    return found


def test_every_structure_of_the_header_is_mirrored_field_by_field() -> None:
    mirrored = {s.__name__: [name for name, *_ in s._fields_] for s in (*structs.STRUCTURES, structs.GsaNumber)}
    assert mirrored == declared()


@needs_native
def test_the_library_lists_every_field_and_every_constant() -> None:
    found = structs.listed(library.library().gsa_layout())
    assert found == structs.expected()
    fields = {f"{s}.{field}" for s, names in declared().items() for field in names if s != "GsaNumber"}
    constants = re.findall(r"\bGSA_(\w+)", " ".join(re.findall(r"enum \{.*?\}", HEADER, re.DOTALL)))
    assert fields | set(constants) <= found.keys()


def test_the_codes_are_those_of_everything_that_has_one() -> None:
    assert structs.READOUT_CODES.keys() == READOUTS.keys()
    assert structs.WEIGHT_CODES.keys() == set(FORMATS)


def test_no_number_may_differ() -> None:
    expected = structs.expected()
    assert structs.difference(expected) is None
    for name, value in expected.items():
        assert structs.difference(expected | {name: value + 1}) == f"{name} is {value + 1} there and {value} here"
        without = {other: number for other, number in expected.items() if other != name}
        assert structs.difference(without) == f"{name} is missing there and {value} here"


def test_a_number_that_python_does_not_know_and_several_at_once() -> None:
    more = structs.expected() | {"GsaStep.mystery": 8}
    assert structs.difference(more) == "GsaStep.mystery is 8 there and missing here"
    assert structs.difference({}) == f"CHUNK is missing there and 64 here, and {len(structs.expected()) - 1} more"


def imitation(folder: Path, numbers: dict[str, int]) -> Path:
    """A library with all functions of ours, which do nothing, and these numbers."""
    entries = ", ".join(f'{{"{name}", {value}}}' for name, value in numbers.items())
    lines = [
        "struct number { const char* name; long long value; };",
        f"static const struct number numbers[] = {{{entries}, {{0, 0}}}};",
        "const struct number* gsa_layout(void) { return numbers; }",
        f"int gsa_abi(void) {{ return {library.ABI}; }}",
        *(f"void {name}(void) {{}}" for name in library._FUNCTIONS if name != "gsa_layout"),
    ]
    source, built = folder / "imitation.c", folder / "imitation.so"
    source.write_text("\n".join(lines))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", built, source], check=True)
    return built


def loaded(path: Path) -> str:
    """What a new process says of the native engine with this library."""
    code = "from gsa.ops import backends; print(backends()['native'])"
    environment = os.environ | {"GSA_NATIVE_LIBRARY": str(path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs GCC")
def test_a_library_built_with_another_constant_is_refused(tmp_path: Path) -> None:
    said = loaded(imitation(tmp_path, structs.expected() | {"CHUNK": 32}))
    assert said == ("its library was built from other sources: CHUNK is 32 there and 64 here; run `pip install` again")


@needs_native
def test_a_structure_that_has_changed_in_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class GsaStep(ctypes.Structure):
        _fields_ = [("state_of", ctypes.c_void_p), ("batch", ctypes.c_int64), *structs.GsaStep._fields_[2:]]

    monkeypatch.delenv("GSA_NATIVE_LIBRARY", raising=False)
    changed = tuple(GsaStep if s is structs.GsaStep else s for s in structs.STRUCTURES)
    monkeypatch.setattr(structs, "STRUCTURES", changed)
    said = library._load()
    assert isinstance(said, str)
    assert "its library was built from other sources: GsaStep.state_of is 8 there and 0 here, and 1 more" in said


@needs_native
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit of memory is Linux's")
def test_without_memory_every_call_raises_the_same_error_and_the_process_goes_on() -> None:
    code = """
import resource, torch
from gsa.ops import gated_linear_attention, gated_slot_attention, joined_slots, window_attention
from gsa.ops.linear import matvec, pack
from gsa.ops.matmul import matmul
from gsa.ops.selective_scan import selective_scan
torch.set_num_threads(1)
q, k = torch.randn(1, 1, 4096, 64), torch.randn(1, 1, 1, 64)  # so many queries need much room, and little outside
A, B = -torch.rand(64, 1 << 17), torch.ones(1, 1, 1 << 17)
n = dict.fromkeys(("slot_scale", "slot_mass", "slot_bias"), torch.zeros(4096))
weight, x = pack(torch.randn(1, 1 << 21), "bf16"), torch.randn(16, 1 << 21)
calls = (
    lambda: gated_linear_attention(q, k, k, backend="native"),
    lambda: gated_slot_attention(q, k, k, -k.abs(), backend="native"),
    lambda: window_attention(q, k, k, window=4, backend="native"),
    lambda: joined_slots(q, k, k, -k.abs(), k.abs(), q, q[..., 0], **n, backend="native"),
    lambda: selective_scan(k[0], k[0].abs(), A, B, B, backend="native"),
    lambda: matvec(weight, x, backend="native"),
    lambda: matmul(weight, x, compute="bf16-portable"),
)
for call in calls:
    used = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1])
    resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), -1))
    try:
        call()
    except MemoryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
gated_slot_attention(k, k, k, -k.abs(), backend="native")
print("it goes on")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    slots = ("gated_linear_attention", "gated_slot_attention", "window_attention", "joined_slots")
    operations = (*slots, "selective_scan", "matvec", "matmul")
    expected = [f"{operation}: the native engine could not get its working memory" for operation in operations]
    assert run.stdout.splitlines() == [*expected, "it goes on"]
