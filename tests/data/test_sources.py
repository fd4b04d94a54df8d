"""Sources: every format gives the same documents in the same order; what is wrong is counted, or refused by name."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gsa.data import portions, sources
from gsa.data.documents import Findings, texts
from gsa.data.portions import Portion, Position, read_portions
from gsa.data.prepare import prepare
from gsa.data.sources import plan
from gsa.errors import GSAError
from tests.data.cases import PACK, documents, jsonl, parquet, text


def read(*paths: Path | str, strict: bool = False, **options: object) -> tuple[list[str], Findings]:
    """The documents of sources, those in parts put together, and what was found wrong."""
    inputs = [entry for group in plan([str(path) for path in paths], **options) for entry in group]
    findings = Findings(strict)
    found: list[str] = []
    for portion in read_portions(inputs, "text"):
        for part in texts(portion.parts, "text", findings):
            found = [*found, part.text] if part.begins else [*found[:-1], found[-1] + part.text]
    return found, findings


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "PORTION_BYTES", 512)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("packed", PACK)
def test_rows_are_documents(tmp_path: Path, packed: str) -> None:
    expected = documents(30)
    (tmp_path / f"a.jsonl{packed}").write_bytes(PACK[packed](jsonl(expected)))
    (tmp_path / f"b.json{packed}").write_bytes(PACK[packed](jsonl(expected)))
    assert read(tmp_path)[0] == 2 * expected


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("packed", PACK)
def test_a_file_of_text_is_one_document_however_long(tmp_path: Path, packed: str) -> None:
    expected = [text(5000), text(300), "短い" * 1000, "x" * 3000]
    for i, document in enumerate(expected):
        (tmp_path / f"{i}.md{packed}").write_bytes(PACK[packed](document.encode()))
    found, findings = read(tmp_path)
    assert found == expected
    assert findings.undecodable_bytes == 0


@pytest.mark.usefixtures("small_blocks")
def test_columns_are_documents(tmp_path: Path) -> None:
    expected = documents(40)
    parquet(tmp_path / "a.parquet", expected)
    assert read(tmp_path / "a.parquet")[0] == expected
    parquet(tmp_path / "b.parquet", ["one", None, "", "two"])
    found, findings = read(tmp_path / "b.parquet")
    assert found == ["one", "two"]
    assert findings.bad_rows == {"not a string": 1, "empty": 1}


@pytest.mark.usefixtures("small_blocks")
def test_a_dataset_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    expected = documents(20)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(jsonl(expected))
    (tmp_path / "set" / "test.jsonl").write_bytes(jsonl(["tested"]))
    assert read(f"hf:{tmp_path / 'set'}")[0] == expected
    assert read(f"hf:{tmp_path / 'set'}:test")[0] == ["tested"]
    with pytest.raises(GSAError, match="split 'none' cannot be opened"):
        read(f"hf:{tmp_path / 'set'}:none")


@pytest.mark.usefixtures("small_blocks")
def test_reading_goes_on_from_any_block(tmp_path: Path) -> None:
    """From the position of each portion, the portions that follow are those that followed it."""
    (tmp_path / "a.txt").write_text(text(3000))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text(3000, 1).encode()))
    (tmp_path / "c.jsonl.zst").write_bytes(PACK[".zst"](jsonl(documents(20))))
    (tmp_path / "d.jsonl").write_bytes(jsonl([text(2000), *documents(9, 50)]))
    parquet(tmp_path / "e.parquet", documents(30))
    for i in range(5):
        (tmp_path / f"f{i}.txt").write_text(text(100, i))
    (tmp_path / "g.txt").touch()
    (inputs,) = plan([str(tmp_path)])

    def parts(portion: Portion) -> object:
        return portion.begin, portion.parts

    whole = [parts(portion) for portion in read_portions(inputs, "text")]
    assert len(whole) > 20
    for i, (begin, _) in enumerate(whole):
        assert isinstance(begin, Position)
        assert [parts(portion) for portion in read_portions(inputs, "text", begin)] == whole[i:]


def test_folders_are_read_in_order_without_what_is_hidden_or_excluded(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c.txt", "b-x.txt", ".h.txt", ".git/x.txt", "drafts/d.txt", "e.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path, exclude=["*.log", "drafts/*"])[0] == ["a.txt", "b/1.txt", "b/2.txt", "b-x.txt", "c.txt"]
    assert read(tmp_path, exclude=["?.*", "drafts"], leave_out=[tmp_path / "b"])[0] == ["b-x.txt"]
    assert read(tmp_path, leave_out=[tmp_path / "b", tmp_path / "a.txt"])[0][0] == "b-x.txt"
    assert read(tmp_path / "c.txt", tmp_path / "b")[0] == ["c.txt", "b/1.txt", "b/2.txt"]


BAD = b"""{"text": "good"}
{"text": "cut
{"other": 1}
[1]
{"text": 5}
{"text": ""}

{"text": "caf\xe9"}
{"text": "half \\ud800 pair"}
{"text": "last"}"""


def test_bad_rows_are_counted_by_kind(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(BAD)
    found, findings = read(tmp_path / "a.jsonl")
    assert found == ["good", "caf\ufffd", "half \ufffd pair", "last"]
    assert findings.bad_rows == {"invalid JSON": 1, "field missing": 2, "not a string": 1, "empty": 1}
    assert findings.undecodable_bytes == 1 + 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (1, "line 2: not JSON: "),
        (2, "line 2: there is no field 'text'"),
        (4, "line 2: 'text' is no string but 5"),
        (5, "line 2: 'text' is empty"),
        (7, "line 2: 1 bytes that are not UTF-8"),
        (8, "line 2: 3 bytes that are not UTF-8"),
    ],
)
def test_strict_names_the_first(tmp_path: Path, line: int, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([BAD.split(b"\n")[i] for i in (0, line, 0, 3)]))
    with pytest.raises(GSAError, match=f"a.jsonl, {message}"):
        read(tmp_path / "a.jsonl", strict=True)


@pytest.mark.usefixtures("small_blocks")
def test_undecodable_bytes_of_text_are_counted_and_found(tmp_path: Path) -> None:
    data = text(2000).encode() + b"\nbad \xff\xfe here\n" + text(2000).encode()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + data)
    found, findings = read(tmp_path / "a.txt")
    assert found == [data.decode(errors="replace")]
    assert findings.undecodable_bytes == 2
    number = data[: data.index(b"\xff")].count(b"\n") + 1
    with pytest.raises(GSAError, match=f"a.txt, line {number}: 2 bytes"):
        read(tmp_path / "a.txt", strict=True)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "changed", "behind"])
def test_what_comes_before_damage_is_kept(tmp_path: Path, packed: str, damage: str) -> None:
    expected = text(500_000)
    data = PACK[packed](expected.encode())
    half = len(data) // 2
    changed = data[:half] + b"junk" * 9 + data[half + 36 :]
    data = {"cut": data[:half], "changed": changed, "behind": data + b"junk"}[damage]
    path = tmp_path / f"a.txt{packed}"
    path.write_bytes(data)
    (found,), findings = read(path)
    assert findings.bad_rows == {"damaged file or row": 1}
    if damage == "cut":
        assert expected.startswith(found.rstrip("\ufffd"))
        assert len(found) > 50_000
    with pytest.raises(GSAError, match=r"a\.txt.*(strict)"):
        read(path, strict=True)


def test_several_packed_files_in_one_are_one(tmp_path: Path) -> None:
    for name, pack in PACK.items():
        (tmp_path / f"a.txt{name}").write_bytes(pack(b"one ") + pack(b"two"))
    assert read(tmp_path)[0] == ["one two"] * 3


@pytest.mark.usefixtures("small_blocks")
def test_a_row_too_long_for_memory_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "MAX_ROW_BYTES", 2000)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one", "x" * 5000, "two", "y" * 9000]))
    found, findings = read(tmp_path / "a.jsonl")
    assert found == ["one", "two"]
    assert findings.bad_rows["damaged file or row"] == 2
    with pytest.raises(GSAError, match=r"a\.jsonl, line 2: a row of more than 2000 bytes"):
        read(tmp_path / "a.jsonl", strict=True)


def test_what_unpacks_to_very_much_is_read_little_by_little(tmp_path: Path) -> None:
    from gsa.data.streams import Stream

    for name in (".gz", ".zst"):
        path = tmp_path / f"a{name}"
        path.write_bytes(PACK[name](b"again and again\n" * 4_000_000))
        with open(path, "rb") as file:
            stream = Stream(file, name[1:])
            assert len(stream.read(1000)) == 1000
            assert len(stream._buffer) < 40_000_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zip", b"PK", r"\.zip files are not read"),
        ("a.tar.gz", b"", r"\.tar files are not read"),
        ("a.txt", b"a\0b", "so it is binary or UTF-16"),
        ("a.txt", "text".encode("utf-16"), "so it is binary or UTF-16"),
        ("a.json", b'\n [{"text": "x"}]', "is one JSON array; expected an object in each line"),
        ("a.json.gz", gzip.compress(b"[\n{}\n]", mtime=0), "is one JSON array; expected an object in each line"),
        ("a.txt.gz", b"plain", "is not compressed as its name says"),
        ("a.txt.zst", b"plain", "is not compressed as its name says"),
        ("a.parquet", b"PAR1", "is not a whole parquet file"),
    ],
)
def test_what_cannot_be_read_is_refused_before_the_work(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GSAError, match=message):
        plan([str(tmp_path)])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", "there is no file or folder nowhere.txt$"),
        ("./nowhere", "there is no file or folder ./nowhere$"),
        ("/nowhere/at/all", "there is no file or folder /nowhere/at/all$"),
        ("hf:", "expected hf:NAME"),
        ("hf:a:b:c:d", "expected hf:NAME"),
        ("no/such", "there is no file or folder no/such; a dataset of the Hugging Face Hub is hf:no/such"),
        ("hf:no/such", "dataset 'no/such', split 'train' cannot be opened: no way"),
    ],
)
def test_a_source_that_is_not_there(monkeypatch: pytest.MonkeyPatch, source: str, message: str) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ConnectionError("no way there")

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", fail)
    with pytest.raises(GSAError, match=message):
        plan([source])


def test_empty_plans(tmp_path: Path) -> None:
    with pytest.raises(GSAError, match="no source was given"):
        plan([])
    with pytest.raises(GSAError, match="has no files"):
        plan([str(tmp_path)])
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(GSAError, match="every file is excluded"):
        plan([str(tmp_path / "a.txt")], exclude=["a.*"])
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(GSAError, match="is no regular file"):
        plan([str(tmp_path / "b.txt")])


def test_a_column_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", ["x"])
    with pytest.raises(GSAError, match="has no column 'body'; it has id, text"):
        plan([str(tmp_path)], field="body")
    with pytest.raises(GSAError, match="column 'id' holds int64, expected string"):
        plan([str(tmp_path)], field="id")


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before")
    (inputs,) = plan([str(tmp_path)])
    (tmp_path / "a.txt").write_text("after, and longer")
    with pytest.raises(GSAError, match=r"a\.txt has changed since"):
        list(read_portions(inputs, "text"))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(GSAError, match=r"a\.txt cannot be read any more"):
        list(read_portions(inputs, "text"))


def test_json_over_several_lines_is_text(tmp_path: Path) -> None:
    content = json.dumps({"name": "x", "text_": "no"}, indent=2)
    (tmp_path / "a.json").write_text(content)
    assert read(tmp_path / "a.json")[0] == [content]


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("first", [{"text": "x" * 200_000}, {"body": "no such field"}, {"text": 5}])
@pytest.mark.parametrize("before", [b"", b"\n  \n", b"\xef\xbb\xbf"])
def test_json_with_an_object_in_the_first_line_is_rows(
    tmp_path: Path, packed: str, first: dict[str, object], before: bytes
) -> None:
    rows = before + json.dumps(first).encode() + b'\n{"text": "second"}\n'
    (tmp_path / f"a.json{packed}").write_bytes(PACK[packed](rows))
    found, findings = read(tmp_path)
    assert found[-1] == "second"
    assert len(found) + findings.bad_rows.total() == 2


def test_a_first_row_too_long_for_memory_is_still_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 100_000)
    (tmp_path / "a.json").write_bytes(jsonl(["x" * 300_000, "second"]))
    assert [entry.kind for entry in plan([str(tmp_path)])[0]] == ["jsonl"]


@pytest.mark.parametrize(
    "pattern", ["held.txt", "h*.txt", "drafts", "drafts/", "books/drafts/held.txt", "./books/drafts", "drafts/*"]
)
def test_what_is_held_out_can_be_named_in_many_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books" / "drafts").mkdir(parents=True)
    (tmp_path / "books" / "drafts" / "held.txt").write_text("held out")
    (tmp_path / "books" / "a.txt").write_text("kept")
    assert read("books", exclude=[pattern])[0] == ["kept"]


@pytest.mark.parametrize("pattern", ["b.txt", "other/a.txt", ""])
def test_a_pattern_that_fits_no_file_is_an_error(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(GSAError, match=f"exclude: '{pattern}' fits no file"):
        plan([str(tmp_path)], exclude=[pattern])


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    for name in ("in", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "same").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "in")
    assert read(tmp_path / "in")[0] == ["in", "elsewhere"]


def test_few_zero_bytes_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\0b" + "c" * 999)
    assert read(tmp_path)[0] == ["a\0b" + "c" * 999]


@pytest.mark.parametrize("kind", ["string_view", "large_string", "binary", "large_binary", "null"])
def test_columns_of_any_kind_of_text(tmp_path: Path, kind: str) -> None:
    import pyarrow
    import pyarrow.parquet

    values = [None, None] if kind == "null" else ["é".encode() if "binary" in kind else "é", None]
    table = pyarrow.table({"text": pyarrow.array(values, getattr(pyarrow, kind)())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found, findings = read(tmp_path)
    assert found == ([] if kind == "null" else ["é"])
    assert findings.bad_rows == {"not a string": 2 - len(found)}


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(GSAError, match="has 2 columns 'text', expected one"):
        plan([str(tmp_path)])


def test_blocks_of_columns_are_small_however_well_they_are_packed(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", ["x" * 40_000] * 200 + [None] * 50_000, group=100_000)
    sizes = []
    for portion in read_portions(plan([str(tmp_path)])[0], "text"):
        sizes.append(portion.size)
        assert sum(len(part.data) for part in portion.parts) <= portions.PORTION_BYTES // portions.VALUE_BYTES
    assert max(sizes) < portions.PORTION_BYTES
    assert sum(sizes) == 200 * 40_000 + 50_200 * portions.VALUE_BYTES


def test_a_dataset_that_changes_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "set" / "train.jsonl"
    path.parent.mkdir()
    path.write_bytes(jsonl(["one"]))
    source = [f"hf:{path.parent}"]
    before = plan(source)
    assert plan(source) == before
    os.utime(path, (1, 1))
    assert plan(source)[0][0].changed != before[0][0].changed
    path.write_bytes(jsonl(["longer"]))
    assert plan(source)[0][0].version != before[0][0].version


class Streamed:
    """A dataset of the Hub that breaks off."""

    features = None

    def skip(self, count: int) -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise ConnectionError("cut off")


def test_a_dataset_of_the_hub_is_read_at_the_commit_that_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(*args: object, **options: object) -> Streamed:
        asked.append((args, options["revision"]))
        return Streamed()

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *args, **options: SimpleNamespace(sha="abc"))
    monkeypatch.setattr("datasets.load_dataset", load)
    (inputs,) = plan(["hf:some/name:small:test"])
    assert inputs[0].version == "abc"
    with pytest.raises(
        GSAError, match=r"some/name:small:test could not be read on: cut off\..*the same command goes on"
    ):
        list(read_portions(inputs, "text"))
    assert asked == [(("some/name", "small"), "abc")] * 2


def test_a_folder_is_the_same_with_a_slash_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    Path("books/a.txt").write_text("a text\n")
    first = prepare(["books/"], "bytes", "out", processes=1, progress=False)
    assert [source["name"] for source in first.sources] == ["books"]
    for name in ("books", "./books", "books//"):
        assert prepare([name], "bytes", "out", processes=1, progress=False) == first
    Path("other").mkdir()
    Path("other/a.txt").write_text("a text\n")
    with pytest.raises(GSAError, match=r"sources \(books, now other\)"):
        prepare(["other"], "bytes", "out", processes=1, progress=False)


def test_a_preparation_that_was_recorded_with_a_slash_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books").mkdir()
    Path("books/a.txt").write_text("a text\n")
    prepare(["books"], "bytes", "out", processes=1, progress=False)
    manifest = Path("out/manifest.json")
    manifest.write_text(manifest.read_text().replace('"books"', '"books/"'))
    prepare(["books"], "bytes", "out", processes=1, progress=False)
