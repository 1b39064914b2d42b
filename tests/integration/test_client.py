"""Both clients against a scripted broker, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import psutil
import pytest

from swarm import (
    AsyncClient,
    Client,
    Completion,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    RequestTimeout,
    SamplingParams,
    Unavailable,
)
from swarm.client.results import VectorAnswer
from swarm.errors import ModelError
from swarm.wire.messages import Ack, Attach, Cancel, Detach, GetAsset, Rejected, Report, Stop, Submit
from tests.integration.fake_broker import EOS, WINDOW, FakeBroker, say

pytestmark = pytest.mark.usefixtures("own_cache")


def story(_submit: object, _index: int) -> list[int]:
    return [*say("hello wörld €, 🙂!"), EOS]


def echo(submit: Submit, index: int) -> list[int]:
    """Says its prompt again, and which continuation it is."""
    return [*submit.prompt[1:], *say(f" #{index}")]


def count_up(_submit: object, _index: int) -> list[int]:
    return [5 + i % 250 for i in range(3000)]


# --- what comes back ------------------------------------------------------------------------------------------------


async def test_generate_gives_the_whole_answer() -> None:
    """Text, tokens, reason, usage and timing come back; the token that ends the text is counted, but not shown."""
    async with FakeBroker(story) as broker, AsyncClient(broker.url) as client:
        done = await client.generate("hi", max_tokens=100, seed=7)
    assert done.text == "hello wörld €, 🙂!"
    assert list(done.tokens) == story(None, 0)
    assert done.finish_reason == "stop"
    assert (done.usage.num_prompt, done.usage.num_tokens) == (3, len(done.tokens))
    assert done.usage.num_total == 3 + len(done.tokens)
    assert done.timing.total_s == pytest.approx(0.003)
    assert done.seed == 7


async def test_stream_gives_every_token_as_it_comes() -> None:
    """Pieces are numbered, whole characters only, and the last one has the reason."""
    async with FakeBroker(story) as broker, AsyncClient(broker.url) as client:
        pieces = [piece async for piece in client.stream("hi", max_tokens=100)]
    assert [piece.token for piece in pieces] == story(None, 0)
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert "".join(piece.text for piece in pieces) == "hello wörld €, 🙂!"
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert not any("\ufffd" in piece.text for piece in pieces)


async def test_a_token_is_shown_before_the_next_one_exists() -> None:
    """Streaming doesn't wait for later tokens."""
    async with (
        FakeBroker(story, allowed=1) as broker,
        AsyncClient(broker.url) as client,
        aclosing(client.stream("hi", max_tokens=100)) as stream,
    ):
        assert (await anext(stream)).text == "hello"
        broker.allow(None)
        assert (await anext(stream)).text == " "


async def test_token_ids_as_prompt_options_and_logprobs() -> None:
    """Ids go to the broker as they are; hops and logprobs come back one per token; options reach the wire."""
    async with FakeBroker(echo) as broker, AsyncClient(broker.url) as client:
        done = await client.generate(
            [0, 10, 20],
            SamplingParams(temperature=0.5),
            max_tokens=4,
            logprobs=1,
            hops=True,
            priority=5,
            deadline_s=9.0,
        )
        [submit] = broker.heard_of(Submit)
    assert isinstance(submit, Submit)
    assert submit.prompt == (0, 10, 20)
    assert (submit.params.temperature, submit.params.max_tokens, submit.priority) == (0.5, 4, 5)
    assert submit.deadline_s == 9.0
    assert len(done.tokens) == len(done.logprobs) == len(done.hops) == 4
    assert done.hops[0][0].worker == "w0"
    assert done.finish_reason == "length"


