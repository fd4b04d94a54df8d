"""Intervals of differences: they are as wide as statistics says, and pairs make them narrower."""

import math

import numpy as np
import pytest

from gsa.errors import GSAError
from gsa.eval.paired import Parts, mean_of, paired_difference
from gsa.eval.parts import documents_of, parts_of
from tests.eval.results import result, text_result

SETTINGS = {"resamples": 4000, "confidence": 0.95, "seed": 0}
Z = 1.959964


def means(x: np.ndarray) -> Parts:
    return mean_of(np.asarray(x, dtype=float))


@pytest.mark.parametrize("kind", ["numbers", "answers"])
def test_intervals_have_the_width_of_the_standard_error(kind: str) -> None:
    random = np.random.default_rng(1)
    first, second = random.normal([[0.0], [0.3]], size=(2, 800))
    if kind == "answers":
        first, second = first > 0, second > 0
    difference = np.asarray(second, float) - np.asarray(first, float)
    error = difference.std(ddof=1) / math.sqrt(len(difference))
    found = paired_difference(means(first), means(second), **SETTINGS)
    assert found.value == pytest.approx(difference.mean())
    assert found.low == pytest.approx(found.value - Z * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.value + Z * error, abs=0.1 * error)
    assert found.draws.std() == pytest.approx(error, rel=0.04)
    narrower = paired_difference(means(first), means(second), **(SETTINGS | {"confidence": 0.68}))
    assert narrower.high - narrower.low == pytest.approx(2 * 0.9945 * error, rel=0.06)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    random, truth, covered, tries = np.random.default_rng(2), 0.1, 0, 300
    for trial in range(tries):
        hard = random.normal(size=200)
        first = hard + random.normal(size=200)
        second = hard + random.normal(size=200) + truth
        found = paired_difference(means(first), means(second), resamples=400, confidence=0.9, seed=trial)
        covered += found.low <= truth <= found.high
    assert abs(covered / tries - 0.9) < 4 * math.sqrt(0.9 * 0.1 / tries)


def test_pairs_make_intervals_narrow() -> None:
    """The same answers in another order have the same means, and nothing in common."""
    random = np.random.default_rng(3)
    first = random.random(1000) < 0.6
    second = first ^ (random.random(1000) < 0.05)
    paired = paired_difference(means(first), means(second), **SETTINGS)
    mixed = paired_difference(means(first), means(random.permutation(second)), **SETTINGS)
    assert paired.value == pytest.approx(mixed.value)
    assert paired.high - paired.low < 0.5 * (mixed.high - mixed.low)


def test_ratios_are_resampled_as_ratios() -> None:
    """One long document decides bits per byte: a mean over documents would hardly see it."""
    random = np.random.default_rng(4)
    sizes = random.integers(10, 1000, size=300)
    nats = [sizes * (1 + 0.3 * random.normal(size=300)), sizes * (1.1 + 0.3 * random.normal(size=300))]
    first, second = (parts_of(text_result("a", each, sizes), "bits_per_byte") for each in nats)
    found = paired_difference(first, second, **SETTINGS)
    ratio = (nats[1] - nats[0]).sum() / sizes.sum()
    rest = (nats[1] - nats[0]) - ratio * sizes
    error = math.sqrt((rest**2).sum()) / sizes.sum() / math.log(2)  # of a ratio, to first order
    assert found.value == pytest.approx(ratio / math.log(2))
    assert found.draws.std() == pytest.approx(error, rel=0.05)
    as_means = paired_difference(means(nats[0] / sizes), means(nats[1] / sizes), **SETTINGS)
    assert as_means.value != pytest.approx(ratio, rel=1e-3)


