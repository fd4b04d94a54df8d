"""What users of other servers complain about does not happen here: a test for each row of that list."""

import asyncio
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import torch

from tests.serve.live import Live, events, served

LONG = "It was the best of times, it was the worst of times. " * 3


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def text(answer: dict) -> str:
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_a_second_turn_reads_only_what_is_new(server: Live) -> None:
    first = server.chat(LONG, return_state="id")
    read = first["usage"]["total_tokens"]
    second = server.chat(LONG, text(first), "Go on.")
    new = second["usage"]["prompt_tokens"] - read
    assert cached(second) == read
    assert new == len("<>\n<>user\nGo on.<>\n<>assistant\n") - 4  # of the template, <> are one token each
    by_state = server.chat("Go on.", state=first["choices"][0]["state"]["id"])
    assert (cached(by_state), text(by_state)) == (read, text(second))
    assert by_state["usage"] == second["usage"]


def test_a_restored_state_saves_its_reading_and_survives_a_restart(folder: Path, tmp_path: Path) -> None:
    with served(folder, state_dir=str(tmp_path), cache_mb=0) as live:
        made = live.post("/v1/states", {"text": LONG}, 201)
        expected = live.complete("And", state=made["id"])
    with served(folder, state_dir=str(tmp_path), cache_mb=0) as live:
        again = live.complete("And", state=made["id"])
        assert (text(again), cached(again)) == (text(expected), made["tokens"])
        assert live.metric("gsa_prompt_tokens_total") == len("And")  # the engine has read nothing else
        assert live.http.get(f"/v1/states/{made['id']}").json()["tokens"] == len(LONG)


def test_a_chat_is_not_read_again_after_a_restart(folder: Path, tmp_path: Path) -> None:
    with served(folder, state_dir=str(tmp_path)) as live:
        first = live.chat(LONG)
        second = live.chat(LONG, text(first), "Go on.")
    with served(folder, state_dir=str(tmp_path)) as live:
        again = live.chat(LONG, text(first), "Go on, then.")
        assert cached(again) >= first["usage"]["total_tokens"]
        assert live.metric("gsa_cache_disk_hits") >= 1
        assert text(live.chat(LONG, text(first), "Go on.")) == text(second)


def test_a_client_marks_what_its_prompts_share(folder: Path) -> None:
    with served(folder) as live:
        expected = live.complete(LONG[:37] + "Other.", cache=False)
        live.complete(LONG, cache_marks=[37])
        found = live.complete(LONG[:37] + "Other.")
        assert (cached(found), text(found)) == (37, text(expected))
        for wrong, message in ((5, "cache_marks"), ([0], "cache_marks"), ([999], "behind the end of a prompt of")):
            refused = live.post("/v1/completions", {"prompt": "a", "cache_marks": wrong}, 400)["error"]
            assert message in refused["message"] or message == refused["param"]


def test_prefixes_of_any_length_are_found_and_hits_are_told(folder: Path) -> None:
    with served(folder) as live:
        live.complete(LONG[:37], max_tokens=0)
        answer = live.complete(LONG[:37] + "another end")
        assert cached(answer) == 37
        assert live.metric("gsa_cache_hits") == 1
        assert live.metric("gsa_cached_tokens_total") == live.metric("gsa_cache_tokens_reused") == 37


def test_nobody_gets_the_text_of_another(server: Live) -> None:
    prompts = [LONG[i : i + 5 + 7 * i] for i in range(10)]
    bodies = [
        {"prompt": prompt, "max_tokens": 5 + i, "temperature": 0.9, "seed": i, "cache_salt": str(i % 3)}
        for i, prompt in enumerate(prompts)
    ]

    async def ask_all() -> list[str]:
        async with httpx2.AsyncClient(base_url=server.address, timeout=60) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        return [text(answer.json()) for answer in answers]

    alone = [text(server.post("/v1/completions", {**body, "cache": False})) for body in bodies]
    assert asyncio.run(ask_all()) == alone