async def test_special_tokens_are_seen_by_those_who_ask() -> None:
    """Each reader for itself, also one that attaches; the broker hears nothing of it."""

    def marked(_submit: object, _index: int) -> list[int]:
        return [0, *say("hi"), 0]

    async with FakeBroker(marked) as broker, AsyncClient(broker.url) as client:
        assert (await client.generate("a", max_tokens=9, request_id="r")).text == "hi"
        assert (await client.generate("a", max_tokens=9, visible=[0])).text == "<s>hi<s>"
        seen = [piece.text async for piece in client.attach("r", timeout=30, visible=[0])]
        silent = [piece.text async for piece in client.attach("r", timeout=30)]
    assert ("".join(seen), "".join(silent)) == ("<s>hi<s>", "hi")
    with broker.in_thread(), Client(broker.url) as blocking:
        assert "".join(piece.text for piece in blocking.attach("r", timeout=30, visible=[0])) == "<s>hi<s>"


async def test_several_continuations() -> None:
    """n continuations come back as choices in order, however they were mixed on the way."""
    async with FakeBroker(echo) as broker, AsyncClient(broker.url) as client:
        done = await client.generate("a", n=3, max_tokens=50)
    assert [choice.text for choice in done.choices] == ["a #0", "a #1", "a #2"]
    assert done.usage.num_tokens == sum(len(choice.tokens) for choice in done.choices)


async def test_batches_keep_their_order() -> None:
    """All prompts of a batch are under way together; answers stand where their prompts stood."""
    prompts = [f"prompt {i}" for i in range(40)]
    async with FakeBroker(echo, allowed=0) as broker, AsyncClient(broker.url) as client:
        batch = asyncio.create_task(client.generate_batch(prompts, max_tokens=50))
        await broker.wait_until(lambda: len(broker.heard_of(Submit)) == 40)  # before a single answer
        broker.allow(None)
        assert [done.text for done in await batch] == [f"{prompt} #0" for prompt in prompts]


async def test_stream_of_a_batch() -> None:
    """Tokens of several prompts come as they come, each with its prompt's place, and exactly one says that it is the
    last; in the end the answers are there as :meth:`generate_batch` gives them."""
    async with FakeBroker(echo) as broker, AsyncClient(broker.url) as client:
        texts, tokens, ends = ["", ""], [0, 0], [0, 0]
        async with client.stream_batch(["a", "b"], max_tokens=50) as stream:
            assert stream.completions is None
            async for index, token, text, finished in stream:
                texts[index] += text
                tokens[index] += token is not None
                ends[index] += finished
        assert stream.completions is not None
        together = await client.generate_batch(["a", "b"], max_tokens=50)
    assert texts == ["a #0", "b #0"]
    assert ends == [1, 1]
    assert [(done.text, len(done.tokens)) for done in stream.completions] == list(zip(texts, tokens, strict=True))
    assert [done.tokens for done in stream.completions] == [done.tokens for done in together]


async def test_pieces_of_a_batch_know_the_rest() -> None:
    """With several continuations, each piece says to which it belongs and why it is the last."""
    async with FakeBroker(echo) as broker, AsyncClient(broker.url) as client:
        ends = [entry.piece async for entry in client.stream_batch(["a"], n=2, max_tokens=50) if entry.finished]
    assert sorted((piece.choice, piece.finish_reason) for piece in ends) == [(0, "length"), (1, "length")]


async def test_leaving_a_batch_cancels_all_of_it() -> None:
    """By leaving the block, with nothing of it finished."""
    async with FakeBroker(echo, allowed=1) as broker, AsyncClient(broker.url) as client:
        async with client.stream_batch(["long one", "long two"], max_tokens=50) as stream:
            index, token, _, finished = await anext(stream)
            assert index in (0, 1)
            assert token is not None
            assert not finished
        await broker.wait_until(lambda: len(broker.heard_of(Cancel)) == 2)
        assert stream.completions is None
        assert [piece async for piece in stream] == []


async def test_an_empty_batch_has_no_tokens() -> None:
    """And no answers."""
    async with FakeBroker(echo) as broker, AsyncClient(broker.url) as client:
        stream = client.stream_batch([])
        assert [piece async for piece in stream] == []
        assert stream.completions == []


