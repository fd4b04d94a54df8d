"""What an engine must stand: odd defaults of torch, threads, models that change, settings and sizes beyond reason."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gsa.errors import GSAError, OutOfMemory
from gsa.infer import Engine, Model, Sampling, State
from gsa.infer.runner import MAX_READ
from tests.infer.engines import SHORT, larger, loaded
from tests.models.cases import ids, model

PROMPTS = [ids(length, seed=length).tolist() for length in (1, 3, 20, 70, 100)]


@contextmanager
def defaults(dtype: torch.dtype | None, device: str | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("dtype", "device"), [(torch.float64, None), (torch.bfloat16, None), (torch.float16, None), (None, "meta")]
)
@pytest.mark.parametrize("weights", ["fp32", "int8"])
@pytest.mark.parametrize("case", ["gsa", "gla"])
def test_other_defaults_of_torch(case: str, weights: str, dtype: torch.dtype | None, device: str | None) -> None:
    engine = Engine(model(case), weights=weights)
    expected = engine.generate(PROMPTS, SHORT)
    with defaults(dtype, device):
        assert [done.tokens for done in engine.generate(PROMPTS, SHORT)] == [done.tokens for done in expected]


def test_several_threads_ask_one_engine() -> None:
    expected = [Engine(larger()).generate(prompt, SHORT).tokens for prompt in PROMPTS]
    engine = Engine(larger(), batch_size=2)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda prompt: engine.generate(prompt, SHORT).tokens, PROMPTS * 6)]
    assert found == expected * 6
    assert not engine.busy


def test_several_engines_share_a_model_in_threads() -> None:
    engines = [Engine(larger(), batch_size=1) for _ in range(3)]
    expected = [engines[0].generate(prompt, SHORT).tokens for prompt in PROMPTS]
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(engine.generate, PROMPTS, SHORT) for engine in engines]
        assert all([done.tokens for done in job.result()] == expected for job in jobs)


@pytest.mark.parametrize("case", ["gsa", "gla"])
def test_made_in_inference_mode_and_used_outside(case: str) -> None:
    with torch.inference_mode():
        engine = Engine(model(case))
    assert engine.generate(PROMPTS, SHORT)[0].tokens == Engine(model(case)).generate(PROMPTS, SHORT)[0].tokens
    assert not engine.busy


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "top_p"])
def test_numbers_beyond_all_numbers(name: str) -> None:
    with pytest.raises(GSAError, match=f"sampling: {name} must be at most .*, got a number of about 401 digits"):
        Sampling(**{name: 10**400})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_goes_on_learning(dtype: torch.dtype) -> None:
    lm = model("gsa").to(dtype)
    engine = Engine(lm)
    before = engine.generate(PROMPTS, SHORT)
    lm.share_memory()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.1)
    assert [done.tokens for done in engine.generate(PROMPTS, SHORT)] == [done.tokens for done in before]


def test_half_precision_keeps_all_its_bits() -> None:
    assert Model.load(model("gsa").half()).weights == "fp32"
    assert Model.load(model("gsa").bfloat16()).weights == "bf16"


def test_requests_that_are_cancelled_while_they_wait_leave_nothing() -> None:
    engine = Engine(loaded(), batch_size=1)
    waiting = [engine.submit([1], SHORT) for _ in range(5)]
    for generation in waiting:
        generation.cancel()
    assert not engine.busy
    assert not engine._scheduler._waiting
    assert all(generation.reason == "cancelled" for generation in waiting)


@pytest.mark.parametrize("size", [10**12, 2**62])
def test_more_places_than_memory(size: int) -> None:
    for lm in (model("gsa"), model("gla")):  # which are compiled, and run by torch
        with pytest.raises(OutOfMemory, match=f"engine: no memory for the states of {size} sequences"):
            Engine(lm, batch_size=size)


def test_no_state_is_kept_that_nothing_can_go_on_from() -> None:
    lm = model("gsa", tie_word_embeddings=True)
    with torch.no_grad():
        lm.model.embeddings.weight[7] = torch.inf
    engine = Engine(lm)
    request = engine.submit([3], Sampling(max_tokens=0), keep_state=True)
    engine.step()
    assert request.reason == "error"
    assert "not finite" in (request.error or "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "zz"}, "State: digest cannot be 'zz'"),
        ({"tokens": -7}, "State: tokens must be from 1 to 999999999999, got -7"),
        ({"tokens": "x"}, "State: tokens must be a whole number, got 'x'"),
        ({"fingerprint": ""}, "State: fingerprint cannot be ''"),
        ({"weights": "int3"}, "State: weights cannot be 'int3'"),
    ],
)
def test_states_that_cannot_be(change: dict, message: str) -> None:
    state = Engine(loaded()).read([1, 2])
    with pytest.raises(GSAError, match=message):
        replace(state, **change)


def test_a_state_is_loaded_for_a_model(tmp_path: Path) -> None:
    engine = Engine(loaded())
    engine.read([1, 2]).save(tmp_path / "a.state")
    with pytest.raises(GSAError, match=r"State\.load: expected a Model, as engine.model is one, got Engine"):
        State.load(tmp_path / "a.state", engine)  # type: ignore[arg-type]


def test_two_write_the_same_file(tmp_path: Path) -> None:
    """One of them wins, and whoever reads meanwhile finds a whole file."""
    states, path = [Engine(loaded()).read([token]) for token in (1, 2)], tmp_path / "a.state"
    states[0].save(path)
    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(lambda state=state: [state.save(path) for _ in range(30)]) for state in states]
        while not all(writer.done() for writer in writers):
            assert State.load(path, loaded()).tokens == 1
        for writer in writers:
            writer.result()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.state"]


def test_a_state_that_appears_while_a_prompt_is_read() -> None:
    """Two prompts alike are read in turns; what one has read the other skips, more than once."""
    engine = Engine(loaded(), batch_size=2, state_cache_bytes=1 << 20)
    prompt = ids(3 * MAX_READ + 5)
    requests = [engine.submit(prompt, SHORT) for _ in range(2)]
    while engine.busy:
        engine.step()
    assert requests[0].tokens == requests[1].tokens == Engine(loaded()).generate(prompt, SHORT).tokens
    assert requests[0].cached_tokens + requests[1].cached_tokens == len(prompt)


@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
def test_maps_over_heads_do_not_depend_on_the_batch(weights: str) -> None:
    lm = model("gsa", feature_map="t2r")
    packed = Model.load(lm, weights)
    prompts = [ids(5, seed=seed).tolist() for seed in range(16)]
    together = Engine(packed).generate(prompts, SHORT)
    alone = [Engine(packed, batch_size=1).generate(prompt, SHORT) for prompt in prompts]
    assert [done.tokens for done in together] == [done.tokens for done in alone]
