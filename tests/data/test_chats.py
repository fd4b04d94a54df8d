"""`chat_field`: conversations become the tokens that their template says, and messages are only text."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.data.chat_template import ChatTemplate
from gsa.data.documents import Findings, texts
from gsa.data.portions import Part
from gsa.data.prepare import prepare
from gsa.data.questions import read_questions
from gsa.data.shards import Tokens
from gsa.data.tokenizer import CONFIG, load_tokenizer
from gsa.errors import GSAError
from tests.examples import examples
from tests.infer.talking import BEGIN_ID, CHATML, END, END_ID, write_tokenizer

ASKED = [{"role": "user", "content": f"Say {END}, naïve one."}, {"role": "assistant", "content": "  No.\n"}]
ONCE_MORE = [*ASKED, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So.", "name": "left out"}]
ONLY_USERS = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "tokenizer", template=ONLY_USERS + CHATML)
    return tmp_path / "tokenizer"


def write(path: Path, *rows: Any) -> list[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def prepared(sources: list[str], tokenizer: Path, out: Path, **options: Any) -> list[list[int]]:
    """The tokens of each document."""
    options = {"chat_field": "messages", "processes": 1, "progress": False, **options}
    prepare(sources, str(tokenizer), out, **options)
    tokens = Tokens.open(out)
    tokens.verify()
    ends = [*tokens.document_starts(0, tokens.length).tolist(), tokens.length]
    return [tokens.read(begin, end).tolist() for begin, end in pairwise(ends)]


def test_text_and_conversations_in_one_file(tokenizer: Path, tmp_path: Path) -> None:
    sources = write(tmp_path / "a.jsonl", {"text": f"Only {END} text"}, {"messages": ONCE_MORE, "text": "left out"})
    text, chat = prepared(sources, tokenizer, tmp_path / "data")
    assert text == [*f"Only {END} text".encode(), END_ID]
    said = [(BEGIN_ID, f"{each['role']}\n{each['content']}", END_ID) for each in ONCE_MORE]
    expected = [id_ for begin, words, end in said for id_ in (begin, *words.encode(), end, 10)][:-1]
    assert chat == expected
    template = ChatTemplate.of(load_tokenizer(tokenizer))
    assert template.encode(template.render(ONCE_MORE[:3])).tolist() == chat[: -len(b"So.") - 1]


def test_rows_that_are_no_conversations_are_counted(tokenizer: Path, tmp_path: Path) -> None:
    wrong = [
        *(None, "text", [], ASKED[1:], ASKED[:1], [*ASKED, ASKED[0]], [None, ASKED[1]]),
        *([ASKED[0], {"role": "assistant"}], [{"role": "user", "content": 3}, ASKED[1]]),
    ]
    refused = [{"role": "tool", "content": "x"}, ASKED[1]]
    rows = [{"messages": each} for each in (*wrong, refused, ASKED)]
    sources = write(tmp_path / "a.jsonl", *rows, {"other": 1})
    assert len(prepared(sources, tokenizer, tmp_path / "data")) == 1
    found = Tokens.open(tmp_path / "data").manifest.bad_rows
    assert found == {"field missing": 1, "not a conversation": len(wrong), "refused by the chat template": 1}
    for row, message in ((wrong[2], "line 1: 'messages' must be a list of messages"), (refused, "line 1.*no tools")):
        with pytest.raises(GSAError, match=message):
            prepared(write(tmp_path / "b.jsonl", {"messages": row}), tokenizer, tmp_path / "strict", strict=True)


def test_half_a_character_is_replaced_and_counted(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": ASKED}).replace("Say", "\\ud800"))
    (ids,) = prepared([str(tmp_path / "a.jsonl")], tokenizer, tmp_path / "data")
    assert bytes(id_ for id_ in ids if id_ < 256).decode().count("\ufffd") == 1
    assert Tokens.open(tmp_path / "data").manifest.undecodable_bytes == 3


def test_conversations_can_be_held_out(tokenizer: Path, tmp_path: Path) -> None:
    chats = [[{**ASKED[0], "content": str(i)}, ASKED[1]] for i in range(6)]
    sources = write(tmp_path / "a.jsonl", *({"messages": each} for each in chats))
    kept = prepared(sources, tokenizer, tmp_path / "data", holdout="2")
    held_out = Tokens.open(tmp_path / "data" / "heldout")
    assert (len(kept), held_out.documents) == (4, 2)


def test_the_field_and_the_template_are_settings(tokenizer: Path, tmp_path: Path) -> None:
    sources = write(tmp_path / "a.jsonl", {"messages": ASKED})
    once = prepared(sources, tokenizer, tmp_path / "data")
    assert prepared(sources, tokenizer, tmp_path / "data") == once  # nothing to do
    for chat_field in (None, "other"):
        with pytest.raises(GSAError, match="begun with other settings; not the same are: chat"):
            prepared(sources, tokenizer, tmp_path / "data", chat_field=chat_field)
    config = json.loads((tokenizer / CONFIG).read_text())
    (tokenizer / CONFIG).write_text(json.dumps(config | {"chat_template": CHATML}))
    with pytest.raises(GSAError, match="not the same are: chat"):
        prepared(sources, tokenizer, tmp_path / "data")


def test_what_tells_no_conversations_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    sources = write(tmp_path / "a.jsonl", {"messages": ASKED})
    write_tokenizer(tmp_path / "without", template=None)
    with pytest.raises(GSAError, match="no chat template"):
        prepared(sources, tmp_path / "without", tmp_path / "data")
    parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(GSAError, match=r"conversations are read from .jsonl files, and .*a.parquet is none"):
        prepared([str(tmp_path / "a.parquet")], tokenizer, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_questions_are_lines_and_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Who is  Ahab?\n\n Where?\r\nWho is Ahab?\n")
    write(tmp_path / "b.jsonl", {"question": "Why\nnot?"}, {"other": 1}, {"question": "Where?"})
    (tmp_path / "c.txt").write_bytes(b"Wh\xff?\n")
    told: list[str] = []
    found = read_questions([str(tmp_path)], "question", told.append)
    assert found == ["Who is Ahab?", "Where?", "Why not?", "Wh\N{REPLACEMENT CHARACTER}?"]
    assert [line.split(":")[0] for line in told] == ["left out 1 rows or files", "replaced 1 bytes that are not UTF-8"]
    with pytest.raises(GSAError, match=r"no text in .*--field is 'ask', the first row has 'question'"):
        read_questions([str(tmp_path / "b.jsonl")], "ask", told.append)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("assistant"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "name"]), inner, max_size=3)
        | st.fixed_dictionaries({"role": inner, "content": inner})
    ),
    max_leaves=8,
)


@given(JSON_VALUES)
@examples(60)
def test_any_row_is_a_conversation_or_counted(value: Any) -> None:
    line = json.dumps({"messages": value}).encode()
    findings = Findings(strict=False)
    found = list(texts([Part("a.jsonl", "jsonl", 0, line)], "text", findings, "messages"))
    assert len(found) + sum(findings.bad_rows.values()) == 1
    for text in found:
        assert text.messages is not None
        assert text.messages[-1]["role"] == "assistant"
        assert [set(message) for message in text.messages] == [{"role", "content"}] * len(value)
