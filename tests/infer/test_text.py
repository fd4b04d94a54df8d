"""Text in, text out: nothing is shown that changes later, and nothing is lost."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import gsa.pretrained
from gsa.data.tokenizer import END_OF_TEXT, JSON, BytesTokenizer, Tokenizer, load_tokenizer
from gsa.data.tokenizer_json import JsonTokenizer
from gsa.data.vocabulary import vocabulary
from gsa.errors import GSAError
from gsa.infer import Engine, Sampling
from gsa.infer.detokenizer import Detokenizer, detokenized
from gsa.infer.stop_strings import StopStrings
from gsa.infer.text import Text, TextEngine
from gsa.infer.tokens import TokenHash
from gsa.models.checkpoint import save_model
from tests.examples import examples
from tests.infer.talking import BEGIN, BEGIN_ID, END_ID, write_model, write_tokenizer
from tests.models.cases import model

GREEDY = Sampling(max_tokens=40, temperature=0)


def json_tokenizer(name: str, **parts: object) -> JsonTokenizer:
    """A tokenizer of a few words, with other parts."""
    names = [
        "<unk>",
        "<s>",
        "▁",
        "▁the",
        "whale",
        "##s",
        "▁s",
        "ea</w>",
        " ",
        "é",
        *(f"<0x{i:02X}>" for i in range(256)),
    ]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "<s>", **special}],
        "model": {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(names)}, "unk_token": "<unk>"},
        **parts,
    }
    return JsonTokenizer(name, json.dumps(content), {}, 1)


STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
DECODERS = {
    "word pieces": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "metaspace": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    "suffixes": {"type": "BPEDecoder", "suffix": "</w>"},
    "none": None,
    "bytes, then stripped": {
        "type": "Sequence",
        "decoders": [
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            STRIP,
        ],
    },
    "bytes in runs": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    },
}
KINDS = ("bytes", "gsa-tiny", "mistral", *DECODERS)


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind in DECODERS:
        return json_tokenizer(kind, decoder=DECODERS[kind])
    return load_tokenizer(gsa.pretrained.folder() if kind == "gsa-tiny" else kind)


def sequences(kind: str) -> st.SearchStrategy[list[int]]:
    """Ids of all kinds: any, those of bytes, special ones."""
    known = vocabulary(tokenizer(kind))
    bytes_ = sorted(known.in_runs) or range(min(256, tokenizer(kind).vocab_size))
    special = [token.id for token in known.special]
    any_id = st.integers(0, tokenizer(kind).vocab_size - 1)
    return st.lists(any_id | st.sampled_from(bytes_) | st.sampled_from(special), max_size=30)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@examples(150)
def test_text_of_single_ids_is_the_text_of_all(kind: str, data: st.DataObject) -> None:
    ids = data.draw(sequences(kind))
    assert detokenized(tokenizer(kind), ids) == tokenizer(kind).decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "gsa-tiny", "mistral"])
@given(data=st.data(), prompt=st.sampled_from(["a", "The whale", "naïve", "two lines\n."]))
@examples(100)
def test_a_continuation_is_what_it_adds(kind: str, data: st.DataObject, prompt: str) -> None:
    ids, before = data.draw(sequences(kind)), tokenizer(kind).encode([prompt])[0].tolist()
    assert prompt + detokenized(tokenizer(kind), ids, continues=True) == tokenizer(kind).decode([*before, *ids])


@pytest.mark.parametrize("kind", ["bytes", "gsa-tiny", "mistral"])
def test_text_comes_as_soon_as_it_is_sure(kind: str) -> None:
    text = Detokenizer(tokenizer(kind))
    written = "Moby Dick, naïve"
    shown = ""
    for id_ in tokenizer(kind).encode([written])[0].tolist():
        shown += text.add(id_)
        assert written.startswith(shown)
    assert shown == written
    assert text.end() == ""


def test_a_character_waits_for_its_last_byte() -> None:
    text = Detokenizer(tokenizer("bytes"))
    assert [text.add(byte) for byte in "a😀b".encode()] == ["a", "", "", "", "😀", "b"]
    assert [text.add(0xF0), text.add(0x9F), text.end()] == ["", "", "\ufffd"]
    assert [text.add(0xE2), text.add(ord("a"))] == ["", "\ufffda"]


def test_the_work_for_a_token_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with the text nor within a long run of bytes."""
    decoded = []
    whole = JsonTokenizer.decode
    monkeypatch.setattr(JsonTokenizer, "decode", lambda self, ids: decoded.append(len(ids)) or whole(self, ids))
    mistral = tokenizer("mistral")
    byte, word = sorted(vocabulary(mistral).in_runs)[65], mistral.encode(["whale"])[0].tolist()
    detokenized(mistral, word * 500)
    assert max(decoded) <= 5
    decoded.clear()
    detokenized(mistral, [byte] * 500 + word)
    assert sum(decoded) < 600


