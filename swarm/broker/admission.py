"""What the broker refuses at its door, and in which words."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.blocks import BLOCK, num_blocks
from swarm.errors import InvalidRequest
from swarm.wire.messages import Manifest, Submit


@dataclass(frozen=True, slots=True)
class Refusal:
    """``code`` is a stable name for programs, ``reason`` a sentence for people."""

    code: str
    reason: str
    retry_after_s: float | None = None


def check_submit(submit: Submit, manifest: Manifest) -> Refusal | None:
    """Whether this model can serve this request at all; None means yes."""
    try:
        submit.params.check()
    except InvalidRequest as error:
        return Refusal("invalid", str(error))
    if not submit.prompt:
        return Refusal("invalid", "the prompt is empty: give at least one token")
    if len(submit.prompt) >= manifest.context:
        return Refusal(
            "context",
            f"the prompt has {len(submit.prompt)} tokens; {manifest.name} holds {manifest.context}, "
            f"and at least one must remain for the answer",
        )
    named = (
        ("prompt", submit.prompt),
        ("logit_bias", tuple(submit.params.logit_bias)),
        ("stop_token_ids", submit.params.stop_token_ids),
    )
    for field, ids in named:
        worst = max(ids, default=0)
        if worst >= manifest.vocab_size:
            return Refusal(
                "invalid", f"{field}: token {worst} is out of range, the vocabulary has {manifest.vocab_size}"
            )
    return None


def limit_of(submit: Submit, manifest: Manifest) -> int:
    """The most positions a sequence of this request can come to hold."""
    return min(len(submit.prompt) + submit.params.max_tokens, manifest.context)


def too_large(limit: int, kv_blocks: int) -> Refusal | None:
    """Whether stages with so many blocks, even empty, have no room for so many positions; None means that they have."""
    if num_blocks(limit) <= kv_blocks:
        return None
    reason = (
        f"prompt and max_tokens make {limit} positions, the stages hold {kv_blocks * BLOCK}: "
        f"ask for fewer tokens, or give the workers more memory"
    )
    return Refusal("too_large", reason)
