"""OpenAI's own client asks a gateway for embeddings; others ask it to rerank."""

from __future__ import annotations

import base64
import json
import shutil
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm import Client
from swarm.demo import model_path
from tests.faults.zygote import Zygote
from tests.integration.gateway import MODEL, Served, request
from tests.integration.http_swarm import http_swarm

openai = pytest.importorskip("openai", reason="OpenAI's Python client is not installed")
pytest.importorskip("fastapi", reason="the gateway's packages are not installed")
if True:  # what needs the client
    from openai import OpenAI

TEXTS = ["The miller sleeps.", "Who lives in the village?", "A dog barks at the mill."]


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def post(url: str, body: Any) -> tuple[int, Any]:
    code, _, content = request(url, body)
    return code, json.loads(content)


def test_the_official_client_gets_what_the_python_client_gets(served: Served, client: OpenAI) -> None:
    """As numbers, and (its default) as base64, which it decodes."""
    with Client(served.swarm.url) as swarm:
        expected = swarm.embed(TEXTS)
    for how in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model=MODEL, input=TEXTS, user="u", **how)  # type: ignore[call-overload]
        assert [item.index for item in answer.data] == [0, 1, 2]
        assert [array("f", item.embedding) for item in answer.data] == [each.vector for each in expected]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(each.num_prompt for each in expected)
        assert answer.model == MODEL


def test_base64_has_the_bits_of_the_numbers(served: Served) -> None:
    bodies = ({"input": TEXTS[0], "encoding_format": how} for how in ("float", "base64"))
    (_, numbers), (_, encoded) = (post(served.v1 + "/embeddings", body) for body in bodies)
    as_bytes = base64.b64decode(encoded["data"][0]["embedding"])
    assert array("f", as_bytes) == array("f", numbers["data"][0]["embedding"])


def test_all_forms_of_input_and_fewer_dimensions(served: Served, client: OpenAI) -> None:
    with Client(served.swarm.url) as swarm:
        ids = request(served.url + "/tokenize", {"prompt": TEXTS[0]})[2]
        tokens = json.loads(ids)["tokens"]
        [whole], [short] = swarm.embed([TEXTS[0]]), swarm.embed([TEXTS[0]], dimensions=16)
    for given in (TEXTS[0], [TEXTS[0]], tokens, [tokens]):
        [item] = client.embeddings.create(model=MODEL, input=given, encoding_format="float").data
        assert array("f", item.embedding) == whole.vector
    [item] = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=16).data
    assert array("f", item.embedding) == short.vector


def test_what_is_too_long_is_refused_in_one_sentence_or_cut(served: Served, client: OpenAI) -> None:
    context = json.loads(request(served.v1 + "/models")[2])["data"][0]["max_model_len"]
    with pytest.raises(openai.BadRequestError, match=f"This model's maximum context length is {context}") as caught:
        client.embeddings.create(model=MODEL, input=[[5] * (context + 1)])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    long = "The miller sleeps. " * context
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=MODEL, input=long)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    for limit, num_tokens in ((-1, context), (12, 12)):
        answer = client.embeddings.create(model=MODEL, input=long, extra_body={"truncate_prompt_tokens": limit})
        assert answer.usage.prompt_tokens == num_tokens


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": []}, "input", "invalid_value"),
        ({"input": [""]}, "input", "invalid_value"),
        ({"input": ["a", [1]]}, None, None),
        ({"input": [[1, "a"]]}, "input", "invalid_value"),
        ({"input": ["a"] * 2049}, "input", "invalid_value"),
        ({"input": "a", "dimensions": 0}, "dimensions", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": "a", "model": "other"}, "model", "model_not_found"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens", "unsupported_parameter"),
        ({"input": "a", "input_type": "query"}, "input_type", "unsupported_parameter"),
        ({"input": [[10**6]]}, "prompt", "invalid"),
    ],
)
def test_what_is_wrong_is_named(served: Served, body: dict[str, Any], param: str | None, code: str | None) -> None:
    status, answer = post(served.v1 + "/embeddings", body)
    if code is None:  # texts and token ids may be mixed
        assert status == 200
        return
    assert status in (400, 404)
    assert (answer["error"]["param"], answer["error"]["code"]) in ((param, code), ("input", code))


def test_a_model_without_a_classification_head_does_not_rerank(served: Served) -> None:
    status, answer = post(served.v1 + "/rerank", {"query": "a", "documents": ["b"]})
    assert (status, answer["error"]["code"]) == (400, "unsupported_task")
    assert "no classification head" in answer["error"]["message"]
    abilities = json.loads(request(served.v1 + "/models")[2])["data"][0]["swarm"]
    assert (abilities["generation"], abilities["embeddings"], abilities["rerank"]) == (True, True, False)


# --- a classifier ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reranker(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A swarm of the demo's layers with a score in place of its head: the gateway's URL, and the model's folder."""
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp("reranker") / "judge"
    shutil.copytree(model_path(), folder)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(model_path(), num_labels=1, dtype=torch.float32)
    model.score.weight.data = torch.randn_like(model.score.weight) * 0.3
    model.config.pad_token_id = 0
    model.save_pretrained(folder)
    with http_swarm(tmp_path_factory.mktemp("rerank"), zygote, folder) as url:
        yield url, folder


def scores_of(folder: Path, query: str, documents: list[str]) -> list[float]:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.inference_mode():
        logits = [model(torch.tensor([tokenizer.encode(query, each).ids])).logits[0, 0] for each in documents]
    return [float(torch.sigmoid(logit)) for logit in logits]


def test_documents_are_ranked_by_the_model_s_own_scores(reranker: tuple[str, Path]) -> None:
    url, folder = reranker
    expected = scores_of(folder, "Who sleeps?", TEXTS)
    body = {"query": "Who sleeps?", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]], "return_documents": True}
    status, answer = post(url + "/v1/rerank", body)
    assert status == 200
    order = [result["index"] for result in answer["results"]]
    assert order == sorted(range(3), key=lambda index: -expected[index])
    assert [r["relevance_score"] for r in answer["results"]] == pytest.approx([expected[i] for i in order], abs=1e-5)
    assert [r["document"]["text"] for r in answer["results"]] == [TEXTS[i] for i in order]
    assert answer["usage"]["total_tokens"] > 0
    status, short = post(url + "/v2/rerank", body | {"top_n": 1, "return_documents": False})
    assert short["results"] == [{key: answer["results"][0][key] for key in ("index", "relevance_score")}]


@pytest.mark.parametrize(
    ("change", "param"),
    [({"query": ""}, "query"), ({"documents": []}, "documents"), ({"top_n": 0}, "top_n"), ({"documents": [{}]}, None)],
)
def test_what_is_wrong_with_a_query_is_named(reranker: tuple[str, Path], change: Any, param: str | None) -> None:
    status, answer = post(reranker[0] + "/v1/rerank", {"query": "a", "documents": ["b"]} | change)
    assert status == 400
    assert answer["error"]["param"] == (param or "documents")


def test_a_classifier_neither_embeds_nor_generates(reranker: tuple[str, Path]) -> None:
    url, _ = reranker
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"model": "judge", "prompt": "a", "max_tokens": 3}),
    ):
        status, answer = post(url + path, body)
        assert (status, answer["error"]["code"]) == (400, "unsupported_task"), answer
    abilities = json.loads(request(url + "/v1/models")[2])["data"][0]["swarm"]
    assert (abilities["generation"], abilities["embeddings"], abilities["rerank"]) == (False, False, True)
