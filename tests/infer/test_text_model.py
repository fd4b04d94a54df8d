"""The front door: `gsa.load` gives a model that takes text and gives text."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from doctest import DocTestFinder, DocTestRunner
from pathlib import Path

import pytest
import torch

import gsa
from gsa import Engine, GSAError, Sampling
from gsa.infer.text import ADVISED, Text
from gsa.infer.text_model import TextModel
from gsa.models.checkpoint import save_model
from gsa.sampling import DEFAULT
from tests.infer.talking import write_model, write_tokenizer
from tests.models.cases import model as small_model

GREEDY = {"max_tokens": 12, "temperature": 0}
PROMPT = "It is a truth universally acknowledged"


@pytest.fixture(scope="module")
def model() -> TextModel:
    return gsa.load("gsa-tiny", weights="fp32")


@pytest.fixture
def talking(tmp_path: Path) -> TextModel:
    return gsa.load(write_model(tmp_path / "model"))


def test_a_text_is_what_the_engine_makes_of_its_ids(model: TextModel) -> None:
    ids = model.tokenizer.encode([PROMPT])[0]
    for options in (GREEDY, {"max_tokens": 12, "seed": 3}, {"max_tokens": 12, "seed": 3, "top_k": 2, "min_p": 0.1}):
        expected = model.engine.generate(ids, Sampling(**options))
        text = model.generate(PROMPT, **options)
        assert text == model.tokenizer.decode(expected.tokens)
        assert (text.tokens, text.reason, text.prompt_tokens) == (expected.tokens, "length", len(ids))
        assert (text.logprobs, text.top, text.state) == (None, None, None)


def test_every_setting_arrives(model: TextModel, talking: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `generate`, `stream` and `chat` are the settings of Sampling, which have their defaults from there."""
    got: list[Sampling] = []
    submit = Engine.submit
    monkeypatch.setattr(
        Engine, "submit", lambda self, ids, sampling, **o: got.append(sampling) or submit(self, ids, sampling, **o)
    )
    others = {"temperature": 0.5, "top_k": 9, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2, "seed": 4}
    others |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {7: 2.0}}
    asked = Sampling(max_tokens=2, **others, logprobs=1)
    assert all(
        getattr(asked, field.name) != getattr(DEFAULT, field.name) for field in fields(asked) if field.name != "stop"
    )
    model.generate("a", max_tokens=2, **others, logprobs=1)
    model.stream("a", max_tokens=2, **others, logprobs=1).close()
    talking.chat(max_tokens=2, **others).say("a")
    without = replace(asked, logprobs=DEFAULT.logprobs)  # which a conversation does not tell
    assert [replace(sampling, stop=()) for sampling in got] == [asked, asked, without]


@pytest.mark.parametrize("function", [TextModel.generate, TextModel.stream, TextModel.chat])
def test_defaults_are_those_of_sampling(function: Callable[..., object]) -> None:
    defaults = {name: entry.default for name, entry in inspect.signature(function).parameters.items()}
    others = {"stop"}
    if function is TextModel.chat:
        others |= {"logprobs", *ADVISED}  # what is not given is as a model advises it, and else as here
        assert {defaults[name] for name in ADVISED} == {None}
    for field in fields(Sampling):
        if field.name not in others:
            assert defaults[field.name] == getattr(DEFAULT, field.name), field.name


def test_a_list_of_texts_gives_a_list(model: TextModel) -> None:
    prompts = ["Call me", PROMPT, "whale " * 300, "She"]
    assert model.generate(prompts, **GREEDY) == [model.generate(prompt, **GREEDY) for prompt in prompts]
    assert model.generate(tuple(prompts[:1]), **GREEDY) == [model.generate(prompts[0], **GREEDY)]
    assert model.generate([], **GREEDY) == []
    with pytest.raises(GSAError, match="generate: expected a text, got int; `engine` takes token ids"):
        model.generate(["Call me", 5])  # type: ignore[list-item]
    assert model.generate("Call me", **GREEDY) == model.generate(["Call me"], **GREEDY)[0]
    assert not model.engine.busy


