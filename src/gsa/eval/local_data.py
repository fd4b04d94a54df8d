"""`--data FOLDER`: which files fill which tasks, and reading them. Every row is checked before it is used.

A file of rows is NAME.jsonl or NAME.jsonl.gz, a JSON object a line with the Hub's field names; SQuAD and DROP are
whole JSON documents, NAME.json or NAME.json.gz, in the folder or the one above it. docs/evaluation.md has the layout.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from gsa.errors import GSAError
from gsa.files import MOST_JSON, byte_count, named, open_file, parse_json, sha256
from gsa.terminal import quoted

Row = dict[str, Any]
Kind = Any
"""A type; a list of one kind; a dict of fields with their kinds; or a tuple of kinds, of which one fits."""

MOST_TEXT = 2**31
"""Bytes of a file of rows, unpacked."""

_WORDS = {str: "text", int: "a whole number", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class FileKind:
    """What stands in the rows of a file."""

    fields: dict[str, Kind]
    wrong: Callable[[Row], str | None] = lambda row: None
    """What is wrong with a row whose fields have the right types; None if nothing."""
    whole: bool = False
    """Whether the file is one JSON document, and not a row a line."""


def _wrong_arc(row: Row) -> str | None:
    texts, labels = row["choices"]["text"], row["choices"]["label"]
    if len(texts) != len(labels) or not texts:
        return f"'choices' has {len(texts)} texts and {len(labels)} labels, expected as many of both"
    return None if row["answerKey"] in labels else f"'answerKey' is {row['answerKey']!r}, expected one of {labels}"


def _wrong_hellaswag(row: Row) -> str | None:
    count = len(row["endings"])
    return None if str(row["label"]) in map(str, range(count)) else f"'label' is {row['label']!r} of {count} endings"


def _wrong_winogrande(row: Row) -> str | None:
    if "_" not in row["sentence"]:
        return "'sentence' has no _ where the options stand"
    return None if row["answer"] in ("1", "2") else f"'answer' is {row['answer']!r}, expected '1' or '2'"


def _wrong_mmlu(row: Row) -> str | None:
    if len(row["choices"]) != 4:
        return f"'choices' has {len(row['choices'])} texts, expected 4"
    return None if 0 <= row["answer"] <= 3 else f"'answer' is {row['answer']}, expected 0 to 3"


def _wrong_answers(row: Row) -> str | None:
    answers = row["answers"]
    return None if answers and all(text.strip() for text in answers) else "'answers' has no text, or an empty one"


def _wrong_value(row: Row) -> str | None:
    return None if row["value"].strip() else "'value' is empty"


_ARC = FileKind({"question": str, "choices": {"text": [str], "label": [str]}, "answerKey": str}, _wrong_arc)
_MMLU = FileKind({"question": str, "subject": str, "choices": [str], "answer": int}, _wrong_mmlu)
_KEYED = FileKind({"text": str, "key": str, "value": str}, _wrong_value)
_READING = FileKind({"context": str, "question": str, "answers": [str]}, _wrong_answers)
_SCROLLS = FileKind({"id": str, "input": str, "output": str})
_QUERIES = [{"query": str, "answer": str}]

FILES: dict[str, FileKind] = {
    "arc_easy.test": _ARC,
    "arc_easy.validation": _ARC,
    "arc_challenge.test": _ARC,
    "arc_challenge.validation": _ARC,
    "hellaswag.validation": FileKind(
        {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": [str], "label": (str, int)}, _wrong_hellaswag
    ),
    "piqa.validation": FileKind(
        {"goal": str, "sol1": str, "sol2": str, "label": int},
        lambda row: None if row["label"] in (0, 1) else f"'label' is {row['label']}, expected 0 or 1",
    ),
    "winogrande_xl.validation": FileKind(
        {"sentence": str, "option1": str, "option2": str, "answer": str}, _wrong_winogrande
    ),
    "lambada_openai.test": FileKind(
        {"text": str}, lambda row: None if " " in row["text"].strip() else "'text' has fewer than two words"
    ),
    "wikitext.test": FileKind({"page": str}, lambda row: None if row["page"].strip() else "'page' is empty"),
    "mmlu.test": _MMLU,
    "mmlu.dev": _MMLU,
    "bbh": FileKind({"task": str, "input": str, "target": str}),
    "nq_open.validation": FileKind(
        {"question": str, "answer": [str]}, lambda row: None if row["answer"] else "'answer' is an empty list"
    ),
    "triviaqa_wikipedia_nocontext.validation": FileKind(
        {"question": str, "answer": {"aliases": [str], "value": str}},
        lambda row: None if row["answer"]["aliases"] else "'answer' has no aliases",
    ),
    "based_fda.validation": _KEYED,
    "based_swde.validation": _KEYED,
    "based_squad.validation": FileKind({"text": str, "value": str}, _wrong_value),
    "based_nq.validation": _READING,
    "based_triviaqa.validation": _READING,
    "based_drop.validation": _READING,
    "squad_dev_v1.1": FileKind(
        {
            "data": [
                {"paragraphs": [{"context": str, "qas": [{"id": str, "question": str, "answers": [{"text": str}]}]}]}
            ]
        },
        whole=True,
    ),
    "drop_answers": FileKind({"examples": [{"input": str, "target": [str]}]}, whole=True),
    "scrolls_qasper.validation": _SCROLLS,
    "scrolls_qasper.train": _SCROLLS,
    "scrolls_narrative_qa.validation": _SCROLLS,
    "scrolls_narrative_qa.train": _SCROLLS,
    "scrolls_quality.validation": _SCROLLS,
    "scrolls_quality.train": _SCROLLS,
    "scrolls_qmsum.validation": _SCROLLS,
    "scrolls_qmsum.train": _SCROLLS,
    "qmsum.validation": FileKind(
        {
            "general_query_list": _QUERIES,
            "specific_query_list": _QUERIES,
            "meeting_transcripts": [{"speaker": str, "content": str}],
        }
    ),
    "qasper_yesno.validation": FileKind(
        {"id": str, "text": str, "question": str, "answer": str},
        lambda row: None if row["answer"] in ("Yes", "No") else f"'answer' is {row['answer']!r}, expected Yes or No",
    ),
}
"""Every file of the layout, by its name without endings."""


class DataFolder:
    """The files of `--data`; or none, if no folder was given."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else named(folder, "data")
        if self.folder is not None and not self.folder.is_dir():
            raise GSAError(f"eval: --data {quoted(str(self.folder))} is not a folder")

    def find(self, name: str) -> Path | None:
        """The file of this name, if it is there."""
        if self.folder is None:
            return None
        whole = FILES[name].whole
        for folder in (self.folder, self.folder.absolute().parent) if whole else (self.folder,):
            for ending in (".json", ".json.gz") if whole else (".jsonl", ".jsonl.gz"):
                if (path := folder / (name + ending)).exists():
                    return path
        return None

    def rows(self, name: str) -> list[Row]:
        """The rows of a file that is there; a whole document is one row."""
        path = self.find(name)
        assert path is not None, name
        kind = FILES[name]
        try:
            with open_file(path) as file:
                stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
                if kind.whole:
                    return [_checked(parse_json(stream.read(MOST_JSON + 1), str(path)), kind, str(path))]
                return parsed_rows(stream, kind, str(path))
        except (OSError, EOFError, zlib.error) as error:
            raise GSAError(f"{path}: cannot be read: {error}") from None

    def digest(self, name: str) -> str:
        """Tells contents of a file apart."""
        path = self.find(name)
        assert path is not None, name
        return sha256(path)


