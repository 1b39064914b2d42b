"""Which request an id means that somebody copied."""

from __future__ import annotations

import pytest

from swarm.admin.orders import parse_request_id

ID = "0123456789abcdef" * 2


@pytest.mark.parametrize("prefix", ["", "chatcmpl-", "cmpl-", "resp_", "msg_"])
@pytest.mark.parametrize("number", ["", "-0", "-255"])
def test_an_answers_id_is_its_requests(prefix: str, number: str) -> None:
    assert parse_request_id(f"{prefix}{ID}{number}") == ID + number


@pytest.mark.parametrize("text", ["", "3f2a", "cmpl-3f2a", "resp_mine", f"x-{ID}", f"cmpl-{ID}-", f"cmpl-{ID}x"])
def test_other_ids_are_what_they_are(text: str) -> None:
    """A program may have chosen them."""
    assert parse_request_id(text) == text