def test_a_stream_is_the_same_text_in_pieces(model: TextModel) -> None:
    stream = model.stream(PROMPT, **GREEDY, keep_state=True, logprobs=0)
    pieces = list(stream)
    text = model.generate(PROMPT, **GREEDY, logprobs=0)
    assert len(pieces) > 5
    assert all(type(piece) is str and piece for piece in pieces)
    assert "".join(pieces) == stream.text == text
    assert (stream.text.tokens, stream.text.reason, stream.text.logprobs) == (text.tokens, "length", text.logprobs)
    assert stream.text.state.tokens == text.prompt_tokens + len(text.tokens)


def test_a_stream_that_is_left_makes_room(model: TextModel) -> None:
    """By `break`, which drops it, or by `close`."""
    for _ in model.stream(PROMPT, max_tokens=1000):
        break
    model.generate("She", max_tokens=3)
    assert not model.engine.busy
    stream = model.stream(PROMPT, max_tokens=1000)
    next(stream)
    stream.close()
    assert (list(stream), stream.text.reason, model.engine.busy) == ([], "cancelled", False)


def test_a_stream_that_is_dropped_before_its_first_token_makes_room() -> None:
    """While its prompt waits for a place, or is read in pieces."""
    one = gsa.load("gsa-tiny", weights="fp32", batch_size=1)
    reads = one.stream("whale " * 3000, max_tokens=1000)
    waits = one.stream(PROMPT, max_tokens=1000)
    assert one.engine.step() == []
    generations = [reads._writing.generation, waits._writing.generation]
    other = one.stream("She", **GREEDY)
    del reads, waits
    assert one.engine.busy
    assert next(other)
    assert [(generation.reason, generation.tokens) for generation in generations] == [("cancelled", [])] * 2
    del other
    assert not one.engine.busy
    assert one.generate("She", **GREEDY) == one.generate("She", **GREEDY)


def test_a_text_stays_as_it_is_while_its_stream_goes_on(model: TextModel) -> None:
    stream = model.stream(PROMPT, **GREEDY, logprobs=1)
    next(stream)
    early = stream.text
    before = (len(early.tokens), len(early.logprobs), len(early.top))
    for _ in stream:
        pass
    assert (len(early.tokens), len(early.logprobs), len(early.top)) == before
    assert len(stream.text.tokens) == 12 > before[0]
    early.tokens.clear()
    assert len(stream.text.tokens) == 12


def test_stop_strings_end_a_text(model: TextModel) -> None:
    whole = model.generate(PROMPT, max_tokens=60, temperature=0)
    stop = whole[25:28]
    for given in (stop, [stop], ("never there", stop)):
        text = model.generate(PROMPT, max_tokens=60, temperature=0, stop=given)
        assert (text, text.reason) == (whole[: whole.index(stop)], "stop")
        assert len(text.tokens) < 60
    assert model.generate(PROMPT, max_tokens=60, temperature=0, stop=None) == whole
    with pytest.raises(GSAError, match="generate: stop strings must be texts of at least one character, got ''"):
        model.generate(PROMPT, stop="")


def test_a_document_is_read_once_and_gone_on_from(model: TextModel, tmp_path: Path) -> None:
    document, seen = " Call me Ishmael." * 200, list[int]()
    state = model.read(document, progress=seen.append)
    assert state.tokens == seen[-1] == len(model.tokenizer.encode([document])[0])
    state.save(tmp_path / "book.state")
    for start in (state, model.load_state(tmp_path / "book.state")):
        assert model.generate(" The whale", state=start, **GREEDY) == model.generate(document + " The whale", **GREEDY)
    more = model.read(" The whale", state=state)
    assert model.generate("", state=more, **GREEDY) == model.generate(" The whale", state=state, **GREEDY)
    assert model.generate([" The whale"] * 2, state=state, **GREEDY) == [model.generate("", state=more, **GREEDY)] * 2


