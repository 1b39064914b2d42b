"""The register of families: by template, and those that other packages bring."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from swarm.errors import ModelError
from swarm.gateway import plugins
from swarm.gateway.tool_calls import formats
from swarm.gateway.tool_calls.format import ComposedFormat, ToolCallFormat
from swarm.gateway.tool_calls.formats import BUILT_IN, all_formats, detect_format, visible_marks
from swarm.gateway.tool_calls.grammars import AddedTokens
from swarm.gateway.tool_calls.hermes import HermesParser, plain
from swarm.gateway.tool_calls.parser import BaseToolCallParser


def shouting(added: AddedTokens) -> ToolCallFormat:
    """A family as another package may bring it."""
    return ComposedFormat(
        "shouting", ("CALL!",), lambda template: "CALL!" in template, HermesParser, plain(added).forced_call_grammar
    )


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points of installed packages."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints(points).select(group=group))
    all_formats.cache_clear()
    yield points
    all_formats.cache_clear()


def test_every_family_is_known_by_the_name_that_it_says() -> None:
    assert all(make({}).name == name for name, make in BUILT_IN.items())


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call> {{ tools }}", "hermes"),
        ("<tool_call><function=x><parameter=y>", "qwen3-coder"),
        ("<|tool_call|>", "granite"),
        ("<|tool_call|> <|/tool_call|>", "phi"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS] [ARGS]", "mistral-args"),
        ("<|python_tag|>", "llama3"),
        ("<|python_start|>", "llama3"),
        ("<｜tool▁call▁begin｜> ```json", "deepseek"),
        ("<｜tool▁call▁begin｜>", "deepseek-v3.1"),
        ("<|channel|>commentary", "harmony"),
        ("{{ messages }}", "plain"),
    ],
)
def test_a_template_is_known_by_its_marks(template: str, name: str) -> None:
    assert detect_format(template).name == name


def test_marks_are_found_by_their_first_character() -> None:
    """Readers rely on it: it stands nowhere else in the mark, and no mark begins another."""
    for make in BUILT_IN.values():
        reader = make({}).parser
        assert isinstance(reader, type)
        assert issubclass(reader, BaseToolCallParser)
        marks = [*reader.starts, *reader.ends]
        assert all(mark[0] not in mark[1:] for mark in marks)
        assert not any(a != b and a.startswith(b) for a in marks for b in marks)


def test_only_tokens_that_the_model_has_are_made_visible() -> None:
    assert visible_marks(BUILT_IN["mistral"]({}), {"[TOOL_CALLS]": 9, "[OTHER]": 8}) == (9,)


def test_other_packages_families_are_asked_first(plugged: list[EntryPoint]) -> None:
    """Also where ours would fit."""
    plugged.append(EntryPoint("shouting", f"{__name__}:shouting", formats.GROUP))
    assert detect_format("CALL! <tool_call>").name == "shouting"
    assert detect_format("<tool_call>").name == "hermes"
    assert all_formats()["shouting"]({}).marks == ("CALL!",)


def test_a_package_that_cant_be_loaded_is_named(plugged: list[EntryPoint]) -> None:
    plugged.append(EntryPoint("broken", "no_such_package:family", formats.GROUP))
    with pytest.raises(ModelError, match=r"'broken' \(no_such_package:family\) can't be loaded"):
        detect_format("<tool_call>")
