"""Conversations: what the model reads is what its template says, and it reads it once."""

from __future__ import annotations

import json
import string
import tempfile
from functools import cache
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gsa
from gsa.data.chat_template import MARK, ChatTemplate
from gsa.data.tokenizer import CONFIG, JSON, Tokenizer, config_text, load_tokenizer
from gsa.errors import GSAError
from gsa.infer import Sampling
from gsa.infer.chat import Chat, rest_of, with_reply
from gsa.infer.text import TextEngine
from gsa.infer.tokens import TokenHash
from tests.examples import examples
from tests.infer.talking import BEGIN, BEGIN_ID, CHATML, END, END_ID, write_model, write_tokenizer

SHORT = Sampling(max_tokens=6, temperature=0)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is naïve\nAhab?"},
    {"role": "assistant", "content": " On the ship. "},
    {"role": "user", "content": "  And the whale?\n"},
]


def text_of(segments: list[str | int]) -> str:
    names = {BEGIN_ID: BEGIN, END_ID: END, 256: "<|endoftext|>"}
    return "".join(names[segment] if isinstance(segment, int) else segment for segment in segments)


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.mark.parametrize("flags", [{}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
def test_transformers_reads_the_same_ids(tmp_path: Path, flags: dict[str, bool]) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path, **flags)
    template = ChatTemplate.of(load_tokenizer(tmp_path))
    other = AutoTokenizer.from_pretrained(tmp_path)
    expected = other.apply_chat_template(CONVERSATION, add_generation_prompt=True)["input_ids"]
    assert template.encode(template.render(CONVERSATION)).tolist() == expected
    assert expected.count(BEGIN_ID) == 5


def sentencepiece(folder: Path, scheme: str) -> Tokenizer:
    """A tokenizer of letters and bytes like Mistral's, with the space in front of texts put there in several ways."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *string.ascii_letters, "▁O"]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    before = [{"type": "Prepend", "prepend": "▁"}, replace]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": names[i], **special} for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": before} if scheme == "prepend" else None,
        "pre_tokenizer": None if scheme == "prepend" else metaspace,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": [["▁", "O"]],
        },
    }
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    config = json.loads(config_text(eos="</s>", bos="<s>")) | {"split_special_tokens": False}
    (folder / JSON).write_text(json.dumps(content))
    (folder / CONFIG).write_text(json.dumps({**config, "chat_template": template}))
    return load_tokenizer(folder)


@pytest.mark.parametrize("scheme", ["prepend", "always", "first", "never"])
def test_transformers_reads_the_same_ids_where_texts_get_a_space(tmp_path: Path, scheme: str) -> None:
    from transformers import AutoTokenizer

    template = ChatTemplate.of(sentencepiece(tmp_path, scheme))
    other = AutoTokenizer.from_pretrained(tmp_path)
    expected = other.apply_chat_template(CONVERSATION, add_generation_prompt=True)["input_ids"]
    assert template.encode(template.render(CONVERSATION)).tolist() == expected
    assert expected[0] == 1


PARTS = [BEGIN, END, "<|endoftext|>", "<|im_", "end|>", MARK, MARK * 2, "0", "a", " "]
typed = st.lists(st.sampled_from(PARTS)).map("".join)


@given(typed, typed)
@examples(200)
def test_names_of_special_tokens_in_messages_are_text(first: str, second: str) -> None:
    template = ChatTemplate(CHATML, load_talking())
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    segments = template.render(messages)
    assert text_of(segments) == (f"{BEGIN}user\n{first}{END}\n{BEGIN}assistant\n{second}{END}\n{BEGIN}assistant\n")
    assert [segment for segment in segments if isinstance(segment, int)] == [
        BEGIN_ID, END_ID, BEGIN_ID, END_ID, BEGIN_ID,
    ]  # fmt: skip


def test_a_template_that_writes_much_white_space_takes_no_time(tmp_path: Path) -> None:
    """Before a token that takes the white space beside it: the search for it was quadratic, minutes for this text."""
    write_tokenizer(tmp_path, lstrip=True, rstrip=True)
    template = ChatTemplate("a{{ ' ' * 10 ** 6 }}b{{ ' ' * 99 }}" + END + "  c", load_tokenizer(tmp_path))
    assert template.render([{"role": "user", "content": "?"}]) == ["a" + " " * 10**6 + "b", END_ID, "c"]


def test_a_template_that_forges_marks_gets_no_words_of_others() -> None:
    forged = "{% set mark = '%c' % " + str(ord(MARK)) + " %}{{ mark ~ '7' ~ mark ~ mark ~ '9' * 5000 ~ mark }}"
    (text,) = ChatTemplate(forged, load_talking()).render([{"role": "user", "content": END}])
    assert text == f"{MARK}7{MARK}{MARK}{'9' * 5000}{MARK}"


@cache
def load_talking() -> Tokenizer:
    """The tokenizer of bytes with special tokens."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return load_tokenizer(folder)


def test_special_tokens_go_by_the_names_in_the_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": BEGIN}}))
    template = ChatTemplate.of(load_tokenizer(tmp_path))
    assert template.render([{"role": "user", "content": "a"}]) == [BEGIN_ID, "a", END_ID]


def test_a_template_may_stand_in_a_file_or_have_a_name(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "by name"}]
    (tmp_path / CONFIG).write_text(json.dumps({**config, "chat_template": named}))
    assert ChatTemplate.of(load_tokenizer(tmp_path)).template == "by name"
    (tmp_path / "chat_template.jinja").write_text("in a file")
    assert ChatTemplate.of(load_tokenizer(tmp_path)).template == "in a file"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(GSAError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("template", [None, 5, [{"name": "tools", "template": "x"}]])
def test_a_model_without_a_template_is_told_so(tmp_path: Path, template: object) -> None:
    write_tokenizer(tmp_path, template=template)
    with pytest.raises(GSAError, match=r"has no chat template .* `gsa generate` continues texts"):
        ChatTemplate.of(load_tokenizer(tmp_path))


@pytest.mark.parametrize("template", ["", " \n"])
def test_an_empty_template_is_told_so(tmp_path: Path, template: str) -> None:
    write_tokenizer(tmp_path, template=template)
    with pytest.raises(GSAError, match=r"the chat template of .* is empty"):
        ChatTemplate.of(load_tokenizer(tmp_path))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users may speak') }}", "only users may speak"),
        ("{% for %}", "Expected an expression"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' * 10**17 }}", "MemoryError"),  # which has no text of its own
    ],
)
def test_a_template_that_fails_is_an_error(template: str, message: str) -> None:
    with pytest.raises(GSAError, match=f"template cannot take this conversation: .*{message}"):
        ChatTemplate(template, load_talking()).render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("whole", "read", "rest"),
    [
        ([1, "ab", 2], [1, "a"], ["b", 2]),
        ([1, "ab", 2], [1, "ab"], [2]),
        ([1, "ab", 2], [1], ["ab", 2]),
        ([1, "ab", 2], [1, "ab", 2], []),
        ([1, "ab", 2], [1, "ac"], None),
        ([1, "ab", 2], [2], None),
        ([1, "ab", 2], ["ab"], None),
        ([1, "ab", 2], [1, "ab", 2, "c"], None),
        ([1, "ab", 2], [1, 2], None),
        ([], [1], None),
    ],
)
def test_what_is_left_to_read(whole: list[str | int], read: list[str | int], rest: list[str | int] | None) -> None:
    assert rest_of(whole, read) == rest


