"""What is wrong is refused; what is cancelled, fails or is interrupted frees its place and hurts nobody else."""

import numpy as np
import pytest
import torch

from gsa import GSAError
from gsa.infer import Engine, Sampling
from gsa.infer.runner import MAX_READ
from tests.infer.engines import SHORT, engine, loaded, poisoned, tensors
from tests.models.cases import ids, model


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "there are no ids, and there is no state to go on from"),
        ([1, True], "ids must be whole numbers .T., got a list with bool"),
        ((1, 2.0), "ids must be whole numbers .T., got a tuple with float"),
        ([1, None], "ids must be whole numbers .T., got a list with NoneType"),
        ([2**70], "ids must be whole numbers .T., got one beyond 64 bits"),
        ([1, [2]], "ids must be whole numbers .T., got a list with list"),
        ([3, -1], r"ids must be in 0..49 .the vocabulary., got -1..3"),
        ([3, 50], r"ids must be in 0..49 .the vocabulary., got 3..50"),
        (np.array([2**64 - 1], np.uint64), "ids must be in 0..49 .the vocabulary., got 18446744073709551615"),
        (np.zeros((1, 2), np.int64), r"ids must be whole numbers .T., got int64 \[1, 2\]"),
        (np.zeros(2), r"ids must be whole numbers .T., got float64 \[2\]"),
        (np.array([True]), r"ids must be whole numbers .T., got bool \[1\]"),
        (torch.zeros(2), r"ids must be whole numbers .T., got torch.float32 \[2\]"),
        (torch.zeros(2, dtype=torch.bool), r"ids must be whole numbers .T., got torch.bool \[2\]"),
        (torch.tensor(3), r"ids must be whole numbers .T., got torch.int64 \[\]"),
        (torch.zeros(1, 2, dtype=torch.int64), r"ids must be whole numbers .T., got torch.int64 \[1, 2\]"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "ids must be whole numbers .T., got torch.int64"),
        (torch.zeros(2, dtype=torch.int64).to_sparse(), "ids must be whole numbers .T., got torch.int64"),
        ("text", r"Engine takes token ids, got text; gsa.load\(\.\.\.\) takes text"),
        (["two", "texts"], r"Engine takes token ids, got text; gsa.load\(\.\.\.\) takes text"),
        (None, "ids must be whole numbers .T. as a list, tuple, array or tensor, got NoneType"),
        (7, "ids must be whole numbers .T. as a list, tuple, array or tensor, got int"),
    ],
    ids=str,
)
def test_ids_that_are_none_are_refused(wrong, message):
    one = engine()
    for operation in (one.submit, one.stream, one.read):
        with pytest.raises(GSAError, match=f"^{operation.__name__}: {message}"):
            operation(wrong)
    assert not one.busy


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sampling": {"max_tokens": 3}}, "submit: sampling must be a Sampling, got dict"),
        ({"sampling": Sampling(stop=(3, 50))}, "submit: stop has the id 50, the vocabulary ends with 49"),
        ({"state": "book.state"}, "submit: state must be a gsa.State, got str"),
    ],
    ids=str,
)
def test_requests_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(GSAError, match=f"^{message}$"):
        engine().submit([1, 2], **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "engine: batch_size must be at least 1, got 0"),
        ({"batch_size": True}, "engine: batch_size must be a whole number, got True"),
        ({"state_cache_bytes": -1}, "engine: state_cache_bytes must be at least 0, got -1"),
        ({"weights": "int8"}, "engine: weights 'int8' were asked for, the model has 'fp32'"),
        ({"model": 3}, "engine: model must be a Model, an LM, a name or a folder, got int"),
    ],
    ids=str,
)
def test_engines_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(GSAError, match=f"^{message}$"):
        Engine(**{"model": loaded(), **wrong})


