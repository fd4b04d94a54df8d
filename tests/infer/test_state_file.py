"""Files of states: one that is not whole, or does not fit the model, is refused with the reason."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gsa.errors import GSAError
from gsa.infer import state_file
from gsa.infer.model import Model
from gsa.infer.state import State
from tests.infer.states import (
    ids,
    lm,
    model,
    numbers,
    put_together,
    read,
    sealed,
    taken_apart,
    with_numbers,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "book.state"


def saved(name: str, path: Path, count: int = 9) -> tuple[dict[str, Any], bytes]:
    """Header and data of the file of a state."""
    read(model(name), ids(count)).save(path)
    return taken_apart(path.read_bytes())


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in [
        (tmp_path, "is not a file"),
        (tmp_path / "pipe", "is not a file"),
        (tmp_path / "missing", "there is no such file"),
        (tmp_path / "null\0", "file: .* cannot be the name of a file"),
        (tmp_path / ("n" * 300), "file: .* cannot be used: File name too long"),
    ]:
        with pytest.raises(GSAError, match=rf"State\.load: .*: {reason}"):
            State.load(path, model("gsa"))


def test_a_state_of_another_model_is_refused_by_its_fingerprint(path: Path) -> None:
    saved("gsa", path)
    other = model("abc").fingerprint
    reason = f"its fingerprint begins with {model('gsa').fingerprint[:12]}, that of this model with {other[:12]}"
    with pytest.raises(GSAError, match=reason):
        State.load(path, model("abc"))


FILES: list[tuple[bytes, str]] = [
    (b"", "not a safetensors file: it has 0 bytes"),
    (b"\1\0\0\0\0\0\0", "not a safetensors file: it has 7 bytes"),
    (b"\xff" * 8, "a header of 18446744073709551615 bytes in a file of 8"),
    (b"\x03\0\0\0\0\0\0\0{}", "a header of 3 bytes in a file of 10"),
    (put_together(b"", b""), "the header is not JSON"),
    (put_together(b"{", b""), "the header is not JSON"),
    (put_together(b"\xff", b""), "the header is not JSON"),
    (put_together("{}".encode("utf-16"), b""), "the header is not JSON"),
    (put_together(b"[" * 100_000, b""), "the header is not JSON"),
    (put_together(b'{"a": ' + b"9" * 5000 + b"}", b""), "a number of 5000 digits"),
    (put_together(b'{"a": 1e5}', b""), "1e5 is not a whole number"),
    (put_together(b'{"a": 1, "a": 1}', b""), "'a' stands there more than once"),
    (put_together(b'"text"', b""), "not a JSON object, but 'text'"),
    (put_together(b"{}", b""), "not a state that gsa saved"),
    (put_together({"__metadata__": []}, b""), "not a state that gsa saved"),
    (put_together({"__metadata__": {"format": "pt"}}, b""), "not a state that gsa saved"),
]


@pytest.mark.parametrize(("start", "reason"), FILES, ids=[reason for _, reason in FILES])
def test_a_file_that_is_no_state_at_all_is_refused(start: bytes, reason: str, path: Path) -> None:
    path.write_bytes(start)
    with pytest.raises(GSAError, match=reason):
        State.load(path, model("gsa"))


def test_a_long_header_is_refused_before_it_is_read(path: Path) -> None:
    with open(path, "wb") as file:
        file.write((2**33).to_bytes(8, "little"))
        file.truncate(2**34)  # takes no room on the disk
    with pytest.raises(GSAError, match="the header has 8589934592 bytes, expected 4194304 at most"):
        State.load(path, model("gsa"))


def of_metadata(**values: object) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        metadata = header["__metadata__"]
        metadata.update(values)
        for name in [name for name, value in values.items() if value is None]:
            del metadata[name]

    return change


def of_tensor(tensor: str, **values: object) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[tensor].update(values)


def renamed(header: dict[str, Any]) -> None:
    header["layers.0.w"] = header.pop("layers.0.v")


def turned(header: dict[str, Any]) -> None:
    """Two tensors change places in the header, not in the data."""
    first = header.pop("layers.0.k")
    header["layers.0.k"] = first


CHANGES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (of_metadata(version="2"), "version '2' of the format, this gsa reads 1; it was written by a newer gsa"),
    (of_metadata(version="x"), "version 'x' of the format, this gsa reads 1$"),
    (of_metadata(version=None), "version None of the format"),
    (of_metadata(tokens="-9"), "metadata: tokens is '-9'"),
    (of_metadata(tokens="0"), "metadata: tokens is '0'"),
    (of_metadata(tokens="nine"), "metadata: tokens is 'nine'"),
    (of_metadata(tokens="９"), "metadata: tokens is '９'"),  # noqa: RUF001  (a digit, but none of ours)
    (of_metadata(tokens="9\n"), "metadata: tokens is '9.n'"),
    (of_metadata(tokens="9" * 19), "metadata: tokens is '9999"),
    (of_metadata(tokens=9), "metadata: tokens is 9"),
    (of_metadata(tokens=None), "metadata: tokens is None"),
    (of_metadata(digest="00"), "metadata: digest is '00'"),
    (of_metadata(fingerprint="A" * 64), "metadata: fingerprint is 'AAA"),
    (of_metadata(fingerprint="a" * 64), "it is of another model: its fingerprint begins with aaaaaaaaaaaa, that of"),
    (of_metadata(weights="int2"), "metadata: weights is 'int2', expected fp32|bf16|int8|int4"),
    (of_metadata(content=None), "metadata: content is None"),
    (of_metadata(more=""), "metadata: unknown field 'more'"),
    (of_tensor("logits", dtype="F16"), r"tensor logits is F16 \[31\], the model asks for F32 \[31\]"),
    (of_tensor("logits", dtype=["F32"]), "tensor 'logits' is described as"),
    (of_tensor("logits", shape=[1, 31]), r"tensor logits is F32 \[1, 31\], the model asks for F32 \[31\]"),
    (of_tensor("logits", shape=[2**60]), r"tensor logits is F32 \[1152921504606846976\]"),
    (of_tensor("logits", shape=[-31]), "tensor 'logits' is described as"),
    (of_tensor("logits", shape=[True]), "tensor 'logits' is described as"),
    (of_tensor("logits", data_offsets=[0, 124]), r"tensor logits lies at \[0, 124\], expected \["),
    (of_tensor("logits", data_offsets=[124]), r"tensor logits lies at \[124\]"),
    (of_tensor("logits", data_offsets=None), "tensor 'logits' is described as"),
    (of_tensor("logits", stride=[1]), "tensor 'logits' is described as"),
    (lambda header: header.pop("layers.1.v"), "tensor layers.1.v is missing"),
    (lambda header: header.update(extra=header["logits"]), "tensor 'extra' is not part of a state of this model"),
    (renamed, "tensor layers.0.v is missing"),
    (turned, r"tensor layers.0.k_conv lies at \["),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[reason[:40] for _, reason in CHANGES])
def test_a_header_that_does_not_fit_is_refused_before_any_tensor_is_read(
    change: Callable[[dict[str, Any]], None], reason: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, data = saved("gsa", path)
    change(header)
    path.write_bytes(put_together(header, data))
    monkeypatch.setattr(state_file, "_read_tensor", lambda *args: pytest.fail("a tensor was read"))
    with pytest.raises(GSAError, match=rf"^State\.load: .*book\.state: .*{reason}"):
        State.load(path, model("gsa"))


@pytest.mark.parametrize(
    ("name", "tokens", "reason"),
    [
        ("attention", 8, r"tensor layers.0.k is F32 \[1, 9, 2, 16\], the model asks for F32 \[1, 8, 2, 16\]"),
        ("attention", 10**11, r"the model asks for F32 \[1, 100000000000, 2, 16\]"),
        ("window", 3, r"tensor layers.0.k is F32 \[1, 4, 2, 16\], the model asks for F32 \[1, 3, 2, 16\]"),
        ("window", 8, r"tensor layers.0.position counts \[9\] tokens, the state 8"),
        ("abc", 8, r"tensor layers.0.position counts \[9\] tokens, the state 8"),
    ],
)
def test_states_that_count_tokens_agree_with_the_metadata(name: str, tokens: int, reason: str, path: Path) -> None:
    header, data = saved(name, path)
    header["__metadata__"]["tokens"] = str(tokens)
    path.write_bytes(put_together(sealed(header, data), data))
    with pytest.raises(GSAError, match=reason):
        State.load(path, model(name))


def test_keys_and_values_are_of_as_many_tokens(path: Path) -> None:
    header, data = saved("attention", path)
    header["layers.1.v"]["shape"][1] = 8
    path.write_bytes(put_together(sealed(header, data), data))
    with pytest.raises(GSAError, match=r"tensor layers.1.v is F32 \[1, 8, 2, 16\], the model asks for F32 \[1, 9"):
        State.load(path, model("attention"))


def test_a_file_that_claims_more_than_it_has_is_refused_before_memory_is_taken(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, data = saved("attention", path)
    tokens, end = 10**11, 0
    header["__metadata__"]["tokens"] = str(tokens)
    for name, entry in list(header.items())[1:]:
        if name.endswith((".k", ".v")):
            entry["shape"][1] = tokens
        start, end = end, end + int(np.prod(entry["shape"], dtype=object)) * (8 if entry["dtype"] == "I64" else 4)
        entry["data_offsets"] = [start, end]
    path.write_bytes(put_together(header, data))
    monkeypatch.setattr(state_file, "_read_tensor", lambda *args: pytest.fail("a tensor was read"))
    with pytest.raises(GSAError, match=f"truncated: {len(data)} bytes of tensors, the header tells of {end}"):
        State.load(path, model("attention"))


@pytest.mark.parametrize(("more", "reason"), [(-1, "truncated"), (1, "longer than it should be")])
def test_a_file_of_another_length_is_refused(more: int, reason: str, path: Path) -> None:
    saved("gsa", path)
    os.truncate(path, path.stat().st_size + more)
    with pytest.raises(GSAError, match=f"{reason}: .* bytes of tensors, the header tells of"):
        State.load(path, model("gsa"))


@pytest.mark.parametrize("field", ["digest", "weights"])
def test_changed_metadata_is_found(field: str, path: Path) -> None:
    header, data = saved("gsa", path)
    header["__metadata__"][field] = {"digest": "0" * 64, "weights": "int4"}[field]
    path.write_bytes(put_together(header, data))
    with pytest.raises(GSAError, match="does not have the hash that was saved with it"):
        State.load(path, model("gsa"))
    path.write_bytes(put_together(sealed(header, data), data))
    assert getattr(State.load(path, model("gsa")), field) == header["__metadata__"][field]


@pytest.mark.parametrize("tensor", ["layers.1.k", "logits"])
def test_changed_numbers_are_found(tensor: str, path: Path) -> None:
    header, data = saved("gsa", path)
    new = numbers(header, data, tensor)
    new[0] += 1
    path.write_bytes(put_together(header, with_numbers(header, data, tensor, new)))
    with pytest.raises(GSAError, match="does not have the hash that was saved with it"):
        State.load(path, model("gsa"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "tensor"), [("gsa", "logits"), ("gsa", "layers.1.k_conv"), ("abc", "layers.0.log_z")])
def test_numbers_that_are_not_finite_are_refused(name: str, tensor: str, value: float, path: Path) -> None:
    header, data = saved(name, path)
    new = numbers(header, data, tensor)
    new[-1] = value
    data = with_numbers(header, data, tensor, new)
    path.write_bytes(put_together(sealed(header, data), data))
    with pytest.raises(GSAError, match=f"tensor {tensor} holds {value}, expected finite numbers"):
        State.load(path, model(name))


def test_a_file_is_inspected_without_its_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header, data = saved("abc", path)  # whose tensors are of several dtypes
    monkeypatch.setattr(state_file, "BLOCK", 7)
    monkeypatch.setattr(state_file, "_read_tensor", lambda *args: pytest.fail("a tensor was read"))
    fields, kinds = state_file.inspect_state(path)
    assert fields == {name: header["__metadata__"][name] for name in state_file.FIELDS}
    assert {name: (kind.dtype, list(kind.shape)) for name, kind in kinds.items()} == {
        name: (entry["dtype"], entry["shape"]) for name, entry in header.items() if name != "__metadata__"
    }
    for at in (0, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(put_together(header, bytes(changed)))
        with pytest.raises(GSAError, match="does not have the hash that was saved with it"):
            state_file.inspect_state(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (of_tensor("logits", dtype="F16"), r"tensor 'logits' is F16 \[31\], expected F32 or I64"),
        (of_tensor("logits", dtype="I64"), r"tensor logits is I64 \[31\], expected F32 of one dimension"),
        (of_tensor("logits", shape=[0, 2**62, 2**62]), "expected F32 of one dimension"),
        (of_tensor("layers.0.k", shape=[0, 2**62, 2**62]), r"tensor layers.0.k lies at \[.*, expected \[0, 0\]"),
        (of_tensor("logits", shape=[2**62]), r"tensor logits lies at \["),
        (of_tensor("logits", shape=[2**64]), "a number of 20 digits"),
        (lambda header: header.pop("logits"), "tensor logits is missing"),
        (lambda header: header.pop("__metadata__"), "not a state that gsa saved"),
    ],
)
def test_a_header_that_none_can_have_is_found_without_a_model(
    change: Callable[[dict[str, Any]], None], reason: str, path: Path
) -> None:
    header, data = saved("gsa", path)
    change(header)
    path.write_bytes(put_together(header, data))
    with pytest.raises(GSAError, match=reason):
        state_file.inspect_state(path)


def test_a_large_file_is_inspected_in_little_memory(path: Path) -> None:
    header, _ = saved("gsa", path)
    count = 2**24
    logits = {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}
    path.write_bytes(put_together({"__metadata__": header["__metadata__"], "logits": logits}, b""))
    os.truncate(path, path.stat().st_size + 4 * count)  # takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(GSAError, match="does not have the hash that was saved with it"):
            state_file.inspect_state(path)
        assert tracemalloc.get_traced_memory()[1] < count
    finally:
        tracemalloc.stop()


def test_a_file_that_shrinks_while_it_is_read_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("gsa", path)
    checked = state_file._check_places

    def shrinking(*args: Any) -> None:
        checked(*args)
        os.truncate(path, 0)

    monkeypatch.setattr(state_file, "_check_places", shrinking)
    monkeypatch.setattr(state_file, "open", partial(open, buffering=16), raising=False)
    with pytest.raises(GSAError, match="truncated while it was read"):
        State.load(path, model("gsa"))
    saved("gsa", path)
    with pytest.raises(GSAError, match="truncated while it was read"):
        state_file.inspect_state(path)


def test_a_model_with_other_weights_is_another_model(path: Path) -> None:
    saved("gsa", path)
    other = lm("gsa")
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    with pytest.raises(GSAError, match="it is of another model"):
        State.load(path, Model.load(other))