def expected_file(name: str) -> str:
    """The file that would fill a gap, as the layout calls it."""
    return name + (".json.gz" if FILES[name].whole else ".jsonl.gz")


def parsed_rows(stream: IO[bytes] | gzip.GzipFile | BufferedReader, kind: FileKind, name: str) -> list[Row]:
    """The rows of a stream of JSON lines, none of which is too long; errors tell the line."""
    rows, left, number = [], MOST_TEXT, 0
    while line := stream.readline(min(left, MOST_JSON) + 1):
        number += 1
        left -= len(line)
        where = f"{name}, line {number}"
        if left < 0 or len(line) > MOST_JSON:
            limits = f"{byte_count(MOST_JSON)} a line and {byte_count(MOST_TEXT)} in all"
            raise GSAError(f"{where}: too much text, expected at most {limits}")
        if line.strip():
            rows.append(_checked(parse_json(line, where), kind, where))
    if not rows:
        raise GSAError(f"{name}: there are no rows, expected a JSON object a line")
    return rows


def checked_rows(rows: list[Row], kind: FileKind, name: str) -> list[Row]:
    """Rows that came otherwise, checked in the same way."""
    return [_checked(row, kind, f"{name}, row {number}") for number, row in enumerate(rows, 1)]


def _checked(row: Row, kind: FileKind, where: str) -> Row:
    _check(row, kind.fields, where, "")
    complaint = kind.wrong(row)
    if complaint is not None:
        raise GSAError(f"{where}: {complaint}")
    return row


def _check(value: Any, kind: Kind, where: str, name: str) -> None:
    """Raises unless a value is of a kind; `name` leads to it from the row."""
    if isinstance(kind, tuple):
        if type(value) not in kind:
            raise _unfit(where, name, " or ".join(_WORDS[each] for each in kind), value)
    elif isinstance(kind, dict):
        if not isinstance(value, dict):
            raise _unfit(where, name, "an object", value)
        for field, inner in kind.items():
            if field not in value:
                inside = f" in {name!r}" if name else ""
                raise GSAError(f"{where}: there is no field {field!r}{inside}, expected {', '.join(kind)}")
            _check(value[field], inner, where, f"{name}.{field}" if name else field)
    elif isinstance(kind, list):
        if not isinstance(value, list):
            raise _unfit(where, name, "a list", value)
        for number, entry in enumerate(value):
            _check(entry, kind[0], where, f"{name}[{number}]")
    elif type(value) is not kind:
        raise _unfit(where, name, _WORDS[kind], value)


def _unfit(where: str, name: str, expected: str, value: Any) -> GSAError:
    return GSAError(f"{where}: {name!r} must be {expected}, got {quoted(str(value))}")
