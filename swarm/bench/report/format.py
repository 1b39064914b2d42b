"""Formatting of figures for people. Pure."""

from __future__ import annotations

import math


def format_time(ms: float) -> str:
    """Format milliseconds with three digits and a unit: 0.31 ms, 12.4 ms, 1.24 s."""
    if ms >= 9_999.5:
        return f"{ms / 1000:.1f} s"
    if ms >= 999.5:
        return f"{ms / 1000:.2f} s"
    return f"{ms:.0f} ms" if ms >= 99.95 else f"{ms:.1f} ms" if ms >= 9.995 else f"{ms:.2f} ms"


def format_number(value: float) -> str:
    """Format a number with its significant digits: 0.53, 17.2, 1,234."""
    if value >= 99.95 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def ticks(max_value: float, about: int = 5) -> list[float]:
    """Return round numbers from 0 to a little over ``max_value``, for an axis."""
    if max_value <= 0:
        return [0.0, 1.0]
    raw = max_value / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    count = math.ceil(max_value / step - 1e-9)
    return [round(n * step, 10) for n in range(count + 1)]


def log_ticks(min_value: float, max_value: float) -> list[float]:
    """Return 1, 2, 5, 10 … for a logarithmic axis from ``min_value`` to ``max_value``."""
    min_value, max_value = max(min_value, 1e-9), max(max_value, 2e-9)
    values = []
    exponent = math.floor(math.log10(min_value))
    while True:
        for factor in (1, 2, 5):
            value = factor * 10.0**exponent
            if value <= min_value:
                values = [value]
            else:
                values.append(value)
            if value >= max_value:
                return values if len(values) > 1 else [*values, value * 10]
        exponent += 1
