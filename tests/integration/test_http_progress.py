"""The progress of a long prompt, as its reader sees it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.faults.zygote import Zygote
from tests.integration.gateway import MODEL, Served, events_in, request

# each chunk of a prompt takes its time
SLOW = {
    "SWARM_FAILPOINTS": "step.prefill=stall:0.2@1+",
    "SWARM_BROKER__PREFILL_CHUNK": "64",
    "SWARM_HEALTH__HANG_MIN_S": "60",
}


def test_a_stream_tells_how_far_a_long_prompt_is(zygote: Zygote, tmp_path: Path) -> None:
    """In comments, until the first token; the events are as without them."""
    with Served(tmp_path, zygote, SLOW) as served:
        body = {"model": MODEL, "prompt": "The miller sees the cat. " * 200, "max_tokens": 2, "stream": True}
        code, _, content = request(served.v1 + "/completions", body | {"stream_options": {"include_usage": True}})
    text = content.decode()
    assert code == 200, text
    total = events_in(text)[-2].json["usage"]["prompt_tokens"]
    seen = [(int(done), int(of)) for done, of in re.findall(r"^: prompt (\d+)/(\d+)$", text, re.MULTILINE)]
    assert {of for _, of in seen} == {total}
    assert seen == sorted(seen)
    assert any(0 < done < total for done, _ in seen)
