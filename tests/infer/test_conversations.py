"""Conversations that a model samples: the same ones however they are computed, and the file they are in."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from gsa.data.prepare import prepare
from gsa.data.shards import Tokens
from gsa.errors import GSAError
from gsa.infer.conversation_file import ConversationFile
from gsa.infer.conversations import FOLLOW_UPS, SENTENCE_END, ChatSettings, Conversation, converse
from gsa.infer.text import TextEngine
from gsa.models.checkpoint import read_model, save_model
from tests.infer.talking import BEGIN_ID, END_ID, write_model

QUESTIONS = ["Who is Ahab?", f"What does {BEGIN_ID} mean?", "Where is the whale?"]
SHORT = ChatSettings(shortest=60, longest=160, answer_tokens=12, temperature=1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def engine(folder: Path, batch_size: int = 3, **options: Any) -> TextEngine:
    return TextEngine.load(folder, batch_size=batch_size, **options)


def some(one: TextEngine, settings: ChatSettings = SHORT, *, first: int = 0, count: int = 5) -> list[Conversation]:
    return list(islice(converse(one, QUESTIONS, settings, first), count))


@pytest.mark.parametrize("case", ["gsa", "attention"])
def test_a_conversation_is_the_same_whatever_is_held_beside_it(tmp_path: Path, case: str) -> None:
    folder = write_model(tmp_path / "model", case=case)
    found = some(engine(folder))
    assert [each.number for each in found] == [0, 1, 2, 3, 4]
    assert len({json.dumps(each.messages) for each in found}) == 5
    assert some(engine(folder, 1)) == found
    assert some(engine(folder, 2), first=3, count=2) == found[3:]


def test_a_conversation_has_questions_and_answers_in_turn(folder: Path) -> None:
    settings = ChatSettings(shortest=150, longest=250, answer_tokens=12, follow_ups=0.5, system="Be brief.")
    asked = set()
    for each in some(engine(folder), settings):
        roles = [message["role"] for message in each.messages]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]
        assert each.messages[0]["content"] == "Be brief."
        assert 150 < each.tokens < 250 + 2 * 12 + 60
        asked |= {message["content"] for message in each.messages if message["role"] == "user"}
    assert asked <= {*QUESTIONS, *FOLLOW_UPS}
    assert asked & set(FOLLOW_UPS)
    assert asked & set(QUESTIONS)


def test_every_setting_changes_what_is_said(folder: Path) -> None:
    one = engine(folder)
    found = some(one, count=2)
    changed = {"seed": 1, "system": "Hm.", "shortest": 150, "longest": 60, "answer_tokens": 5, "follow_ups": 1.0}
    for name, value in {**changed, "temperature": 0.1, "top_p": 0.1}.items():
        settings = ChatSettings(**{**vars(SHORT), name: value})
        assert some(one, settings, count=2) != found, name


def test_prepare_gives_what_the_model_has_read_and_said(folder: Path, tmp_path: Path) -> None:
    """Byte for byte, where all that it says is text: here, because only letters can be the likeliest."""
    lm = read_model(folder)
    with torch.no_grad():
        weight = lm.lm_head.weight.clone()
        weight[:32], weight[127:] = 0, 0
        lm.lm_head.weight = torch.nn.Parameter(weight)
    save_model(lm, folder, eos_token_id=[END_ID, 256])
    one = engine(folder, 1)
    submit, read, said = one.engine.submit, list[list[int]](), list[Any]()

    def recorded(ids: Any, *args: Any, **options: Any) -> Any:
        read.append(list(map(int, ids)))
        said.append(submit(ids, *args, **options))
        return said[-1]

    one.engine.submit = recorded  # type: ignore[method-assign]
    path = tmp_path / "chats.jsonl"
    settings = ChatSettings(shortest=150, longest=150, answer_tokens=12, temperature=0)
    with ConversationFile(path, one, QUESTIONS, settings) as file:
        assert len(list(file.extend(1))) == 1
    turns = [*zip(read, said, strict=True)]
    turns = turns[: len(json.loads(path.read_text())["messages"]) // 2]
    expected = [id_ for prompt, generation in turns for id_ in (*prompt, *generation.tokens)] + [END_ID]
    prepare([str(path)], str(folder), tmp_path / "data", chat_field="messages", processes=1, progress=False)
    tokens = Tokens.open(tmp_path / "data")
    assert tokens.read(0, tokens.length).tolist() == expected
    assert file.tokens == len(expected)
    assert expected.count(END_ID) == 2 * len(turns)


def test_a_file_goes_on_where_it_was_stopped(folder: Path, tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "new" / "stopped.jsonl"
    with ConversationFile(whole, engine(folder, 1), QUESTIONS, SHORT) as file:
        assert sum(each.tokens for each in file.extend(500)) == file.tokens
        assert 500 <= file.tokens < 500 + 260
    with ConversationFile(path, engine(folder), QUESTIONS, SHORT) as file:
        list(islice(file.extend(500), 2))
    path.write_bytes(path.read_bytes() + whole.read_bytes().splitlines(keepends=True)[2][:-5])  # cut short by a kill
    with ConversationFile(path, engine(folder), QUESTIONS, SHORT) as file:
        assert file.conversations == 2
        with (
            pytest.raises(GSAError, match="another process is writing"),
            ConversationFile(path, engine(folder), QUESTIONS, SHORT),
        ):
            pass
        list(file.extend(500))
    assert path.read_bytes() == whole.read_bytes()
    with ConversationFile(path, engine(folder), QUESTIONS, SHORT) as file:
        assert not list(file.extend(500))
    assert path.read_bytes() == whole.read_bytes()


def test_a_file_of_something_else_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    with ConversationFile(path, engine(folder), QUESTIONS, SHORT) as file:
        list(file.extend(200))
    rows = path.read_bytes().splitlines(keepends=True)
    kept = path.read_bytes()
    others = (
        (engine(folder), QUESTIONS, ChatSettings(seed=1), "line 1: another model, other questions"),
        (engine(folder), QUESTIONS[1:], SHORT, "other questions"),
        (engine(folder, weights="int8"), QUESTIONS, SHORT, "another model"),
    )
    for model, questions, settings, message in others:
        with pytest.raises(GSAError, match=message), ConversationFile(path, model, questions, settings):
            pass
        assert path.read_bytes() == kept
    for content, message in ((b"[]\n", "no conversation"), (b"x\n", "no conversation"), (rows[1], "conversation 0")):
        path.write_bytes(content)
        with pytest.raises(GSAError, match=message), ConversationFile(path, engine(folder), QUESTIONS, SHORT):
            pass
        assert path.read_bytes() == content
    with (
        pytest.raises(GSAError, match="cannot be written"),
        ConversationFile(tmp_path, engine(folder), QUESTIONS, SHORT),
    ):
        pass


def test_where_a_text_may_end() -> None:
    for text in ("It is so.", "Is it? ", 'He said "no."', "the end!\n", "- an item\n", "**Bold.**"):
        assert SENTENCE_END.search(text), text
    for text in ("It is", "as follows:\n", "items:\n\n2.", "about 3.", "one, ", ""):
        assert not SENTENCE_END.search(text), text


def test_wrong_settings_are_refused() -> None:
    for options, message in (
        ({"shortest": 10, "longest": 9}, "shortest"),
        ({"follow_ups": 2.0}, "follow_ups"),
        ({"answer_tokens": 0}, "answer_tokens"),
        ({"seed": -1}, "seed"),
    ):
        with pytest.raises(GSAError, match=message):
            ChatSettings(**options)