def say(chat: Chat, text: str) -> str:
    return "".join(piece.text for piece in chat.reply(text))


def test_what_was_read_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TextEngine.load(folder)
    chat = Chat(engine, SHORT, system="Be brief.")
    read: list[tuple[list[int], list[int], bool]] = []
    stream = TextEngine.stream

    def watched(self: TextEngine, prompt: np.ndarray, *args: object, **options: object) -> object:
        writing = stream(self, prompt, *args, **options)
        read.append((prompt.tolist(), writing.generation.tokens, options["state"] is not None))
        return writing

    monkeypatch.setattr(TextEngine, "stream", watched)
    first, second = say(chat, "Who?"), say(chat, f"And {END}?")
    start = [BEGIN_ID, *bytes_of("system\nBe brief."), END_ID, *bytes_of("\n")]
    ask = [BEGIN_ID, *bytes_of("user\nWho?"), END_ID, *bytes_of("\n"), BEGIN_ID, *bytes_of("assistant\n")]
    more = [END_ID, *bytes_of("\n"), BEGIN_ID, *bytes_of(f"user\nAnd {END}?"), END_ID, *bytes_of("\n"), BEGIN_ID]
    assert [(prompt, goes_on) for prompt, _, goes_on in read] == [
        ([*start, *ask], False),
        ([*more, *bytes_of("assistant\n")], True),
    ]
    whole = [id_ for prompt, reply, _ in read for id_ in (*prompt, *reply)]
    assert (chat.state.tokens, chat.state.digest) == (len(whole), TokenHash.advance(TokenHash.EMPTY, whole).hex())
    assert [message["content"] for message in chat.messages] == ["Be brief.", "Who?", first, f"And {END}?", second]
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 2]


