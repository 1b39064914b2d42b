"""Rewrites a chat template when it is loaded: replaces its control tokens by secret words (``spelling``), and inserts
counters into its loops and outputs (``budget``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from swarm.client.text import budget

# Methods with which a template inspects a message: their literals are compared with a user's text.
_INSPECTING = frozenset({
    "count",
    "endswith",
    "find",
    "index",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "rfind",
    "rindex",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "startswith",
    "strip",
})  # fmt: skip
_COMPARING_FILTERS = frozenset({"reject", "rejectattr", "select", "selectattr", "trim"})


def rewrite(template: nodes.Template, spell: Callable[[str], str]) -> nodes.Template:
    """Rewrite the template in place and return it. ``spell``: maps each literal that the template writes to its spelled
    form."""
    environment = template.environment
    _Rewriter(spell).visit(template)
    assert environment is not None  # the parser sets it
    template.set_environment(environment)
    return template


class _Rewriter(NodeTransformer):
    """Tree transformer that applies the rewriting. It leaves compared literals as they are, since messages contain no
    secret words."""

    def __init__(self, spell: Callable[[str], str]) -> None:
        self._spell = spell
        self._num_comparing = 0  # number of comparing nodes around the current one

    # --- literals

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.TemplateData(self._spell(node.data), lineno=node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if self._num_comparing or not isinstance(node.value, str):
            return node
        return nodes.Const(self._spell(node.value), lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> Any:
        return self._visit_compared(node)

    def visit_Test(self, node: nodes.Test) -> Any:
        return self._visit_compared(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        node.arg = self._visit_compared(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        node.key = self._visit_compared(node.key)
        node.value = self.visit(node.value)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        method = node.node.attr if isinstance(node.node, nodes.Getattr) else ""
        node.node = self.visit(node.node)
        if method in _INSPECTING:
            node.args = [self._visit_compared(argument) for argument in node.args]
        else:
            self._visit_arguments(node, num_compared=1 if method == "replace" else 0)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.node is not None:
            node.node = self.visit(node.node)
        compared = {"replace": 1}.get(node.name, len(node.args) if node.name in _COMPARING_FILTERS else 0)
        self._visit_arguments(node, num_compared=compared)
        return node

    def _visit_arguments(self, node: nodes.Call | nodes.Filter, num_compared: int) -> None:
        node.args = [
            self._visit_compared(argument) if place < num_compared else self.visit(argument)
            for place, argument in enumerate(node.args)
        ]
        node.kwargs = [self.visit(keyword) for keyword in node.kwargs]

    def _visit_compared(self, node: Any) -> Any:
        self._num_comparing += 1
        try:
            return self.visit(node) if isinstance(node, nodes.Const) else self.generic_visit(node)
        finally:
            self._num_comparing -= 1

    # --- counting

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_make_call(budget.tick, [], node.lineno), lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        parts: list[nodes.Expr] = []
        for part in node.nodes:
            visited = self.visit(part)
            if isinstance(visited, nodes.TemplateData):
                parts += (_make_call(budget.charge_literal, [nodes.Const(len(visited.data))], node.lineno), visited)
            else:
                parts.append(_make_call(budget.write, [visited], node.lineno))
        node.nodes = parts
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _make_call(budget.concat, [self.visit(part) for part in node.nodes], node.lineno)


def _make_call(function: Callable[..., str], arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    name = nodes.ImportedName(f"{function.__module__}.{function.__name__}", lineno=lineno)
    return nodes.Call(name, arguments, [], None, None, lineno=lineno)