def test_ids_that_the_tokenizer_does_not_know_are_no_text() -> None:
    for kind in ("bytes", "mistral"):
        known = tokenizer(kind).encode(["ab"])[0].tolist()
        assert detokenized(tokenizer(kind), [known[0], 10**6, *known[1:]]) == "ab"


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


@given(
    st.text("ab\n", max_size=30),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=10),
)
@example("abcd", ["abcd", "bc"], [3])
@examples(400)
def test_stop_strings_do_not_depend_on_how_text_is_cut(text: str, stops: list[str], places: list[int]) -> None:
    """The oracle goes letter by letter: the first end of any stop string, of those that end there the longest."""
    expected, hit = text, False
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            expected, hit = text[: end - max(map(len, ending))], True
            break
    guard, shown, found = StopStrings(stops), "", False
    for part in cut(text, places):
        more, found = guard.add(part)
        shown += more
        if found:
            break
    assert (shown + ("" if found else guard.end()), found) == (expected, hit)


def test_only_what_may_be_a_stop_string_waits() -> None:
    guard = StopStrings(["\n\nQ:", "END"])
    assert [guard.add(part) for part in ("a\n", "\n", "b EN", "d E")] == [
        ("a", False),
        ("", False),
        ("\n\nb ", False),
        ("ENd ", False),
    ]
    assert guard.end() == "E"
    assert guard.end() == ""


@pytest.mark.parametrize("stop", ["", 5, None])
def test_what_is_no_stop_string(stop: object) -> None:
    with pytest.raises(GSAError, match="at least one character, got"):
        StopStrings([stop])


@pytest.fixture(scope="module")
def tiny() -> TextEngine:
    return TextEngine.load("gsa-tiny", "fp32")


