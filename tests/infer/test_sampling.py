"""Choosing tokens: as transformers' filters leave them, by one random number each, whatever else is in the batch."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gsa import GSAError
from gsa.infer.sampling import Sampler, choose, drawn, kept
from gsa.sampling import Sampling
from tests.examples import examples

NO_PROMPT = torch.zeros(0, dtype=torch.int64)
# Shares that no sum of a few probabilities hits, so that rounding does not decide.
SHARES = st.sampled_from([0.0, 0.0371, 0.1379, 0.5313, 0.9137, 0.9773, 0.99917, 1.0])
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.31, 0.9, 1.0, 1.7]),
    top_k=st.integers(0, 12),
    top_p=SHARES,
    min_p=SHARES,
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
)
SCORES = st.lists(st.integers(-20, 20).map(lambda x: x / 4), min_size=1, max_size=40)  # equal ones are frequent


def sampler(sampling: Sampling, prompt: torch.Tensor = NO_PROMPT, vocabulary: int = 40) -> Sampler:
    return Sampler(sampling, prompt, vocabulary)


def ours(logits: torch.Tensor, prompt: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The probabilities [V] from which we draw."""
    weights = kept(sampler(sampling, prompt, len(logits)).penalised(logits), sampling)
    return weights / weights.sum()


