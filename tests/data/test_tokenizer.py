"""Tokenizers: nothing is lost, text is only text, and transformers gives the same ids."""

from __future__ import annotations

import errno
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa import pretrained
from gsa.data.report import losses
from gsa.data.tokenizer import BytesTokenizer, Tokenizer, cut_before, load_tokenizer, pieces
from gsa.data.tokenizer_train import train_tokenizer
from gsa.errors import GSAError
from tests.data.cases import text

TEXTS = [
    "",
    "Call me Ishmael.",
    "  two spaces,\ttab\n\n\nlines \r\n end ",
    "naïve café 东西 ไทย 😀 👨‍👩‍👧 \u200b\u0301",
    "<|endoftext|> <s></s><unk> <0x0A> [INST]",
    "\x00\x01\x7f\ufffd\U0010ffff",
    "1851 12345.678 don't we'll 'quoted'",
    "▁ under ▁▁ line",
    " ",
    "a" * 3000,
]
plain_text = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def mistral() -> Tokenizer:
    return load_tokenizer("mistral")


@pytest.fixture(params=["bytes", "bpe", "mistral"])
def tokenizer(request: pytest.FixtureRequest, bpe: str) -> Tokenizer:
    if request.param == "mistral":
        return request.getfixturevalue("mistral")
    return load_tokenizer(bpe if request.param == "bpe" else "bytes")


@given(st.lists(plain_text, max_size=3))
def test_any_text_comes_back(bpe: str, texts: list[str]) -> None:
    for tokenizer in (load_tokenizer("bytes"), load_tokenizer(bpe)):
        assert [tokenizer.decode(ids) for ids in tokenizer.encode(texts)] == texts


def test_ids_fit_and_none_is_special(tokenizer: Tokenizer) -> None:
    for ids in tokenizer.encode([*TEXTS, text(40_000)]):
        assert ids.dtype == tokenizer.dtype == "uint16"
        assert tokenizer.eos_id not in ids
        assert ids.size == 0 or ids.max() < tokenizer.vocab_size


def test_transformers_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    other = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(other), other.eos_token_id) == (tokenizer.vocab_size, tokenizer.eos_id)
    texts = [*TEXTS, text(3000)]
    assert [ids.tolist() for ids in tokenizer.encode(texts)] == other(texts, add_special_tokens=False)["input_ids"]
    assert other.decode(tokenizer.encode([TEXTS[3]])[0]) == TEXTS[3]