def written(engine: TextEngine, prompt: str, **options: object) -> tuple[str, str | None]:
    pieces = list(engine.stream(prompt, GREEDY, **options))
    assert [piece.reason is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    return "".join(piece.text for piece in pieces), pieces[-1].reason


def test_the_text_is_that_of_the_engines_tokens(tiny: TextEngine) -> None:
    writing = tiny.stream("Call me Ishmael.", Sampling(max_tokens=40, temperature=0, logprobs=1))
    pieces = list(writing)
    ids = tiny.tokenizer.encode(["Call me Ishmael."])[0]
    expected = tiny.engine.generate(ids, Sampling(max_tokens=40, temperature=0, logprobs=1))
    assert "".join(piece.text for piece in pieces) == tiny.tokenizer.decode(expected.tokens)
    assert pieces[-1].reason == expected.reason == "length"
    tokens = [piece.token for piece in pieces if piece.token is not None]
    assert [token.id for token in tokens] == expected.tokens == writing.generation.tokens
    assert [token.logprob for token in tokens] == expected.logprobs


def test_a_stop_string_ends_the_text_and_the_request(tiny: TextEngine) -> None:
    whole, _ = written(tiny, "Call me Ishmael.")
    stop = whole[30:37]
    assert len(stop) == 7
    writing = tiny.stream("Call me Ishmael.", GREEDY, stop=["never there", stop])
    text = ""
    for piece in writing:
        text += piece.text
        assert not (stop in tiny.tokenizer.decode(writing.generation.tokens) and tiny.engine.busy)
    assert (text, piece.reason) == (whole[: whole.index(stop)], "stop")
    assert len(writing.generation.tokens) < 40


def test_a_stop_string_in_the_very_last_text_counts(tiny: TextEngine) -> None:
    """It is the flush of half a character that completes it."""
    engine = TextEngine(tiny.engine, tiny.tokenizer)
    writing = engine.stream("a", Sampling(max_tokens=1, temperature=0), stop=["\ufffd"])
    half = next(i for i, spelt in enumerate(vocabulary(tiny.tokenizer).spelt) if spelt == b"\xe2")
    writing._text.add(half)
    writing.cancel()
    assert [(piece.text, piece.reason) for piece in writing] == [("", "stop")]


def test_the_model_ends_a_text(tmp_path: Path) -> None:
    """By the tokens that tokenizer, config.json and generation_config.json name."""
    folder = write_model(tmp_path / "model")
    engine = TextEngine.load(folder)
    assert engine.ends == (256, END_ID)
    (folder / "generation_config.json").write_text('{"eos_token_id": 65}')
    assert TextEngine.load(folder).ends == (65, 256, END_ID)
    first = engine.engine.generate([10, 11], Sampling(max_tokens=1, temperature=0)).tokens[0]
    ended = TextEngine(engine.engine, engine.tokenizer, [first, 10**6])
    assert written(ended, "\n\x0b") == ("", "stop")
    for odd in ('"x"', "[1, true]", "-1"):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {odd}}}')
        with pytest.raises(GSAError, match="eos_token_id must be a token or a list of them"):
            TextEngine.load(folder)


def test_text_goes_on_from_a_state(tiny: TextEngine) -> None:
    first = tiny.stream("Call me Ishmael.", GREEDY, keep_state=True)
    before = "".join(piece.text for piece in first)
    state = first.generation.kept
    ids = [*tiny.encode("Call me Ishmael.").tolist(), *first.generation.tokens]
    assert state.digest == TokenHash.advance(TokenHash.EMPTY, ids).hex()
    # As if it had never been interrupted.
    assert before + written(tiny, "", state=state)[0] == "".join(
        piece.text for piece in tiny.stream("Call me Ishmael.", Sampling(max_tokens=80, temperature=0))
    )
    new = tiny.tokenizer.encode([" And then"], continues=True)[0]
    expected = tiny.engine.generate(new, GREEDY, state=state)
    assert written(tiny, " And then", state=state)[0] == tiny.tokenizer.decode(expected.tokens)


def test_closing_frees_the_place(tiny: TextEngine) -> None:
    for read in (0, 3):
        writing = tiny.stream("Call me", GREEDY)
        for _ in range(read):
            next(iter(writing))
        writing.close()
        assert (writing.generation.reason, tiny.engine.busy, list(writing)) == ("cancelled", False, [])


def test_a_cancelled_text_keeps_what_there_is(tiny: TextEngine) -> None:
    writing = tiny.stream("Call me", GREEDY, keep_state=True, stop=["x" * 100])
    text = ""
    for piece in writing:
        text += piece.text
        if len(writing.generation.tokens) == 5:
            writing.cancel()
    assert piece.reason == "cancelled"
    assert text == tiny.tokenizer.decode(writing.generation.tokens)
    assert writing.generation.kept.tokens == len(tiny.encode("Call me")) + 5


def test_scores_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    lm = model("gsa", vocab_size=257)
    lm.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(GSAError, match="not finite"):
        list(TextEngine(Engine(lm), BytesTokenizer()).stream("a"))


def with_processor(folder: Path, processor: dict) -> Path:
    write_tokenizer(folder)
    content = json.loads((folder / JSON).read_text())
    (folder / JSON).write_text(json.dumps({**content, "post_processor": processor}))
    return folder


