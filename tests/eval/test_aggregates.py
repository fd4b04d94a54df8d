"""Standard errors, and what is kept of every document."""

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from lm_eval.api import metrics

from gsa.eval.aggregates import samples_of, standard_error
from gsa.eval.tasks.long import geometric_mean


def drawn_anew(aggregation, values, times=2000):
    draw = np.random.default_rng(1)
    return np.std(
        [aggregation([values[i] for i in draw.integers(len(values), size=len(values))]) for _ in range(times)]
    )


def test_standard_errors_are_those_of_documents_drawn_anew() -> None:
    draw = np.random.default_rng(0)
    likelihoods = list(-1 - 0.3 * draw.random(200))
    weighted = [(float(x), int(n)) for x, n in zip(-3 * draw.random(200) - 20, draw.integers(8, 12, 200), strict=True)]
    scores = [tuple(each) for each in draw.random((60, 3)).tolist()]
    for aggregation, values in [
        (metrics.mean, list(draw.integers(0, 2, 200))),
        (metrics.perplexity, likelihoods),
        (metrics.weighted_perplexity, weighted),
        (metrics.bits_per_byte, weighted),
        (geometric_mean, scores),
    ]:
        expected = drawn_anew(aggregation, values)
        assert standard_error(aggregation, values) == pytest.approx(expected, rel=0.1), aggregation
    ones = list(draw.integers(0, 2, 50))
    assert standard_error(metrics.mean, ones) == pytest.approx(metrics.mean_stderr(ones))
    assert standard_error(metrics.mean, [1.0]) is None


def test_samples_are_scores_or_losses() -> None:
    assert samples_of("acc", metrics.mean, [1, 0.0, np.float64(1)]) == {"acc": [1.0, 0.0, 1.0]}
    assert samples_of("perplexity", metrics.perplexity, [-1.5]) == {"nats": [1.5]}
    words = samples_of("word_perplexity", metrics.weighted_perplexity, [(-9.0, 3), (-4.0, 2)])
    assert words == {"nats": [9.0, 4.0], "words": [3.0, 2.0]}
    assert samples_of("rouge", geometric_mean, [(0.1, 0.2, 0.3)]) == {}
