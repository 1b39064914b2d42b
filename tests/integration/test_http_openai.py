"""OpenAI's own Python client against a gateway with a real swarm behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from swarm import AsyncClient
from swarm.demo import model_path
from swarm.errors import RequestFailed
from tests.integration.gateway import LONG, MODEL, Gateway, Served, events_in, request
from tests.integration.processes import Processes

openai = pytest.importorskip("openai", reason="OpenAI's Python client is not installed")
pytest.importorskip("fastapi", reason="the gateway's packages are not installed")
if True:  # what needs the client
    from openai import AsyncOpenAI, OpenAI

QUESTION = [{"role": "user", "content": "Who lives in the village?"}]
PROMPT = "The miller"


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest_asyncio.fixture
async def swarm(served: Served) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(served.swarm.url) as client:
        yield client


def chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, "max_tokens": 24, **options})


def text(client: OpenAI, **options: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 24, **options})


def streamed(chunks: Any) -> dict[int, str]:
    """The texts of a chat's stream, by choice."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


# --- the same as the Python client ----------------------------------------------------------------------------------


async def test_a_conversation_is_answered_as_by_the_python_client(client: OpenAI, swarm: AsyncClient) -> None:
    """Text, reason and counts, for the same seed, whole and streamed."""
    expected = await swarm.chat(QUESTION, max_tokens=24, temperature=1.0, seed=5)
    whole = await asyncio.to_thread(chat, client, seed=5)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage.prompt_tokens == expected.usage.num_prompt
    assert whole.usage.completion_tokens == expected.usage.num_tokens
    assert whole.usage.total_tokens == expected.usage.num_total
    parts = await asyncio.to_thread(lambda: streamed(chat(client, seed=5, stream=True)))
    assert parts == {0: expected.text}


async def test_several_continuations_are_as_by_the_python_client(client: OpenAI, swarm: AsyncClient) -> None:
    """Each choice at its place, whole and streamed, of chats and of texts."""
    talk = await swarm.chat(QUESTION, max_tokens=24, temperature=1.0, seed=6, n=3)
    told = [choice.text for choice in talk.choices]
    whole = await asyncio.to_thread(chat, client, seed=6, n=3)
    assert [choice.message.content for choice in whole.choices] == told
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    parts = await asyncio.to_thread(lambda: streamed(chat(client, seed=6, n=3, stream=True)))
    assert [parts[index] for index in range(3)] == told
    prose = await swarm.generate(PROMPT, max_tokens=24, temperature=1.0, seed=6, n=2)
    found = await asyncio.to_thread(text, client, seed=6, n=2)
    assert [choice.text for choice in found.choices] == [choice.text for choice in prose.choices]


async def test_stop_strings_end_the_text_wherever_tokens_begin(client: OpenAI, swarm: AsyncClient) -> None:
    """Each stop string is cut out of the middle of the undisturbed text, over borders of tokens; nothing of it shows,
    not even the beginning that a stream could have sent."""
    plain = (await swarm.chat(QUESTION, max_tokens=40)).text
    for at in range(8, 20, 3):
        stop = plain[at : at + 7]
        cut = plain[: plain.index(stop)]
        expected = await swarm.chat(QUESTION, max_tokens=40, stop=[stop])
        assert expected.text == cut
        whole = await asyncio.to_thread(chat, client, temperature=0, max_tokens=40, stop=stop)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (cut, "stop")
        assert whole.usage.completion_tokens == expected.usage.num_tokens
        parts = await asyncio.to_thread(
            lambda stop=stop: streamed(chat(client, temperature=0, max_tokens=40, stop=["\0", stop], stream=True))
        )
        assert parts == {0: cut}


def test_an_answer_goes_on_where_its_beginning_ends(client: OpenAI) -> None:
    """The beginning is the last message; the rest is as if it had never been cut. Other servers' names for lengths,
    penalties and formats mean the same."""
    whole = chat(client, temperature=0, max_tokens=12).choices[0].message.content
    half = chat(client, temperature=0, max_tokens=5).choices[0].message.content
    history = [*QUESTION, {"role": "assistant", "content": half}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "n_predict": 7, "repeat_penalty": 1.0}
    rest = chat(client, messages=history, temperature=0, max_tokens=None, extra_body=more).choices[0].message.content
    assert half + rest == whole
    chosen = chat(client, extra_body={"structured_outputs": {"choice": ["Rome", "Oslo"]}}).choices[0].message.content
    assert chosen in ("Rome", "Oslo")


