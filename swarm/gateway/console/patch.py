"""JSON merge patches (RFC 7396): computes the difference between two views, and applies it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tree = dict[str, Any]


def diff(before: Mapping[str, Any], after: Mapping[str, Any]) -> Tree:
    """Return the patch that turns ``before`` into ``after``; empty if they are equal. A null member of ``after`` counts
    as absent, because a patch cannot express anything else."""
    patch: Tree = {}
    if not before.keys() <= after.keys():
        patch = {name: None for name in before if before[name] is not None and name not in after}
    for name, value in after.items():
        was = before.get(name)
        if value is was or value == was:
            continue
        if isinstance(value, dict) and isinstance(was, dict):
            if below := diff(was, value):
                patch[name] = below
        else:
            patch[name] = value
    return patch


def apply_patch(tree: Mapping[str, Any], patch: Mapping[str, Any]) -> Tree:
    """Return the tree after the patch. Unchanged parts are shared."""
    result = dict(tree)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            below = result.get(name)
            result[name] = apply_patch(below if isinstance(below, dict) else {}, value)
        else:
            result[name] = value
    return result