def test_draws_of_answers_and_of_numbers_agree() -> None:
    """Few kinds of documents are counted, many are drawn one by one: both have the same distribution."""
    random = np.random.default_rng(5)
    first, second = random.random((2, 600)) < [[0.5], [0.55]]
    counted = paired_difference(means(first), means(second), **SETTINGS)
    noise = random.normal(size=600) * 1e-9  # no two documents are alike any more
    drawn = paired_difference(means(first + noise), means(second), **SETTINGS)
    assert counted.value == pytest.approx(drawn.value)
    assert counted.draws.std() == pytest.approx(drawn.draws.std(), rel=0.05)


def test_the_same_seed_gives_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = np.random.default_rng(6).normal(size=(2, 50))
    found = [paired_difference(means(first), means(second), **(SETTINGS | {"seed": seed})) for seed in (0, 0, 1)]
    assert np.array_equal(found[0].draws, found[1].draws)
    assert found[0].low != found[2].low
    monkeypatch.setattr("gsa.eval.paired._AT_ONCE", 333)  # many rounds
    assert paired_difference(means(first), means(second), **SETTINGS).low == pytest.approx(found[0].low, abs=0.05)


def test_parts_of_every_kind_of_metric() -> None:
    nats = 20.0
    samples = {"id": [0, 1, 2], "nats": [10.0, 4.0, 6.0], "words": [3, 2, 2], "bytes": [15, 8, 9]}
    truth = {
        "word_perplexity": math.exp(nats / 7),
        "byte_perplexity": math.exp(nats / 32),
        "bits_per_byte": nats / 32 / math.log(2),
        "perplexity": math.exp(nats / 3),  # a document is a word, as in LAMBADA
    }
    metrics = {name: {"value": value, "stderr": None, "higher_is_better": False} for name, value in truth.items()}
    found = result("a", "text", [0.0], metrics=metrics, main="perplexity", samples=samples)
    for name, value in truth.items():
        assert parts_of(found, name).value() == pytest.approx(value), name
    rouge = {"id": [0, 1], "rouge1": [0.4, 0.6], "rouge2": [0.1, 0.3], "rougeL": [0.2, 0.6]}
    mean = {"value": (0.5 * 0.2 * 0.4) ** (1 / 3), "stderr": None, "higher_is_better": True}
    found = result("a", "qmsum", [0.0], metrics={"rouge": mean}, main="rouge", samples=rouge)
    assert parts_of(found, "rouge").value() == pytest.approx(mean["value"])
    losses = {"id": [0, 1], "nats": [20.0, 90.0], "tokens": [10, 30], "bytes": [40, 100]}
    mean = {"value": 2.75, "stderr": None, "higher_is_better": False}
    found = result("a", "text", [0.0], metrics={"loss": mean}, main="loss", samples=losses)
    assert parts_of(found, "loss").value() == 2.75


BROKEN = {
    "no samples of 'acc'": {"samples": {"id": [0, 1]}},
    "there are no samples": {"samples": {"id": [], "acc": []}},
    "the samples give a acc of 0.5, the file says 0.7": {"samples": {"id": [0, 1], "acc": [0, 1]}},
    "the samples of 'acc' must be numbers, got None": {"samples": {"id": [0, 1], "acc": [0, None]}},
    "the samples of 'acc' must be numbers, got 'x'": {"samples": {"id": [0, 1], "acc": [0, "x"]}},
}


@pytest.mark.parametrize("said", BROKEN)
def test_samples_that_are_not_those_of_the_metric(said: str) -> None:
    value = {"acc": {"value": 0.7, "stderr": None, "higher_is_better": True}}
    with pytest.raises(GSAError) as raised:
        parts_of(result("a", "piqa", [1], metrics=value) | BROKEN[said], "acc")
    assert said in str(raised.value)


def test_documents_have_ids_of_their_own() -> None:
    found = result("a", "piqa", [1, 0])
    assert documents_of(found) == {0: 0, 1: 1}
    for ids, said in (([1, 1], "twice"), ([[1], [2]], "texts or whole numbers"), ([], "no ids")):
        with pytest.raises(GSAError, match=said):
            documents_of(found | {"samples": {"id": ids}})
