"""A tokenizer.json of any content: a tokenizer that works, or a sentence; never a hang, an abort or a panic."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gsa.pretrained
from gsa.data import tokenizer_check
from gsa.data.prepare import prepare
from gsa.data.tokenizer import CONFIG, JSON, BytesTokenizer, config_text, load_tokenizer
from gsa.data.tokenizer_check import WORDS
from gsa.data.tokenizer_json import JsonTokenizer
from gsa.errors import GSAError
from tests.examples import examples

DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def content(**parts: Any) -> dict[str, Any]:
    """A tokenizer of bytes with other parts, which is not taken for our own."""
    return {**json.loads(BytesTokenizer().files()[JSON]), **parts}


def folder(place: Path, whole: Any) -> Path:
    (place / JSON).write_text(whole if isinstance(whole, str) else json.dumps(whole))
    (place / CONFIG).write_text(config_text(eos="<|endoftext|>"))
    return place


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 40}},
            "normalizer could make a text more than 64",
        ),
        ({"normalizer": {**DOUBLE, "pattern": {"Regex": ""}, "content": "a" * 99}}, "normalizer could make a text"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 10**6}}, "normalizer could make a text"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 9}}, "pre_tokenizer could"),
        ({"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 40}}, "decoder could make a text"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 500}}, "has 501 steps, expected 100"),
        ({"pre_tokenizer": split("(a+)+$")}, "pre_tokenizer cannot be used; .*retry-limit"),
        ({"pre_tokenizer": split(r"(Z|ZZ)+\1$")}, "pre_tokenizer cannot be used; .*retry-limit"),
        ({"normalizer": {**DOUBLE, "pattern": {"Regex": "(x+x+)+y"}}}, "normalizer cannot be used; .*retry-limit"),
        ({"pre_tokenizer": split("(")}, "pre_tokenizer cannot be used; .*parenthesis"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}}, "normalizer cannot be used"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////"}}, "normalizer cannot be used"),
        ({"normalizer": {"type": "Nothing"}}, "not a tokenizer.json that `tokenizers` reads"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1, "b": 0}, "unk_token": "b"}}, "without a gap"),
        ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**9, "vocab": {}}}, "expected 1000 at most"),
    ],
    ids=str,
)
def test_a_file_that_could_hang_or_crash_is_refused(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    with pytest.raises(GSAError, match=f"^tokenizer: {tmp_path}.*: .*{message}"):
        load_tokenizer(folder(tmp_path, content(**parts)))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for whole in ("", "[]", "3", "{", "[" * 10**5, '{"normalizer": ' * 10**5, '{"a": ' + "9" * 5000 + "}"):
        with pytest.raises(GSAError, match=r"^tokenizer: .{10,300}$"):
            load_tokenizer(folder(tmp_path, whole))
    monkeypatch.setattr(tokenizer_check, "MAX_BYTES", 100)
    with pytest.raises(GSAError, match="characters, expected 100 at most"):
        load_tokenizer(folder(tmp_path, content(version="2.0")))


def test_a_trial_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_check, "SECONDS", 0.01)
    with pytest.raises(GSAError, match=r"tried out on short texts: it took more than 0.01 seconds"):
        load_tokenizer(folder(tmp_path, content(pre_tokenizer=split("(a|b)+"))))


def test_usual_expressions_pass(tmp_path: Path) -> None:
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of GPT-2
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts = {"type": "Sequence", "pretokenizers": [split(words), byte_level]}
    tokenizer = load_tokenizer(folder(tmp_path, content(pre_tokenizer=parts)))
    (ids,) = tokenizer.encode(["It's 12345 naïve words\n"])
    assert tokenizer.decode(ids) == "It's 12345 naïve words\n"


def test_usual_tokenizers_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a tenth of a second."""
    monkeypatch.setattr(tokenizer_check, "Helper", lambda *_, **__: pytest.fail("a helper was started"))
    for name in (gsa.pretrained.folder(), "mistral", "bytes"):
        assert load_tokenizer(name).encode(["a"])
    for expression in tokenizer_check._TRIED:
        tokenizer_check.check_tokenizer("known", json.dumps(content(pre_tokenizer=split(expression))))


@pytest.mark.parametrize("expression", [WORDS, *tokenizer_check._TRIED])
def test_expressions_that_need_no_trial_pass_one(expression: str) -> None:
    assert tokenizer_check._tried({**dict.fromkeys(tokenizer_check.STAGES), "pre_tokenizer": split(expression)}) == ""


def test_a_vocabulary_with_a_gap_beyond_reason_is_refused() -> None:
    model = {"type": "WordLevel", "vocab": {"a": 2**32 - 1, "b": 0}, "unk_token": "b"}
    with pytest.raises(GSAError, match="its ids go up to 4,294,967,295, expected 0 to 16,777,215"):
        JsonTokenizer("gap", json.dumps({"version": "1.0", "model": model}), {}, 0)


def bad() -> JsonTokenizer:
    """A tokenizer that passes no trial, as one might be that a trial does not see through."""
    whole = content(pre_tokenizer=split("(a+)+$"))
    return JsonTokenizer("bad", json.dumps(whole), {}, 256)


def test_a_panic_of_the_library_is_a_sentence() -> None:
    with pytest.raises(GSAError, match=r"^tokenizer: bad: its library failed: .*retry-limit"):
        bad().encode(["a" * 40 + "b"])
    assert len(bad().encode(["bbb"])[0]) == 3


def test_a_panic_while_data_is_prepared_is_told_and_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "good.txt").write_text("b" * 100)
    with pytest.raises(GSAError, match="pre_tokenizer cannot be used"):  # already in the worker, before any text
        prepare([str(tmp_path / "text")], bad(), tmp_path / "out", progress=False)
    assert not (tmp_path / "out" / "manifest.json").exists()


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 300), st.sampled_from([2**31, 2**32, 2**63, 1e300]), st.text(max_size=4)
)
STEPS = st.sampled_from(
    [
        DOUBLE,
        split("(a+)+$"),
        split(r"\s+"),
        {"type": "NFKC"},
        {"type": "Lowercase"},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Digits", "individual_digits": True},
        {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "ByteFallback"},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    ]
)
PARTS = STEPS | LEAVES | st.lists(STEPS, max_size=9)


@pytest.mark.filterwarnings("ignore")
@examples(80)
@given(st.data())
def test_any_change_of_a_file_gives_a_tokenizer_or_a_sentence(tmp_path_factory: Any, data: st.DataObject) -> None:
    whole = copy.deepcopy(content())
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from([*whole, "more"]))
        part = data.draw(PARTS)
        names = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
        if isinstance(part, list):
            part = {"type": "Sequence", names.get(key, "parts"): part}
        if key == "model" and isinstance(whole["model"], dict) and data.draw(st.booleans()):
            part = {**whole["model"], data.draw(st.sampled_from([*whole["model"]])): part}
        whole[key] = part
    place = tmp_path_factory.mktemp("tokenizer")
    try:
        tokenizer = load_tokenizer(folder(place, whole))
        (ids,) = tokenizer.encode(["It's aaaa naïve 12 <|endoftext|>\n" * 3])
        tokenizer.decode(ids)
    except GSAError as error:
        said = str(error)
    else:
        said = "tokenizer: it works"
    assert said.startswith("tokenizer: ")
    assert len(said) < 1000