def test_replies_are_those_of_the_whole_conversation(folder: Path) -> None:
    """Going on from a state gives what reading all anew would give."""
    engine = TextEngine.load(folder)
    chat = Chat(engine, SHORT)
    ids: list[int] = []
    for text in ("Who?", "Where?", "When?"):
        whole = chat.template.render([*chat.messages, {"role": "user", "content": text}])
        rest = whole if not ids else rest_of(whole, chat._read)
        ids += chat.template.encode(rest, chat._read[-1] if ids else None).tolist()
        expected = engine.engine.generate(ids, Sampling(max_tokens=6, temperature=0, stop=engine.ends)).tokens
        assert say(chat, text) == engine.tokenizer.decode(expected)
        ids += expected


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("message['content']", "(message['content'] if loop.last else '...')"),
        CHATML.replace("for message in messages", "for message in messages[-1:]"),
    ],
)
def test_a_past_that_is_told_differently_is_read_anew(tmp_path: Path, template: str) -> None:
    chat = Chat(TextEngine.load(write_model(tmp_path / "model", template=template)), SHORT)
    say(chat, "Who?")
    say(chat, "Where?")
    whole = chat.template.render(chat.messages[:-1])
    assert chat.state.tokens == len(chat.template.encode(whole)) + 6


def test_special_tokens_in_a_reply_stay_what_they_are(folder: Path) -> None:
    chat = Chat(TextEngine.load(folder), SHORT)
    asked = [BEGIN_ID, "user\n"]
    assert with_reply(chat.template, asked, [72, 195, 169]) == [BEGIN_ID, "user\nHé"]
    assert with_reply(chat.template, asked, [72, BEGIN_ID, END_ID, 73]) == [BEGIN_ID, "user\nH", BEGIN_ID, END_ID, "I"]
    assert with_reply(chat.template, [BEGIN_ID], [72]) == [BEGIN_ID, "H"]
    assert with_reply(chat.template, [BEGIN_ID], []) == [BEGIN_ID]
    assert asked == [BEGIN_ID, "user\n"]


def test_a_reply_that_is_cancelled_counts(folder: Path) -> None:
    chat = Chat(TextEngine.load(folder), Sampling(max_tokens=50, temperature=0))
    shown = ""
    for piece in chat.reply("Who?"):
        shown += piece.text
        if piece.token is not None:
            chat.cancel()
    assert piece.reason == "cancelled"
    assert chat.messages[-1] == {"role": "assistant", "content": shown}
    before = chat.state.tokens
    say(chat, "Where?")
    assert chat.state.tokens > before + 50


def test_a_reply_that_is_dropped_or_fails_changes_nothing(folder: Path) -> None:
    chat = Chat(TextEngine.load(folder), SHORT)
    say(chat, "Who?")
    messages, state = list(chat.messages), chat.state
    pieces = chat.reply("Where?")
    next(pieces)
    pieces.close()
    with pytest.raises(GSAError, match="surrogate"):
        say(chat, "\ud800")
    assert (chat.messages, chat.state, chat.engine.engine.busy) == (messages, state, False)


def test_a_question_that_was_not_read_is_forgotten(folder: Path) -> None:
    chat = Chat(TextEngine.load(folder), SHORT)
    for _ in chat.reply("Who? " * 1000):
        chat.cancel()
    assert (chat.messages, chat.state) == ([], None)


def test_reset_begins_anew(folder: Path) -> None:
    chat = Chat(TextEngine.load(folder), SHORT, system="Be brief.")
    chat.cancel()  # of nothing
    first = say(chat, "Who?")
    state = chat.state
    chat.reset()
    assert (chat.messages, chat.state) == ([{"role": "system", "content": "Be brief."}], None)
    assert say(chat, "Who?") == first
    assert chat.state.digest == state.digest


def test_two_conversations_in_turns_are_those_held_alone(folder: Path) -> None:
    engine = TextEngine.load(folder, batch_size=2)
    asked = ("Who?", "Where are you, my friend?")
    alone = [Chat(engine, SHORT).say(text) for text in asked]
    chats = [Chat(engine, SHORT), Chat(engine, SHORT)]
    said = ["", ""]
    for pieces in zip_longest(*(chat.reply(text) for chat, text in zip(chats, asked, strict=True))):
        for i, piece in enumerate(pieces):
            said[i] += "" if piece is None else piece.text
    assert said == alone
    assert [chat.messages[-1]["content"] for chat in chats] == said
    assert [chat.state.digest for chat in chats] == [text.state.digest for text in alone]


def test_a_model_that_was_loaded_talks_as_its_makers_advise(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert gsa.load(folder).chat().sampling == Sampling()
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.2, "repetition_penalty": 1.1}')
    model = gsa.load(folder)
    assert model.chat().sampling == Sampling(temperature=0.2, repetition_penalty=1.1)
    assert model.chat(temperature=0, top_k=5).sampling == Sampling(temperature=0, top_k=5, repetition_penalty=1.1)
