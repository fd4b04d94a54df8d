"""Files of states that were damaged, cut or forged: always an error that says why, or the very state that was saved."""

from __future__ import annotations

import copy
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from gsa.errors import GSAError
from gsa.infer import state_file
from gsa.infer.state import State
from tests.examples import examples
from tests.infer.states import fields, ids, model, put_together, read, same, sealed, taken_apart, tensors

NAMES = ("gsa", "attention", "hybrid")  # states of a fixed size, states that grow, and both
names = st.sampled_from(NAMES)
many, some = examples(300), examples(150)
counts = st.one_of(st.integers(-3, 40), st.integers(-(2**70), 2**70), st.sampled_from([2**31, 2**60, 2**63 - 1, 2**64]))
long = st.sampled_from(["x" * 999, [1] * 999, ["x" * 99] * 9, "\ud800"])
values = st.one_of(
    st.none(), st.booleans(), counts, st.floats(), st.text(max_size=9), st.lists(counts, max_size=4), long
)
trees = st.recursive(values, lambda inner: st.dictionaries(st.text(max_size=9), inner, max_size=4), max_leaves=12)


@cache
def original(name: str) -> tuple[State, bytes]:
    """A state and its file."""
    state = read(model(name), ids(6))
    with tempfile.TemporaryDirectory() as folder:
        state.save(Path(folder) / "state")
        return state, (Path(folder) / "state").read_bytes()


def load(name: str, file: bytes) -> State | None:
    """The state in a file, or None if it is refused in a sentence. Whatever else is raised fails the test, and so does
    a tensor that is larger than the file."""
    read_tensor = state_file._read_tensor

    def bounded(opened: Any, kind: state_file.Kind) -> torch.Tensor:
        assert kind.nbytes <= len(file)
        return read_tensor(opened, kind)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(state_file, "_read_tensor", bounded):
        path = Path(folder) / "state"
        path.write_bytes(file)
        try:
            return State.load(path, model(name))
        except GSAError as error:
            message = str(error)
    operation, reason = message.split(f" {path}: ")
    assert operation == "State.load:"
    assert 10 < len(reason) < 400
    reason.encode()  # it can be printed
    return None


def assert_refused_or_the_same(name: str, file: bytes) -> None:
    state = load(name, file)
    assert state is None or same(state, original(name)[0])


def assert_refused_or_of_this_model(name: str, file: bytes) -> None:
    """For forged files, whose hash is that of their content: what they say may be untrue, but it fits."""
    state = load(name, file)
    if state is not None:
        state.check(model(name))
        assert state.tokens >= 1
        assert all(bool(x.isfinite().all()) for x in tensors(state).values())


@many
@given(
    name=names, flips=st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=4), data=st.data()
)
def test_bytes_that_flip_anywhere(name: str, flips: list[tuple[int, int]], data: st.DataObject) -> None:
    file = bytearray(original(name)[1])
    header_only = data.draw(st.booleans())  # where most of the checks are
    end = 8 + int.from_bytes(file[:8], "little") if header_only else len(file)
    for at, bits in flips:
        file[at % end] ^= bits
    assert_refused_or_the_same(name, bytes(file))


@many
@given(name=names, at=st.integers(0), new=st.binary(max_size=20), removed=st.integers(0, 20))
def test_bytes_that_are_cut_out_or_put_in(name: str, at: int, new: bytes, removed: int) -> None:
    file = original(name)[1]
    at %= len(file) + 1
    assert_refused_or_the_same(name, file[:at] + new + file[at + removed :])


@some
@given(name=names, length=st.integers(0))
def test_files_that_end_early(name: str, length: int) -> None:
    file = original(name)[1]
    assert load(name, file[: length % len(file)]) is None


@some
@given(name=names, more=st.binary(min_size=1, max_size=100))
def test_files_that_go_on(name: str, more: bytes) -> None:
    assert load(name, original(name)[1] + more) is None


