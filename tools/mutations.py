"""Find what can be broken: single expressions of the deciding modules, by cosmic-ray's operators and one of ours. Give
a function its broken code while everything is imported. ``mutate`` uses it."""

from __future__ import annotations

import gc
import inspect
import json
import random
import types
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHELLS = ("asyncio", "zmq", "torch", "sqlite3", "threading", "subprocess", "ctypes", "transformers", "socket")


def modules() -> list[str]:
    """List the modules that decide: those without I/O, threads or torch."""
    folders = ("broker", "client", "stage", "wire")
    paths = [path for folder in folders for path in sorted((ROOT / "swarm" / folder).rglob("*.py"))]
    paths += [ROOT / "swarm/params.py", ROOT / "swarm/series.py"]
    shells = tuple(f"{word} {name}" for word in ("import", "from") for name in SHELLS)
    return [
        str(path.relative_to(ROOT))
        for path in paths
        if not any(line.strip().startswith(shells) for line in path.read_text().splitlines())
    ]


@cache
def operators() -> dict[str, Any]:
    """List operators by name; without those that only rename, and with one that leaves statements out."""
    from cosmic_ray.operators.operator import Operator  # noqa: PLC0415
    from cosmic_ray.operators.provider import _OPERATORS  # noqa: PLC0415
    from parso.python import tree  # noqa: PLC0415

    class RemoveCall(Operator):  # type: ignore[misc]
        """Turn a statement that only calls or changes something that is there into ``pass``."""

        def mutation_positions(self, node: Any) -> Iterator[Any]:
            if node.type != "simple_stmt" or len(node.children) != 2:
                return
            first = node.children[0]
            call = first.type in ("atom_expr", "power") and first.children[-1].type == "trailer"
            if call or (first.type == "expr_stmt" and self._is_kept(first)):
                yield (node.start_pos, node.end_pos)

        @staticmethod
        def _is_kept(node: Any) -> bool:
            """Whether this assigns to something of an object, or adds to a name: without it the name is there still."""
            target, sign = node.children[:2]
            return sign.type == "operator" and (sign != "=" or target.type in ("atom_expr", "power"))

        def mutate(self, node: Any, index: int) -> Any:
            indent, lines = node.get_first_leaf().prefix, node.end_pos[0] - node.start_pos[0]
            return tree.Keyword("pass" + "\n" * lines, node.start_pos, prefix=indent)

        @classmethod
        def examples(cls) -> tuple[Any, ...]:
            return ()

    left_out = {"VariableReplacer", "VariableInserter", "RemoveDecorator", "ExceptionReplacer"}
    found = {name: operator() for name, operator in _OPERATORS.items() if name not in left_out}
    return found | {"RemoveCall": RemoveCall()}


def sites(path: str) -> Iterator[dict[str, Any]]:
    """List every place of a module with all that can be done to it."""
    from cosmic_ray.ast import ast_nodes, get_ast  # noqa: PLC0415

    source, places = (ROOT / path).read_text(), defaultdict(list)
    nodes = list(ast_nodes(get_ast(source)))
    for name, operator in operators().items():
        count = 0
        for node in nodes:
            for start, end in operator.mutation_positions(node):
                if not _only_declares(node):
                    places[start, end].append((name, count, _first_line(node)))
                count += 1
    lines = source.splitlines()
    for (start, _), ways in sorted(places.items()):
        if "TYPE_CHECKING" not in lines[start[0] - 1]:
            yield {"path": path, "line": start[0], "ways": ways}


def _only_declares(node: Any) -> bool:
    """Whether this is part of a type, or of how a class is made (frozen, slots): nothing depends on it."""
    while node is not None:
        if node.type in ("annassign", "tfpdef", "param") and "=" not in node.get_code():
            return True
        parent = node.parent
        if node.type == "decorator" or (parent is not None and parent.type == "classdef" and node.type == "arglist"):
            return True
        if parent is not None and parent.type == "classdef" and node.type == "argument":
            return True
        annotated = parent is not None and parent.type in ("annassign", "tfpdef", "funcdef")
        if annotated and node.get_previous_sibling() in (":", "->") and node.type != "suite":
            return True
        node = parent
    return False


def _first_line(node: Any) -> int:
    while node.parent is not None and node.type not in (
        "simple_stmt",
        "if_stmt",
        "while_stmt",
        "for_stmt",
        "with_stmt",
    ):
        node = node.parent
    return int(node.start_pos[0]) if node.parent is not None else 0


def drawn(out: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Draw so many places, each with one mutation; of each place no more than one. Drawn once, then read."""
    kept = out / f"drawn-{count}-{seed}.json"
    if kept.exists():
        return list(json.loads(kept.read_text()))
    everywhere = [site for path in modules() for site in sites(path)]
    chance = random.Random(seed)
    picked = chance.sample(everywhere, count)
    found = [{"path": s["path"], "line": s["line"], "way": chance.choice(s["ways"])} for s in picked]
    kept.write_text(json.dumps(found))
    return found


@cache
def _tree(path: str) -> Any:
    from cosmic_ray.ast import get_ast  # noqa: PLC0415

    return get_ast((ROOT / path).read_text())


def mutated(mutation: dict[str, Any]) -> str:
    """Return the module's text with this mutation."""
    from cosmic_ray.mutating import MutationVisitor  # noqa: PLC0415

    name, occurrence, _ = mutation["way"]
    visitor = MutationVisitor(occurrence, operators()[name])
    text = str(visitor.walk(_tree(mutation["path"])).get_code())
    _tree.cache_clear()  # this one is broken now
    return text


def prepare(path: str) -> None:
    """Save a child time: prepare what it would otherwise find out for itself."""
    operators()
    _tree(path)
    _owners()


@cache
def _owners() -> dict[tuple[str, str, int], list[types.FunctionType]]:
    """Find all functions of the package: by file, name and first line."""
    found = defaultdict(list)
    for thing in gc.get_objects():
        if isinstance(thing, types.FunctionType) and "/swarm/" in thing.__code__.co_filename:
            code = thing.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(thing)
    return found


def exchange(path: str, source: str) -> bool:
    """Give the functions of a module their new code. False if something else changes."""
    full, owners = str(ROOT / path), _owners()
    old, new = compile((ROOT / path).read_text(), full, "exec"), compile(source, full, "exec")
    (bodies, was), (new_bodies, now) = _parts(old), _parts(new)
    if bodies != new_bodies or len(was) != len(now):
        return False
    pairs = [(a, b) for a, b in zip(was, now, strict=True) if a != b]
    found = [(function, b) for a, b in pairs for function in owners[full, a.co_qualname, a.co_firstlineno]]
    if len(found) < len(pairs) or any(f.__code__.co_freevars != b.co_freevars for f, b in found):
        return False
    for function, code in found:
        function.__code__ = code
    return bool(found)


def _parts(code: types.CodeType) -> tuple[list[Any], list[types.CodeType]]:
    """Split what the module and its classes do when they are made; and the functions in them."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    plain = [repr(constant) for constant in code.co_consts if not isinstance(constant, types.CodeType)]
    bodies, functions = [(code.co_code, plain, code.co_names)], []  # type: list[Any], list[types.CodeType]
    for constant in inner:
        if constant.co_flags & inspect.CO_OPTIMIZED:
            functions.append(constant)
        else:
            more, within = _parts(constant)
            bodies += more
            functions += within
    return bodies, functions