def test_a_text_goes_on_from_its_own_state(model: TextModel) -> None:
    first = model.generate(PROMPT, **GREEDY, keep_state=True)
    second = model.generate("", state=first.state, **GREEDY)
    assert first + second == model.generate(PROMPT, max_tokens=24, temperature=0)


def test_a_text_is_a_str(model: TextModel) -> None:
    text = model.generate(PROMPT, **GREEDY, logprobs=1)
    assert isinstance(text, str)
    assert f"{text}" == str(text) == text
    for same in (copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert (same, same.reason, same.tokens, same.logprobs) == (text, text.reason, text.tokens, text.logprobs)
    assert len(text.logprobs) == len(text.top) == len(text.tokens) == 12


def test_what_it_is_can_be_seen(model: TextModel, talking: TextModel) -> None:
    assert repr(model) == "TextModel('gsa-tiny', 4,590,848 parameters, fp32 weights (17.5 MB), state of 256.0 KB)"
    assert model.engine.model.num_parameters == gsa.LM.from_pretrained("gsa-tiny").num_parameters
    assert talking.name.endswith("model")
    assert model.config == gsa.preset("gsa-tiny")


def test_the_state_of_attention_grows(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    save_model(small_model("attention", vocab_size=259), tmp_path)
    assert repr(gsa.load(tmp_path)).endswith("state that grows with the text)")


def test_options_of_load(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    try:
        loaded = gsa.load("gsa-tiny", weights="int8", batch_size=3, threads=1)
        assert (loaded.engine.model.weights, loaded.engine.batch_size, torch.get_num_threads()) == ("int8", 3, 1)
    finally:
        torch.set_num_threads(threads)
    assert gsa.load().engine.batch_size == Engine().batch_size


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda model: model.generate("a", temprature=1),
            r"generate: there is no argument 'temprature' \(did you mean 'temperature'\?\)",
        ),
        (
            lambda model: model.stream("a", max_token=1),
            r"stream: there is no argument 'max_token' \(did you mean 'max_tokens'\?\)",
        ),
        (lambda model: model.chat(sytem="a"), r"chat: there is no argument 'sytem' \(did you mean 'system'\?\)"),
        (
            lambda model: gsa.load("gsa-tiny", weight="int8"),
            r"load: there is no argument 'weight' \(did you mean 'weights'\?\)",
        ),
        (
            lambda model: gsa.load(xyz=1),
            "load: there is no argument 'xyz'; there are model, weights, compute, device, batch_size, "
            "state_cache_bytes, state_dir, state_dir_bytes, threads",
        ),
        (
            lambda model: model.generate("a", 20),
            "generate: got 20 without its name; the arguments after prompt have names: max_tokens, temperature, ",
        ),
        (
            lambda model: model.chat("Hello"),
            "chat: got 'Hello' without its name; the arguments have names: system, max_tokens",
        ),
        (lambda model: gsa.load(threads="two"), "load: threads must be a whole number or none, got 'two'"),
        (lambda model: gsa.load(threads=0), "threads must be at least 1, got 0"),
        (lambda model: gsa.load(5), "load: model must be a name or a folder, got int"),
        (lambda model: gsa.load("gsa-tiny", weights="int3"), "unknown weights 'int3'; expected one of auto, fp32"),
        (lambda model: gsa.load("gsa-tinny"), r"model 'gsa-tinny' was not found"),
        (lambda model: model.generate("a", max_tokens="many"), "max_tokens must be a whole number, got 'many'"),
        (lambda model: model.generate("a", top_p=2.0), "top_p must be at most 1, got 2.0"),
        (lambda model: model.generate(""), "generate: the text is empty, and there is no state to go on from"),
        (lambda model: model.read(""), "read: the text is empty, and there is no state to go on from"),
        (lambda model: model.stream([1, 2]), "stream: expected a text, got list; `engine` takes token ids"),
        (lambda model: model.read(b"a"), "read: expected a text, got bytes"),
        (lambda model: model.generate("a", state="book.state"), "got str; load_state reads one from a file"),
        (lambda model: model.generate("a", state=5), "generate: state must be a gsa.State, got int$"),
        (lambda model: model.load_state("nowhere.state"), "nowhere.state: there is no such file"),
        (lambda model: model.load_state(3), "State.load: 3: file: expected a name, got 3"),
        (lambda model: model.read("a").save(None), "State.save: file: expected a name, got None"),
        (lambda model: gsa.LM.from_pretrained(None), "model must be a name or a folder, got None"),
        (lambda model: model.chat(), "has no chat template .* the model was not made for conversations"),
        (lambda model: model.generate("\ud800"), "surrogate"),
        (lambda model: model.generate("a", stop=5), "generate: stop must be a text, several texts, or None, got 5"),
        (
            lambda model: gsa.LM.from_pretrained("gsa-tiny", dtype="bf16"),
            "LM: dtype must be a floating torch.dtype, .*'bf16'",
        ),
        (lambda model: gsa.LM.from_pretrained("gsa-tiny", dtype=torch.int8), "LM: dtype must be .*, got torch.int8"),
    ],
)
def test_mistakes_are_named(model: TextModel, wrong: Callable[[TextModel], object], message: str) -> None:
    with pytest.raises(GSAError, match=message):
        wrong(model)
    assert not model.engine.busy