def test_caching_changes_no_answer(server: Live) -> None:
    prompt = LONG[:90]
    for fields in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "seed": 4, "frequency_penalty": 1.5}):
        without = server.complete(prompt, cache=False, cache_salt=str(fields), logprobs=2, **fields)
        for expected in (0, 90):
            with_ = server.complete(prompt, cache_salt=str(fields), logprobs=2, **fields)
            assert cached(with_) == expected
            assert with_["choices"] == without["choices"]  # also the numbers, to the last bit


def test_salts_share_nothing(server: Live) -> None:
    assert cached(server.complete(LONG[:50], cache_salt="one")) == 0
    assert cached(server.complete(LONG[:50], cache_salt="two")) == 0
    assert cached(server.complete(LONG[:50], cache_salt="one")) == 50


def test_a_client_can_hold_its_own_state(server: Live) -> None:
    first = server.complete(LONG[:20], return_state="base64")
    state = first["choices"][0]["state"]
    assert state["tokens"] == 28
    second = server.complete(" more", state={"base64": state["base64"]})
    whole = server.complete(LONG[:20] + text(first) + " more", cache=False)
    assert text(second) == text(whole)
    assert cached(second) == 28


def test_the_prompt_has_log_probabilities(server: Live) -> None:
    prompt = LONG[:30]
    answer = server.complete([list(prompt.encode())], echo=True, logprobs=1, max_tokens=1)
    told = answer["choices"][0]["logprobs"]
    assert "".join(told["tokens"]) == text(answer)
    assert text(answer).startswith(prompt)
    assert len(told["tokens"]) == 31
    assert told["token_logprobs"][0] is None
    assert told["text_offset"] == list(range(31))
    lm, ids = server.serving.texts.engine.model.lm, torch.tensor([list(prompt.encode())])
    with torch.no_grad():
        scores = lm(ids).logits[0].log_softmax(-1)
    expected = scores[:-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(told["token_logprobs"][1:30]), expected, atol=1e-4, rtol=1e-4)
    best = [max(top.values()) for top in told["top_logprobs"][1:30]]
    torch.testing.assert_close(torch.tensor(best), scores[:-1].max(1).values, atol=1e-4, rtol=1e-4)


def test_an_answer_ends_with_its_client(folder: Path) -> None:
    """With and without a stream: it is cancelled, and its place is free."""
    for stream in (False, True):
        with served(folder, max_tokens=10**6, max_concurrency=1) as live:
            address = urlsplit(live.address)
            body = f'{{"prompt": "a", "temperature": 0, "max_tokens": 1000000, "stream": {str(stream).lower()}}}'
            request = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            with socket.create_connection((address.hostname, address.port)) as connection:
                connection.sendall(f"{request}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                live.wait_for(1)
            assert live.idle()
            assert text(live.complete("The place is free", max_tokens=3))
            assert live.metric('gsa_answers_total{reason="cancelled"}') == 1
            # A stream had begun with 200; of the other, nobody saw a status.
            left = live.metric('gsa_requests_total{route="/v1/completions",status="499"}') if not stream else 1
            assert left == 1


def test_a_stream_that_is_not_read_to_its_end_is_cancelled(server: Live) -> None:
    body = {"prompt": "a", "temperature": 0, "max_tokens": 200, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    assert server.idle()


def test_streams_are_the_same_as_whole_answers(server: Live) -> None:
    fields = {"temperature": 1.0, "seed": 5, "n": 2, "stop": ["x"], "max_tokens": 40}
    whole = server.complete(["One", "Two"], **fields)
    answer = server.http.post(
        "/v1/completions",
        json={"prompt": ["One", "Two"], "stream": True, "stream_options": {"include_usage": True}, **fields},
    )
    *chunks, last, done = events(answer.text)
    assert done is None
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]


def test_tokens_are_told_where_they_stand_also_with_stops(server: Live) -> None:
    """What may begin a stop string is held back; the tokens stand where they stand all the same."""
    plain = server.complete("One", logprobs=0, max_tokens=20)
    written = text(plain)
    for stop in (written[3:5] + "\x00", written[10:13]):  # one that nearly comes, one that comes
        told = server.complete("One", logprobs=0, max_tokens=20, stop=[stop])["choices"][0]["logprobs"]
        offsets = told["text_offset"]
        assert offsets == plain["choices"][0]["logprobs"]["text_offset"][: len(offsets)], stop
