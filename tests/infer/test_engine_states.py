"""States from the engine: taken at any moment, kept, read from documents, forked; what goes on from them is right."""

from dataclasses import replace

import pytest
import torch

from gsa import GSAError
from gsa.infer import Engine
from gsa.infer.runner import MAX_READ
from gsa.infer.state_file import MAX_TOKENS
from gsa.infer.tokens import TokenHash
from gsa.models.state import ModelState
from tests.infer.engines import SHORT, engine, larger, loaded, teacher_forced, tensors
from tests.models.cases import ids, model


@pytest.mark.parametrize("case", ["gsa", "attention", "hybrid"])
def test_a_state_taken_at_any_moment_goes_on_as_the_request_does(case):
    one, other = Engine(loaded(case)), Engine(loaded(case))
    prompt, sampling = ids(20), replace(SHORT, logprobs=0)
    expected = other.generate(prompt, sampling)
    generation = one.submit(prompt, sampling)
    for count in range(1, 8):
        one.step()
        state = generation.state()
        assert state.tokens == 20 + count
        assert state.digest == TokenHash.advance(TokenHash.EMPTY, [*prompt.tolist(), *generation.tokens]).hex()
        rest = other.generate([], replace(sampling, max_tokens=8 - count), state=state)
        assert rest.tokens == expected.tokens[count:]
        assert rest.logprobs == expected.logprobs[count:]
    while one.busy:
        one.step()
    assert (generation.tokens, generation.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize("reason", ["length", "stop", "cancelled", "nothing asked"])
def test_a_state_is_kept_at_the_end_if_asked(reason):
    one = Engine(larger())
    said = one.generate([5, 6], replace(SHORT, max_tokens=12)).tokens
    settings = {"stop": replace(SHORT, stop=(said[3],)), "nothing asked": replace(SHORT, max_tokens=0)}
    generation = one.submit([5, 6], settings.get(reason, SHORT), keep_state=True)
    while not generation.done:
        one.step()
        if reason == "cancelled" and len(generation.tokens) == 4:
            generation.cancel()
    count = len(generation.tokens)
    assert generation.reason == {"nothing asked": "length"}.get(reason, reason)
    assert count == {"length": 8, "stop": said.index(said[3]), "cancelled": 4, "nothing asked": 0}[reason]
    state = generation.state()
    assert state is generation.completion().state
    assert (state.tokens, state.fingerprint, state.weights) == (2 + count, larger().fingerprint, "fp32")
    assert one.generate([], replace(SHORT, max_tokens=12 - count), state=state).tokens == said[count:]


def test_a_request_has_no_state_before_it_is_read_nor_after_it_was_let_go():
    one = engine()
    generation = one.submit(ids(2 * MAX_READ), SHORT)
    for _ in range(2):
        with pytest.raises(GSAError, match=r"^request 0: its prompt is not read yet"):
            generation.state()
        with pytest.raises(GSAError, match=r"^request 0: it is not done"):
            generation.completion()
        one.step()
    assert generation.state().tokens == 2 * MAX_READ + 1
    while one.busy:
        one.step()
    with pytest.raises(GSAError, match=r"^request 0: it is done, and its state was not kept"):
        generation.state()
    assert generation.completion().state is None


@pytest.mark.parametrize("case", ["gsa", "abc", "attention", "hybrid", "mamba"])
def test_a_document_is_read_in_pieces_and_forked_without_being_changed(case):
    lm, document = model(case), ids(2 * MAX_READ + 77)
    one, progress = Engine(lm), []
    state = one.read(document, progress=progress.append)
    assert progress == [MAX_READ, 2 * MAX_READ, 2 * MAX_READ + 77]
    with torch.no_grad():
        expected = lm(document[None]).logits[0, -1]
    torch.testing.assert_close(state.logits, expected, atol=1e-3, rtol=1e-3)
    assert (state.tokens, state.digest) == (len(document), TokenHash.advance(TokenHash.EMPTY, document).hex())
    before = [x.clone() for x in tensors(state)]
    questions = [ids(9, seed=i) for i in range(3)]
    forked = one.generate(questions, SHORT, state=state)
    for question, completion in zip(questions, forked, strict=True):
        assert completion.prompt_tokens == 9
        assert completion.tokens == Engine(lm, batch_size=1).generate(question, SHORT, state=state.clone()).tokens
        assert completion.tokens == teacher_forced(lm, torch.cat([document, question]), completion.tokens)
    assert all(torch.equal(x, y) for x, y in zip(before, tensors(state), strict=True))
    further = one.read(ids(5, seed=3), state)
    assert further.tokens == len(document) + 5
    assert further.digest == TokenHash.advance(TokenHash.EMPTY, torch.cat([document, ids(5, seed=3)])).hex()
    copy = one.read([], state)
    assert all(torch.equal(x, y) for x, y in zip(tensors(copy), tensors(state), strict=True))
    assert not {x.data_ptr() for x in tensors(copy)} & {x.data_ptr() for x in tensors(state)}


def test_a_document_read_in_parts_of_whole_pieces_gives_the_same_numbers():
    document, one = ids(2 * MAX_READ + 77), engine()
    whole, parts = one.read(document), one.read(document[MAX_READ:], one.read(document[:MAX_READ]))
    assert all(torch.equal(x, y) for x, y in zip(tensors(whole), tensors(parts), strict=True))
    assert whole.digest == parts.digest
    assert one.generate([], SHORT, state=whole).tokens == one.generate(document, SHORT).tokens


def test_a_state_of_another_model_is_refused_with_both_fingerprints():
    state, one = Engine(model("gsa", tie_word_embeddings=True)).read([1, 2, 3]), engine()
    for operation in (one.submit, one.stream, one.generate, one.read):
        with pytest.raises(GSAError, match=f"^{operation.__name__}: .*") as caught:
            operation([1], state=state)
        assert state.fingerprint[:12] in str(caught.value)
        assert one.model.fingerprint[:12] in str(caught.value)


def test_a_state_whose_tensors_do_not_fit_is_refused():
    one = engine()
    state = one.read([1, 2, 3])
    broken = replace(state, model=state.model.map(lambda x: x[..., :-1]))
    with pytest.raises(GSAError, match=r"^submit: "):
        one.submit([1], state=broken)
    with pytest.raises(GSAError, match=r"^submit: "):
        one.submit([1], state=replace(state, logits=state.logits[:-1]))


def test_a_state_read_with_other_weights_goes_on():
    lm = model("gsa")
    state = Engine(lm, weights="int8").read(ids(9))
    assert state.weights == "int8"
    assert len(Engine(lm).generate([], SHORT, state=state).tokens) == 8


@pytest.mark.parametrize("case", ["gsa", "hybrid"])
@pytest.mark.parametrize("left", [0, 3, 40])
def test_a_state_near_the_last_token_there_can_be_harms_no_other_request(case, left):
    """Its file is refused beyond that, and a request that would go beyond it is refused alone."""
    one = Engine(loaded(case), batch_size=2)
    state = counted(one.read(ids(20)), MAX_TOKENS - left)
    healthy = one.submit(ids(6), SHORT, keep_state=True)
    one.step()
    if left < 10:
        with pytest.raises(GSAError, match=r"^submit: State: it has read [\d,]+ tokens, and 10 more would be beyond"):
            one.submit([1, 2], SHORT, state=state, keep_state=True)
        with pytest.raises(GSAError, match=r"^read: State: it has read [\d,]+ tokens, and 5 more would be beyond"):
            one.read([1] * 5, state)
    else:
        generation = one.submit([1, 2], SHORT, state=state, keep_state=True)
        while not generation.done:
            one.step()
        assert generation.completion().state.tokens == MAX_TOKENS - left + 10
    while one.busy:
        one.step()
    assert healthy.tokens == Engine(loaded(case)).generate(ids(6), SHORT).tokens


def counted(state, tokens):
    """A state that says it has read so many tokens."""
    layers = [
        {name: x if x.is_floating_point() else x * 0 + tokens for name, x in layer.items()}
        for layer in state.model.layers
    ]
    return replace(state, model=ModelState(layers), tokens=tokens)


def test_a_state_made_by_hand_is_checked_at_the_door(tmp_path):
    one = Engine(loaded("hybrid"))
    state = one.read(ids(20))
    for tokens in (MAX_TOKENS + 1, 10**18 - 1, 2**63, 10**5000, 0, -(10**5000)):
        with pytest.raises(GSAError, match=r"^State: tokens must be from 1 to 999999999999, got .{1,60}$"):
            replace(state, tokens=tokens)
    with pytest.raises(GSAError, match=r"^State: model must be a ModelState, got int$"):
        replace(state, model=3)
    wrong = replace(state, tokens=30)  # its counters say 20
    sparse = replace(state, logits=state.logits.to_sparse())
    elsewhere = replace(state, logits=state.logits.to("meta"))
    for other, message in ((wrong, "counts .20. tokens, the state 30"), (sparse, "sparse"), (elsewhere, "on meta")):
        with pytest.raises(GSAError, match=rf"^submit: State: tensor .*{message}"):
            one.submit([1], SHORT, state=other)
    assert not one.busy