def test_temperature_0_and_a_seed_repeat_an_answer(client: OpenAI) -> None:
    """And another seed is another answer."""
    assert len({chat(client, temperature=0, seed=seed).choices[0].message.content for seed in (1, 2)}) == 1
    drawn = [text(client, temperature=1.5, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


# --- forms ----------------------------------------------------------------------------------------------------------


def test_a_stream_has_the_form_that_clients_read(served: Served) -> None:
    """A role first, then texts, then the reason alone; usage is null until a chunk without choices; no delta has empty
    tool calls; the end is [DONE]."""
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 6, "temperature": 0, "stream": True}
    code, headers, content = request(
        served.v1 + "/chat/completions", body | {"stream_options": {"include_usage": True}}
    )
    assert code == 200
    assert headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_in(content.decode())
    assert done.data == "[DONE]"
    *said, usage = [event.json for event in chunks]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in said)
    deltas = [chunk["choices"][0]["delta"] for chunk in said]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta and "tool_calls" not in delta for delta in deltas[1:])
    assert deltas[-1] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in said]
    assert reasons == [None] * (len(said) - 1) + ["length"]
    assert len({chunk["id"] for chunk in [*said, usage]}) == 1
    assert len({event.id for event in chunks}) == len(chunks)


def test_without_stream_options_there_is_no_usage_in_a_stream(client: OpenAI) -> None:
    chunks = list(chat(client, max_tokens=4, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


@pytest.mark.parametrize("top", [None, 0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_with_each_token(client: OpenAI, top: int | None, stream: bool) -> None:
    """Without alternatives unless some are asked for; the most likely first; one entry a token; and the reason is told
    at the cap as it is without."""
    options = {} if top is None else {"top_logprobs": top}
    answer = chat(client, temperature=0, max_tokens=7, logprobs=True, stream=stream, **options)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        entries = [entry for choice in chunks if choice.logprobs for entry in choice.logprobs.content]
        said, reason = "".join(choice.delta.content or "" for choice in chunks), chunks[-1].finish_reason
    else:
        entries, said = answer.choices[0].logprobs.content, answer.choices[0].message.content
        reason = answer.choices[0].finish_reason
    assert reason == "length"
    assert len(entries) == 7
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == said
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == (top or 0)
        if top:
            assert entry.top_logprobs[0].token == entry.token  # greedy


def test_without_logprobs_there_are_none(client: OpenAI) -> None:
    assert chat(client).choices[0].logprobs is None
    assert chat(client, logprobs=False).choices[0].logprobs is None
    assert text(client).choices[0].logprobs is None


@pytest.mark.parametrize("top", [0, 1, 3])
def test_a_texts_logprobs_are_lists_beside_each_other(client: OpenAI, top: int) -> None:
    choice = text(client, temperature=0, max_tokens=8, logprobs=top).choices[0]
    told = choice.logprobs
    assert "".join(told.tokens) == choice.text
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 8
    assert all(len(each) == top for each in told.top_logprobs)
    assert told.text_offset == [sum(map(len, told.tokens[:at])) for at in range(8)]


def test_echo_says_the_prompt_first(client: OpenAI) -> None:
    """Whole and streamed, for every prompt and choice at its place."""
    plain, echoed = (text(client, seed=3, n=2, echo=echo) for echo in (False, True))
    assert [c.text for c in echoed.choices] == [PROMPT + c.text for c in plain.choices]
    texts = {0: "", 1: ""}
    for chunk in text(client, prompt=[PROMPT, "Anna"], temperature=0, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    both = text(client, prompt=[PROMPT, "Anna"], temperature=0, echo=True)
    assert texts == {choice.index: choice.text for choice in both.choices}
    assert texts[1].startswith("Anna")


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_has_those_of_the_prompt(client: OpenAI, max_tokens: int) -> None:
    """As lm-evaluation-harness asks for them. The first token has none."""
    prompts = [PROMPT, "Anna"]
    answer = text(client, prompt=prompts, temperature=0, max_tokens=max_tokens, echo=True, logprobs=2)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        told = choice.logprobs
        begin, *tokens = told.tokens  # a special token, which has no text
        assert (begin, "".join(tokens)) == ("<|begin|>", choice.text)
        assert choice.text.startswith(prompt)
        assert told.text_offset == [0, *(sum(map(len, tokens[:at])) for at in range(len(tokens)))]
        assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
        assert all(each < 0 for each in told.token_logprobs[1:])
        assert all(len(each) == 2 for each in told.top_logprobs[1:])
        assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * max_tokens
    twice = text(client, temperature=0.9, seed=3, n=2, max_tokens=3, echo=True, logprobs=2)
    num_prompt = len(answer.choices[0].logprobs.tokens) - max_tokens
    first, second = (choice.logprobs.token_logprobs[:num_prompt] for choice in twice.choices)
    assert first == second == answer.choices[0].logprobs.token_logprobs[:num_prompt]


def test_an_echo_alone_needs_no_logprobs(client: OpenAI) -> None:
    answer = text(client, max_tokens=0, echo=True)
    assert (answer.choices[0].text, answer.choices[0].logprobs) == (PROMPT, None)


def test_prompts_may_be_token_ids(client: OpenAI, served: Served) -> None:
    """One list, several, and texts: the same answers."""
    ids = asyncio.run(_ids(served.swarm.url, PROMPT))
    plain = text(client, temperature=0).choices[0].text
    assert text(client, prompt=list(ids), temperature=0).choices[0].text == plain
    both = text(client, prompt=[list(ids), list(ids)], temperature=0)
    assert [choice.text for choice in both.choices] == [plain, plain]
    assert both.usage.prompt_tokens == 2 * len(ids)


async def _ids(url: str, prompt: str) -> tuple[int, ...]:
    async with AsyncClient(url) as client:
        model = await client.text_model()
        assert model is not None
        return model.encode(prompt)


def test_the_streaming_helper_adds_up_the_whole_answer(client: OpenAI) -> None:
    """Its events are those of a text, and the final completion equals the one that isn't streamed."""
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert kinds == {"chunk", "content.delta", "content.done"}
    whole = client.chat.completions.create(**options)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_models_are_listed_and_told_singly(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    one = client.models.retrieve(MODEL)
    assert (one.id, one.object, one.owned_by) == (MODEL, "model", "swarm")
    can = one.model_dump()["swarm"]
    assert can["context"] == 2048
    assert {"tools", "json_schema", "chat", "context_now"} <= can.keys()


def test_every_answer_has_a_request_id(client: OpenAI) -> None:
    """Of an answer, it is the one that the broker knows it by; errors have one, too."""
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION, max_tokens=2)
    assert raw.parse().id == "chatcmpl-" + raw.headers["x-request-id"]
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="another")
    assert caught.value.request_id


# --- what clients send ----------------------------------------------------------------------------------------------


def test_messages_are_taken_as_clients_send_them(client: OpenAI) -> None:
    """A developer is a system; contents may be lists, empty or null; systems may come late."""
    lines: list[Any] = [{"role": "system", "content": "Be kind."}, *QUESTION]
    plain = chat(client, messages=lines, temperature=0)
    for same in (
        [{"role": "developer", "content": "Be kind."}, *QUESTION],
        [
            {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
            *QUESTION,
        ],
    ):
        other = chat(client, messages=same, temperature=0)
        assert other.usage.prompt_tokens == plain.usage.prompt_tokens
        assert other.choices[0].message.content == plain.choices[0].message.content
    late = [*QUESTION, {"role": "assistant", "content": None}, {"role": "user", "content": ""},
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": []}, *QUESTION]  # fmt: skip
    assert chat(client, messages=late).choices[0].message.content is not None


def test_bookkeeping_is_accepted(client: OpenAI) -> None:
    """It changes nothing of an answer."""
    plain = chat(client, temperature=0)
    told = chat(
        client, temperature=0, user="me", metadata={"a": "b"}, store=False, service_tier="auto", prompt_cache_key="k",
        safety_identifier="s", parallel_tool_calls=True, reasoning_effort="none", modalities=["text"],
        extra_body={"client_metadata": {"x": 1}},
    )  # fmt: skip
    assert told.choices[0].message.content == plain.choices[0].message.content


def test_max_completion_tokens_is_the_cap(client: OpenAI) -> None:
    """It goes before max_tokens; without either an answer ends by itself, or where the context does."""
    answer = chat(client, max_tokens=20, max_completion_tokens=3, temperature=0)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")
    free = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert free.choices[0].finish_reason == "stop"
    full = text(client, prompt=[7] * 2040, max_tokens=100, extra_body=LONG)
    assert (full.usage.total_tokens, full.choices[0].finish_reason) == (2048, "length")


def test_json_is_read_whatever_it_is_called(served: Served) -> None:
    """Without a content type it is JSON, and with a wrong one."""
    body = json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 2}).encode()
    assert request(served.v1 + "/completions", body)[0] == 200
    bare = _bare(served, body)
    assert bare.startswith(b"HTTP/1.1 200")
    form = [("content-type", "application/x-www-form-urlencoded")]  # as curl says without being told
    assert request(served.v1 + "/completions", body, form)[0] == 200


def _bare(served: Served, body: bytes) -> bytes:
    """The answer to a body without a content type, which no library would send."""
    import socket

    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    answer = b""
    with socket.create_connection(("127.0.0.1", served.gateway.port), timeout=60) as link:
        link.sendall(head.encode() + body)
        while more := link.recv(65536):
            answer += more
    return answer


# --- errors ---------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"frequency": 1}, "frequency"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1000}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 50}, "stop"),
    ({"presence_penalty": 1000}, "presence_penalty"),
    ({"logit_bias": {"word": 1}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"messages": []}, "messages"),
    ({"messages": ["hello"]}, "messages.0"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ({"reasoning_effort": "most"}, "reasoning_effort"),
    ({"priority": "urgent"}, "priority"),
    ({"speculation": "always"}, "speculation"),
    ({"deadline_s": 0}, "deadline_s"),
    ({"keep_s": 5}, "keep_s"),
    ({"keep_s": 601, "stream": True}, "keep_s"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=[f"{param}-{at}" for at, (_, param) in enumerate(WRONG)])
def test_what_is_wrong_is_named(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    """A 400 in OpenAI's form, with the field."""
    known = {name: value for name, value in fields.items() if name in ("messages", "stream")}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **known, extra_body={name: value for name, value in fields.items() if name not in known})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": 0, "n": 2}, "n"),
        ({"logprobs": 100}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 2, 100000]}, "prompt"),
        ({"prompt": ["a", "b"], "keep_s": 5, "stream": True}, "keep_s"),
        ({"prompt": "long " * 3000}, "prompt"),
    ],
)
def test_what_is_wrong_with_a_text_is_named(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        text(client, extra_body=fields)
    assert caught.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_before_a_stream_begins(client: OpenAI, stream: bool) -> None:
    """By its status and code, not in the stream."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=QUESTION * 300, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 2048 tokens. However, you requested " in caught.value.message


def test_a_chat_that_goes_on_fills_the_context_and_is_then_refused_at_once(client: OpenAI) -> None:
    """Each answer ends by itself or where the context does, and the one for which there is no position is refused by
    its code: nobody waits for an answer that can't come."""
    messages, ends = list(QUESTION), []
    while (said := _turn(client, messages, ends)) is not None:
        messages += [{"role": "assistant", "content": said}, *QUESTION]
    assert len(ends) > 2
    assert set(ends) == {"length"}


def _turn(client: OpenAI, messages: list[dict[str, str]], ends: list[str]) -> str | None:
    """What is answered, while there is room for an answer; how it ended is added to ``ends``."""
    try:
        chunks = list(chat(client, messages=messages, max_tokens=600, stream=True, temperature=0, extra_body=LONG))
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise
        return None
    ends += [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    return streamed(chunks)[0]


def test_unknown_models_and_places_are_not_found(client: OpenAI, served: Served) -> None:
    for ask in (lambda: chat(client, model="another"), lambda: client.models.retrieve("another")):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    for path, method, expected in (("/v1/nothing", "GET", 404), ("/v1/models", "POST", 405)):
        code, headers, content = request(served.url + path, b"{}" if method == "POST" else None, method=method)
        assert code == expected
        assert json.loads(content)["error"]["message"]
        assert headers["x-request-id"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": NaN}'])
def test_what_is_no_body_is_refused(served: Served, body: bytes) -> None:
    code, _, content = request(served.v1 + "/chat/completions", body)
    assert code == 400
    assert json.loads(content)["error"]["type"] == "invalid_request_error"


async def test_each_prompt_of_several_can_be_traced(served: Served, swarm: AsyncClient) -> None:
    """By the answer's id and its number; the answer's id alone begins them all."""
    body = {"model": MODEL, "prompt": ["Hello", "Good"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    _, headers, content = await asyncio.to_thread(request, served.v1 + "/completions", body)
    request_id = headers["x-request-id"]
    assert json.loads(content)["id"] == f"cmpl-{request_id}"
    for number in range(2):
        trace: Any = await swarm.trace(f"{request_id}-{number}")
        assert [len(sequence["tokens"]) for sequence in trace["sequences"]] == [3, 3]
    with pytest.raises(RequestFailed, match="2 requests begin with"):
        await swarm.trace(request_id)


# --- time, hanging up, fullness -------------------------------------------------------------------------------------


async def test_a_client_that_gives_up_leaves_nothing_behind(served: Served, swarm: AsyncClient) -> None:
    """By its time limit, and by leaving a stream: the broker's counters go back to nothing at once, not at the end of
    an answer of two thousand tokens."""
    async with AsyncOpenAI(base_url=served.v1, api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "extra_body": LONG | {"n": 4}}
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**options, timeout=0.3)
        stream = await client.chat.completions.create(**options, stream=True)
        async for _ in stream:
            break
        await stream.close()
        task = asyncio.ensure_future(client.chat.completions.create(**options))
        await served.swarm.until(swarm, "stats", lambda s: not _is_quiet(s))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await served.until_empty(swarm)


def _is_quiet(report: dict[str, Any]) -> bool:
    return bool(report["pipeline"]["running"] == 0)


async def test_a_deadline_ends_an_answer(served: Served) -> None:
    """Which is no fault of the client's, and none of the server's either: 5xx with a reason, in time."""
    async with AsyncOpenAI(base_url=served.v1, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(
                model=MODEL, messages=QUESTION, extra_body=LONG | {"deadline_s": 0.2, "n": 4}
            )
    assert caught.value.status_code >= 500
    assert "deadline" in caught.value.message


def test_a_full_swarm_says_when_to_come_again(zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """429 with Retry-After; the client's own retries keep to it and get their answer in the end."""
    options = {"SWARM_BROKER__MAX_QUEUE": "1", "SWARM_BROKER__MAX_RUNNING": "1"}
    with Served(tmp_path_factory.mktemp("full"), zygote, options) as full:
        asyncio.run(_fill_up(full))


async def _fill_up(full: Served) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 600, "extra_body": LONG}
    async with (
        AsyncOpenAI(base_url=full.v1, api_key="none", max_retries=0) as once,
        AsyncOpenAI(base_url=full.v1, api_key="none", max_retries=20, timeout=60) as patient,
        AsyncClient(full.swarm.url) as swarm,
    ):
        busy = [asyncio.ensure_future(once.chat.completions.create(**options)) for _ in range(2)]
        await full.swarm.until(swarm, "stats", lambda s: s["pipeline"]["queued"] == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await once.chat.completions.create(**options)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        late = await patient.chat.completions.create(**options | {"max_tokens": 3})
        assert late.usage is not None
        assert late.usage.completion_tokens == 3
        await asyncio.gather(*busy)


def test_a_gateway_without_a_broker_says_so(zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It is alive and not ready; 503 with a reason and a time to come again; with a broker, it serves at once."""
    logs = tmp_path_factory.mktemp("alone")
    swarm = Processes(model_path(), logs, launch=zygote)
    gateway = Gateway(swarm.url, logs, start=zygote)
    try:
        gateway.start()
        code, headers, content = request(gateway.url + "/v1/models")
        assert code == 503
        assert headers["retry-after"]
        assert swarm.url in json.loads(content)["error"]["message"]
        assert request(gateway.url + "/health")[0] == 200
        swarm.start_broker()
        code, _, content = request(gateway.url + "/ready")
        assert code == 503
        assert "worker" in json.loads(content)["error"]["message"]
    finally:
        gateway.stop()
        swarm.stop()
