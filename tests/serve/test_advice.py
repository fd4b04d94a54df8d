"""How answers are chosen when a request does not say: as the model's makers advise."""

from pathlib import Path

from gsa.sampling import Sampling
from gsa.serve.bodies import ResponseBody
from tests.serve.live import Live, served, write_talker

ADVICE = '{"do_sample": true, "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}'


def test_requests_that_say_nothing_are_answered_as_the_model_advises(tmp_path: Path) -> None:
    folder = write_talker(tmp_path / "talks")
    (folder / "generation_config.json").write_text(ADVICE)
    with served(folder) as live:

        def used(**fields: object) -> Sampling:
            return live.serving.sampling(ResponseBody(input="Hi", **fields), 8)

        assert used() == Sampling(temperature=0.2, top_p=0.9, repetition_penalty=1.1, max_tokens=8)
        assert used(temperature=0.0) == Sampling(temperature=0, top_p=1, max_tokens=8)
        assert used(top_k=3) == Sampling(temperature=1, top_p=1, top_k=3, max_tokens=8)
        ask = {"input": "Hi", "max_output_tokens": 8}
        told = live.post("/v1/responses", ask)
        assert (told["temperature"], told["top_p"]) == (0.2, 0.9)
        told = live.post("/v1/responses", {**ask, "temperature": 0.5})
        assert (told["temperature"], told["top_p"]) == (0.5, 1)


def test_where_nobody_advises_anything_defaults_are_those_of_openai(server: Live) -> None:
    used = server.serving.sampling(ResponseBody(input="Hi"), 8)
    assert used == Sampling(temperature=1, top_p=1, max_tokens=8)
