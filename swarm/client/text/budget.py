"""Limits on what a chat template may use: processor time and characters.

Templates come with models and are not trusted. Their loops, calls and outputs are counted (``rewriting`` inserts the
calls of ``tick``, ``write`` and ``concat``). Operations that could make a large value out of small ones in one step are
refused beforehand, since a time limit cannot interrupt a single operation.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2

TIME_S = 2.0  # seconds of a thread's processor time; a conversation of 16,000 messages takes a tenth of it
GROWTH = 8  # characters written per input character; escapes take six
PASSES = 64  # how often all of the input may be trimmed, joined and replaced
SPARE_CHARS = 1 << 20  # allowance for the template's own text
MAX_NUMBER = 10_000  # largest number passed as an argument, such as a width or a count
MAX_BITS = 4096  # bits of an integer
_CHECK_CLOCK_EVERY = 64  # ticks between two reads of the clock
_WIDE = re.compile(r"\d{5}|\*")  # in a format string: a width of five digits, or one taken from the arguments
_PADDED = re.compile(r"\d{3}|:[^}]*\{")  # a width of three digits, or one taken from a field of its own


class TemplateLimitExceeded(jinja2.TemplateError):
    """A template exceeded one of its limits."""


class TemplateTimeout(TemplateLimitExceeded):
    """A template exceeded its time limit."""


class TemplateBudget:
    """Remaining allowance of one rendering."""

    __slots__ = ("_chars", "_ends_at", "_made", "_ticks", "most", "time_s")

    def __init__(self, num_chars: int, time_s: float = TIME_S) -> None:
        """Start the clock. ``num_chars``: the size of the input."""
        self.most = self._chars = GROWTH * num_chars + SPARE_CHARS
        self._made = PASSES * (num_chars + SPARE_CHARS)
        self.time_s = time_s
        self._ends_at = time.thread_time() + time_s
        self._ticks = 0

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % _CHECK_CLOCK_EVERY == 0 and time.thread_time() > self._ends_at:
            raise TemplateTimeout(f"it takes longer than {self.time_s:g} s")

    def write(self, num_chars: int) -> None:
        self._chars -= num_chars
        if self._chars < 0:
            raise TemplateLimitExceeded(f"it writes more than {self.most} characters")

    def charge_result(self, value: object) -> None:
        """Charge the length of a text that a filter or a method has returned. Each text may be within the size limit
        and all together still exceed the budget."""
        if isinstance(value, str):
            self._made -= len(value)
            if self._made < 0:
                raise TemplateLimitExceeded(f"it processes more than {PASSES} times its input")

    def check_size(self, size: int) -> None:
        """Raise TemplateLimitExceeded if a value of this size is too large."""
        if size > self.most:
            raise TemplateLimitExceeded(f"it makes a value of more than {self.most} characters or items")


_CURRENT: ContextVar[TemplateBudget] = ContextVar("budget")


@contextmanager
def use_budget(budget: TemplateBudget) -> Iterator[None]:
    """Charge the templates rendered inside this context to the budget."""
    token = _CURRENT.set(budget)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_budget() -> TemplateBudget:
    """Return the budget of this rendering. Raises TemplateLimitExceeded outside of one, as when a template is compiled:
    nothing may be used there."""
    try:
        return _CURRENT.get()
    except LookupError:
        raise TemplateLimitExceeded("no template is being rendered") from None


def size_of(value: object, most: int | None = None) -> int:
    """Return the approximate number of characters of a value as text. Counting stops beyond ``most``."""
    size, rest = 0, [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            size += 2
            rest += item.keys()
            rest += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            size += 2
            rest += item
        else:
            size += 8
        if most is not None and size > most:
            break
    return size


# --- called by templates


def tick() -> str:
    current_budget().tick()
    return ""


def write(value: object) -> str:
    """Charge a value that the template outputs, and return its text."""
    budget = current_budget()
    text = _text(value, budget)
    budget.write(len(text))
    return text


def charge_literal(num_chars: int) -> str:
    """Charge the literal that follows."""
    current_budget().write(num_chars)
    return ""


def concat(*values: object) -> str:
    """Join values as ``~`` does."""
    budget = current_budget()
    texts = [_text(value, budget) for value in values]
    budget.check_size(sum(map(len, texts)))
    return "".join(texts)


TEMPLATE_FUNCTIONS = (tick, write, charge_literal, concat)


def _text(value: object, budget: TemplateBudget) -> str:
    if not isinstance(value, str):
        budget.check_size(size_of(value, budget.most))
    return str(value)


# --- single operations that make a large value from small ones


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimitExceeded if the result of ``left operator right`` would be too large."""
    budget = current_budget()
    budget.tick()
    if operator == "+" and _is_long(left) and _is_long(right):
        budget.check_size(len(left) + len(right))
    elif operator == "*":
        _check_product(left, right, budget)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right, budget)


