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


NUM_EXAMPLES = 25  # for each operation


def test_the_document_tells_the_truth(served: Served) -> None:
    """Whatever is sent to whatever route of /openapi.json: nothing breaks, and no answer has a status or a form that
    is not documented."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import checks as of
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    schema = schemathesis.openapi.from_url(served.url + "/openapi.json")
    kept = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
    kept += [checks.response_schema_conformance, checks.negative_data_rejection]
    assert of is not None
    num = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=NUM_EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def holds(case: Any) -> None:
            case.call_and_validate(timeout=60, checks=kept)

        holds()
        num += 1
    assert num >= 6
    assert request(served.url + "/ready")[0] == 200