def test_a_request_may_be_cancelled_while_it_waits_is_read_or_runs():
    one = engine(batch_size=2)
    runs = one.submit(ids(5), SHORT)
    one.step()
    reads, waits = one.submit(ids(3 * MAX_READ), SHORT), one.submit(ids(7), SHORT)
    last = one.submit(ids(8), SHORT)
    one.step()
    for generation in (runs, reads, waits):
        generation.cancel()
        generation.cancel()
        assert (generation.done, generation.reason) == (True, "cancelled")
    assert (len(runs.tokens), reads.tokens, waits.tokens) == (2, [], [])
    while one.busy:
        one.step()
    last.cancel()
    assert (last.tokens, last.reason) == (engine().generate(ids(8), SHORT).tokens, "length")
    assert one.step() == []


def test_a_stream_that_is_closed_early_frees_its_place():
    one = engine(batch_size=1)
    stream = one.stream(ids(5), SHORT)
    token = next(stream)
    other = one.submit(ids(6), SHORT)
    stream.close()
    assert token.request.reason == "cancelled"
    while one.busy:
        one.step()
    assert other.tokens == engine().generate(ids(6), SHORT).tokens
    abandoned = one.stream(ids(5), SHORT)
    next(abandoned)
    assert one.busy
    del abandoned
    assert not one.busy


@pytest.mark.parametrize("case", ["gsa", "abc", "attention", "mamba"])
def test_nothing_of_a_request_is_left_for_the_next_one(case, monkeypatch):
    one = Engine(loaded(case), batch_size=2)
    freed = poisoned(one, monkeypatch)
    prompts = [ids(3 + i, seed=i) for i in range(6)]
    completions = one.generate(prompts, SHORT)
    one.submit(ids(5), SHORT)
    one.step()
    one.submit(ids(5), SHORT).cancel()
    cancelled = one.submit(ids(5), SHORT)
    one.step()
    cancelled.cancel()
    assert len(freed) == 7
    again = one.generate(prompts, SHORT)
    alone = Engine(loaded(case), batch_size=1)
    expected = [alone.generate(prompt, SHORT) for prompt in prompts]
    assert [completion.tokens for completion in completions] == [completion.tokens for completion in expected]
    assert again == completions


def test_a_freed_place_is_empty():
    one = engine(batch_size=2)
    one.generate(ids(5), SHORT)
    assert all(not x.any() for layer in one._runner.take(0).layers for x in layer.values())


def test_scores_that_are_not_finite_end_only_their_own_request():
    lm = model("gsa")
    with torch.no_grad():
        lm.model.embeddings.weight[7] = float("nan")
    one = Engine(lm, batch_size=4)
    clean = [prompt[prompt != 7] for prompt in (ids(9, seed=i) for i in range(3))]
    expected = [completion.tokens for completion in one.generate(clean, SHORT)]
    assert all(7 not in said for said in expected)
    good = [one.submit(prompt, SHORT) for prompt in clean]
    bad = one.submit([1, 7, 3], SHORT)
    while one.busy:
        one.step()
    assert [generation.tokens for generation in good] == expected
    assert (bad.tokens, bad.reason) == ([], "error")
    assert bad.error == f"request {bad.id}: the model's scores are not finite"
    for fails in (lambda: one.generate([clean[0], [7]], SHORT), lambda: list(one.stream([7], SHORT))):
        with pytest.raises(GSAError, match=r"^request \d+: the model's scores are not finite$"):
            fails()
        assert not one.busy
    with pytest.raises(GSAError, match=r"^read: the model's scores are not finite$"):
        one.read([7])


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("step", RuntimeError),  # which computes for all
        *((where, kind) for where in ("step", "put", "read") for kind in (KeyboardInterrupt, TimeoutError)),
    ],
)
def test_an_engine_that_was_interrupted_goes_on(where, kind, monkeypatch):
    one = engine(batch_size=2)
    freed = poisoned(one, monkeypatch)
    running, waiting = [one.submit(ids(5), SHORT) for _ in range(2)], one.submit(ids(6), SHORT)
    if where == "step":
        one.step()
    runner, original, calls = one._runner, getattr(one._runner, where), []

    def interrupted(*arguments: object) -> object:
        result = original(*arguments)  # the state is changed already
        calls.append(1)
        if len(calls) == 1:
            raise kind("now")
        return result

    monkeypatch.setattr(runner, where, interrupted)
    with pytest.raises(kind):
        one.step()
    for generation in running:
        assert generation.reason == "error"
        assert generation.error == f"request {generation.id}: the engine was interrupted by {kind.__name__}: now"
        with pytest.raises(GSAError, match="interrupted"):
            generation.completion()
    assert sorted(freed) == [0, 1]
    while one.busy:
        one.step()
    assert waiting.tokens == engine().generate(ids(6), SHORT).tokens
    assert one.generate(ids(5), SHORT) == engine().generate(ids(5), SHORT)


