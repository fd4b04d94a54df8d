"""Shards: any stretch is what was written, documents are found, damage is named, copies travel to other processes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.data.shards import Manifest, Tokens, npy_header, token_dtype
from gsa.data.tokenizer import load_tokenizer
from gsa.data.writer import ShardWriter
from gsa.errors import GSAError
from gsa.files import unfinished

DOCUMENTS = [
    b"one",
    b"the second one",
    b"3",
    b"a longer one that spans more than two shards of ten tokens",
    b"end",
]
IDS = np.concatenate([[*document, 256] for document in DOCUMENTS])
STARTS = np.cumsum([0, *(len(document) + 1 for document in DOCUMENTS)])[:-1]


def write(folder: Path, shard_tokens: int = 10) -> Path:
    """A prepared folder by way of the writer alone."""
    folder.mkdir()
    writer = ShardWriter(folder, "uint16", shard_tokens, [])
    at = 0
    while at < len(IDS):
        at += writer.append(IDS[at : at + 7], STARTS[(at <= STARTS) & (at + 7 > STARTS)] - at)
        if writer.room == 0 or at == len(IDS):
            writer.finish()
    manifest = Manifest(
        tokenizer=load_tokenizer("bytes").info,
        dtype="uint16",
        tokens=len(IDS),
        documents=len(DOCUMENTS),
        text_bytes=len(IDS) - len(DOCUMENTS),
        bad_rows={"empty": 1},
        undecodable_bytes=0,
        sources=[{"name": "x"}],
        options={},
        shards=writer.shards,
        tokenizer_files=load_tokenizer("bytes").hashes(),
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    load_tokenizer("bytes").save(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("shards") / "out")


@given(st.integers(0, len(IDS)), st.integers(0, len(IDS)))
def test_any_stretch_and_its_documents(folder: Path, a: int, b: int) -> None:
    tokens = Tokens.open(folder)
    begin, end = min(a, b), max(a, b)
    ids, starts = tokens.read(begin, end), tokens.document_starts(begin, end)
    assert ids.dtype == starts.dtype == np.int64
    assert ids.tolist() == IDS[begin:end].tolist()
    assert starts.tolist() == STARTS[(begin <= STARTS) & (end > STARTS)].tolist()


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (4, 3), (0, len(IDS) + 1)])
def test_positions_outside_are_refused(folder: Path, begin: int, end: int) -> None:
    with pytest.raises(GSAError, match=f"positions {begin} to {end} are not within its {len(IDS)} tokens"):
        Tokens.open(folder).read(begin, end)


def test_what_is_known_of_a_folder(folder: Path) -> None:
    tokens = Tokens.open(folder)
    assert (len(tokens), tokens.length, tokens.documents) == (len(IDS), len(IDS), len(DOCUMENTS))
    assert tokens.tokenizer == load_tokenizer("bytes").info
    assert len(tokens.manifest.shards) == -(-len(IDS) // 10)
    assert any(shard.document_count == 0 for shard in tokens.manifest.shards)
    tokens.verify()


def test_numpy_reads_the_files(folder: Path) -> None:
    row = np.load(folder / "tokens-00001.npy", mmap_mode="r", allow_pickle=False)
    assert (row.dtype, row.tolist()) == (np.uint16, IDS[10:20].tolist())


def test_a_copy_for_another_process_opens_its_own_files(folder: Path) -> None:
    tokens = Tokens.open(folder)
    tokens.read(0, len(IDS))
    assert len(pickle.dumps(tokens)) < 8000
    copy = pickle.loads(pickle.dumps(tokens))
    assert copy._mapped == {}
    assert copy.read(5, 25).tolist() == IDS[5:25].tolist()


def test_the_fingerprint_is_of_the_content(folder: Path, tmp_path: Path) -> None:
    assert Tokens.open(write(tmp_path / "again")).fingerprint == Tokens.open(folder).fingerprint
    assert Tokens.open(write(tmp_path / "other", 11)).fingerprint != Tokens.open(folder).fingerprint


def edit(folder: Path, **fields: object) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, **fields}))


def edit_shard(folder: Path, **fields: object) -> None:
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    edit(folder, shards=[{**shards[0], **fields}, *shards[1:]])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "manifest.json").unlink(), r"manifest\.json: there is no such file; `gsa data prepare`"),
        (lambda d: (d / "manifest.json").write_text("{"), "not JSON"),
        (lambda d: (d / "manifest.json").write_text("[]"), "expected a JSON object, got list"),
        (lambda d: edit(d, format=2), "expected format 1"),
        (lambda d: edit(d, tokens="many"), "tokens must be int, got 'many'"),
        (lambda d: edit(d, tokens=-1), "tokens must be int"),
        (lambda d: edit(d, documents=True), "documents must be int"),
        (lambda d: edit(d, tokens=5), "do not add up"),
        (lambda d: edit(d, documents=6), "do not add up"),
        (lambda d: edit(d, dtype="uint32"), "dtype is 'uint32', expected 'uint16'"),
        (lambda d: edit(d, shards={}), "shards must be"),
        (lambda d: edit(d, shards=[3]), "shard 0: expected an object, got int"),
        (lambda d: edit(d, tokenizer={"name": "x"}), "tokenizer: field 'fingerprint' is missing"),
        (lambda d: edit(d, bad_rows={"x": "y"}), "bad_rows must be"),
        (lambda d: edit(d, sources=["x"]), "sources must be"),
        (lambda d: edit(d, more=1), "unknown field 'more'"),
        (lambda d: edit_shard(d, tokens="../../secret.npy"), r"shard 0 is '\.\./\.\./secret\.npy'"),
        (lambda d: edit_shard(d, tokens_size=5), "expected 148"),
        (lambda d: (d / "tokens-00002.npy").unlink(), r"tokens-00002\.npy: the file is missing"),
        (lambda d: (d / "documents-00001.npy").unlink(), r"documents-00001\.npy: the file is missing"),
        (lambda d: (d / "tokens-00002.npy").write_bytes(b"x"), "1 bytes are there, expected 148"),
        (lambda d: (d / "tokens-00002.npy").write_bytes(b"x" * 148), "not a .npy file with 10 of uint16"),
        (lambda d: np.save(d / "tokens-00002.npy", np.zeros(20, "i1")), "not a .npy file with 10 of uint16"),
    ],
)
def test_damage_is_named(folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    shutil.copytree(folder, tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(GSAError, match=message):
        Tokens.open(tmp_path / "out")


@pytest.mark.parametrize("name", ["tokens-00003.npy", "documents-00000.npy"])
def test_a_changed_byte_is_found(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(folder, tmp_path / "out")
    data = bytearray((tmp_path / "out" / name).read_bytes())
    data[-2] ^= 1
    (tmp_path / "out" / name).write_bytes(data)
    tokens = Tokens.open(tmp_path / "out")
    with pytest.raises(GSAError, match=f"{name}: its bytes have changed"):
        tokens.verify()


def rename_end_of_text(tokenizer: Path) -> None:
    for path in tokenizer.iterdir():
        path.write_text(path.read_text().replace("<|endoftext|>", "</s>"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: shutil.rmtree(d), "tokenizer: the folder is missing"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "not a tokenizer.json"),
        (lambda d: rename_end_of_text(d), "tokenizer: its fingerprint is .*, expected "),
        (lambda d: (d / "tokenizer_config.json").unlink(), "tokenizer_config.json: the file is missing; the command"),
        (lambda d: (d / "tokenizer_config.json").write_text("{}"), "tokenizer_config.json: its bytes have changed"),
        (lambda d: replace_by_pipe(d / "tokenizer_config.json"), "tokenizer_config.json: .*not a regular file"),
        (lambda d: replace_by_pipe(d / "tokenizer.json"), "tokenizer.json cannot be read: .*not a regular file"),
    ],
)
def test_another_tokenizer_is_found(folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    shutil.copytree(folder, tmp_path / "out")
    damage(tmp_path / "out" / "tokenizer")
    with pytest.raises(GSAError, match=message):
        Tokens.open(tmp_path / "out").verify()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["manifest.json", "tokens-00000.npy", "documents-00000.npy"])
def test_a_pipe_in_place_of_a_file_is_told(folder: Path, tmp_path: Path, name: str) -> None:
    """It once was waited for, until someone would write to it."""
    shutil.copytree(folder, tmp_path / "out")
    replace_by_pipe(tmp_path / "out" / name)
    with pytest.raises(GSAError, match=rf"{name}: .*not a regular file"):
        Tokens.open(tmp_path / "out")


def test_a_manifest_of_an_earlier_version_says_nothing_of_the_tokenizers_files(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    values = json.loads(path.read_text())
    del values["tokenizer_files"]
    path.write_text(json.dumps(values))
    Tokens.open(tmp_path / "out").verify()


def fill_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first shard will be written to, there is no room."""
    monkeypatch.setattr("gsa.files.secrets.token_hex", lambda count: "0")
    unfinished(folder / "tokens-00000.npy").symlink_to("/dev/full")


def test_a_full_disk_is_told_and_leaves_nothing_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path, "uint16", 2**20, [])
    fill_disk(tmp_path, monkeypatch)
    with pytest.raises(GSAError, match="the disk is full"):
        writer.append(np.zeros(2**20), np.zeros(1, np.int64))
    writer.close()
    assert not any(tmp_path.iterdir())


def test_what_is_not_yet_on_a_full_disk_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path, "uint16", 2**20, [])
    fill_disk(tmp_path, monkeypatch)
    writer.append(np.zeros(9), np.zeros(1, np.int64))
    writer.close()
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_not_there_or_not_finished(tmp_path: Path) -> None:
    with pytest.raises(GSAError, match="there is no such folder"):
        Tokens.open(tmp_path / "nowhere")
    (tmp_path / "progress.json").touch()
    with pytest.raises(GSAError, match="not finished; the command"):
        Tokens.open(tmp_path)


def test_ids_take_two_bytes_where_they_can() -> None:
    assert [token_dtype(size) for size in (257, 2**16, 2**16 + 1)] == ["uint16", "uint16", "uint32"]
    assert len({len(npy_header("uint32", count)) for count in (0, 1, 10**12)}) == 1