SINGLE = [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
PROCESSORS = {
    "template": {
        "type": "TemplateProcessing",
        "single": SINGLE,
        "pair": [*SINGLE, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BEGIN: {"id": BEGIN, "ids": [BEGIN_ID], "tokens": [BEGIN]}},
    },
    "roberta": {
        "type": "RobertaProcessing",
        "cls": [BEGIN, BEGIN_ID],
        "sep": ["<|im_end|>", END_ID],
        "trim_offsets": True,
        "add_prefix_space": False,
    },
    "bytes": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
}
PROCESSORS["sequence"] = {"type": "Sequence", "processors": [PROCESSORS["bytes"], PROCESSORS["template"]]}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_text_begins_as_it_does_in_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = with_processor(tmp_path / "t", PROCESSORS[kind])
    engine = TextEngine(Engine(model("gsa", vocab_size=259)), load_tokenizer(folder))
    found = engine.encode("Hé").tolist()
    ids = AutoTokenizer.from_pretrained(folder)("Hé")["input_ids"]
    assert found == (ids[:-1] if kind == "roberta" else ids)  # what ends a text has no place in a prompt
    assert found[0] == (72 if kind == "bytes" else BEGIN_ID)
    assert engine.encode("Hé", continues=True).tolist() == [72, 195, 169]


def test_bytes_begin_as_they_do_in_transformers(tmp_path: Path) -> None:
    """Where nothing but the beginning of a text tells a tokenizer from that of bytes."""
    from transformers import AutoTokenizer

    BytesTokenizer().save(tmp_path)
    assert type(load_tokenizer(tmp_path)) is BytesTokenizer
    text = json.dumps(PROCESSORS["template"]).replace(BEGIN, END_OF_TEXT).replace(str(BEGIN_ID), "256")
    content = json.loads((tmp_path / JSON).read_text())
    (tmp_path / JSON).write_text(json.dumps({**content, "post_processor": json.loads(text)}))
    engine = TextEngine(Engine(model("gsa", vocab_size=257)), load_tokenizer(tmp_path))
    assert engine.encode("Hé").tolist() == AutoTokenizer.from_pretrained(tmp_path)("Hé")["input_ids"]
    assert engine.encode("Hé").tolist() == [256, 72, 195, 169]
    (tmp_path / JSON).write_text(json.dumps({**content, "post_processor": PROCESSORS["bytes"]}))
    assert type(load_tokenizer(tmp_path)) is BytesTokenizer


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    save_model(model("gsa", vocab_size=258), folder)
    message = "the tokenizer does not fit the model: it has a vocabulary of 259, the model of 258"
    with pytest.raises(GSAError, match=message):
        TextEngine.load(folder)
    save_model(model("gsa", vocab_size=5000), folder)
    assert TextEngine.load(folder).engine.model.vocab_size == 5000


def test_prompts_are_one_array(tiny: TextEngine) -> None:
    ids = tiny.encode("whale " * 100_000)
    assert (ids.dtype, ids.ndim) == (np.int64, 1)
    assert len(ids) > 100_000


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / JSON).unlink()
    with pytest.raises(GSAError, match=r"has no tokenizer\.json"):
        TextEngine.load(folder)
    shutil.rmtree(folder)
    with pytest.raises(GSAError, match="there is no such folder"):
        TextEngine.load(folder)


def alone(engine: TextEngine, prompt: str, stop: str = "") -> tuple[Text, list[int]]:
    text = engine.stream(prompt, GREEDY, stop=stop or (), keep_state=True).rest()
    return text, text.tokens


@pytest.mark.parametrize("places", [1, 4])
def test_texts_written_in_turns_are_those_written_alone(tiny: TextEngine, places: int) -> None:
    """A step for one of them makes tokens of all; none is lost, none comes after a stop string, also in the state."""
    engine = TextEngine(Engine(tiny.engine.model, batch_size=places), tiny.tokenizer)
    prompts = ["Call me Ishmael.", "It is a truth", "whale " * 700]
    stops = ["", alone(engine, prompts[1])[0][20:24], ""]
    expected = [alone(engine, prompt, stop) for prompt, stop in zip(prompts, stops, strict=True)]
    assert [text.reason for text, _ in expected] == ["length", "stop", "length"]
    writings = [
        engine.stream(prompt, GREEDY, stop=stop or (), keep_state=True)
        for prompt, stop in zip(prompts, stops, strict=True)
    ]
    found, going = ["", "", ""], [0, 1, 2]
    for turn in count():
        for i in [*going]:
            if turn % (i + 1) == 0:  # some are asked more often than others
                piece = next(writings[i], None)
                found[i] += piece.text if piece is not None else ""
                going = going if piece is not None else [other for other in going if other != i]
        if not going:
            break
    for text, writing, (whole, tokens) in zip(found, writings, expected, strict=True):
        assert (text, writing.generation.tokens, writing.reason) == (whole, tokens, whole.reason)
        assert writing.generation.kept.digest == whole.state.digest