def test_an_interrupted_generate_leaves_nothing_behind(monkeypatch):
    one = engine(batch_size=2)
    step, calls = one._runner.step, []

    def interrupted(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(one._runner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.generate([ids(5)] * 6, SHORT)
    assert not one.busy
    assert one.step() == []


def finished(one: Engine) -> Engine:
    while one.busy:
        one.step()
    return one


@pytest.mark.parametrize("says", [False, True])
def test_a_request_that_cancels_itself_keeps_its_own_state(says):
    one, requests = engine(batch_size=2), []

    def until(_: int) -> bool:
        if len(requests[0].tokens) == 3:
            requests[0].cancel()
            return says
        return False

    requests.append(one.submit(ids(5), SHORT, keep_state=True, until=until))
    finished(one)
    expected = engine().generate(ids(5), Sampling(max_tokens=3, temperature=0), keep_state=True)
    assert (requests[0].tokens, requests[0].reason) == (expected.tokens, "stop" if says else "cancelled")
    assert all(map(torch.equal, tensors(requests[0].kept), tensors(expected.state)))
    assert requests[0].kept.digest == expected.state.digest


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("length", "reason"), [(3, "length"), (8, "cancelled")])
def test_a_request_may_cancel_another_from_inside_a_step(first, length, reason):
    """Also one whose last token comes in the same step, before or after its own."""
    one, requests = engine(batch_size=2), {}

    def until(_: int) -> bool:
        if len(requests["own"].tokens) == 3:
            requests["other"].cancel()
        return False

    for name in ("own", "other") if first else ("other", "own"):
        if name == "own":
            requests[name] = one.submit(ids(5), SHORT, until=until)
        else:
            settings = Sampling(max_tokens=length, temperature=0)
            requests[name] = one.submit(ids(6), settings, keep_state=True)
    finished(one)
    expected = engine().generate(ids(6), Sampling(max_tokens=3, temperature=0), keep_state=True)
    other = requests["other"]
    assert (other.tokens, other.reason, other.kept.digest) == (expected.tokens, reason, expected.state.digest)
    assert all(map(torch.equal, tensors(other.kept), tensors(expected.state)))
    assert requests["own"].tokens == engine().generate(ids(5), SHORT).tokens


def test_requests_that_wait_may_be_cancelled_from_inside_a_step():
    one, waiting = engine(batch_size=1), []
    one.submit(ids(5), SHORT, until=lambda _: any(request.cancel() for request in waiting))
    waiting += [one.submit(ids(6), SHORT) for _ in range(2000)]
    one.step()
    assert {request.reason for request in waiting} == {"cancelled"}
    finished(one)


@pytest.mark.parametrize("length", [1, 8])
def test_an_until_that_raises_fails_its_own_request_only(length):
    one = engine(batch_size=2)
    healthy = one.submit(ids(6), SHORT)
    failing = one.submit(ids(5), Sampling(max_tokens=length, temperature=0), until=lambda _: [][1])
    finished(one)
    assert (failing.reason, failing.error) == (
        "error",
        f"request {failing.id}: until raised IndexError: list index out of range",
    )
    assert (healthy.tokens, healthy.reason) == (engine().generate(ids(6), SHORT).tokens, "length")


@pytest.mark.parametrize("asked", ["step", "state"])
def test_inside_a_step_nothing_else_can_be_asked(asked):
    one = engine(batch_size=2)
    other = one.submit(ids(6), SHORT)
    one.step()
    failing = one.submit(ids(5), SHORT, until=lambda _: bool(one.step() if asked == "step" else other.state()))
    finished(one)
    assert "until can cancel requests, and no more" in failing.error.replace("`", "")
    assert asked in failing.error
    assert other.tokens == engine().generate(ids(6), SHORT).tokens
