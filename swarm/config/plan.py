"""Settings of the plan, which assigns layers to workers: objective, constraints, and an operator's decisions. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from swarm.config.values import Layers, Seconds, Section


class PlanSettings(Section):
    """The plan: the load that it is made for, its constraints, and an operator's decisions."""

    objective: Literal["auto", "throughput", "latency"] = Field(
        default="auto",
        description="throughput: the most tokens for all requests together, so the slowest stage counts. latency: the "
        "fastest single answer, so the sum over stages counts, and fewer workers may be better. auto: "
        "latency after a time with at most one running sequence (plan.quiet_s), throughput as soon as there"
        " are more. The objective also decides what a change must gain (plan.margin). It makes no "
        "difference where all stages share the cores of one machine.",
    )
    quiet_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        default=60.0,
        description="Seconds with at most one running sequence after which objective auto means latency. The time "
        "doubles, up to an hour, whenever the load soon rises again, so that layers do not move back and "
        "forth. 0: auto always means throughput.",
    )
    rows: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=8, description="Sequences that decode together in one step of the planned load."
    )
    context: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        default=512, description="Positions of each of these sequences; long ones give attention more weight."
    )
    prompt: Annotated[float, Field(ge=0, le=10_000)] = Field(
        default=1.0, description="Prompt positions per generated token; 1 is an even mixture."
    )
    kv_positions: Annotated[int, Field(ge=0, le=1 << 24)] = Field(
        default=4096,
        description="Positions of keys and values that every stage should have memory for, all sequences together. If "
        "memory is too small, the plan goes without and notes it.",
    )
    margin: Annotated[float, Field(ge=0, le=10)] = Field(
        default=0.1,
        description="Fraction by which another plan must be faster before layers are moved for speed alone. "
        "Measurements differ by a few percent, and moving costs seconds.",
    )
    cooldown_s: Seconds = Field(
        default=30.0,
        description="Seconds between two comparisons of the workers' actual speed with what they measured at their "
        "start. While requests run, layers are not moved more often for speed alone, also if workers join. "
        "Departures and losses are handled without delay.",
    )
    standby: Literal["none", "neighbours", "all"] = Field(
        default="neighbours",
        description="Which layers a worker keeps loaded in addition to its own, in case their worker is lost. "
        "neighbours: half of the layers of the previous and the next stage, so that nothing is loaded after"
        " a loss; it costs the memory of the weights once more, in total, and never more than half of what "
        "a worker's own weights leave free. all: as many as fit. none: no layers, and a loss costs a load. "
        "A worker without a part in the plan keeps what fits.",
    )
    standby_kv: Literal["none", "neighbours", "all"] = Field(
        default="neighbours",
        description="Which workers that keep layers warm for others (plan.standby) also receive copies of their keys "
        "and values, so that a loss costs a replay of the last positions only. neighbours: one worker for "
        "each layer. all: every worker that keeps the layer warm. none: no copies, and a loss costs a replay "
        "of all positions. Copies take only memory that positions in use leave free.",
    )
    min_memory: ByteSize = Field(
        default=ByteSize(0), description="Bytes that a worker must have for the model; one with less is refused."
    )
    min_layers_per_s: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="Layers that a worker must compute per second for a single sequence, as measured by itself; a "
        "slower one is refused. 0: no limit.",
    )
    pins: dict[str, Layers] = Field(
        default={}, description='Layers that a worker gets in any case, by its name: { "big-one" = "0-10" }.'
    )
    caps: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={}, description='Largest number of layers that a worker gets, by its name: { "laptop" = 8 }.'
    )
    exclude: tuple[str, ...] = Field(
        default=(), description='Names of workers that get no layers, though they may join: ["old-one"].'
    )
