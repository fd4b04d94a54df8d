"""The client that people have: openai's own, in all of its ways."""

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.serve.live import Live

ASK = {"model": "talks", "temperature": 0, "max_tokens": 12}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.sampling == {}  # nobody advises anything
    assert (model.id, model.object, client.models.retrieve("talks").id) == ("talks", "model", "talks")


def test_completions_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="One two", logprobs=2, **ASK)
    chunks = list(client.completions.create(prompt="One two", logprobs=2, stream=True, **ASK))
    (choice,) = whole.choices
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason == "length"
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert tokens == choice.logprobs.tokens
    assert len(tokens) == whole.usage.completion_tokens == 12
    assert whole.usage.prompt_tokens == len("One two")


def test_chats_whole_and_streamed(client: openai.OpenAI) -> None:
    ask = {**ASK, "messages": HELLO, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask))
    *said, last = chunks
    assert said[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in said) == whole.choices[0].message.content
    assert said[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 12
    content = whole.choices[0].logprobs.content
    assert len(content) == 12
    assert all(len(each.top_logprobs) == 3 and each.logprob == each.top_logprobs[0].logprob for each in content)


def test_several_answers(client: openai.OpenAI) -> None:
    several = client.chat.completions.create(**{**ASK, "temperature": 1.5}, messages=HELLO, n=3, seed=7)
    texts = [choice.message.content for choice in several.choices]
    assert len(set(texts)) == 3
    alone = client.chat.completions.create(**{**ASK, "temperature": 1.5}, messages=HELLO, seed=7)
    assert alone.choices[0].message.content == texts[0]
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens


def test_responses_go_on_from_each_other(client: openai.OpenAI) -> None:
    ask = {"model": "talks", "temperature": 0, "max_output_tokens": 12}
    first = client.responses.create(input="Hello", **ask)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    second = client.responses.create(input="And then?", previous_response_id=first.id, **ask)
    told = [*HELLO, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And then?"}]
    whole = client.chat.completions.create(**ASK, messages=told)
    assert second.output_text == whole.choices[0].message.content
    read = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens == read
    assert second.usage.input_tokens == whole.usage.prompt_tokens


def test_responses_streamed(client: openai.OpenAI) -> None:
    ask = {"model": "talks", "temperature": 0, "max_output_tokens": 12, "input": "Hello"}
    with client.responses.stream(**ask) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"
    whole = client.responses.create(**ask)
    events = list(client.responses.create(stream=True, **ask))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_asynchronous_and_together(server: Live) -> None:
    async def ask(client: openai.AsyncOpenAI, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        stream = await client.chat.completions.create(messages=messages, stream=True, **ASK)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all(texts: list[str]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(ask(client, text) for text in texts))
            alone = [await ask(client, text) for text in texts]
        assert together == alone
        return together

    assert len(set(asyncio.run(ask_all([f"Question {i}" for i in range(9)])))) > 1


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature") as error:
        client.completions.create(model="talks", prompt="a", temperature=3)
    assert (error.value.param, error.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(model="talks", messages=HELLO, tools=[{"type": "function"}])
    with pytest.raises(openai.BadRequestError, match="no field 'temprature'"):
        client.completions.create(model="talks", prompt="a", extra_body={"temprature": 1})
    with pytest.raises(openai.NotFoundError, match="no response"):
        client.responses.create(model="talks", input="a", previous_response_id="x")