def check_method(owner: object, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Raise TemplateLimitExceeded if the result of calling a method of a text or list would be too large."""
    budget = current_budget()
    if not isinstance(owner, str):
        return
    given = (*args, *keywords.values())
    if name in _WIDENING:
        _check_numbers(given)
    if name in ("format", "format_map"):
        _check_format(owner, given, budget)
    elif name == "translate":
        raise TemplateLimitExceeded("translate is not allowed in templates")
    elif name == "expandtabs":
        budget.check_size(len(owner) + MAX_NUMBER * owner.count("\t"))
    elif name == "replace" and len(given) >= 2:
        _check_replaced(owner, given[0], given[1], budget)
    elif name == "join" and given:
        _check_joined(given[0], owner, budget)


def check_filter(name: str, value: object, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Raise TemplateLimitExceeded if the result of a filter would be too large."""
    budget = current_budget()
    budget.tick()
    given = (*args, *keywords.values())
    if name in _WIDENING:
        _check_numbers(given)
    if name not in _CONTAINERS and not isinstance(value, str):
        budget.check_size(size_of(value, budget.most))
    text = value if isinstance(value, str) else ""
    if name == "replace" and len(given) >= 2:
        _check_replaced(text, given[0], given[1], budget)
    elif name == "join":
        _check_joined(value, given[0] if given else "", budget)
    elif name == "format":
        _check_format(text, given, budget)
    elif name in ("indent", "wordwrap"):
        width = sum(one if isinstance(one, int) else len(one) for one in given if isinstance(one, int | str))
        budget.check_size(len(text) + (text.count("\n") + len(text) // 8 + 1) * (width or 4))
    elif name == "tojson" and isinstance(keywords.get("indent"), int) and keywords["indent"] > 16:
        raise TemplateLimitExceeded("tojson indents by 16 at most")


# Methods and filters whose output is as wide as a numeric argument.
_WIDENING = frozenset({
    "batch",
    "center",
    "expandtabs",
    "format",
    "indent",
    "ljust",
    "rjust",
    "slice",
    "truncate",
    "wordwrap",
    "zfill",
})  # fmt: skip

# Filters that take containers as they are, without converting them to text.
_CONTAINERS = frozenset({
    "attr",
    "batch",
    "count",
    "d",
    "default",
    "dictsort",
    "first",
    "groupby",
    "items",
    "join",
    "last",
    "length",
    "list",
    "map",
    "max",
    "min",
    "random",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "slice",
    "sort",
    "sum",
    "unique",
})  # fmt: skip


def _is_long(value: object) -> bool:
    return isinstance(value, str | list | tuple)


def _check_product(left: Any, right: Any, budget: TemplateBudget) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif _is_long(left) and isinstance(right, int):
        budget.check_size(len(left) * right)
    elif _is_long(right) and isinstance(left, int):
        budget.check_size(len(right) * left)


def _check_bits(num_bits: int) -> None:
    if num_bits > MAX_BITS:
        raise TemplateLimitExceeded(f"it makes a number of more than {MAX_BITS} bits")


def _check_numbers(given: Iterable[object]) -> None:
    if any(isinstance(one, int) and abs(one) > MAX_NUMBER for one in given):
        raise TemplateLimitExceeded(f"it passes a number above {MAX_NUMBER}")


def _check_format(form: str, given: object, budget: TemplateBudget) -> None:
    if _WIDE.search(form):
        raise TemplateLimitExceeded("it formats something wider than 9999 characters")
    width = MAX_NUMBER if _PADDED.search(form) else 0
    budget.check_size(len(form) + (form.count("%") + form.count("{")) * (width + size_of(given, budget.most)))


def _check_replaced(text: str, old: object, new: object, budget: TemplateBudget) -> None:
    num_places = text.count(str(old)) if old else len(text) + 1
    budget.check_size(len(text) + num_places * size_of(new, budget.most))


def _check_joined(values: object, between: object, budget: TemplateBudget) -> None:
    if isinstance(values, list | tuple | Mapping | str):
        size = size_of(values, budget.most) + len(values) * size_of(between, budget.most)
        budget.check_size(size)
