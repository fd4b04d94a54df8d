"""The script that makes the training text of distillation: what it does to texts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from gsa.data.chat_template import ChatTemplate
from gsa.data.tokenizer import load_tokenizer
from tests.infer.talking import CHATML
from tests.scripts import DOCS, script

corpus = script(DOCS / "results" / "distill_corpus.py")

CIRCLES = "I am glad that you are happy about it. " * 8


def test_paragraphs_become_lines_and_verse_stays() -> None:
    text = "CHAPTER I\r\n\r\nCall me\r\nIshmael.\r\n\r\n\r\n   A garden\r\n   that I ken\r\n"
    assert corpus.unwrapped(text) == "CHAPTER I\n\nCall me Ishmael.\n\n   A garden\n   that I ken\n"


def test_parts_are_the_whole_text() -> None:
    text = "\n\n".join("ab"[i % 2] * 50 for i in range(40))
    pieces = list(corpus.parts(text, 500))
    assert "".join(pieces) == text
    assert len(pieces) == 4
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])
    assert list(corpus.parts("short", 500)) == ["short"]


def test_speech_is_written_down() -> None:
    assert corpus.spoken("{vocalsound} So , that 's it {disfmarker} OK ?") == "So, that's it OK?"
    assert corpus.spoken("{vocalsound} .") == ""


def test_a_topic_is_a_name_within_a_question() -> None:
    assert corpus.topic("Who was the wife of Genghis Khan?") == "Genghis Khan"
    assert corpus.topic("Which Roman was it?") is None


def test_a_conversation_ends_before_it_goes_in_circles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert corpus.circles(CIRCLES)
    assert not corpus.circles(" ".join(map(str, range(100))))
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    circling = [turns[0], {"role": "assistant", "content": CIRCLES}]
    rows = [[*turns, *circling, *turns], circling, turns]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    monkeypatch.setattr(corpus, "SHORTEST_CHAT", 5)
    chats = list(corpus.conversations(path, ChatTemplate(CHATML, load_tokenizer("bytes"))))
    assert [row["messages"] for row in chats] == [turns, turns]
    assert chats[0]["tokens"] == len("<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo.") + 1


def test_conversations_have_their_share() -> None:
    text = [{"source": "books", "tokens": 10, "text": str(i)} for i in range(100)]
    chats = [{"source": "chats", "tokens": 7, "messages": []} for _ in range(10)]
    documents = corpus.mixed(text, chats, random.Random(0))
    of_chats = sum(row["tokens"] for row in documents if row["source"] == "chats")
    assert of_chats / sum(row["tokens"] for row in documents) == pytest.approx(0.35, abs=0.01)
    assert documents != sorted(documents, key=lambda row: row["source"])
