"""Ollama's API of real processes, as its Python and JavaScript clients (0.6.3) send and read it: lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.zygote import Zygote
from tests.integration.gateway import request
from tests.integration.http_swarm import http_swarm

pytest.importorskip("fastapi", reason="the gateway's packages are not installed")

Json = dict[str, Any]
MODEL = "village"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY: Json = {"num_predict": 8, "temperature": 0}


@pytest.fixture(scope="module")
def url(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with http_swarm(tmp_path_factory.mktemp("logs"), zygote) as url:
        yield url


def ask(url: str, path: str, **fields: Any) -> Any:
    code, headers, content = request(f"{url}/api/{path}", {"model": MODEL, **fields})
    assert (code, headers["content-type"]) == (200, "application/json"), content
    return json.loads(content)


def stream(url: str, path: str, **fields: Any) -> list[Json]:
    """The lines of an answer; streams are the default."""
    code, headers, content = request(f"{url}/api/{path}", {"model": MODEL, **fields})
    assert (code, headers["content-type"]) == (200, "application/x-ndjson"), content
    return [json.loads(line) for line in content.decode().splitlines()]


def test_a_conversation(url: str) -> None:
    """Whole and streamed say the same, with counts and times at the end."""
    whole = ask(url, "chat", messages=HELLO, options=GREEDY, stream=False)
    *texts, end = stream(url, "chat", messages=HELLO, options=GREEDY)
    assert "".join(line["message"]["content"] for line in texts) == whole["message"]["content"] != ""
    assert [line["done"] for line in texts] == [False] * len(texts)
    for answer in (whole, end):
        assert (answer["done"], answer["done_reason"], answer["eval_count"]) == (True, "length", 8)
        assert answer["prompt_eval_count"] > 0
        assert answer["total_duration"] >= answer["eval_duration"] > 0


def test_a_prompt(url: str) -> None:
    """As a message of the conversation; raw as the beginning of the text, as in OpenAI's completions."""
    message = ask(url, "generate", prompt="Hello", options=GREEDY, stream=False)
    assert message["response"] == ask(url, "chat", messages=HELLO, options=GREEDY, stream=False)["message"]["content"]
    *texts, end = stream(url, "generate", prompt="Anna was", raw=True, options=GREEDY)
    plain = {"model": MODEL, "prompt": "Anna was", "max_tokens": 8, "temperature": 0}
    code, _, content = request(f"{url}/v1/completions", plain)
    assert code == 200
    assert "".join(line["response"] for line in texts) == json.loads(content)["choices"][0]["text"]
    assert end["done"] is True


def test_embeddings(url: str) -> None:
    """The same bits as OpenAI's route has, also by the older route; a text that is too long is cut."""
    texts = ["The miller sleeps.", "Who lives in the village?"]
    code, _, content = request(f"{url}/v1/embeddings", {"model": MODEL, "input": texts})
    openai = json.loads(content)
    vectors = [item["embedding"] for item in openai["data"]]
    answer = ask(url, "embed", input=texts)
    assert (code, answer["model"], answer["embeddings"]) == (200, MODEL, vectors)
    assert answer["prompt_eval_count"] == openai["usage"]["prompt_tokens"]
    assert answer["total_duration"] >= answer["load_duration"] >= 0
    assert ask(url, "embeddings", model=f"{MODEL}:latest", prompt=texts[0]) == {"embedding": vectors[0]}
    assert len(ask(url, "embed", input=texts[0], dimensions=16)["embeddings"][0]) == 16
    assert ask(url, "embed", input=texts[0] * 2048)["prompt_eval_count"] == 2048


def test_a_format_is_kept(url: str) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    answer = ask(url, "chat", messages=HELLO, format=schema, options={**GREEDY, "num_predict": 64}, stream=False)
    assert answer["done_reason"] == "stop"
    assert set(json.loads(answer["message"]["content"])) == {"age"}


def test_a_request_without_a_prompt_loads_the_model(url: str) -> None:
    loaded = ask(url, "generate")
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")
    unloaded = ask(url, "chat", messages=[], keep_alive=0)
    assert (unloaded["message"]["content"], unloaded["done_reason"]) == ("", "unload")


def test_models(url: str) -> None:
    """Listed and described, also by their name with the usual tag."""
    for path in ("tags", "ps"):
        code, _, content = request(f"{url}/api/{path}")
        (row,) = json.loads(content)["models"]
        assert (code, row["name"], row["model"]) == (200, MODEL, MODEL)
        assert row["size"] > 0
    shown = ask(url, "show", model=f"{MODEL}:latest")
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 2048
    assert shown["capabilities"][0] == "completion"
    assert ask(url, "show", model=None, name=MODEL) == shown
    assert ask(url, "chat", model=f"{MODEL}:latest", messages=HELLO, options=GREEDY, stream=False)["model"] == MODEL


def test_a_client_finds_the_server(url: str) -> None:
    assert json.loads(request(f"{url}/api/version")[2])["version"].count(".") == 2
    assert request(url, method="HEAD")[0] == 200


@pytest.mark.parametrize(
    ("path", "fields", "code", "text"),
    [
        ("chat", {"model": "llama3", "messages": HELLO}, 404, "'llama3' does not exist"),
        ("show", {"model": "llama3"}, 404, "'llama3' does not exist"),
        ("chat", {"messages": [{**HELLO[0], "images": ["aGk="]}]}, 400, "reads text only"),
        ("chat", {"messages": 3}, 400, "messages"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("embed", {"model": "llama3", "input": "a"}, 404, "'llama3' does not exist"),
        ("embed", {"input": "Who? " * 2048, "truncate": False}, 400, "input"),
        ("pull", {}, 404, "/api/pull is not offered"),
    ],
)
def test_errors_have_ollamas_form(url: str, path: str, fields: Json, code: int, text: str) -> None:
    status, _, content = request(f"{url}/api/{path}", {"model": MODEL, **fields})
    error = json.loads(content)
    assert (status, list(error)) == (code, ["error"])
    assert text in error["error"]
