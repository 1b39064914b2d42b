"""Settings of the plan, which assigns layers to workers: objective, constraints, and an operator's decisions. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from swarm.config.values import Layers, Seconds, Section


class PlanSettings(Section):
    """The plan: what load it is made for, what it must keep to, what is decided by hand."""

    objective: Literal["auto", "throughput", "latency"] = Field(
        default="auto",
        description="throughput: the most tokens for all together, so the slowest stage counts. latency: the quickest "
        "single answer, so the sum over stages counts, and fewer workers may be better. auto: latency after a time "
        "in which at most one sequence was under way (plan.quiet_s), throughput as soon as there are more. Either "
        "counts for what a change must gain (plan.margin). Where all stages share the cores of one machine it makes "
        "no difference.",
    )
    quiet_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        default=60.0,
        description="Seconds with at most one sequence under way after which objective auto is latency. They are "
        "doubled, up to an hour, each time that it was soon busy again, so that layers don't move to and fro. 0: auto "
        "is always throughput.",
    )
    rows: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=8, description="Sequences that decode together in one step of the load that is planned for."
    )
    context: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        default=512, description="Positions that each of them has; long ones make attention count for more."
    )
    prompt: Annotated[float, Field(ge=0, le=10_000)] = Field(
        default=1.0, description="Positions of prompt for every token that is generated; 1 is an even mixture."
    )
    kv_positions: Annotated[int, Field(ge=0, le=1 << 24)] = Field(
        default=4096,
        description="Positions of keys and values that every stage should have room for, all sequences together. Where "
        "memory doesn't allow it, the plan does without and says so.",
    )
    margin: Annotated[float, Field(ge=0, le=10)] = Field(
        default=0.1,
        description="How much quicker, as a part, another plan must be before layers are moved for speed alone. "
        "Measurements differ by a few percent, and moving costs seconds.",
    )
    cooldown_s: Seconds = Field(
        default=30.0,
        description="Seconds between two looks at how quick workers really are, beside what they measured at their "
        "start; so layers are moved for that no more often. What joins, leaves or dies is acted on at once.",
    )
    standby: Literal["none", "neighbours", "all"] = Field(
        default="neighbours",
        description="Which layers a worker keeps loaded beside its own, for the case that their holder dies. "
        "neighbours: half of what the stage before it and the one behind it hold, so that nothing is loaded after a "
        "death; it costs the memory of the weights once more, in all, and never more than half of what a worker's own "
        "weights leave. all: as much as fits. none: nothing, and a death costs a load. Whoever has no part in the plan "
        "keeps what fits.",
    )
    min_memory: ByteSize = Field(
        default=ByteSize(0), description="Bytes that a worker must have for the model; one with less is turned away."
    )
    min_layers_per_s: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Layers that a worker must compute in a second for a single sequence, as it measured itself; a "
        "slower one is turned away. 0: none is.",
    )
    pins: dict[str, Layers] = Field(
        default={}, description='Layers that a worker gets whatever else, by its name: { "big-one" = "0-10" }.'
    )
    caps: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={}, description='The most layers that a worker gets, by its name: { "laptop" = 8 }.'
    )
    exclude: tuple[str, ...] = Field(
        default=(), description='Names of workers that get no layers, though they may join: ["old-one"].'
    )
