"""What arrives as an upload: the form, its lines, and what each line must have."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from swarm.gateway.batches import upload
from swarm.gateway.batches.lines import (
    MAX_BODY_VALUES,
    MAX_ERRORS,
    LineChecker,
    LineSplitter,
    LineTooLong,
    read_custom_id,
)
from swarm.gateway.batches.multipart import (
    MAX_PART_HEAD,
    MAX_PARTS,
    MultipartParser,
    PartBegan,
    PartData,
    PartEnded,
    parse_boundary,
)
from swarm.gateway.errors import ApiError
from swarm.gateway.middleware.body import MAX_DEPTH

CHAT = "/v1/chat/completions"


def form(*parts: tuple[str, bytes], boundary: str = "xyz") -> bytes:
    body = b"".join(
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content + b"\r\n"
        for head, content in parts
    )
    return body + f"--{boundary}--\r\n".encode()


def parse(pieces: list[bytes]) -> list[tuple[str, str | None, bytes]]:
    parser, parts = MultipartParser(b"xyz"), []
    for piece in pieces:
        for event in parser.feed(piece):
            match event:
                case PartBegan(name, filename):
                    parts.append((name, filename, b""))
                case PartData(data):
                    parts[-1] = (*parts[-1][:2], parts[-1][2] + data)
                case PartEnded():
                    pass
    parser.check_complete()
    return parts


def test_a_form_is_the_same_however_it_is_cut() -> None:
    """Contents that look like a delimiter, empty parts, and quotes in names."""
    tricky = b"\r\n--xy\r\n--\r\n\r\n-xyz\n"
    body = b"preamble\r\n" + form(
        ('name="purpose"', b"batch"), ('name="none"', b""), ('name="file"; filename="a \\"b\\".jsonl"', tricky)
    )
    expected = [("purpose", None, b"batch"), ("none", None, b""), ("file", 'a "b".jsonl', tricky)]
    assert parse([body]) == expected
    assert parse([body[at : at + 1] for at in range(len(body))]) == expected
    chance = random.Random(5)
    for _ in range(50):
        cuts = sorted(chance.sample(range(len(body)), 6))
        assert parse([body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]) == expected


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([form(('name="a"', b"1"))[:-6]], "last boundary"),
        ([form(("filename=x", b"1"))], "no name"),
        ([b"--xyz\r\n" + b"x" * (MAX_PART_HEAD + 10)], "headers"),
        ([form(*[('name="a"', b"")] * (MAX_PARTS + 1))], "parts"),
    ],
)
def test_a_broken_form_is_refused(pieces: list[bytes], why: str) -> None:
    with pytest.raises(ApiError, match=why) as caught:
        parse(pieces)
    assert caught.value.status == 400


def test_the_boundary_comes_from_the_content_type() -> None:
    assert parse_boundary('multipart/form-data; charset=utf-8; boundary="a b"') == b"a b"
    assert parse_boundary("multipart/form-data; boundary=----x") == b"----x"
    for wrong in ("application/json", "multipart/form-data", "multipart/form-data; boundary="):
        with pytest.raises(ApiError):
            parse_boundary(wrong)


def test_lines_keep_their_breaks_and_the_last_one_needs_none() -> None:
    splitter = LineSplitter(100)
    lines = [*splitter.feed(b"a\n\nb"), *splitter.feed(b"c\r\nd"), *splitter.finish()]
    assert lines == [b"a\n", b"\n", b"bc\r\n", b"d"]
    assert splitter.num_lines == 4


def test_a_line_that_is_too_long_is_named_before_its_end() -> None:
    splitter = LineSplitter(10)
    assert list(splitter.feed(b"123456789\n12345")) == [b"123456789\n"]
    with pytest.raises(LineTooLong) as caught:
        list(splitter.feed(b"6789ab"))
    assert caught.value.line == 2


def line(**fields: Any) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": {}} | fields).encode()


@pytest.mark.parametrize(
    ("content", "code", "param"),
    [
        (b"{not json", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b'{"body": {"a": ' + b"[" * 10_000, "invalid_json_line", None),
        (b"[]", "invalid_request", None),
        (b'{"custom_id": "x", "method": "POST", "url": "/v1/chat/completions"}', "invalid_request", None),
        (line(custom_id=7), "invalid_request", None),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id="first"), "duplicate_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/completions"), "invalid_url", "url"),
        (line(body={"stream": True}), "invalid_request", "body.stream"),
        (line(body=[]), "invalid_request", "body"),
        (line(body={"a": "\ud800"}), "invalid_json_line", None),
    ],
)
def test_a_wrong_line_is_named_by_its_number(content: bytes, code: str, param: str | None) -> None:
    checker = LineChecker(CHAT, 10)
    checker.check(1, line(custom_id="first"))
    checker.check(4, content)
    [error] = checker.finish()
    assert (error.code, error.param, error.line) == (code, param, 4)


def nested(depth: int) -> bytes:
    """A line whose body has this many levels."""
    return line(body={"a": 0}).replace(b"0", b"[" * (depth - 1) + b"]" * (depth - 1))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (nested(MAX_DEPTH + 1), "nested deeper than 100 levels"),
        (nested(500), "nested deeper than 100 levels"),
        (nested(1 << 16), "recursion"),
        (line(body={"a": 0}).replace(b"0", b"[" + b"0," * MAX_BODY_VALUES + b"0]"), "values"),
    ],
    ids=["deep", "deeper", "deepest", "broad"],
)
def test_a_body_that_the_gateway_would_not_decode_is_refused(content: bytes, why: str) -> None:
    checker = LineChecker(CHAT, 10)
    checker.check(1, nested(MAX_DEPTH))
    assert not checker.errors
    checker.check(2, content.replace(b'"custom_id": "a"', b'"custom_id": "b"'))
    [error] = checker.finish()
    assert why in error.message
    assert error.line == 2


def test_the_custom_id_is_read_from_any_line() -> None:
    assert read_custom_id(nested(MAX_DEPTH)) == "a"
    for wrong in (b"{", b"\xff", b"[]", b"[" * 100_000):
        assert read_custom_id(wrong) == ""


def test_right_lines_have_no_errors_and_an_empty_file_has_one() -> None:
    checker = LineChecker(CHAT, 2)
    for number in (1, 2):
        checker.check(number, line(custom_id=str(number), body={"stream": False}))
    assert checker.finish() == ()
    assert [error.code for error in LineChecker(CHAT, 2).finish()] == ["empty_file"]


def test_a_batch_with_too_many_lines_has_that_error_alone() -> None:
    checker = LineChecker(CHAT, 2)
    for number in (1, 2, 3):
        assert not checker.is_full
        checker.check(number, b"wrong")
    assert checker.is_full
    assert [(error.code, error.line) for error in checker.finish()] == [("too_many_tasks", 3)]


def test_only_so_many_errors_are_collected() -> None:
    checker = LineChecker(CHAT, 10 * MAX_ERRORS)
    number = 0
    while not checker.is_full:
        number += 1
        checker.check(number, b"wrong")
    assert number == len(checker.finish()) == MAX_ERRORS


def test_an_upload_keeps_a_page_and_bounds_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces: every page has at most so many lines, with the number of its first one."""
    content = b"\n" * (2 * upload.PAGE_LINES) + b"last"
    body = form(('name="purpose"', b"batch"), ('name="file"; filename="in.jsonl"', content))
    for size in (1000, 65_536, len(body)):
        reader = upload.Upload(b"xyz", 100, len(content))
        pages = [page for at in range(0, len(body), size) for page in reader.feed(body[at : at + size])]
        pages += reader.finish()
        assert [first for first, _ in pages] == [1, upload.PAGE_LINES + 1, 2 * upload.PAGE_LINES + 1]
        assert b"".join(line for _, lines in pages for line in lines) == content
        assert (reader.filename, reader.max_age_s) == ("in.jsonl", None)
    monkeypatch.setattr(upload, "MAX_LINES", upload.PAGE_LINES)
    with pytest.raises(ApiError, match=f"more than {upload.PAGE_LINES} lines"):
        list(upload.Upload(b"xyz", 100, len(content)).feed(body))
    with pytest.raises(ApiError, match=r"line 1 has more than 100 bytes"):
        list(upload.Upload(b"xyz", 100, 1 << 30).feed(form(('name="file"', b"x" * 101))))