def test_a_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Whether it was saved here or by transformers."""
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path / "a")
    AutoTokenizer.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    for path in (tmp_path / "a", tmp_path / "a" / "tokenizer.json", tmp_path / "b"):
        loaded = load_tokenizer(path)
        assert loaded.encode([TEXTS[6]])[0].tolist() == tokenizer.encode([TEXTS[6]])[0].tolist()
        assert type(loaded) is type(tokenizer)
        assert (loaded.fingerprint, loaded.info.eos_id) == (tokenizer.fingerprint, tokenizer.eos_id)
        assert loaded.name == str(path)


def test_a_text_in_pieces_has_the_tokens_of_the_whole(tokenizer: Tokenizer) -> None:
    whole = text(30_000)
    parts = [tokenizer.encode([part], continues=i > 0)[0] for i, part in enumerate(pieces(whole, 1000))]
    assert len(parts) > 20
    assert tokenizer.decode(np.concatenate(parts)) == whole
    if tokenizer.name != "bytes":
        assert np.concatenate(parts).tolist() == tokenizer._run.encode(whole, add_special_tokens=False).ids


@given(st.text(st.sampled_from("ab \n\t"), max_size=300), st.integers(1, 40))
def test_pieces_are_the_text_and_no_longer_than_asked(whole: str, limit: int) -> None:
    found = list(pieces(whole, limit))
    assert "".join(found) == whole
    assert all(len(piece) <= limit for piece in found)
    assert all(found[:-1])


def test_cuts_come_at_lines_then_words() -> None:
    assert cut_before("aaaa\nbb cc", 0, 10, "\n", " ") == 7
    assert cut_before("aaaaa bb\ncccc", 0, 12, "\n", " ") == 9
    assert cut_before("aaaaa bb\n cccc", 0, 12, "\n", " ") == 9
    assert cut_before(b"aaaaaaaaaa", 0, 10, b"\n", b" ") == 0


def test_mistral_is_that_of_mistral_common(mistral: Tokenizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        other = MistralTokenizer.v1().instruct_tokenizer.tokenizer
        texts = [*TEXTS, *(text(500, seed) for seed in range(20)), text(60_000), " " * 999, "=-" * 999]
        assert (mistral.vocab_size, mistral.eos_id) == (other.n_words, other.eos_id) == (32000, 2)
        for sample, ids in zip(texts, mistral.encode(texts), strict=True):
            assert ids.tolist() == other.encode(sample, bos=False, eos=False)
        assert mistral.decode(mistral.encode([TEXTS[3]])[0]) == TEXTS[3]


def test_special_tokens_are_decoded_by_name(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode(["end"])[0], tokenizer.eos_id]
    assert tokenizer.decode(ids) == "end" + ("</s>" if tokenizer.name == "mistral" else "<|endoftext|>")


@pytest.mark.parametrize("size", [257, 300, 512])
def test_a_trained_tokenizer_has_exactly_the_size_asked_for(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_text(text(20_000))
    made = [train_tokenizer([str(tmp_path / "a.txt")], size, tmp_path / f"{i}") for i in range(2)]
    assert made[0].vocab_size == size
    assert made[0].fingerprint == made[1].fingerprint
    assert (tmp_path / "0" / "tokenizer.json").read_bytes() == (tmp_path / "1" / "tokenizer.json").read_bytes()


def test_numbers_are_spelt_digit_by_digit(bpe: str) -> None:
    assert len(load_tokenizer(bpe).encode(["1851185118"])[0]) == 10


def test_training_reads_rows_and_stops_at_the_limit(tmp_path: Path) -> None:
    rows = [json.dumps({"body": "aaaa bbbb " * 20}), json.dumps({"body": "cccc dddd " * 20})]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    one = train_tokenizer([str(tmp_path / "a.jsonl")], 262, tmp_path / "one", field="body", limit_bytes=100)
    both = train_tokenizer([str(tmp_path / "a.jsonl")], 262, tmp_path / "both", field="body")
    assert len(one.encode(["cccc"])[0]) == 4
    assert len(both.encode([" cccc"])[0]) < 5
    assert one.fingerprint != both.fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 256}, "vocab_size must be at least 257"),
        ({"vocab_size": 2**20 + 1}, "vocab_size must be at most 1048576"),
        ({"vocab_size": 300, "out": ""}, "out is empty"),
        ({"vocab_size": 300, "out": "/dev/null"}, "folder /dev/null cannot be made"),
        ({"vocab_size": 4000}, "too little variety for 4000 tokens"),
        ({"vocab_size": 300, "limit_bytes": 0}, "limit_bytes must be at least 1"),
    ],
)
def test_what_cannot_be_trained(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    (tmp_path / "a.txt").write_text("so few words")
    with pytest.raises(GSAError, match=message):
        train_tokenizer([str(tmp_path / "a.txt")], **{"out": tmp_path / "new", **options})
    assert not (tmp_path / "new").exists()


def test_training_tells_what_was_wrong_with_rows(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "aaaa bbbb " * 20}) + "\n{}\n")
    with pytest.raises(GSAError, match=r"there is no text in .*field missing: 2\); --field is 'text', .* has 'body'"):
        train_tokenizer([str(tmp_path / "a.jsonl")], 260, tmp_path / "new")
    with pytest.raises(GSAError, match=r"too little variety .*; left out: 1 rows \(field missing\)"):
        train_tokenizer([str(tmp_path / "a.jsonl")], 300, tmp_path / "new", field="body")
    assert not (tmp_path / "new").exists()
    train_tokenizer([str(tmp_path / "a.jsonl")], 260, tmp_path / "new", field="body")
    assert "left out: 1 rows (field missing)" in capsys.readouterr().err


def edited(bpe: str, folder: Path, config: dict[str, Any] | None = None, **model: object) -> Path:
    """A copy of a tokenizer with other settings."""
    shutil.copytree(bpe, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"] |= model
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if config is not None:
        config |= {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_no_merge_is_left_out_by_chance(bpe: str, tmp_path: Path) -> None:
    plain, tokenizer = load_tokenizer(bpe), load_tokenizer(edited(bpe, tmp_path / "t", dropout=0.9))
    assert tokenizer.encode([text(2000)])[0].tolist() == plain.encode([text(2000)])[0].tolist()
    assert tokenizer.fingerprint == plain.fingerprint
    assert json.loads(tokenizer.files()["tokenizer.json"])["model"]["dropout"] is None


def test_a_tokenizer_of_others_is_saved_so_that_text_is_only_text(bpe: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(edited(bpe, tmp_path / "t", {"add_prefix_space": False}))
    tokenizer.save(tmp_path / "saved")
    other = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert other(TEXTS[4])["input_ids"] == tokenizer.encode([TEXTS[4]])[0].tolist()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"add_prefix_space": True}, "add_prefix_space"),
        ({"added_tokens_decoder": {"400": {"content": "<new>", "special": False}}}, "added token 400"),
        (
            {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": False}}},
            "added token '<|endoftext|>'",
        ),
        ({"added_tokens_decoder": {"x": 5}}, "added token x"),
    ],
)
def test_a_config_that_would_change_ids_is_refused(
    bpe: str, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(GSAError, match=f"do not say the same \\({re.escape(message)}\\)"):
        load_tokenizer(edited(bpe, tmp_path / "t", config))


@pytest.mark.parametrize(
    ("id_", "content", "message"),
    [
        (300, "<x>", "'<x>' has id 300, `tokenizers` gives it id 257;"),
        (257, "a", "'a' has id 257, `tokenizers` gives it id 97;"),
        (257, "", "'' has id 257, `tokenizers` gives it none;"),
        (257, "<|endoftext|>", "has id 257, `tokenizers` gives it id 256;"),
    ],
)
def test_an_added_token_that_would_get_another_id_is_refused(
    tmp_path: Path, id_: int, content: str, message: str
) -> None:
    BytesTokenizer().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    whole = json.loads(path.read_text())
    added = {**whole["added_tokens"][0], "id": id_, "content": content}
    path.write_text(json.dumps({**whole, "added_tokens": [*whole["added_tokens"], added]}))
    with pytest.raises(GSAError, match=re.escape(message)):
        load_tokenizer(tmp_path)


def test_what_a_tokenizer_loses_is_noted(tokenizer: Tokenizer, bpe: str, tmp_path: Path) -> None:
    assert losses(tokenizer) == []
    folder = edited(bpe, tmp_path / "t")
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, "normalizer": {"type": "Lowercase"}}))
    assert losses(load_tokenizer(folder)) == ["note: the tokenizer loses or changes characters; of those tried: 'Z'"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(GSAError, match="cannot be written: Is a directory"):
        BytesTokenizer().save(tmp_path)


def test_a_tokenizer_is_not_written_over(tmp_path: Path, bpe: str) -> None:
    with pytest.raises(GSAError, match=r"has a tokenizer\.json already"):
        train_tokenizer([bpe], 300, bpe)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "not a tokenizer.json that `tokenizers` reads"),
        (lambda d: (d / "tokenizer.json").write_bytes(b"\xff"), "cannot be read"),
        (lambda d: (d / "tokenizer_config.json").write_text("[]"), "expected a JSON object, got list"),
        (lambda d: (d / "tokenizer_config.json").write_text('{"eos_token": "<no>"}'), "names '<no>' as eos_token"),
    ],
)
def test_damage_is_named(tmp_path: Path, bpe: str, change: object, message: str) -> None:
    shutil.copytree(bpe, tmp_path / "t")
    change(tmp_path / "t")
    with pytest.raises(GSAError, match=message):
        load_tokenizer(tmp_path / "t")


def test_end_of_text_is_found_or_asked_for(tmp_path: Path, bpe: str) -> None:
    path = tmp_path / "tokenizer.json"
    content = json.loads((Path(bpe) / "tokenizer.json").read_text())
    path.write_text(json.dumps(content))
    assert load_tokenizer(path).eos_id == 0  # by its known name
    path.write_text(json.dumps(content).replace("<|endoftext|>", "<|strange|>"))
    with pytest.raises(GSAError, match=r"which token ends a text; .*special tokens: <\|strange\|>"):
        load_tokenizer(path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert load_tokenizer(path).eos_id == 7
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|strange|>"}}')
    assert load_tokenizer(path).eos_id == 0


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "a/b/c"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(GSAError, match="there is no file or folder"):
        load_tokenizer(name)


def test_a_hub_out_of_reach_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ConnectionError("no way there")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail)
    with pytest.raises(GSAError, match=r"'no/such' is neither .* the Hugging Face Hub: no way there"):
        load_tokenizer("no/such")


def test_what_is_no_text_and_no_id() -> None:
    with pytest.raises(GSAError, match="half a surrogate pair at 1"):
        BytesTokenizer().encode(["a\ud800"])
    with pytest.raises(GSAError, match="ids go from 3 to 257, the vocabulary from 0 to 256"):
        BytesTokenizer().decode([3, 257])


def test_half_a_surrogate_pair_is_named_by_every_tokenizer(tokenizer: Tokenizer) -> None:
    with pytest.raises(GSAError, match="half a surrogate pair"):
        tokenizer.encode(["fine", "a\ud800"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mistral_common", None)
    with pytest.raises(GSAError, match=r"needs mistral-common: pip install 'gsa-lm\[data\]'"):
        load_tokenizer("mistral")


def test_models_of_the_package_have_tokenizers_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = pretrained.folder("gsa-tiny")
    named, placed = load_tokenizer("gsa-tiny"), load_tokenizer(folder)
    assert (named.name, named.info.fingerprint) == ("gsa-tiny", placed.info.fingerprint)
    monkeypatch.chdir(tmp_path)
    Path("gsa-tiny").mkdir()  # what is here comes first
    with pytest.raises(GSAError, match="gsa-tiny"):
        load_tokenizer("gsa-tiny")


def test_a_full_disk_leaves_no_part_of_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gsa.data import writer

    whole = writer.write_text

    def full(path: Path, text: str) -> None:
        if path.name == "tokenizer.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, text)

    monkeypatch.setattr(writer, "write_text", full)
    (tmp_path / "book.txt").write_text(text(200))
    with pytest.raises(GSAError, match="cannot be written: No space left on device"):
        train_tokenizer([str(tmp_path / "book.txt")], 270, tmp_path / "new", progress=False)
    assert not (tmp_path / "new").exists()
