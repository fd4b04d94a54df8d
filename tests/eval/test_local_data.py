"""`--data`: files are found, read, and checked row by row."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.errors import GSAError
from gsa.eval.local_data import FILES, DataFolder, checked_rows
from tests.examples import examples

DATA = Path(__file__).parent / "data"
PIQA = {"goal": "To see", "sol1": "look", "sol2": "sleep", "label": 0}


def written(folder: Path, *lines: object, name: str = "piqa.validation.jsonl") -> DataFolder:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / name).write_text(text)
    return DataFolder(folder)


def test_every_sample_is_read_plain_or_packed(tmp_path: Path) -> None:
    data = DataFolder(DATA)
    present = [name for name in FILES if data.find(name) is not None]
    assert len(present) > 20
    for name in present:
        rows = data.rows(name)
        path = data.find(name)
        assert path is not None
        assert rows
        other = tmp_path / (path.name.removesuffix(".gz") if path.suffix == ".gz" else path.name + ".gz")
        content = path.read_bytes()
        other.write_bytes(gzip.decompress(content) if path.suffix == ".gz" else gzip.compress(content))
        assert DataFolder(tmp_path).rows(name) == rows, name


def test_whole_documents_may_lie_one_folder_up(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "squad_dev_v1.1.json").write_bytes((DATA / "squad_dev_v1.1.json").read_bytes())
    (tmp_path / "piqa.validation.jsonl").write_text(json.dumps(PIQA))
    data = DataFolder(tmp_path / "eval")
    assert data.find("squad_dev_v1.1") is not None
    assert data.find("piqa.validation") is None
    assert DataFolder(None).find("squad_dev_v1.1") is None


def test_what_is_wrong_with_a_row_is_told_with_file_and_line(tmp_path: Path) -> None:
    for wrong, said in [
        ({**PIQA, "label": 2}, "'label' is 2, expected 0 or 1"),
        ({**PIQA, "label": "0"}, "'label' must be a whole number, got '0'"),
        ({**PIQA, "label": True}, "'label' must be a whole number"),
        ({"goal": "To see"}, "there is no field 'sol1'"),
        ([1], "expected a JSON object"),
        ("{", "not JSON"),
    ]:
        data = written(tmp_path, PIQA, wrong)
        with pytest.raises(GSAError) as raised:
            data.rows("piqa.validation")
        assert "piqa.validation.jsonl, line 2: " in str(raised.value), wrong
        assert said in str(raised.value), wrong


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("arc_easy.test", {"question": "?", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"}, "answerKey"),
        (
            "arc_easy.test",
            {"question": "?", "choices": {"text": ["a"], "label": []}, "answerKey": "B"},
            "1 texts and 0",
        ),
        (
            "hellaswag.validation",
            {"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["a", "b"], "label": "2"},
            "of 2 endings",
        ),
        ("winogrande_xl.validation", {"sentence": "a", "option1": "", "option2": "", "answer": "1"}, "has no _"),
        ("mmlu.test", {"question": "", "subject": "", "choices": ["a"] * 4, "answer": 4}, "expected 0 to 3"),
        ("lambada_openai.test", {"text": "word"}, "fewer than two words"),
        ("nq_open.validation", {"question": "", "answer": []}, "empty list"),
        ("based_nq.validation", {"context": "", "question": "", "answers": [" "]}, "an empty one"),
        ("qasper_yesno.validation", {"id": "", "text": "", "question": "", "answer": "yes"}, "expected Yes or No"),
    ],
)
def test_rows_that_no_task_could_use_are_refused(tmp_path: Path, name: str, row: object, said: str) -> None:
    with pytest.raises(GSAError, match=said):
        written(tmp_path, row, name=f"{name}.jsonl").rows(name)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(GSAError, match="there are no rows"):
        DataFolder(tmp_path).rows("piqa.validation")
    (tmp_path / "piqa.validation.jsonl").unlink()
    (tmp_path / "piqa.validation.jsonl.gz").write_bytes(gzip.compress(json.dumps(PIQA).encode() * 50)[:-9])
    with pytest.raises(GSAError, match="cannot be read"):
        DataFolder(tmp_path).rows("piqa.validation")
    with pytest.raises(GSAError, match="is not a folder"):
        DataFolder(tmp_path / "none")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@examples(60)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_rows_of_any_kind_are_taken_or_refused(name: str, data: st.DataObject) -> None:
    fields = FILES[name].fields
    row = {key: data.draw(st.sampled_from(["", "Yes", 0, ["a"], {}]) | json_values) for key in fields}
    try:
        found = checked_rows([row], FILES[name], "here")
    except GSAError as error:
        found = [row] if str(error).startswith("here, row 1: ") else []
    assert found == [row]
