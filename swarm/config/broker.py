"""Settings of the broker: listeners, queue, health of workers, recovery, journal."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from swarm.config.values import Advertised, Count, Host, Listened, Network, Seconds, Section


class BrokerSettings(Section):
    """The broker: its doors, its queue and its patience."""

    host: Host = Field(
        default="127.0.0.1",
        description="Address at which this machine is served, without keys: who is on it may do all. Only loopback.",
    )
    listen: tuple[Listened, ...] = Field(
        default=(),
        max_length=16,
        examples=[["192.0.2.1"], ["eth0"]],
        description="Addresses or network interfaces at which other machines are served too, with keys: see swarmctl "
        "invite. Needs a state directory, where the keys are.",
    )
    advertise: tuple[Advertised, ...] = Field(
        default=(),
        max_length=16,
        examples=[["swarm.example"]],
        description="What invitations tell others to connect to, if it is not what broker.listen says: behind a "
        "forwarded port, say. HOST or HOST:PORT.",
    )
    worker_networks: tuple[Network, ...] = Field(
        default=(),
        max_length=64,
        examples=[["10.1.0.0/16", "192.0.2.7"]],
        description="Networks or addresses at which workers from other machines may be reached, beside the one that "
        "each comes from: for a second network between workers (worker.host, worker.advertise). At any other address "
        "nobody connects to a worker; its steps go by the broker's relay.",
    )
    discoverable: bool = Field(
        default=False,
        description="Tell whoever asks on the local network that this broker is here, with its public key (swarm "
        "discover; needs swarm[discover] and broker.listen). Joining takes an invitation all the same.",
    )
    port: int = Field(
        default=5700,
        ge=1,
        le=65532,
        description="Port of the clients' door. The next one is the door for workers' control; with broker.listen, the "
        "two after it are those for beats and finished steps.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of the weights in memory, the same at all workers of the swarm. auto: that of the first "
        "worker. A worker whose worker.dtype is auto takes it if its device can; another one is refused.",
    )
    max_queue: Count = Field(
        default=1024,
        description="Sequences that may wait. Beyond it a request is refused with a time to come back: "
        "better than waiting longer than anybody would. One tenant may hold three quarters of the places; the last "
        "tenth, at least one, is kept for classes above low, the last twentieth for those above normal.",
    )
    max_running: Count = Field(
        default=64,
        description="Sequences computed at a time, if worker.max_sequences is as large. More fill the steps, and cost "
        "KV memory.",
    )
    step_tokens: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        default=512,
        description="Tokens per step, prompts and answers together. Larger steps use the device better, "
        "smaller ones let running answers flow more evenly.",
    )
    prefill_chunk: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        default=256,
        description="Tokens of one prompt per step, at most step_tokens. Half a step leaves room for running answers.",
    )
    step_target_s: Annotated[float, Field(ge=0, le=60)] = Field(
        default=0.0,
        description="Seconds between two tokens of running answers that prompts shall not exceed: a step gets as much "
        "of the prompts as its measured time allows, at least 32 tokens, at most step_tokens. 0: always step_tokens, "
        "which is best for throughput.",
    )
    kv_headroom: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        default=64,
        description="Positions beyond what a sequence has for which it gets room when it enters; more comes as it "
        "grows. Small lets many in, of which some may have to give way and be computed again; as large as the longest "
        "answer, nobody ever has to.",
    )
    max_passed: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        default=16,
        description="How many later sequences may go ahead of one that waits for more room than there is, before the "
        "room is kept free for it. Some fill gaps, many would starve it.",
    )
    max_passed_s: Seconds = Field(default=5.0, description="Seconds for which they may, whichever is reached first.")
    mode: Literal["auto", "batch", "overlapped"] = Field(
        default="auto",
        description="Steps in flight: batch is one, overlapped is one per stage. auto: one where all stages share the "
        "cores of a machine, for they would only take them from each other, else one per stage.",
    )
    prefix_cache: bool = Field(
        default=True,
        description="Keep the beginnings of ended sequences in the stages, as long as nobody needs the room: who "
        "begins alike starts from a copy. Never changes a token.",
    )
    prefix_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="The part of the stages' room for keys and values that kept beginnings may take at most. Less "
        "leaves room free for who comes next.",
    )
    prefix_policy: Literal["recent", "frequent"] = Field(
        default="recent",
        description="Whose beginning is kept longest where room is short. recent: whose use is the shortest time ago. "
        "frequent: which most have begun from; for a few long system prompts among many that come once.",
    )
    kv_cache: bool = Field(
        default=True,
        description="Keep keys and values between steps. Off, every token computes its whole sequence anew: "
        "only good for measuring what the cache is worth.",
    )
    settle_s: Seconds = Field(
        default=0.5,
        description="Seconds to wait for further workers after one has joined, before a plan is made: "
        "workers started together should share the first plan, which is made at once when min_workers, if these are "
        "several, are there.",
    )
    min_workers: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Workers to wait for before the first plan is made, even if fewer could hold the model; for 30 "
        "seconds at most, once one has joined. swarm up sets it to the workers that it starts.",
    )
    prepare_timeout_s: Seconds = Field(
        default=600.0,
        description="Seconds that a worker may take to load its layers; long, as large models load from disks.",
    )
    activate_timeout_s: Seconds = Field(
        default=5.0,
        description="Seconds that a worker may take to switch to a plan it has prepared; nothing is loaded then.",
    )
    too_large_patience_s: Seconds = Field(
        default=30.0,
        description="Seconds that a request waits which the stages could not hold even alone, since a worker was lost: "
        "a lost worker is back within seconds, and the room with it.",
    )
    client_grace_s: Seconds = Field(
        default=10.0,
        description="Seconds that a request goes on without its client, which may only have lost its connection.",
    )
    retain_s: Seconds = Field(
        default=60.0,
        description="Seconds that a finished answer is kept, so that a client that comes back can still fetch it.",
    )
    check_rules: bool = Field(
        default=False,
        description="Compare all that the broker knows with its own rules, at every tick. What does not hold is logged "
        "as rule_broken, and counted. Costs little with few requests; for hunting a fault, not for every day.",
    )
    trace_steps: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        default=4096,
        description="Steps whose times are kept in memory for swarmctl trace; 1 to 3 KB each. 0 keeps none. "
        "The default is a minute or two of a small model, more of a large one.",
    )


class HealthSettings(Section):
    """When a worker counts as lost."""

    beat_timeout_s: Annotated[float, Field(ge=0.02, le=3600)] = Field(
        default=0.7,
        description="Seconds without a beat after which a worker is out, at the most. It is sooner if its beats have "
        "come evenly: three times as late as the latest of the last half minute.",
    )
    beat_least_s: Annotated[float, Field(ge=0.02, le=3600)] = Field(
        default=0.4,
        description="Seconds without a beat that are never silence, however evenly beats have come.",
    )
    hang_factor: Annotated[float, Field(ge=1, le=10_000)] = Field(
        default=10.0,
        description="How many times longer than a step should take, or usually takes, its worker may show no progress "
        "before it is out. A busy machine makes steps slow, hardly ever ten times slower.",
    )
    hang_min_s: Seconds = Field(
        default=2.0,
        description="Seconds without progress that are never a hang, however short the step should have been; 15 times "
        "as many while layers are loaded, 5 times as many for the control loop.",
    )
    asleep_s: Seconds = Field(
        default=0.75,
        description="Seconds in which a worker that should compute makes no progress and none of its threads runs, or "
        "waits for a core or a disk: then it is out before hang_min_s. Known on Linux.",
    )


class RecoverySettings(Section):
    """How lost layers are rebuilt."""

    source: Literal["logs", "tokens"] = Field(
        default="logs",
        description="From what. logs: what the stage before them sent, through the lost layers alone; tokens where "
        "there is no log. tokens: always from these, through all layers before them too; only good for comparisons.",
    )
    chunk: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        default=256,
        description="Positions of one sequence that are replayed at a time. Running answers wait for no more than one "
        "such chunk.",
    )
    recheck_every_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        default=0.0,
        description="Seconds between two comparisons in which what one stage computed for a running sequence is "
        "computed again by others that have its layers warm (plan.standby), when they have time; disagreement is "
        "logged and shown by swarmctl nodes. The only means against results that are wrong and look right. 0: none.",
    )


class JournalSettings(Section):
    """What a broker with a state directory remembers on disk."""

    keep_s: Annotated[float, Field(ge=0)] = Field(
        default=86_400.0,
        description="Seconds for which a request that has ended can still be read (swarmctl requests, Attach). Those "
        "that have not ended are kept in any case.",
    )
    max_bytes: ByteSize = Field(
        default=ByteSize(1 << 30),
        description="Bytes of the journal; beyond, the requests that ended first go first. At most an eighth is for "
        "the times of steps (swarmctl trace), which go before any request.",
    )
