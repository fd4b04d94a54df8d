"""Tokens drawn by the native engine: those that torch draws by the same chance, for any vocabulary and settings."""

import pytest
import torch
from torch import Tensor

from gsa.infer.sampling import Sampler, drawn, kept
from gsa.ops.native.draws import draw
from gsa.sampling import Sampling

from .isas import ISAS, needs_native, used

pytestmark = needs_native

NO_PROMPT = torch.zeros(0, dtype=torch.int64)
SETTINGS = {
    "all": {"top_p": 1.0},
    "top-p": {"top_p": 0.9},
    "top-p of nearly all": {"top_p": 0.9999},
    "top-p of none": {"top_p": 0.0},
    "top-k": {"top_p": 1.0, "top_k": 7},
    "top-k of more than there are": {"top_p": 1.0, "top_k": 10**12},
    "min-p": {"top_p": 1.0, "min_p": 0.05},
    "all filters": {"top_p": 0.93, "top_k": 300, "min_p": 0.01},
    "cold": {"top_p": 0.95, "temperature": 0.2},
    "hot": {"top_p": 0.95, "temperature": 30.0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {0: 2.0}},
}
WIDTHS = [1, 2, 7, 16, 511, 512, 513, 5000]


def check(token: int, logits: Tensor, one: Sampler, chance: float) -> None:
    """The token is one that the filters leave, and the chance lies in its part of the whole, up to rounding."""
    weights = kept(one.penalised(logits), one.settings)
    ends = weights.cumsum(0)
    whole = float(ends[-1])
    assert weights[token] > 0
    assert ends[token] - weights[token] <= (chance + 1e-9) * whole
    assert (chance - 1e-9) * whole <= ends[token]
    if token != drawn(weights, chance):  # only at the border between two tokens
        assert (
            min(abs(float(end) - chance * whole) for end in (ends[token], ends[token] - weights[token])) < 1e-9 * whole
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SETTINGS)
def test_the_token_that_torch_draws(name, width, isa):
    settings = Sampling(**{"temperature": 0.9, "seed": 3, **SETTINGS[name]})
    logits = 3 * torch.randn(24, width)
    samplers = [Sampler(settings, torch.arange(0, width, 3), width) for _ in logits]
    for one in samplers:
        for token in (0, 0, width - 1):
            one.took(token)
    draws = [one.draw() for one in samplers]
    for i, each in enumerate(draws):
        each.chance = i / len(draws) + 0.0123
    with used(isa):
        tokens = draw(logits, draws)
    for token, row, one, each in zip(tokens, logits, samplers, draws, strict=True):
        check(token, row, one, each.chance)


@pytest.mark.parametrize("scores", [[0.0] * 600, [1.0, 1.0, 0.0, 0.0, 0.0] * 120, [-3e38, 3e38, 3e38]], ids=len)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.37}, {"top_k": 3}, {"min_p": 0.5}, {"top_p": 0.37, "top_k": 200}])
def test_equal_scores(scores, filters):
    """Of equals, top-p leaves the lower ids, and top-k all that are as likely as the last."""
    logits = torch.tensor([scores] * 50)
    samplers = [
        Sampler(Sampling(**{"temperature": 1.0, "top_p": 1.0, **filters}), NO_PROMPT, len(scores)) for _ in logits
    ]
    draws = [one.draw() for one in samplers]
    for token, row, one, each in zip(draw(logits, draws), logits, samplers, draws, strict=True):
        check(token, row, one, each.chance)


@pytest.mark.parametrize("chance", [0.0, 5e-324, 1 - 2**-53])
@pytest.mark.parametrize("likeliest", [0, 511, 512, 1999])
def test_a_token_that_is_all_there_is_always_comes(likeliest, chance):
    logits = torch.zeros(1, 2000)
    logits[0, likeliest] = 1e6
    one = Sampler(Sampling(temperature=1.0, top_p=1.0), NO_PROMPT, 2000).draw()
    one.chance = chance
    assert draw(logits, [one]) == [likeliest]


def test_the_likeliest_by_penalised_scores():
    logits = torch.randn(40, 300).double().float()
    samplers = [Sampler(Sampling(temperature=0, repetition_penalty=1.7), torch.arange(150), 300) for _ in logits]
    tokens = draw(logits, [one.draw() for one in samplers])
    assert tokens == [int(one.penalised(row).argmax()) for one, row in zip(samplers, logits, strict=True)]


def test_draws_do_not_depend_on_the_others_nor_on_threads():
    logits = torch.randn(64, 5000)
    settings = [Sampling(seed=i, top_p=0.9 + 0.001 * i, top_k=i) for i in range(64)]

    def tokens(rows: range) -> list[int]:
        return draw(logits[rows.start : rows.stop], [Sampler(settings[i], NO_PROMPT, 5000).draw() for i in rows])

    together = tokens(range(64))
    assert together == [token for i in range(64) for token in tokens(range(i, i + 1))]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert tokens(range(64)) == together
    finally:
        torch.set_num_threads(threads)
    assert draw(logits[:0], []) == []
