"""Strangers that never heard of us: what the OpenAPI document promises, and langchain."""

from __future__ import annotations

from typing import Any

import pytest

from swarm import AsyncClient
from tests.integration.gateway import MODEL, Served, request

pytest.importorskip("fastapi", reason="the gateway's packages are not installed")


async def test_langchain_gets_the_same_answers(served: Served) -> None:
    """Invoked, streamed and in a batch, with its usage."""
    langchain = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    question = "Who lives in the village?"
    async with AsyncClient(served.swarm.url) as client:
        expected = await client.chat([{"role": "user", "content": question}], max_tokens=20)
    model = langchain.ChatOpenAI(
        model=MODEL, base_url=served.v1, api_key="none", temperature=0, max_tokens=20, max_retries=0, timeout=60
    )
    answer = await model.ainvoke(question)
    assert answer.content == expected.text
    assert answer.usage_metadata["total_tokens"] == expected.usage.num_total
    assert answer.response_metadata["finish_reason"] == expected.finish_reason
    chunks = [chunk async for chunk in model.astream(question)]
    assert "".join(chunk.content for chunk in chunks) == expected.text
    both = await model.abatch([question, question])
    assert [each.content for each in both] == [expected.text] * 2
    late = await model.ainvoke([("system", "Be kind."), ("human", question), ("system", "Be brief."), ("ai", "")])
    assert isinstance(late.content, str)
    await model.root_async_client.close()
    model.root_client.close()


NUM_EXAMPLES = 20  # for each operation, made to fit and made not to fit
OURS: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "prompt": "hello",
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "deadline_s": None,
}


def mended(case: Any, number: int) -> Any:
    """The case, with some of its fields as they must be: else nothing would ever come to an answer."""
    if isinstance(case.body, dict) and number % 3:
        fields = OURS if number % 3 == 1 else {"model": MODEL, "max_tokens": 3, "max_completion_tokens": 3}
        case.body |= {name: value for name, value in fields.items() if name in case.body}
        case.body.setdefault("max_tokens", 3)
    return case


def test_the_document_tells_the_truth(served: Served) -> None:
    """Whatever is sent to whatever route of /openapi.json: nothing breaks, and no answer has a status or a form that
    is not documented. Some of it is answered."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    kept = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
    kept.append(checks.response_schema_conformance)
    statuses: dict[str, list[int]] = {}

    def check(operation: Any, mode: Any) -> None:
        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=NUM_EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def holds(case: Any) -> None:
            seen = statuses.setdefault(operation.path, [])
            fitting = mended(case, len(seen)) if mode is GenerationMode.POSITIVE else case
            seen.append(fitting.call_and_validate(timeout=60, checks=kept).status_code)

        holds()

    for result in schemathesis.openapi.from_url(served.url + "/openapi.json").get_all_operations():
        operation = result.ok()
        check(operation, GenerationMode.POSITIVE)
        if operation.body:
            check(operation, GenerationMode.NEGATIVE)
    assert len(statuses) >= 6
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready"):
        assert 200 in statuses[path], f"{path}: {statuses[path]}"
    assert request(served.url + "/ready")[0] == 200
