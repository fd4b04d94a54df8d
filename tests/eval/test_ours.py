"""A reader of our models says what a plain loop over whole texts says, however requests are read together."""

import pytest
import torch

from gsa import LM
from gsa.errors import GSAError
from gsa.eval import packed
from gsa.eval.ours import OurReader
from gsa.eval.reader import Continuation, is_ours, open_reader
from gsa.ops.matmul import missing_unit
from tests.eval.cases import CLOSE, VOCABULARY, apart, plain, reader_of, requests, scores
from tests.models.cases import CASES, model


@pytest.mark.parametrize("case", CASES)
def test_every_mixer_scores_as_a_plain_loop(case: str) -> None:
    lm = model(case, vocab_size=VOCABULARY)
    reader, asked = reader_of(lm), requests()
    expected = plain(lambda ids: lm(ids).logits, asked)
    others = [(1, True), (32, True), (8, False)] if case in ("gsa", "hybrid") else []
    for batch_size, reuse in [(8, True), *others]:
        found = scores(reader, asked, batch_size, reuse)
        assert apart(found, expected) < CLOSE, (batch_size, reuse)
        assert [score.greedy for score in found] == [score.greedy for score in expected]


def test_greedy_continuations_are_told() -> None:
    lm = model("gsa", vocab_size=VOCABULARY)
    context, said = [1, 2, 3], []
    for _ in range(4):
        said.append(int(lm(torch.tensor([[*context, *said]])).logits[0, -1].argmax()))
    wrong = [*said[:-1], (said[-1] + 1) % VOCABULARY]
    asked = [Continuation(context, said), Continuation(context, wrong), Continuation(context, said[:1])]
    for number in range(3):  # together, and alone
        assert scores(reader_of(lm), asked[number:])[0].greedy is (number != 1)
        assert [score.greedy for score in scores(reader_of(lm), asked)] == [True, False, True]


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_size_of_batches_does_not_change_a_bit(compute: str) -> None:
    """Nor does company, where products of few tokens would be computed in other numbers."""
    if compute != "fp32" and missing_unit(compute) is not None:
        pytest.skip(str(missing_unit(compute)))
    reader, asked = OurReader.open("gsa-tiny", compute=compute), requests()
    one, *others = (scores(reader, asked, batch_size) for batch_size in (1, 8, 32))
    for other in others:
        assert apart(one, other) < (1e-5 if compute == "fp32" else 1e-12)


def test_gsa_tiny_scores_as_with_transformers() -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained("gsa-tiny", dtype=torch.float32)
    asked = requests()
    expected = plain(lambda ids: theirs(ids).logits, asked)
    assert apart(scores(OurReader.open("gsa-tiny", compute="fp32"), asked), expected) < CLOSE