@pytest.mark.parametrize("function", [gsa.load, TextModel.generate, TextModel.stream, TextModel.read])
def test_examples_are_true(function: Callable[..., object]) -> None:
    """doctest by itself passes decorated functions over."""
    (found,) = DocTestFinder().find(inspect.unwrap(function), globs={"gsa": gsa})
    assert found.examples
    assert DocTestRunner().run(found).failed == 0


def test_a_conversation(talking: TextModel) -> None:
    chat = talking.chat(system="Be brief.", max_tokens=6, temperature=0)
    assert repr(chat) == "Chat(messages=1, tokens=0)"
    first = chat.say("Who?")
    assert isinstance(first, Text)
    assert (first.reason, len(first.tokens), first.state.tokens) == ("length", 6, chat.state.tokens)
    second = "".join(chat.stream("Where?"))
    assert [message["content"] for message in chat.messages] == ["Be brief.", "Who?", first, "Where?", second]
    other = talking.chat(system="Be brief.", max_tokens=6, temperature=0)
    assert [other.say("Who?"), other.say("Where?")] == [first, second]
    chat.reset()
    assert chat.say("Who?") == first
    with pytest.raises(GSAError, match="chat: a message must be a text, got int"):
        chat.say(5)  # type: ignore[arg-type]


def test_a_reply_ends_before_a_stop_string(talking: TextModel) -> None:
    whole = talking.chat(max_tokens=9, temperature=0).say("Who?")
    chat = talking.chat(max_tokens=9, temperature=0, stop=whole[3])
    cut = chat.say("Who?")
    assert (cut, cut.reason, chat.messages[-1]["content"]) == (whole[: whole.index(whole[3])], "stop", cut)
    chat.say("Where?")
    with pytest.raises(GSAError, match="stop strings must be texts"):
        talking.chat(stop=[""])


def test_prompts_that_begin_alike_go_on_from_what_was_kept(tmp_path: Path) -> None:
    first = gsa.load("gsa-tiny", state_cache_bytes=10**8, state_dir=tmp_path)
    asked = "It was a dark and stormy night."
    assert first.generate(asked, **GREEDY).cached_tokens == 0
    again = first.generate(asked + " The colonel", **GREEDY)
    assert again.cached_tokens == first.generate(asked, **GREEDY).prompt_tokens
    first.engine.close()
    later = gsa.load("gsa-tiny", state_cache_bytes=10**8, state_dir=tmp_path).generate(asked + " The colonel", **GREEDY)
    assert (later, later.cached_tokens) == (again, again.prompt_tokens)
