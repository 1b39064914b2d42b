"""Number of tokens that a server makes from our words, estimated from probe requests. Pure."""

from __future__ import annotations

from swarm.bench.plan import ASSUMED, Scale

PROBES = (16, 144)  # lengths of the two probe prompts, in words


def fit_scale(probes: list[tuple[int, int | None]]) -> Scale:
    """Fit a line through (words, ``usage.prompt_tokens``) of the answered probes."""
    points = [(words, tokens) for words, tokens in probes if tokens is not None and tokens > 0]
    if not points:
        return ASSUMED
    words, tokens = points[0]
    if len(points) > 1:
        more_words, more_tokens = points[-1]
        per_word = (more_tokens - tokens) / (more_words - words)
        if per_word <= 0:  # the server reports the same number for every prompt
            return ASSUMED
        base = max(0.0, tokens - words * per_word)
        return Scale(round(base, 2), round(per_word, 4), _describe(base, per_word))
    return Scale(0.0, round(tokens / words, 4), _describe(0.0, tokens / words))


def _describe(base: float, per_word: float) -> str:
    around = f" and {base:.0f} around them" if base >= 0.5 else ""
    return f"calibrated by usage.prompt_tokens: {per_word:.2f} tokens a word{around}"