def theirs(logits: torch.Tensor, prompt: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The probabilities [V] from which transformers draws."""
    filters = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        filters.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    filters.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        filters.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        filters.append(TopPLogitsWarper(sampling.top_p))
    filters.append(MinPLogitsWarper(sampling.min_p))
    return filters(prompt[None], logits[None]).softmax(-1)[0]


def assert_same_distribution(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same probabilities for the same tokens. Of equal tokens at the limit of top-p, transformers keeps whichever
    its sort put last, so there it is only their number that counts."""
    expected = expected.double()
    torch.testing.assert_close(actual.sort().values, expected.sort().values, atol=1e-5, rtol=1e-4)
    least = actual[actual > 0].min()
    clear = torch.maximum(actual, expected) > least * (1 + 1e-3)
    torch.testing.assert_close(actual[clear], expected[clear], atol=1e-5, rtol=1e-4)


@examples(300)
@given(SCORES, st.lists(st.integers(0, 39), max_size=8), SAMPLINGS)
def test_filters_leave_what_those_of_transformers_leave(scores, prompt, sampling):
    logits = torch.tensor(scores)
    earlier = torch.tensor(prompt, dtype=torch.int64) % len(scores)
    assert_same_distribution(ours(logits, earlier, sampling), theirs(logits, earlier, sampling))


@pytest.mark.parametrize(
    ("spread", "top_p", "left"), [(5.0, 0.3, 1), (1.0, 0.3, 300), (1.0, 0.9, 3000), (0.1, 0.9999, 5000)]
)
def test_top_p_is_right_however_many_tokens_it_leaves(spread, top_p, left):
    """Few of them, and so many that the first guess has to be widened once, twice and to all."""
    logits = torch.randn(5000).double() * spread
    ordered, ids = logits.softmax(0).sort(descending=True)
    count = 1 + int((ordered.cumsum(0) < top_p).sum())
    assert 0.8 <= count / left <= 1.25
    weights = kept(logits, Sampling(temperature=1.0, top_p=top_p))
    assert set(weights.nonzero()[:, 0].tolist()) == set(ids[:count].tolist())
    torch.testing.assert_close(weights[ids[:count]], ordered[:count] / ordered[0])


def test_top_p_keeps_as_few_as_reach_it_and_of_equals_the_lower_ids():
    logits = torch.zeros(4)
    for top_p, left in ((0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)):
        assert kept(logits, Sampling(temperature=1.0, top_p=top_p)).tolist() == [1.0] * left + [0.0] * (4 - left)


def test_top_k_keeps_those_as_likely_as_the_last():
    weights = kept(torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0]), Sampling(temperature=1.0, top_k=2, top_p=1.0))
    assert (weights > 0).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("chosen", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
def test_tokens_come_as_often_as_their_probability_says(chosen):
    logits = torch.randn(12).double()
    weights = kept(logits, Sampling(**{"temperature": 1.3, "top_p": 1.0, **chosen}))
    draws = Counter(drawn(weights, (i + 0.5) / 4096) for i in range(4096))
    assert all(weights[token] > 0 for token in draws)
    for token, share in enumerate((weights / weights.sum() * 4096).tolist()):
        assert abs(draws[token] - share) <= 1


@pytest.mark.parametrize("chance", [0.0, 5e-324, 1 - 2**-53])
@pytest.mark.parametrize("weights", [[0.0, 1.0, 0.0], [0.0, 0.3, 1.0, 0.0, 0.0], [1.0], [1e-300, 1.0, 0.0]], ids=str)
def test_a_token_without_weight_never_comes(weights, chance):
    numbers = torch.tensor(weights, dtype=torch.float64)
    assert numbers[drawn(numbers, chance)] > 0


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 5e-324},
        {"temperature": 1e308},
        {"repetition_penalty": 5e-324},
        {"repetition_penalty": 1e308},
        {"presence_penalty": 1e30, "frequency_penalty": -1e30, "logit_bias": {3: 1e30, 4: -1e30}},
        {"temperature": 5e-324, "repetition_penalty": 5e-324, "top_p": 0.0, "min_p": 1.0, "top_k": 10**9},
        {"seed": 2**64 - 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_extreme_settings_still_choose_a_token(extreme, scale):
    one = sampler(Sampling(**{"temperature": 1.0, **extreme}), torch.arange(5))
    for _ in range(5):
        (choice,) = choose(torch.randn(1, 40) * scale, [one])
        assert choice is not None
        assert 0 <= choice.id < 40


def test_a_temperature_near_nothing_is_greedy():
    logits = torch.randn(1, 40)
    (choice,) = choose(logits, [sampler(Sampling(temperature=1e-300))])
    assert choice.id == int(logits.argmax())


@pytest.mark.parametrize("vocabulary", [3, 40, 5000])
def test_the_lowest_of_equally_likely_tokens_is_the_greedy_one(vocabulary):
    logits = torch.randint(0, 3, (7, vocabulary)).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert [choice.id for choice in choose(logits, [sampler(Sampling(temperature=0))] * 7)] == expected
    penalising = Sampling(temperature=0, repetition_penalty=2.0)
    each = [sampler(penalising, vocabulary=vocabulary) for _ in range(7)]
    assert [choice.id for choice in choose(logits, each)] == expected


def test_a_greedy_text_with_a_penalty_takes_the_likeliest_by_transformers_penalty():
    one, said = sampler(Sampling(temperature=0, repetition_penalty=1.8), torch.tensor([3, 4])), [3, 4]
    processor = RepetitionPenaltyLogitsProcessor(1.8)
    logits = torch.randn(1, 40) * 2
    for _ in range(15):
        expected = int(processor(torch.tensor([said]), logits).argmax())
        (choice,) = choose(logits, [one])
        assert choice.id == expected
        said.append(choice.id)
    assert len(set(said)) > 3


def test_presence_and_frequency_count_what_came_out_and_not_the_prompt():
    settings = Sampling(temperature=0, presence_penalty=0.75, frequency_penalty=0.5)
    one, logits = sampler(settings, torch.arange(40)), torch.randn(1, 40) * 2
    counts = torch.zeros(40)
    for _ in range(25):
        expected = logits[0] - 0.75 * (counts > 0) - 0.5 * counts
        torch.testing.assert_close(one.penalised(logits[0]), expected.double())
        (choice,) = choose(logits, [one])
        assert choice.id == int(expected.argmax())
        counts[choice.id] += 1
    assert 3 < int((counts > 0).sum()) < 25


def test_a_bias_is_added_to_the_scores_of_its_tokens():
    logits = torch.randn(1, 40)
    best = int(logits.argmax())
    (banned,) = choose(logits, [sampler(Sampling(temperature=0, logit_bias={best: -100}))])
    assert banned.id == int(logits[0].argsort(descending=True)[1])
    (chosen,) = choose(logits, [sampler(Sampling(temperature=1.0, seed=1, logit_bias={7: 100.0}, logprobs=0))])
    assert chosen.id == 7
    assert chosen.logprob == pytest.approx(float(logits[0].double().log_softmax(0)[7]), abs=1e-12)  # the model's own


def test_all_that_changes_scores_is_applied_in_the_order_that_is_told():
    settings = Sampling(
        temperature=0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 1.5}
    )
    one, logits = sampler(settings, torch.tensor([5])), torch.zeros(40)
    logits[3] = 4.0
    (choice,) = choose(logits[None], [one])
    assert choice.id == 3
    assert float(one.penalised(logits)[3]) == 4.0 / 2.0 - 0.5 - 0.25 + 1.5


def test_settings_can_be_hashed_and_keep_their_bias_to_themselves():
    bias = {3: 1.0}
    settings = Sampling(logit_bias=bias)
    bias[4] = 2.0
    assert settings.logit_bias == {3: 1.0}
    assert hash(settings) == hash(Sampling())
    assert settings != Sampling()


def draws(sampling: Sampling, count: int = 20) -> list[int]:
    one, logits = sampler(sampling), torch.linspace(0, 1, 40)[None]
    return [choose(logits, [one])[0].id for _ in range(count)]


