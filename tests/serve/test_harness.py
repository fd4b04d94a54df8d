"""The evaluation harness over HTTP: its type `local-completions` finds the numbers that its type `gsa` finds here."""

import pytest

from tests.serve.live import served

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the harness and what it imports

PAIRS = [
    ("She was", " very well"),
    ("She was not at home, and the colonel", " was a little man"),
    ("It was", " the best of times, it was the worst of times"),
    ("", "Once"),
    ("The end of all", "<|endoftext|>"),
]


def test_the_same_scores_and_texts() -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from gsa.eval.harness import HarnessModel
    from gsa.pretrained import folder

    def asked(kind: str, arguments: tuple) -> Instance:
        return Instance(kind, {}, arguments, 0)

    ours = HarnessModel(str(folder("gsa-tiny")), device="cpu")
    scored = [asked("loglikelihood", pair) for pair in PAIRS]
    written = [asked("generate_until", (text, {"until": ["."], "max_gen_toks": 20})) for text, _ in PAIRS[:3]]
    with served("gsa-tiny") as live:
        theirs = LocalCompletionsAPI(
            base_url=f"{live.address}/v1/completions",
            pretrained="gsa-tiny",
            tokenizer=str(folder("gsa-tiny")),
            tokenizer_backend="huggingface",
            num_concurrent=3,
            max_retries=1,
        )
        scores, texts = theirs.loglikelihood(scored), theirs.generate_until(written)
    for found, expected, pair in zip(scores, ours.loglikelihood(scored), PAIRS, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-3, abs=1e-3), pair
        assert found[1] == expected[1], pair
    assert texts == ours.generate_until(written)