async def test_errors_in_a_batch() -> None:
    """By default the first error is raised and the others are cancelled; with return_errors it takes its place."""

    def refuse(submit: Submit) -> Rejected | None:
        if len(submit.prompt) == 2:  # "b" and the token before it
            return Rejected(request_id=submit.request_id, code="overloaded", reason="full", retry_after_s=3.0)
        return None

    async with FakeBroker(echo, refuse=refuse, allowed=1) as broker, AsyncClient(broker.url) as client:
        with pytest.raises(Overloaded) as raised:
            await client.generate_batch(["long", "b"], max_tokens=9)
        assert raised.value.retry_after_s == 3.0
        await broker.wait_until(lambda: len(broker.heard_of(Cancel)) == 1)
        broker.allow(None)
        good, bad = await client.generate_batch(["long", "b"], return_errors=True, max_tokens=9)
    assert not isinstance(good, Exception)
    assert good.text == "long #0"
    assert isinstance(bad, Overloaded)


async def test_prompts_that_are_wrong_in_a_batch() -> None:
    """Whatever is wrong with a prompt, with return_errors it is an error in its place and the others are answered; by
    default nothing is submitted."""
    prompts: list[str | list[int]] = ["", "one", [-1], [], "two", [1 << 40]]
    async with FakeBroker(echo) as broker, AsyncClient(broker.url) as client:
        with pytest.raises(InvalidRequest, match="empty"):
            await client.generate_batch(prompts, max_tokens=9)
        assert broker.heard_of(Submit) == []
        answers = await client.generate_batch(prompts, return_errors=True, max_tokens=9)
        assert [type(answer) for answer in answers] == [
            InvalidRequest,
            Completion,
            InvalidRequest,
            InvalidRequest,
            Completion,
            InvalidRequest,
        ]
        texts = [answer.text for answer in answers if isinstance(answer, Completion)]
        assert [text.split()[0] for text in texts] == ["one", "two"]
        (only,) = await client.generate_batch([""], return_errors=True)
        assert isinstance(only, InvalidRequest)


async def test_chat_uses_the_models_template() -> None:
    """A conversation becomes the prompt that the template writes, without a second <s> before it."""
    async with FakeBroker(echo) as broker, AsyncClient(broker.url) as client:
        done = await client.chat([{"role": "user", "content": "hello"}], max_tokens=100)
        text = await client.text_model()
    assert done.text == "user: hello\nassistant:  #0"
    assert text is not None
    assert text.render_chat([{"role": "user", "content": "x"}]) == "<s>user: x\n<s>assistant: "


# --- stop strings -----------------------------------------------------------------------------------------------------


async def test_a_stop_string_ends_the_text_at_the_broker_too() -> None:
    """The text ends before the stop string, the broker hears where, and its end is awaited."""

    def answer(_submit: Submit, _index: int) -> list[int]:
        return say("one END two") * 100

    async with FakeBroker(answer, allowed=20) as broker, AsyncClient(broker.url) as client:
        done = await client.generate("x", stop="END", max_tokens=1000)
        [stop] = broker.heard_of(Stop)
    assert done.text == "one "
    assert done.finish_reason == "stop"
    assert isinstance(stop, Stop)
    assert stop.at_index == len(done.tokens) == 4
    assert done.tokens == tuple(say("one "))


async def test_stop_strings_without_a_tokenizer() -> None:
    """Refused before anything is sent; so is text. Token ids still work, without text."""
    async with FakeBroker(count_up, files={}) as broker, AsyncClient(broker.url) as client:
        with pytest.raises(InvalidRequest, match="stop_token_ids"):
            await client.generate([1], stop="x")
        with pytest.raises(InvalidRequest, match="this model has no tokenizer: pass token ids"):
            await client.generate("text")
        assert broker.heard_of(Submit) == []
        done = await client.generate([1], max_tokens=3)
    assert (done.text, done.tokens) == ("", (5, 6, 7))


