"""The register of families: by template, and those that other packages bring."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from swarm.errors import ModelError
from swarm.gateway.tools import families
from swarm.gateway.tools.families import OWN, all_families, family_of, visible
from swarm.gateway.tools.family import Family, Way
from swarm.gateway.tools.grammars import Added
from swarm.gateway.tools.hermes import HermesReader, plain
from swarm.gateway.tools.reading import Reader


def shouting(added: Added) -> Family:
    """A family as another package may bring it."""
    return Way("shouting", ("CALL!",), lambda template: "CALL!" in template, HermesReader, plain(added).forced)


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points of installed packages."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(families, "entry_points", lambda group: EntryPoints(points).select(group=group))
    all_families.cache_clear()
    yield points
    all_families.cache_clear()


def test_every_family_is_known_by_the_name_that_it_says() -> None:
    assert all(make({}).name == name for name, make in OWN.items())


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
        ("{{ messages }}", "plain"),
    ],
)
def test_a_template_is_known_by_its_marks(template: str, name: str) -> None:
    assert family_of(template).name == name


def test_marks_are_found_by_their_first_character() -> None:
    """Readers rely on it: it stands nowhere else in the mark, and no mark begins another."""
    for make in OWN.values():
        reader = make({}).reader
        assert isinstance(reader, type)
        assert issubclass(reader, Reader)
        marks = [*reader.starts, *reader.ends]
        assert all(mark[0] not in mark[1:] for mark in marks)
        assert not any(a != b and a.startswith(b) for a in marks for b in marks)


def test_only_tokens_that_the_model_has_are_made_visible() -> None:
    assert visible(OWN["mistral"]({}), {"[TOOL_CALLS]": 9, "[OTHER]": 8}) == (9,)


def test_other_packages_families_are_asked_first(plugged: list[EntryPoint]) -> None:
    """Also where ours would fit."""
    plugged.append(EntryPoint("shouting", f"{__name__}:shouting", families.GROUP))
    assert family_of("CALL! <tool_call>").name == "shouting"
    assert family_of("<tool_call>").name == "hermes"
    assert all_families()["shouting"]({}).marks == ("CALL!",)


def test_a_package_that_cant_be_loaded_is_named(plugged: list[EntryPoint]) -> None:
    plugged.append(EntryPoint("broken", "no_such_package:family", families.GROUP))
    with pytest.raises(ModelError, match=r"'broken' \(no_such_package:family\) can't be loaded"):
        family_of("<tool_call>")
