"""Regular expressions of a model's configuration, matched in linear time. Does not import torch.

The configuration and the names come from a file that somebody has published. ``re`` may take exponential time for
them, in C code that holds the interpreter's lock, so that a worker neither answers nor ends. Here, an expression
becomes the states of an automaton, and all states that a name can lead to are followed at once. What has no such
automaton (back references, looking ahead or behind) and flags are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

from swarm.errors import ModelError

_MAX_TEXT: Final = 1024  # letters of an expression, and of a name
_MAX_NODES: Final = 4096  # of an automaton, after repeats are written out
_MAX_CACHED: Final = 4096  # steps of an automaton that are kept

_parser: Any = import_module("re._parser")

Test = Callable[[str], bool]


@dataclass(slots=True)
class _Node:
    """A state: it consumes a letter that passes ``test``, or none if the letters around pass ``place``."""

    targets: list[int]
    test: Test | None = None
    place: Callable[[str, str], bool] | None = None


@dataclass(slots=True)
class Pattern:
    """A compiled expression."""

    _nodes: list[_Node]
    _start: int
    # by states, whether they follow a letter of a word or the beginning, and the next letter
    _steps: dict[tuple[frozenset[int], str, str], tuple[frozenset[int], bool]] = field(default_factory=dict)

    def matches(self, name: str) -> bool:
        """Whether the name begins with what the expression describes, as with ``re.match``."""
        states, before = frozenset([self._start]), ""
        for letter in (*name, ""):  # an empty one at the end
            states, is_match = self._step(states, before, letter)
            if is_match or not states:
                return is_match
            before = letter
        return False

    def _step(self, states: frozenset[int], before: str, letter: str) -> tuple[frozenset[int], bool]:
        """Return the states after one more letter, and whether the end was reached before it."""
        key = states, before, letter
        step = self._steps.get(key)
        if step is None:
            reached = self._follow(states, before, letter)
            nodes = [self._nodes[state] for state in reached]
            step = (
                frozenset(node.targets[0] for node in nodes if node.test is not None and letter and node.test(letter)),
                _END in reached,
            )
            if len(self._steps) >= _MAX_CACHED:
                self._steps.clear()
            self._steps[key] = step
        return step

    def _follow(self, states: Iterable[int], before: str, letter: str) -> set[int]:
        """Return the states that are reached from these without a letter."""
        reached: set[int] = set()
        left = list(states)
        while left:
            state = left.pop()
            if state in reached:
                continue
            reached.add(state)
            node = self._nodes[state]
            if node.test is None and (node.place is None or node.place(before, letter)):
                left.extend(node.targets)
        return reached


_END: Final = 0  # the number of the last state


@lru_cache(maxsize=1024)
def compile_pattern(text: str) -> Pattern:
    """Return the compiled expression. Raises ``ModelError``."""
    if len(text) > _MAX_TEXT:
        raise ModelError(f"quantization_config has a pattern of {len(text)} letters; name the modules instead")
    try:
        parsed = _parser.parse(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"quantization_config has an invalid pattern {text!r} ({error})") from None
    builder = _Builder(text)
    if parsed.state.flags != re.UNICODE.value:
        raise builder.unsupported("flags")
    start = builder.build(parsed, _END)
    return Pattern(builder.nodes, start)


def is_match(text: str, name: str) -> bool:
    """Whether ``re.match`` would find the expression in the name. Raises ``ModelError``."""
    if len(name) > _MAX_TEXT:
        raise ModelError(f"the tensor {name[:80]}… has a name of {len(name)} letters; download the model's files again")
    return compile_pattern(text).matches(name)


class _Builder:
    """Builder of an automaton, from its end to its start."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.nodes = [_Node([])]

    def unsupported(self, what: str) -> ModelError:
        return ModelError(
            f"quantization_config has the pattern {self._text!r} with {what}, which is not supported; use literals, "
            "classes, alternatives and repeats, or name the modules"
        )

    def build(self, sequence: Any, target: int) -> int:
        """Return the first state of a sequence that leads to ``target``."""
        for operation, argument in reversed(list(sequence)):
            target = self._build_one(str(operation), argument, target)
        return target

    def _add(self, node: _Node) -> int:
        if len(self.nodes) >= _MAX_NODES:
            raise self.unsupported("too many repeats")
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _build_one(self, operation: str, argument: Any, target: int) -> int:
        match operation:
            case "SUBPATTERN":
                _, added, removed, inner = argument
                if added or removed:
                    raise self.unsupported("flags")
                return self.build(inner, target)
            case "BRANCH":
                return self._add(_Node([self.build(inner, target) for inner in argument[1]]))
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = argument
                return self._repeat(least, most, inner, target)
            case "AT" if str(argument) in _PLACES:
                return self._add(_Node([target], place=_PLACES[str(argument)]))
            case _:
                test = _make_test(operation, argument)
                if test is None:
                    raise self.unsupported(operation.lower().replace("_", " "))
                return self._add(_Node([target], test=test))

    def _repeat(self, least: int, most: int, inner: Any, target: int) -> int:
        if most == _parser.MAXREPEAT:
            loop = self._add(_Node([target]))
            self.nodes[loop].targets.append(self.build(inner, loop))
            target = loop
        else:
            for _ in range(most - least):
                target = self._add(_Node([target, self.build(inner, target)]))
        for _ in range(least):
            target = self.build(inner, target)
        return target


def _is_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


def _is_boundary(before: str, letter: str) -> bool:
    return _is_word(before) != _is_word(letter)


_PLACES: Final[dict[str, Callable[[str, str], bool]]] = {
    "AT_BEGINNING": lambda before, _: not before,
    "AT_BEGINNING_STRING": lambda before, _: not before,
    "AT_END": lambda _, letter: not letter,
    "AT_END_STRING": lambda _, letter: not letter,
    "AT_BOUNDARY": _is_boundary,
    "AT_NON_BOUNDARY": lambda before, letter: not _is_boundary(before, letter),
}

_CATEGORIES: Final[dict[str, Test]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda letter: not letter.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda letter: not letter.isspace(),
    "CATEGORY_WORD": _is_word,
    "CATEGORY_NOT_WORD": lambda letter: not _is_word(letter),
}


def _make_test(operation: str, argument: Any) -> Test | None:
    """Return the test of one letter; None if the operation is something else."""
    make = _TESTS.get(operation)
    return None if make is None else make(argument)


def _make_class(items: Any) -> Test | None:
    is_negated = str(items[0][0]) == "NEGATE"
    tests = [_make_test(str(operation), argument) for operation, argument in items[is_negated:]]
    if any(test is None for test in tests):
        return None
    return lambda letter: is_negated != any(test(letter) for test in tests if test is not None)


_TESTS: Final[dict[str, Callable[[Any], Test | None]]] = {
    "LITERAL": lambda code: chr(code).__eq__,
    "NOT_LITERAL": lambda code: chr(code).__ne__,
    "ANY": lambda _: "\n".__ne__,
    "RANGE": lambda ends: lambda letter: ends[0] <= ord(letter) <= ends[1],
    "CATEGORY": lambda name: _CATEGORIES.get(str(name)),
    "IN": _make_class,
}
