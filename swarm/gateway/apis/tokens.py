"""Log probabilities and hops of tokens in OpenAI's format. Pure, apart from the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from swarm.client.results import Piece
from swarm.gateway.answer import PromptPart, TokenCounts
from swarm.gateway.completion.served_model import ServedModel
from swarm.wire.messages import TokenLogprob

Json = dict[str, Any]
_LOWEST = -9999.0  # OpenAI's stand-in for minus infinity


def chat_logprobs(served: ServedModel, pieces: Iterable[Piece]) -> list[Json]:
    """Return log probabilities in the format of /v1/chat/completions, one entry per token."""
    return [
        {**_entry(served, own), "top_logprobs": [_entry(served, each) for each in others]}
        for own, *others in (piece.logprobs for piece in pieces if piece.logprobs)
    ]


def _entry(served: ServedModel, entry: TokenLogprob) -> Json:
    content = served.token_bytes(entry.token)
    return {
        "token": content.decode(errors="replace"),
        "logprob": max(entry.logprob, _LOWEST),
        "bytes": list(content),
    }


def prompt_logprobs(served: ServedModel, part: PromptPart) -> Json:
    """Return the prompt's log probabilities in the format of /v1/completions: null for the first token. There may be
    hundreds of thousands."""
    text, offset = None if served.text is None else served.text.detokenizer(), 0
    result: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entries in zip(part.tokens, part.completion.prompt_logprobs, strict=True):
        result["tokens"].append(_token_text(served, token))
        result["token_logprobs"].append(max(entries[0].logprob, _LOWEST) if entries else None)
        result["top_logprobs"].append(_top(served, entries[1:]) if entries else None)
        result["text_offset"].append(offset)
        offset += 0 if text is None else len(text.push(token))
    return result


def _top(served: ServedModel, entries: Iterable[TokenLogprob]) -> Json:
    return {_token_text(served, each.token): max(each.logprob, _LOWEST) for each in entries}


def text_logprobs(served: ServedModel, pieces: Iterable[Piece], offset: int) -> tuple[Json, int]:
    """Return log probabilities in the format of /v1/completions, and the text offset after them."""
    result: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for piece in pieces:
        if piece.logprobs:
            own, *others = piece.logprobs
            result["tokens"].append(_token_text(served, own.token))
            result["token_logprobs"].append(max(own.logprob, _LOWEST))
            result["top_logprobs"].append(_top(served, others))
            result["text_offset"].append(offset)
        offset += len(piece.text)
    return result, offset


def _token_text(served: ServedModel, token: int) -> str:
    content = served.token_bytes(token)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def list_hops(pieces: Iterable[Piece]) -> list[Any]:
    """Return the hops of each token (where its time went), one list per token."""
    return [msgspec.to_builtins(piece.hops) for piece in pieces if piece.token is not None]


def usage_object(counts: TokenCounts) -> Json:
    """Return token counts in the format of /v1/chat/completions and /v1/completions."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.answer,
        "total_tokens": counts.prompt + counts.answer,
        "prompt_tokens_details": {"cached_tokens": counts.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": counts.reasoning,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
