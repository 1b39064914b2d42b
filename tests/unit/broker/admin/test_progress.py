"""How far each request is, as the report of requests tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from swarm.wire.messages import Query
from tests.unit.broker.bench import Bench, submit
from tests.unit.broker.steps.test_scheduler import scheduling


def progress(bench: Bench) -> tuple[int, int, int]:
    """The only request's prompt, what is computed of it, and the tokens that were drawn."""
    (row,) = cast(list[dict[str, int]], bench.ask(Query(what="requests")).body["requests"])
    return row["num_prompt"], row["num_prompt_computed"], row["num_tokens"]


def test_a_long_prompt_tells_how_much_of_it_every_stage_has_computed(make_bench: Callable[..., Bench]) -> None:
    """Chunk by chunk as they are acknowledged, and all of it from its first token on."""
    bench = make_bench(scheduling(mode="batch", prefill_chunk=4, step_tokens=6)).serve(1)
    bench.say(submit(num_prompt=10, max_tokens=2))
    assert progress(bench) == (10, 0, 0)  # under way is not computed
    bench.finish()
    assert progress(bench) == (10, 4, 0)
    bench.finish()
    assert progress(bench) == (10, 8, 0)
    bench.finish()
    assert progress(bench) == (10, 10, 1)
    bench.run_dry()
    assert progress(bench) == (10, 10, 2)


def test_a_prompt_with_several_continuations_is_one(make_bench: Callable[..., Bench]) -> None:
    """The continuation that is furthest tells how far it is."""
    bench = make_bench(scheduling(mode="batch", prefill_chunk=4, step_tokens=6)).serve(1)
    bench.say(submit(num_prompt=10, max_tokens=2, n=2))
    bench.finish()
    assert progress(bench) == (10, 4, 0)