# --- leaving early ----------------------------------------------------------------------------------------------------


async def test_breaking_out_of_a_stream_cancels() -> None:
    """No explicit close is needed."""
    async with FakeBroker(count_up, allowed=3) as broker, AsyncClient(broker.url) as client:
        async for _ in client.stream("x", max_tokens=1000):
            break
        await broker.wait_until(lambda: len(broker.heard_of(Cancel)) == 1)


async def test_cancelling_the_task_cancels() -> None:
    """A cancelled task passes its cancellation on to the broker, and the next request is served."""
    async with FakeBroker(story, allowed=1) as broker, AsyncClient(broker.url) as client:
        task = asyncio.create_task(client.generate("x", max_tokens=1000))
        await broker.wait_until(lambda: len(broker.heard_of(Submit)) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await broker.wait_until(lambda: len(broker.heard_of(Cancel)) == 1)
        broker.allow(None)
        assert (await client.generate("x", max_tokens=1000)).finish_reason == "stop"


@pytest.mark.parametrize("cancels", [True, False])
async def test_a_cancelled_task_leaves_a_detached_request_as_its_stream_says(cancels: bool) -> None:
    """Also before the first token has come: the request continues, or is cancelled for ``cancel_when_left``."""
    async with FakeBroker(story, allowed=0) as broker, AsyncClient(broker.url) as client:
        stream = client.stream("x", max_tokens=1000, detached=True)
        if cancels:
            stream.cancel_when_left()
        task = asyncio.ensure_future(stream.take_ready())
        await broker.wait_until(lambda: len(broker.heard_of(Submit)) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await broker.wait_until(lambda: len(broker.heard_of(Cancel if cancels else Detach)) == 1)


async def test_vectors_of_one_request_id_are_found_again() -> None:
    """Each prompt has an id that follows from its place. Detached ones continue after an error, so that a repetition
    finds them, and are cancelled when the caller gives up."""

    def refuse(submit: Submit) -> Rejected | None:
        if submit.prompt == (2,) and len(broker.heard_of(Submit)) <= 2:
            return Rejected(request_id=submit.request_id, code="overloaded", reason="full", retry_after_s=3.0)
        return None

    async with FakeBroker(story, refuse=refuse, allowed=0) as broker, AsyncClient(broker.url) as client:

        def compute() -> Coroutine[Any, Any, list[VectorAnswer]]:
            options = {"request_id": "e", "detached": True, "seed": 1}
            return client.compute_vectors([(1,), (2,)], SamplingParams(vector="mean"), **options)  # type: ignore[arg-type]

        with pytest.raises(Overloaded):
            await compute()
        await broker.wait_until(lambda: len(broker.heard_of(Detach)) == 1)
        assert broker.heard_of(Cancel) == []
        task = asyncio.create_task(compute())
        await broker.wait_until(lambda: len(broker.heard_of(Submit)) == 4)
        first, second = broker.heard_of(Submit)[:2], broker.heard_of(Submit)[2:]
        assert first == second
        assert [submit.request_id for submit in second] == ["e-0", "e-1"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await broker.wait_until(lambda: len(broker.heard_of(Cancel)) == 2)


async def test_closing_the_client_cancels_what_is_under_way() -> None:
    """The broker hears of it, and whoever waits is told."""
    async with FakeBroker(story, allowed=1) as broker:
        client = AsyncClient(broker.url)
        task = asyncio.create_task(client.generate("x", max_tokens=1000))
        await broker.wait_until(lambda: len(broker.heard_of(Submit)) == 1)
        await client.aclose()
        await broker.wait_until(lambda: len(broker.heard_of(Cancel)) == 1)
        with pytest.raises(Unavailable, match="closed"):
            await asyncio.wait_for(task, 5)
        with pytest.raises(Unavailable, match="closed"):
            await client.generate("x")


async def test_a_timeout_cancels() -> None:
    """The caller gets RequestTimeout at about the time asked for, the broker a Cancel."""
    async with FakeBroker(story, allowed=1) as broker, AsyncClient(broker.url) as client:
        began = asyncio.get_running_loop().time()
        with pytest.raises(RequestTimeout, match="time limit"):
            await client.generate("x", timeout=0.3)
        assert asyncio.get_running_loop().time() - began < 3
        await broker.wait_until(lambda: len(broker.heard_of(Cancel)) == 1)


async def test_a_slow_consumer_closes_the_window() -> None:
    """The broker sends no more than its window beyond what the consumer has taken; then all of it comes."""
    async with FakeBroker(count_up, chunk=16) as broker, AsyncClient(broker.url) as client:
        stream = client.stream([1], max_tokens=3000)
        pieces = [await anext(stream)]
        [known] = broker.known.values()
        await broker.wait_until(lambda: known.plays[0].sent >= WINDOW)
        assert known.plays[0].sent <= WINDOW + 64
        pieces += [piece async for piece in stream]
    assert [piece.token for piece in pieces] == count_up(None, 0)


# --- a bad road -------------------------------------------------------------------------------------------------------


async def test_repeated_and_lost_messages_change_nothing() -> None:
    """What comes twice is taken once; what is lost is fetched again."""
    lost: list[int] = []

    def lose(message: object) -> bool:
        start = getattr(message, "start", 0)
        if start % 50 == 20 and start not in lost:
            lost.append(start)
            return True
        return False

    async with FakeBroker(count_up, lose=lose, repeat=True) as broker, AsyncClient(broker.url) as client:
        done = await client.generate([1], max_tokens=500)
        assert broker.heard_of(Attach)
    assert list(done.tokens) == count_up(None, 0)[:500]
    assert len(lost) == 10


async def test_a_broker_that_restarts_is_met_again() -> None:
    """Requests go on where they were: nothing twice, nothing missing."""
    async with FakeBroker(count_up, allowed=10) as broker, AsyncClient(broker.url) as client:
        stream = client.stream([1], max_tokens=40)
        tokens = [(await anext(stream)).token for _ in range(10)]
        await broker.shut()
        broker.allow(None)
        await broker.open()
        tokens += [piece.token async for piece in stream]
        assert broker.heard_of(Attach)
        assert len(broker.heard_of(Submit)) == 1
    assert tokens == count_up(None, 0)[:40]


async def test_a_broker_that_stays_away() -> None:
    """After reconnect_timeout_s, and not before, the request fails."""
    async with FakeBroker(count_up, allowed=1) as broker, AsyncClient(broker.url, reconnect_timeout_s=0.5) as client:
        task = asyncio.create_task(client.generate([1], max_tokens=40))
        await broker.wait_until(lambda: len(broker.heard_of(Submit)) == 1)
        await broker.shut()
        with pytest.raises(Unavailable, match="went away"):
            await asyncio.wait_for(task, 10)


async def test_nobody_answers() -> None:
    """Within connect_timeout_s, with a hint."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: nobody else can take the port meanwhile
        url = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        async with AsyncClient(url, connect_timeout_s=0.4) as client:
            with pytest.raises(Unavailable, match=f"no broker answers at {url}: is `swarm up` running there"):
                await client.generate([1])


async def test_somebody_else_answers() -> None:
    """A port that speaks another protocol, or none, is no broker either."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    url = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, AsyncClient(url, connect_timeout_s=0.4) as client:
        with pytest.raises(Unavailable, match="no broker answers"):
            await client.describe()
    async with FakeBroker(story, silent=True) as broker, AsyncClient(broker.url, connect_timeout_s=0.4) as client:
        with pytest.raises(Unavailable, match="does not answer like a broker"):
            await client.describe()


async def test_failures_have_their_types() -> None:
    """What the broker says arrives as the right error, with its words."""
    answers = {
        "overloaded": Overloaded,
        "unavailable": Unavailable,
        "context": InvalidRequest,
        "conflict": InvalidRequest,
        "something new": InvalidRequest,
    }
    async with FakeBroker(story) as broker, AsyncClient(broker.url) as client:
        for code, kind in answers.items():

            def refuse(submit: Submit, code: str = code) -> Rejected:
                return Rejected(request_id=submit.request_id, code=code, reason=f"because {code}")

            broker.refuse = refuse
            with pytest.raises(kind, match=f"because {code}"):
                await client.generate([1])
        broker.refuse, broker.allowed = lambda _: None, 1
        task = asyncio.create_task(client.generate([1], request_id="mine"))
        await broker.wait_until(lambda: "mine" in broker.known)
        broker.fail("mine", "stage 1 was lost")
        with pytest.raises(RequestFailed, match="stage 1 was lost"):
            await task
        task = asyncio.create_task(client.generate([1]))
        await broker.wait_until(lambda: len(broker.known) == 2)
        broker.malformed("protocol version 1 is not spoken here")
        with pytest.raises(InvalidRequest, match="can't decode this client's messages: protocol version"):
            await task


async def test_a_swarm_without_a_model() -> None:
    """Text can't be sent; the error says what the swarm waits for."""
    async with FakeBroker(story) as broker, AsyncClient(broker.url) as client:
        broker.manifest = None
        with pytest.raises(Unavailable, match="no model yet, it waits for a first worker"):
            await client.generate("text")


async def test_a_forged_tokenizer_is_refused() -> None:
    """What doesn't have the announced digest is neither used nor kept."""
    async with FakeBroker(story) as broker, AsyncClient(broker.url) as client:
        good = broker.files["tokenizer.json"]
        broker.files["tokenizer.json"] = good.replace(b"hello", b"jello")
        with pytest.raises(ModelError, match="digests differ"):
            await client.generate("x")
        broker.files["tokenizer.json"] = good
        assert (await client.generate("x", max_tokens=100)).text


async def test_the_tokenizer_is_fetched_once() -> None:
    """Kept in memory by a client and on disk for the next one."""
    async with FakeBroker(story) as broker:
        for _ in range(2):
            async with AsyncClient(broker.url) as client:
                await client.generate_batch(["x", "y"], max_tokens=3)
        assert len(broker.heard_of(GetAsset)) == 2  # tokenizer.json and tokenizer_config.json


async def test_wrong_requests_are_refused_before_anything_is_sent() -> None:
    """Each names what is wrong."""
    async with FakeBroker(story) as broker, AsyncClient(broker.url) as client:
        wrong: list[tuple[object, dict[str, object], str]] = [
            ("", {}, "the prompt is empty"),
            ([], {}, "the prompt is empty"),
            ([1, -1], {}, "-1 is not a token id"),
            (["a"], {}, "sequence of token ids"),
            (b"abc", {}, "not bytes"),
            ("x", {"max_tokens": 0}, "max_tokens must be between 1"),
            ("x", {"max_tokens": "5"}, "max_tokens: expected `int`"),
            ("x", {"temperature": float("nan")}, "temperature must be between"),
            ("x", {"tempratur": 1}, "unknown option 'tempratur'; known are .*temperature"),
            ("x", {"timeout": 0}, "timeout must be a positive"),
            ("x", {"priority": 101}, "priority must be between"),
            ("x", {"logit_bias": {"a": 1.0}}, "logit_bias"),
        ]
        for prompt, options, text in wrong:
            with pytest.raises(InvalidRequest, match=text):
                await client.generate(prompt, **options)  # type: ignore[arg-type]
        assert broker.heard == []


# --- governing --------------------------------------------------------------------------------------------------------


async def test_questions() -> None:
    """Reports come back as they are; a refusal is an error with the broker's words."""
    async with FakeBroker(story) as broker, AsyncClient(broker.url) as client:
        broker.reports["status"] = Report(what="status", ok=True, body={"state": "serving"})
        assert await client.query("status") == {"state": "serving"}
        assert await client.join(2) == {"started": ["w0", "w1"]}
        assert await client.stop_worker("w1") == {"worker": "w1"}
        broker.reports["stop"] = Report(what="stop", ok=False, body={"error": "no worker 'w9'"})
        with pytest.raises(RequestFailed, match="no worker 'w9'"):
            await client.stop_worker("w9")
        assert (await client.describe()).state == "serving"


# --- the blocking twin, and nothing left behind -----------------------------------------------------------------------


def test_the_blocking_client() -> None:
    """Same verbs, same answers, from any thread; leaving an iterator early cancels; a closed client says so."""
    with FakeBroker(echo).in_thread() as broker:
        with Client(broker.url) as client:
            assert client.generate("a", max_tokens=50).text == "a #0"
            stream = client.stream("b", max_tokens=50)
            assert "".join(piece.text for piece in stream) == "b #0"
            assert stream.completion is not None
            assert stream.completion.text == "b #0"
            assert [done.text for done in client.generate_batch(["c", "d"], max_tokens=50)] == ["c #0", "d #0"]
            batch = client.stream_batch(["c", "d"], max_tokens=50)
            assert sorted(index for index, _, _, finished in batch if finished) == [0, 1]
            assert batch.completions is not None
            assert [done.text for done in batch.completions] == ["c #0", "d #0"]
            assert client.chat([{"role": "user", "content": "e"}], max_tokens=90).text.startswith("user: e")
            with pytest.raises(InvalidRequest, match="unknown option"):
                client.stream("x", colour=1)  # type: ignore[call-arg]
            broker.allowed = 1
            for _ in client.stream("f", max_tokens=50):
                break
        broker.wait_in_thread(lambda: len(broker.heard_of(Cancel)) == 1)
        with pytest.raises(Unavailable, match="closed"):
            client.generate("x")


def test_nothing_is_left_behind() -> None:
    """No thread, socket or descriptor outlives its client, whatever became of its requests."""
    process = psutil.Process()
    with FakeBroker(story, allowed=1).in_thread() as broker:
        for _ in range(2):  # the first round opens what stays open for good (the loop's own, the imports')
            gc.collect()
            threads, descriptors = threading.active_count(), process.num_fds()
            with Client(broker.url) as client:
                kept = [client.stream("x", max_tokens=50) for _ in range(5)]
                assert all(next(stream).text for stream in kept)
                kept[0].close()
                with pytest.raises(RequestTimeout):
                    client.generate("x", timeout=0.2)
        assert threading.active_count() == threads
        assert process.num_fds() <= descriptors + 2  # the broker's end of a connection may close a moment later


async def test_no_task_is_left_behind() -> None:
    """Leaving the context ends every task of the client."""
    async with FakeBroker(story, allowed=1) as broker:
        before = asyncio.all_tasks()
        async with AsyncClient(broker.url) as client:
            stream = client.stream("x", max_tokens=50)
            await anext(stream)
        assert asyncio.all_tasks() == before
        with pytest.raises(Unavailable, match="closed"):
            await anext(stream)


async def test_acknowledgements_let_the_broker_forget() -> None:
    """The last acknowledgement covers every token of the answer."""
    async with FakeBroker(count_up) as broker, AsyncClient(broker.url) as client:
        await client.generate([1], max_tokens=70)
        await broker.wait_until(lambda: any(a.next_index == 70 for a in broker.heard_of(Ack)))  # type: ignore[union-attr]
        assert client._session.is_idle


async def test_a_client_that_is_abandoned_cancels_nothing() -> None:
    """Neither when it goes nor when its streams are closed afterwards."""
    async with FakeBroker(echo, allowed=1) as broker:
        first = AsyncClient(broker.url)
        stream = first.stream("long one", max_tokens=50)
        await anext(stream)
        await first.abandon()
        await stream.aclose()
        await first.aclose()
        broker.allow(None)
        async with AsyncClient(broker.url) as second:
            await second.generate("b", max_tokens=9)  # whatever the first had said, was heard before
        assert not broker.heard_of(Cancel)
