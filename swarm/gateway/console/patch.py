"""JSON merge patches (RFC 7396): what is different between two views, and what a view is after that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tree = dict[str, Any]


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Tree:
    """The patch that makes ``after`` of ``before``; empty if they are alike. A member that is null in ``after`` is one
    that is not there: a patch has no other word for it."""
    patch: Tree = {}
    if not before.keys() <= after.keys():
        patch = {name: None for name in before if before[name] is not None and name not in after}
    for name, value in after.items():
        was = before.get(name)
        if value is was or value == was:
            continue
        if isinstance(value, dict) and isinstance(was, dict):
            if below := difference(was, value):
                patch[name] = below
        else:
            patch[name] = value
    return patch


def patched(tree: Mapping[str, Any], patch: Mapping[str, Any]) -> Tree:
    """The tree after the patch. What is not changed is shared."""
    result = dict(tree)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            below = result.get(name)
            result[name] = patched(below if isinstance(below, dict) else {}, value)
        else:
            result[name] = value
    return result
