"""Merge patches: applying what is different gives what there is now."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.gateway.console.patch import apply_patch, diff

Tree = dict[str, Any]

LEAVES = (
    st.none() | st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2) | st.lists(st.integers(0, 2), max_size=2)
)
TREES = st.recursive(
    st.dictionaries(st.sampled_from("abc"), LEAVES, max_size=3),
    lambda below: st.dictionaries(st.sampled_from("abc"), LEAVES | below, max_size=3),
    max_leaves=12,
)


def plain(tree: Any) -> Any:
    """Without members that are null: a patch has no word for those."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items() if value is not None}
    return tree


@pytest.mark.slow
@given(TREES, TREES)
def test_a_patch_makes_the_new_of_the_old(before: Tree, after: Tree) -> None:
    patch = diff(before, after)
    assert plain(apply_patch(plain(before), patch)) == plain(after)
    assert bool(patch) == (plain(before) != plain(after))


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_patches_are_those_of_the_standard(target: Tree, patch: Tree, result: Tree) -> None:
    """Examples of RFC 7396."""
    assert apply_patch(target, patch) == result


def test_what_is_not_changed_is_not_told() -> None:
    workers = {"w0": {"pid": 1, "pace": 1.0}, "w1": {"pid": 2, "pace": 1.0}}
    changed = {"w0": {"pid": 1, "pace": 1.0}, "w1": {"pid": 2, "pace": 1.5}}
    assert diff({"workers": workers}, {"workers": changed}) == {"workers": {"w1": {"pace": 1.5}}}
