"""State: a sequence goes on where it was taken, in memory, from a file, and in transformers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gsa.errors import GSAError
from gsa.infer.engine import Engine
from gsa.infer.runners import make_runner
from gsa.infer.state import State
from gsa.infer.tokens import TokenHash
from gsa.models.hf.config import GSAConfig
from gsa.models.hf.modeling import GSAForCausalLM
from gsa.sampling import Sampling
from tests.infer.states import (
    MIXERS,
    ids,
    lm,
    model,
    read,
    same,
    sealed,
    taken_apart,
    tensors,
)

every_mixer = pytest.mark.parametrize("name", MIXERS)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "book.state"


@every_mixer
@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_state_comes_back_from_a_file_and_goes_on_the_same(name: str, count: int, path: Path) -> None:
    state = read(model(name), ids(count))
    state.save(path)
    again = State.load(path, model(name))
    assert same(again, state)
    again.check(model(name))
    new = ids(4, seed=1)
    runner = make_runner(model(name), 1)
    expected, after = runner.read(new, state.model)
    logits, again_after = runner.read(new, again.model)
    assert torch.equal(logits, expected)
    assert all(
        torch.equal(x, layer[key])
        for layer, other in zip(after.layers, again_after.layers, strict=True)
        for key, x in other.items()
    )


@every_mixer
def test_an_engine_goes_on_from_a_file_as_from_memory(name: str, path: Path) -> None:
    engine = Engine(model(name))
    state = engine.read(ids(600))  # more than is read at once
    state.save(path)
    again = State.load(path, engine.model)
    assert (again.tokens, again.digest) == (600, TokenHash.advance(TokenHash.EMPTY, ids(600)).hex())
    answers = [
        [token.id for token in engine.stream(ids(3, seed=1), Sampling(max_tokens=8, temperature=0), state=start)]
        for start in (state, again, again.clone())
    ]
    assert len(answers[0]) == 8
    assert answers[1] == answers[2] == answers[0]


@every_mixer
def test_a_clone_shares_no_memory(name: str) -> None:
    state = read(model(name), ids(9))
    clone, before = state.clone(), state.clone()
    assert same(clone, state)
    for x in tensors(clone).values():
        x.zero_()
    assert same(state, before)


def test_what_a_state_tells_of_itself() -> None:
    state = read(model("gsa"), ids(9))
    assert state.nbytes == sum(x.nbytes for x in tensors(state).values())
    assert repr(state) == f"State(9 tokens, {state.nbytes} bytes, model {model('gsa').fingerprint[:12]})"


@every_mixer
def test_a_file_is_safetensors_with_everything_in_it(name: str, path: Path) -> None:
    state = read(model(name), ids(9))
    state.save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (not a dict)
    assert found.keys() == tensors(state).keys()
    assert all(torch.equal(found[key], x) for key, x in tensors(state).items())
    header, data = taken_apart(path.read_bytes())
    assert metadata == sealed(header, data)["__metadata__"]
    content = metadata.pop("content")
    assert len(content) == 64
    assert metadata == {
        "format": "gsa-state",
        "version": "1",
        "tokens": "9",
        "digest": state.digest,
        "fingerprint": model(name).fingerprint,
        "weights": "fp32",
    }


@every_mixer
def test_a_file_that_safetensors_wrote_again_is_the_same_state(name: str, path: Path) -> None:
    state = read(model(name), ids(9))
    state.save(path)
    metadata = taken_apart(path.read_bytes())[0]["__metadata__"]
    save_file({key: x.contiguous() for key, x in reversed(tensors(state).items())}, path, metadata=metadata)
    assert same(State.load(path, model(name)), state)


def test_tensors_are_aligned_in_a_file(path: Path) -> None:
    read(model("hybrid"), ids(9)).save(path)
    header, data = taken_apart(path.read_bytes())
    assert (path.stat().st_size - len(data)) % 8 == 0
    dtypes = [entry["dtype"] for name, entry in header.items() if name != "__metadata__"]
    assert dtypes == ["I64"] + ["F32"] * (len(dtypes) - 1)  # the wide ones first


def test_the_same_state_is_the_same_file(path: Path) -> None:
    state = read(model("hybrid"), ids(9))
    state.save(path)
    first = path.read_bytes()
    State.load(path, model("hybrid")).clone().save(path)
    assert path.read_bytes() == first
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_other_formats_of_the_same_weights_go_on_from_a_state(weights: str, path: Path) -> None:
    state = read(model("gsa", weights), ids(9))
    state.save(path)
    again = State.load(path, model("gsa"))
    assert same(again, state)
    assert again.weights == weights


@every_mixer
def test_transformers_generate_goes_on_from_a_state(name: str, path: Path) -> None:
    source, text = lm(name), ids(12)[None]
    other = GSAForCausalLM(GSAConfig(**source.config.to_dict())).eval()
    other.load_state_dict(source.state_dict())
    read(model(name), text[0, :9]).save(path)
    state = State.load(path, model(name))
    before = state.clone()
    logits = other(text[:, 9:], past_key_values=state.cache()).logits
    torch.testing.assert_close(logits[0], other(text).logits[0, 9:], atol=1e-4, rtol=1e-4)
    options = {"attention_mask": torch.ones_like(text), "do_sample": False, "max_new_tokens": 5}
    expected = other.generate(text, **options)
    assert torch.equal(other.generate(text, past_key_values=state.cache(), **options), expected)
    assert same(state, before)


def test_a_cache_taken_in_inference_mode_serves_outside_of_it() -> None:
    with torch.inference_mode():
        cache = read(model("gsa"), ids(9)).cache()
    assert cache.get_seq_length() == 9
    assert not any(x.is_inference() for layer in cache.state.layers for x in layer.values())


def test_a_state_of_another_model_or_batch_does_not_pass() -> None:
    state = read(model("gsa"), ids(9))
    with pytest.raises(GSAError, match="State: it is of another model: its fingerprint begins with"):
        state.check(model("hybrid"))
    wrong = State(state.model.repeat(2), state.logits, 9, state.digest, state.fingerprint, "fp32")
    with pytest.raises(GSAError, match=r"State: tensor layers.0.k is F32 \[2, 2, 16, 4\], the model asks for F32 \[1"):
        wrong.check(model("gsa"))


def test_numbers_that_are_not_finite_are_not_saved(path: Path) -> None:
    state = read(model("gsa"), ids(9)).clone()
    state.model.layers[1]["v"][0, 0, 0, 0] = torch.inf
    with pytest.raises(GSAError, match=r"State\.save: tensor layers\.1\.v holds inf, expected finite numbers"):
        state.save(path)
    assert not path.exists()


def test_a_state_is_not_saved_over_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    state = read(model("gsa"), ids(9))
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(GSAError, match=r"State\.save: .* is there and is not a file"):
            state.save(path)
    for path, reason in [
        (tmp_path / "missing" / "book.state", "cannot write"),
        (tmp_path / "null\0", "file: .* cannot be the name of a file"),
        (tmp_path / ("n" * 300), "file: .* cannot be used: File name too long"),
    ]:
        with pytest.raises(GSAError, match=rf"State\.save: {reason}"):
            state.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


def test_a_disk_that_fills_up_leaves_the_earlier_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = read(model("gsa"), ids(9))
    earlier.save(path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(GSAError, match=r"State\.save: cannot write .*No space left on device"):
        read(model("gsa"), ids(5)).save(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert same(State.load(path, model("gsa")), earlier)
