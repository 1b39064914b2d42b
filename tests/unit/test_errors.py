"""The tree of exceptions: drawn truthfully, and fit to be caught where callers expect."""

from __future__ import annotations

import inspect
import re

import pytest

from swarm import errors
from swarm.errors import (
    ClientError,
    InvalidRequest,
    JournalDown,
    ModelError,
    Overloaded,
    PromptTooLong,
    StageSetError,
    SwarmError,
)


def own() -> dict[str, type[SwarmError]]:
    classes = inspect.getmembers(errors, inspect.isclass)
    return {name: c for name, c in classes if issubclass(c, SwarmError)}


def test_the_drawing_is_the_tree() -> None:
    """Every class stands in the module's drawing below its parent, and nothing else does."""
    drawn: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│ ]*)(?:[├└]── )?([A-Z]\w+)(?:  |$)", line)
        if found is None:
            continue
        depth = len(found[1]) // 4 + ("──" in line)
        path[depth:] = [found[2]]
        drawn[found[2]] = path[depth - 1] if depth else "Exception"
    assert drawn == {name: c.__bases__[0].__name__ for name, c in own().items()}


@pytest.mark.parametrize("name", sorted(own()))
def test_every_error_has_a_status_and_a_text(name: str) -> None:
    """The status says whose fault it is; the text is what was given."""
    kind = own()[name]
    extra = {
        StageSetError: ("gap", "words"),
        Overloaded: ("words", 1.5),
        JournalDown: ("words", 1.5),
        PromptTooLong: ("words", 9),
    }.get(kind, ("words",))
    error = kind(*extra)
    assert str(error) == "words"
    assert 400 <= error.hint_status < 600
    assert inspect.getdoc(kind)


def test_whose_fault_it_is() -> None:
    """4xx: the caller's; 5xx: ours."""
    status = {name: c.hint_status for name, c in own().items()}
    assert {n for n, s in status.items() if s < 500} == {
        "ConfigError",
        "WireError",
        "ForeignMessage",
        "InvalidRequest",
        "Overloaded",
        "PromptTooLong",
        "ReadElsewhere",
        "RequestCancelled",
    }


def test_what_an_error_carries() -> None:
    """Names for programs beside the sentences for people."""
    assert InvalidRequest("x").code == "invalid"
    assert InvalidRequest("x", code="top_p").code == "top_p"
    assert Overloaded("x", retry_after_s=2.5).retry_after_s == 2.5
    assert (PromptTooLong("x", 9).code, PromptTooLong("x", 9).least_tokens) == ("context", 9)
    assert StageSetError("gap", "x").kind == "gap"
    assert isinstance(StageSetError("gap", "x"), ModelError)
    assert isinstance(Overloaded("x", 1.0), ClientError)
