"""The values of a body are counted before it is decoded, wherever it is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from swarm.gateway.errors import ApiError
from swarm.gateway.json_scanner import FEW_VALUES, ValueScanner, has_few_values
from swarm.gateway.middleware.body import decode_body


def values_of(decoded: Any) -> int:
    if isinstance(decoded, dict):
        return 1 + sum(map(values_of, decoded.values()))
    return 1 + sum(map(values_of, decoded)) if isinstance(decoded, list) else 1


def made(source: random.Random, depth: int = 0) -> Any:
    kind = source.randrange(6 if depth < 4 else 4)
    if kind < 3:
        return source.choice([1, None, "", "a,b", '"', "\\", '\\"', '[{"', 'x\\\\",[', "é\n", True, 1.5])
    if kind == 3:
        return "".join(source.choices('",\\[]{}:ab', k=source.randrange(12)))
    inner = [made(source, depth + 1) for _ in range(source.randrange(5))]
    return inner if kind == 4 else {f'k{number},"[\\': one for number, one in enumerate(inner)}


@pytest.mark.parametrize("seed", range(40))
def test_no_value_is_missed_however_the_text_is_cut(seed: int) -> None:
    """An empty list or object counts for what it might hold, at most twice."""
    source = random.Random(seed)
    value = [made(source) for _ in range(30)]
    body = json.dumps(value, ensure_ascii=bool(seed % 2)).encode()
    for size in (1, 2, 3, 7, len(body)):
        scanner = ValueScanner()
        for start in range(0, len(body), size):
            scanner.feed(body[start : start + size])
        assert values_of(value) <= scanner.num_values <= 2 * values_of(value)


def test_too_many_values_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.gateway.middleware.body.msgspec", None)
    with pytest.raises(ApiError, match="more than 10 values") as told:
        decode_body(b"[" + b"[]," * 20 + b"1]", max_values=10)
    assert (told.value.status, told.value.code) == (400, "too_large")


def test_json_in_a_string_is_decoded_if_it_is_modest() -> None:
    assert has_few_values("[" * 100)
    assert has_few_values(json.dumps(["a,b" * 10_000]))
    assert not has_few_values("[" + "[]," * FEW_VALUES + "1]")