def test_a_seed_decides_and_without_one_each_request_differs():
    free = Sampling(temperature=1.0)
    assert draws(replace(free, seed=1)) == draws(replace(free, seed=1))
    assert draws(replace(free, seed=1)) != draws(replace(free, seed=2))
    assert draws(free) != draws(free)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0},
        {"top_k": 5, "min_p": 0.01},
        {"temperature": 1.7, "top_p": 1.0, "repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.2, "logit_bias": {3: 2.0, 4: -1.0}},
    ],
    ids=str,
)
def test_the_tokens_are_the_same_without_the_native_engine(settings, monkeypatch):
    logits = torch.randn(60, 5, 700) * 3
    sampling = [Sampling(**{"seed": i, **settings}) for i in range(5)]

    def said() -> list[list[int]]:
        each = [sampler(one, torch.arange(9), vocabulary=700) for one in sampling]
        return [[choice.id for choice in choose(scores, each)] for scores in logits]

    compiled = said()
    monkeypatch.setattr("gsa.infer.sampling.library.unavailable", lambda _: "it is away")
    assert said() == compiled


def test_a_choice_does_not_depend_on_the_others():
    logits = torch.randn(9, 40) * 3
    kinds = [
        Sampling(temperature=0),
        Sampling(temperature=1.0, top_p=1.0, seed=5),
        Sampling(temperature=0.7, top_p=0.9, seed=6, logprobs=3),
    ]
    each = [kinds[i % 3] for i in range(9)]
    together = choose(logits, [sampler(sampling) for sampling in each])
    assert together == [choose(logits[i : i + 1], [sampler(sampling)])[0] for i, sampling in enumerate(each)]


def test_log_probabilities_are_the_models_own():
    logits = torch.randn(1, 40)
    warped = Sampling(temperature=3.0, top_k=2, repetition_penalty=3.0, seed=1, logprobs=4)
    (choice,) = choose(logits, [sampler(warped, torch.arange(20))])
    expected = logits[0].double().log_softmax(0)
    assert choice.logprob == pytest.approx(float(expected[choice.id]), abs=1e-12)
    ids = expected.argsort(descending=True)[:4]
    assert choice.top == [(int(i), pytest.approx(float(expected[i]), abs=1e-12)) for i in ids]


@pytest.mark.parametrize(("asked", "told"), [(0, 0), (40, 40), (99, 40)])
def test_as_many_alternatives_are_reported_as_asked_for_and_exist(asked, told):
    (choice,) = choose(torch.zeros(1, 40), [sampler(Sampling(logprobs=asked))])
    assert choice.logprob is not None
    assert [token for token, _ in choice.top] == list(range(told))


def test_nothing_is_reported_unless_asked():
    (choice,) = choose(torch.zeros(1, 40), [sampler(Sampling())])
    assert choice.logprob is None
    assert choice.top is None


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(temperature=1.0, top_p=0.5, seed=1)], ids=["greedy", "drawn"]
)
def test_scores_that_are_not_finite_give_no_token_and_do_not_disturb_others(odd, sampling):
    logits = torch.randn(3, 40)
    expected = choose(logits, [sampler(sampling) for _ in range(3)])
    logits[1, 7] = odd
    assert choose(logits, [sampler(sampling) for _ in range(3)]) == [expected[0], None, expected[2]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": -1}, "max_tokens must be at least 0, got -1"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, got 1.5"),
        ({"max_tokens": True}, "max_tokens must be a whole number, got True"),
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite, got nan"),
        ({"temperature": float("inf")}, "temperature must be finite, got inf"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": -0.1}, "top_p must be at least 0, got -0.1"),
        ({"top_p": 1.1}, "top_p must be at most 1, got 1.1"),
        ({"min_p": 2}, "min_p must be at most 1, got 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, got 0.0"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be finite, got nan"),
        ({"frequency_penalty": 1e31}, "frequency_penalty must be at most 1e\\+30, got 1e\\+31"),
        ({"logit_bias": [1]}, r"logit_bias must be names with values, got \[1\]"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias must be given by ids of tokens, got '1'"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be given by ids of tokens, got -1"),
        ({"logit_bias": {1: "a"}}, "logit_bias of 1 must be a finite number, got 'a'"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias of 1 must be a finite number, got nan"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"stop": [1]}, r"stop must be tuple, got \[1\]"),
        ({"stop": (1, True)}, "stop must hold ids of tokens, got True"),
        ({"stop": (-1,)}, "stop must hold ids of tokens, got -1"),
        ({"logprobs": -1}, "logprobs must be at least 0, got -1"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong, message):
    with pytest.raises(GSAError, match=f"^sampling: {message}$"):
        Sampling(**wrong)
