"""Formatting of figures for people. Pure."""

from __future__ import annotations

import math


def time_of(ms: float) -> str:
    """Format milliseconds with three digits and a unit: 0.31 ms, 12.4 ms, 1.24 s."""
    if ms >= 9_999.5:
        return f"{ms / 1000:.1f} s"
    if ms >= 999.5:
        return f"{ms / 1000:.2f} s"
    return f"{ms:.0f} ms" if ms >= 99.95 else f"{ms:.1f} ms" if ms >= 9.995 else f"{ms:.2f} ms"


def number(value: float) -> str:
    """Format a number with its significant digits: 0.53, 17.2, 1,234."""
    if value >= 99.95 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def ticks(most: float, about: int = 5) -> list[float]:
    """Return round numbers from 0 to a little over ``max_value``, for an axis."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    count = math.ceil(most / step - 1e-9)
    return [round(n * step, 10) for n in range(count + 1)]


def log_ticks(least: float, most: float) -> list[float]:
    """Return 1, 2, 5, 10 … for a logarithmic axis from ``min_value`` to ``max_value``."""
    least, most = max(least, 1e-9), max(most, 2e-9)
    found = []
    exponent = math.floor(math.log10(least))
    while True:
        for factor in (1, 2, 5):
            value = factor * 10.0**exponent
            if value <= least:
                found = [value]
            else:
                found.append(value)
            if value >= most:
                return found if len(found) > 1 else [*found, value * 10]
        exponent += 1