def test_texts_written_in_threads_are_those_written_alone(tiny: TextEngine) -> None:
    prompts = ["Call me Ishmael.", "It is a truth", "She was", "whale " * 700]
    engine = TextEngine(Engine(tiny.engine.model, batch_size=3), tiny.tokenizer)
    settings = Sampling(max_tokens=40, temperature=0, logprobs=1)
    expected = [engine.stream(prompt, settings).rest() for prompt in prompts]

    def write(prompt: str) -> tuple[str, list[int], list[float]]:
        writing = engine.stream(prompt, settings)
        pieces = list(writing)
        tokens = [piece.token for piece in pieces if piece.token is not None]
        assert [token.id for token in tokens] == writing.generation.tokens
        return "".join(piece.text for piece in pieces), writing.generation.tokens, [token.logprob for token in tokens]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(write, prompts * 3))
    assert found == [(str(text), text.tokens, text.logprobs) for text in expected] * 3
    with ThreadPoolExecutor(4) as pool:
        streamed = list(
            pool.map(lambda ids: list(engine.engine.stream(ids, settings)), map(engine.encode, prompts * 3))
        )
    assert [[token.id for token in tokens] for tokens in streamed] == [text.tokens for text in expected] * 3


def test_what_was_made_before_a_text_is_cancelled_is_given(tiny: TextEngine) -> None:
    engine = TextEngine(Engine(tiny.engine.model, batch_size=2), tiny.tokenizer)
    waiting, other = engine.stream("Call me", GREEDY), engine.stream("She was", GREEDY)
    for _ in other:
        if len(waiting.generation.tokens) == 5:
            waiting.cancel()
    assert len(other.generation.tokens) == 40
    text = waiting.rest()
    assert (text, text.reason) == (tiny.tokenizer.decode(waiting.generation.tokens), "cancelled")
    assert len(text.tokens) == 5


def test_a_text_that_nobody_waits_for_ends(tiny: TextEngine) -> None:
    writing = tiny.stream("Call me", Sampling(max_tokens=1000))
    for _ in range(3):
        next(writing)
    generation = writing.generation
    del writing
    written(tiny, "She was")
    assert (generation.reason, len(generation.tokens)) == ("cancelled", 3)
    assert not tiny.engine.busy


def test_a_predicate_ends_a_request(tiny: TextEngine) -> None:
    """`until` of Engine.submit is asked with every token; its last word counts before the length does."""
    whole = tiny.engine.generate([10, 11], GREEDY).tokens
    seen: list[int] = []

    def until(id_: int) -> bool:
        seen.append(id_)
        return len(seen) == 5

    for length in (40, 5):
        seen.clear()
        request = tiny.engine.submit([10, 11], Sampling(max_tokens=length, temperature=0), until=until)
        while not request.done:
            tiny.engine.step()
        assert (request.tokens, request.reason) == (seen, "stop") == (whole[:5], "stop")


def test_pieces_can_be_taken_without_a_step(tiny: TextEngine) -> None:
    """For a thread that makes the steps of many texts itself."""
    whole = list(tiny.stream("She was", Sampling(max_tokens=4, temperature=0)))
    writing = tiny.stream("She was", Sampling(max_tokens=4, temperature=0))
    assert writing.ready() == []
    pieces = []
    while writing.reason is None:
        tiny.engine.step()
        pieces += writing.ready()
    assert [(piece.text, piece.reason) for piece in pieces] == [(piece.text, piece.reason) for piece in whole][-5:]
    assert writing.ready() == []
