"""The plan of log-likelihoods reads everything that is needed, and what is shared once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.errors import GSAError
from gsa.eval.reader import Continuation
from gsa.eval.scoring import (
    LEAST_SAVED,
    LEAST_SHARED,
    Beginnings,
    Ids,
    Job,
    batches,
    contexts_of,
    prompts_of,
    room,
    share_beginnings,
)
from tests.examples import examples

# Contexts made of a few long blocks have much in common, in several levels.
BLOCKS = st.lists(st.sampled_from([(1,) * 20, (2,) * 30, (3,), (1, 2)]), min_size=1, max_size=5)


@examples(100)
@given(st.lists(BLOCKS, min_size=1, max_size=12))
def test_beginnings_are_read_once_and_lead_to_every_context(blocks: list[list[Ids]]) -> None:
    requests = [Continuation(sum(parts, ()), (1,)) for parts in blocks]
    contexts = contexts_of(requests, None, 10)
    share_beginnings(contexts)
    read: list[Ids] = []

    def reading(ids: Ids, state: Ids | None) -> Ids:
        read.append((state or ()) + ids)
        assert len(ids) >= LEAST_SHARED
        return read[-1]

    beginnings = Beginnings(reading)
    tokens = 0
    for context in contexts:
        state, length = beginnings.of(context)
        assert (state or ()) == context.ids[:length]
        assert length < len(context.ids)
        tokens += len(context.ids) - length
    assert len(set(read)) == len(read)
    for own in read:  # each of them pays
        users = sum(context.ids[: len(own)] == own for context in contexts)
        known = max((len(other) for other in read if other != own and own[: len(other)] == other), default=0)
        tokens += len(own) - known
        assert (users - 1) * (len(own) - known) >= LEAST_SAVED
    assert tokens + LEAST_SAVED * len(read) <= sum(len(context.ids) for context in contexts)


def test_a_few_shots_are_shared_and_short_questions_are_not() -> None:
    shots = tuple(range(50))
    requests = [Continuation((*shots, 60 + i, 1), (2,)) for i in range(5)] + [
        Continuation((i, 3), (2,)) for i in (70, 71)
    ]
    contexts = contexts_of(requests, None, 100)
    share_beginnings(contexts)
    assert [context.cuts for context in contexts] == [[50]] * 5 + [[], []]


def test_contexts_that_are_too_long_lose_their_beginning() -> None:
    requests = [Continuation(range(10), (1, 2)), Continuation(range(10), (1,)), Continuation((9,), (1, 2, 3, 4))]
    by_number = {n: c.ids for c in contexts_of(requests, 4, 10) for n in c.continuations}
    # As in the harness: the last token of a continuation is not read, so max_length + 1 tokens fit.
    assert by_number == {0: (7, 8, 9), 1: (6, 7, 8, 9), 2: (9,)}
    with pytest.raises(GSAError, match=r"continuation of 5 tokens, expected at most 4 \(max_length\)"):
        contexts_of([Continuation((1,), range(5))], 4, 10)


def test_bad_requests_are_named() -> None:
    for request, message in [
        (Continuation((), (1,)), "request 0 is empty, or a part of it"),
        (Continuation((1,), ()), "request 0 is empty, or a part of it"),
        (Continuation((1,), (10,)), r"request 0 has ids 10..10, expected 0..9 \(the vocabulary\)"),
        (Continuation((-1,), (1,)), "request 0 has ids -1..-1"),
    ]:
        with pytest.raises(GSAError, match=message):
            contexts_of([request], None, 10)


def test_batches_keep_contexts_whole() -> None:
    requests = [Continuation((i, 5), (1,) * (j + 1)) for i in range(4) for j in range(3)]
    contexts = contexts_of(requests, None, 10)
    for batch_size, expected in [(1, [1, 1, 1, 1]), (6, [2, 2]), (7, [2, 2]), (100, [4])]:
        assert [len(batch) for batch in batches(contexts, batch_size, 1000)] == expected, batch_size
    assert [len(batch) for batch in batches(contexts, 100, 10)] == [2, 2]  # tokens: five of each
    assert [len(batch) for batch in batches(contexts, 100, 1)] == [1, 1, 1, 1]


def test_a_job_that_is_cut_asks_the_same() -> None:
    job: Job[None] = Job.whole((1, 2, 3), None, 7, (4, 5, 6))
    assert job.ids == (1, 2, 3, 4, 5)
    assert job.asked == [(2, 4, 7), (3, 5, 7), (4, 6, 7)]
    first, rest = job.cut(3)
    assert (first.ids, first.asked) == ((1, 2, 3), [(2, 4, 7)])
    assert (rest.ids, rest.asked) == ((4, 5), [(0, 5, 7), (1, 6, 7)])


def test_prompts_leave_room_for_what_is_written() -> None:
    assert room(None, 10) is None
    assert room(100, 10) == 90
    with pytest.raises(GSAError, match=r"max_tokens must be below 10 \(max_length\), got 10"):
        room(10, 10)
    contexts = prompts_of([(1, 2, 3), (9, 2, 3), (2, 3)], 2, 10)
    assert [(c.ids, list(c.continuations)) for c in contexts] == [((2, 3), [0, 1, 2])]