@pytest.mark.parametrize("case", ["gsa, convolved", "hybrid", "attention"])
def test_long_texts_are_read_in_pieces(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model(case, vocab_size=VOCABULARY)
    asked = requests()
    expected = plain(lambda ids: lm(ids).logits, asked)
    monkeypatch.setattr(packed, "PIECE", 7)
    monkeypatch.setattr("gsa.eval.ours.PIECE", 7)
    assert apart(scores(reader_of(lm), asked), expected) < CLOSE


def test_logits_are_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, asked = reader_of(model("gsa", vocab_size=VOCABULARY)), requests()
    expected = scores(reader, asked)
    monkeypatch.setattr(packed, "LOGITS_AT_ONCE", 1)
    assert apart(scores(reader, asked), expected) < 1e-6


@pytest.mark.parametrize("case", ["gsa", "hybrid"])
def test_log_probs_go_on_from_a_state(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.eval.ours.PIECE", 8)
    lm = model(case, vocab_size=VOCABULARY)
    ids = torch.randint(VOCABULARY, (40,)).tolist()
    rows = lm(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    expected = rows.gather(1, torch.tensor(ids)[1:, None])[:, 0]
    reader = reader_of(lm)
    whole, _ = reader.log_probs(ids)
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=0)
    for cut in (1, 9, 39):
        first, state = reader.log_probs(ids[:cut])
        for _ in range(2):  # the state stays as it is
            rest, _ = reader.log_probs(ids[cut:], state)
            torch.testing.assert_close(torch.cat([first, rest]).double(), expected, atol=1e-5, rtol=0)
    nothing, same = reader.log_probs([], state)
    assert len(nothing) == 0
    assert same is state
    for ids, state in (([], None), ([VOCABULARY], None), ([1], "a state")):
        with pytest.raises(GSAError, match="log_probs"):
            reader.log_probs(ids, state)


@pytest.mark.parametrize("case", ["gsa", "hybrid"])
def test_texts_are_greedy_whatever_else_is_written(case: str) -> None:
    lm = model(case, vocab_size=VOCABULARY)
    reader = reader_of(lm)
    prompts = [list(request.context) for request in requests()[::5]]
    found = {size: dict(reader.generate(prompts, max_tokens=6, until=[], batch_size=size)) for size in (1, 3)}
    assert found[1] == found[3]
    for number, prompt in enumerate(prompts):
        said: list[int] = []
        while len(said) < 6 and reader.tokenizer.eos_id not in said:
            said.append(int(lm(torch.tensor([[*prompt, *said]])).logits[0, -1].argmax()))
        known = [id_ for id_ in said if id_ < 256]
        assert found[1][number] == bytes(known).decode("utf-8", "replace")


def test_texts_end_before_stop_strings() -> None:
    reader = OurReader.open("gsa-tiny")
    prompts = [reader.tokenizer.encode(text) for text in ("She was", "The old man")]
    whole = dict(reader.generate(prompts, max_tokens=20, until=[], batch_size=2))
    for number, text in reader.generate(prompts, max_tokens=20, until=[" a", "he"], batch_size=2):
        ends = [whole[number].find(stop) for stop in (" a", "he") if stop in whole[number]]
        assert text == whole[number][: min(ends, default=None)]
        assert text != whole[number]
    shorter = OurReader.open("gsa-tiny", max_length=12)
    last = [prompt[-2:] for prompt in prompts]
    assert dict(shorter.generate(prompts, max_tokens=10, until=[], batch_size=2)) == dict(
        reader.generate(last, max_tokens=10, until=[], batch_size=2)
    )


def test_what_a_reader_tells() -> None:
    reader = open_reader("gsa-tiny", weights="int8", compute="fp32", max_length=64)
    assert isinstance(reader, OurReader)
    assert (reader.name, reader.max_length) == ("gsa-tiny", 64)
    assert reader.about["kind"] == "gsa"
    assert (reader.about["weights"], reader.about["compute"], reader.about["mixer"]) == ("int8", "fp32", "gsa")
    assert reader.about["parameters"] == LM.from_pretrained("gsa-tiny").num_parameters
    text = "She was <|endoftext|> very well."
    assert reader.tokenizer.decode(reader.tokenizer.encode(text)) == text
    assert reader.tokenizer.eos_id not in reader.tokenizer.encode(text, special=True)


def test_bad_wishes_are_refused(tmp_path: pytest.TempPathFactory) -> None:
    for options, message in [
        ({"dtype": "bf16"}, "a model of ours, for which weights and compute are chosen"),
        ({"max_length": 1}, "max_length must be a whole number of at least 2, got 1"),
        ({"weights": "fp7"}, "unknown weights"),
    ]:
        with pytest.raises(GSAError, match=message):
            open_reader("gsa-tiny", **options)
    assert is_ours("no-such-model")
    with pytest.raises(GSAError, match="model 'no-such-model' was not found"):
        open_reader("no-such-model")
    with pytest.raises(GSAError, match="batch_size must be at least 1"):
        list(OurReader.open("gsa-tiny").score(requests(), batch_size=0))