@some
@given(name=names, file=st.binary(max_size=200), length=st.none() | st.integers(0, 2**64 - 1))
def test_bytes_of_any_kind(name: str, file: bytes, length: int | None) -> None:
    start = (len(file) if length is None else length).to_bytes(8, "little")
    assert load(name, file) is None
    assert load(name, start + file) is None


@some
@given(name=names, header=trees, metadata=trees, with_data=st.booleans())
def test_headers_of_any_json(name: str, header: Any, metadata: Any, with_data: bool) -> None:
    data = taken_apart(original(name)[1])[1] if with_data else b""
    assert load(name, put_together(header, data)) is None
    assert load(name, put_together({"__metadata__": metadata, "logits": header}, data)) is None


def offered(name: str, header: dict[str, Any]) -> None:
    """Loads a changed header, with the hash as it was and as a forger would have it."""
    data = taken_apart(original(name)[1])[1]
    assert_refused_or_the_same(name, put_together(header, data))
    try:
        forged = sealed(header, data)
    except (TypeError, KeyError, ValueError):  # no hash can be computed of what is no description of tensors
        return
    assert_refused_or_of_this_model(name, put_together(forged, data))


@many
@given(name=names, data=st.data())
def test_metadata_of_any_kind(name: str, data: st.DataObject) -> None:
    header = copy.deepcopy(taken_apart(original(name)[1])[0])
    others = [taken_apart(original(other)[1])[0]["__metadata__"] for other in NAMES]
    field = data.draw(st.sampled_from([*header["__metadata__"], "more"]))
    like_it = st.sampled_from([other.get(field, "") for other in others])
    digits = st.integers(-5, 10**25).map(str)
    header["__metadata__"][field] = data.draw(st.one_of(like_it, digits, values))
    offered(name, header)


@many
@given(name=names, data=st.data())
def test_tensors_described_in_any_way(name: str, data: st.DataObject) -> None:
    header = copy.deepcopy(taken_apart(original(name)[1])[0])
    tensor = data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    entry = header[tensor]
    kinds = {
        "dtype": st.sampled_from(["F64", "F32", "BF16", "I64", "U8", "BOOL", "F4", ""]),
        "shape": st.permutations(entry["shape"]) | st.lists(counts, max_size=5),
        "data_offsets": st.lists(counts, max_size=3),
    }
    for key in data.draw(st.sets(st.sampled_from(sorted(kinds)), min_size=1)):
        entry[key] = data.draw(kinds[key] | values)
    offered(name, header)


@some
@given(name=names, data=st.data())
def test_tensors_that_are_missing_doubled_renamed_or_exchanged(name: str, data: st.DataObject) -> None:
    header = copy.deepcopy(taken_apart(original(name)[1])[0])
    one, other = (data.draw(st.sampled_from(sorted(header))) for _ in range(2))
    change = data.draw(st.sampled_from(["missing", "doubled", "renamed", "exchanged"]))
    if change == "missing":
        del header[one]
    elif change == "doubled":
        header[data.draw(st.text(max_size=9))] = header[one]
    elif change == "renamed":
        header[data.draw(st.text(max_size=9))] = header.pop(one)
    else:
        header[one], header[other] = header[other], header[one]
    offered(name, header)


@some
@given(name=names, at=st.integers(0), new=st.binary(min_size=1, max_size=16))
def test_forged_numbers(name: str, at: int, new: bytes) -> None:
    header, data = taken_apart(original(name)[1])
    at %= len(data) - len(new)
    changed = data[:at] + new + data[at + len(new) :]
    assert_refused_or_the_same(name, put_together(header, changed))
    assert_refused_or_of_this_model(name, put_together(sealed(header, changed), changed))


def test_files_of_other_models_are_refused() -> None:
    for name in NAMES:
        for other in NAMES:
            state = load(name, original(other)[1])
            assert (state is None) == (name != other)
            if state is not None:
                assert fields(state) == fields(original(name)[0])
