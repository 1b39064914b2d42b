"""Settings of the broker: listeners, queue, health of workers, recovery, journal."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from swarm.config.values import AdvertisedAddress, Count, Host, ListenAddress, Network, Seconds, Section
from swarm.version import with_extra


class BrokerSettings(Section):
    """The broker: its listeners, its queue and its time limits."""

    host: Host = Field(
        default="127.0.0.1",
        description="Address for this machine's own connections, which need no keys: every local process may do "
        "everything. Only loopback.",
    )
    listen: tuple[ListenAddress, ...] = Field(
        default=(),
        max_length=16,
        examples=[["192.0.2.1"], ["eth0"]],
        description="Addresses or network interfaces at which other machines are served too, with keys: see swarmctl "
        "invite. Needs a state directory, which holds the keys.",
    )
    advertise: tuple[AdvertisedAddress, ...] = Field(
        default=(),
        max_length=16,
        examples=[["swarm.example"]],
        description="Addresses that invitations contain, if they differ from broker.listen, for example behind a "
        "forwarded port. HOST or HOST:PORT.",
    )
    worker_networks: tuple[Network, ...] = Field(
        default=(),
        max_length=64,
        examples=[["10.1.0.0/16", "192.0.2.7"]],
        description="Networks or addresses at which workers on other machines may be reached, in addition to the "
        "address that each one connects from: for a second network between workers (worker.host, "
        "worker.advertise). No process connects to a worker at any other address; its steps use the "
        "broker's relay.",
    )
    discoverable: bool = Field(
        default=False,
        description="Answer discovery requests on the local network with the broker's address and public key (swarm "
        f"discover; needs {with_extra('discover')} and broker.listen). Joining still requires an invitation.",
    )
    port: int = Field(
        default=5700,
        ge=1,
        le=65532,
        description="Port for clients. The next one is for workers' control connections; with broker.listen, the two "
        "after it are for heartbeats and finished steps.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the weights in memory, the same for all workers of the swarm. auto: the type of the first "
        "worker. A worker whose worker.dtype is auto adopts it if its device can; another one is refused. float16: "
        "all workers need GPUs.",
    )
    max_queue: Count = Field(
        default=1024,
        description="Sequences that may wait. Beyond it a request is refused with a time to retry, which is better than"
        " an endless wait. One tenant may hold three quarters of the places; the last tenth, at least one, "
        "is reserved for priorities above low, the last twentieth for those above normal.",
    )
    max_running: Count = Field(
        default=64,
        description="Sequences computed at a time, if worker.max_sequences is as large. More fill the steps, and cost "
        "KV memory.",
    )
    step_tokens: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        default=512,
        description="Tokens per step, prompts and answers together. Larger steps use the device better; smaller ones "
        "let running answers flow more evenly.",
    )
    prefill_chunk: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        default=256,
        description="Tokens of one prompt per step, at most step_tokens. Half a step leaves room for running answers.",
    )
    step_target_s: Annotated[float, Field(ge=0, le=60)] = Field(
        default=0.0,
        description="Seconds between two tokens of running answers that prompts should not exceed: a step takes as many"
        " prompt tokens as its measured time allows, at least 32, at most step_tokens, and no more guessed ones than "
        "it allows. 0: always step_tokens, which is best for throughput.",
    )
    kv_headroom: Annotated[int, Field(ge=1, le=1 << 20)] = Field(
        default=64,
        description="Positions reserved beyond a sequence's own when it is admitted; it gets more as it grows. A small "
        "value admits many sequences, some of which may be preempted and computed again; a value as large "
        "as the longest answer avoids preemption.",
    )
    max_passed: Annotated[int, Field(ge=0, le=1 << 20)] = Field(
        default=16,
        description="Number of later sequences that may overtake one that waits for more memory than is free, before "
        "memory is kept free for it. A few fill gaps, many would starve it.",
    )
    max_passed_s: Seconds = Field(
        default=5.0, description="Seconds for which later sequences may overtake it; the first limit reached counts."
    )
    mode: Literal["auto", "batch", "overlapped"] = Field(
        default="auto",
        description="Steps in flight: batch is one, overlapped is one per stage. auto: one where all stages share the "
        "cores of a machine, because they would compete for them, otherwise one per stage.",
    )
    prefix_cache: bool = Field(
        default=True,
        description="Keep the beginnings of ended sequences in the stages while their memory is not needed: a sequence "
        "with the same beginning starts from a copy. Never changes a token.",
    )
    prefix_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="Largest share of the stages' KV memory for kept beginnings. A smaller one leaves memory free for "
        "new sequences.",
    )
    prefix_tokens: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Most tokens that a request takes over from kept beginnings; the rest is computed. 0: no limit.",
    )
    prefix_policy: Literal["recent", "frequent"] = Field(
        default="recent",
        description="Which beginnings are kept longest when memory is short. recent: the most recently used. frequent: "
        "the most often used, for a few long system prompts among many prompts that come once.",
    )
    speculation: Literal["auto", "off", "suffix", "draft"] = Field(
        default="auto",
        description="Guess tokens ahead, and verify several of them in one step, where that pays. Never changes a "
        "token. suffix: as the text went on before, in the prompt, the answer, or recent answers of the same tenant. "
        "draft: with a small model. auto: everything that is there. off: nothing, whatever a request asks for.",
    )
    draft: str | None = Field(
        default=None,
        min_length=1,
        examples=["/models/small"],
        description="Draft model: a small model with the same tokenizer, as a directory, a GGUF file or a name on the "
        "hub. A process beside the broker loads it and proposes tokens, which the stages verify: it never "
        "changes an answer. Worth it if it computes a token in a fraction of a step's time.",
    )
    draft_threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0,
        description="Threads of the draft model's process. 0: all cores of the machine, because the stages wait while "
        "it computes. Set it if other sequences' steps are computed meanwhile (mode overlapped).",
    )
    kv_cache: bool = Field(
        default=True,
        description="Keep keys and values between steps. Off: every token computes its whole sequence again, only "
        "useful for measuring the cache's worth.",
    )
    settle_s: Seconds = Field(
        default=0.5,
        description="Seconds to wait for further workers after one has joined, before a plan is made: workers started "
        "together should share the first plan. If min_workers is more than one, the plan is made as soon as"
        " that many have joined.",
    )
    min_workers: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1,
        description="Workers to wait for before the first plan is made, even if fewer could hold the model; for 30 "
        "seconds at most after the first one has joined. swarm up sets it to the number of workers that it "
        "starts.",
    )
    prepare_timeout_s: Seconds = Field(
        default=600.0,
        description="Seconds that a worker may take to load its layers; long, as large models load from disks.",
    )
    activate_timeout_s: Seconds = Field(
        default=5.0,
        description="Seconds that a worker may take to activate a plan that it has prepared; nothing is loaded then.",
    )
    too_large_patience_s: Seconds = Field(
        default=30.0,
        description="Seconds that a request waits if the stages could not hold it even alone because a worker was lost:"
        " a lost worker usually returns within seconds, and its memory with it.",
    )
    client_grace_s: Seconds = Field(
        default=10.0,
        description="Seconds that a request continues without its client, which may only have lost its connection.",
    )
    retain_s: Seconds = Field(
        default=60.0,
        description="Seconds that a finished answer is kept, so that a client that reconnects can still fetch it.",
    )
    check_rules: bool = Field(
        default=False,
        description="Check the broker's state against its invariants at every tick. A violation is logged as "
        "rule_broken, and counted. Cheap with few requests; for debugging, not for daily use.",
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
        description="Seconds without a heartbeat after which a worker is lost, at most. A worker with regular "
        "heartbeats is lost sooner: after three times the longest delay of the last half minute.",
    )
    beat_least_s: Annotated[float, Field(ge=0.02, le=3600)] = Field(
        default=0.4,
        description="Seconds without a heartbeat that never count as silence, however regular the heartbeats are.",
    )
    hang_factor: Annotated[float, Field(ge=1, le=10_000)] = Field(
        default=10.0,
        description="How many times longer than a step should take, or usually takes, its worker may show no progress "
        "before it is lost. A busy machine makes steps slow, but hardly ever ten times slower.",
    )
    hang_min_s: Seconds = Field(
        default=2.0,
        description="Seconds without progress that never count as a hang, however short the step should have been; 15 "
        "times as many while layers are loaded, 5 times as many for the control loop.",
    )
    asleep_s: Seconds = Field(
        default=0.75,
        description="Seconds in which a worker that should compute makes no progress and none of its threads runs, or "
        "waits for a core or a disk: then it is lost before hang_min_s. Detected on Linux only.",
    )


class RecoverySettings(Section):
    """The rebuilding of lost layers."""

    source: Literal["logs", "tokens"] = Field(
        default="logs",
        description="Source of a rebuild. logs: the inputs that the previous stage has sent, computed through the lost "
        "layers only; tokens where there is no log. tokens: always the tokens, computed through all earlier"
        " layers too; only useful for comparisons.",
    )
    chunk: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        default=256,
        description="Positions of one sequence that are replayed at a time. Running answers wait for at most one such "
        "chunk.",
    )
    recheck_every_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        default=0.0,
        description="Seconds between two rechecks, in which one stage's computation for a running sequence is repeated "
        "by other workers that have its layers loaded (plan.standby), in their idle time; a difference is "
        "logged and shown by swarmctl nodes. The only protection against wrong results that look right. 0: "
        "none.",
    )


class JournalSettings(Section):
    """The state that a broker with a state directory stores on disk."""

    keep_s: Annotated[float, Field(ge=0)] = Field(
        default=86_400.0,
        description="Seconds for which an ended request can still be read (swarmctl requests, Attach). Requests that "
        "have not ended are kept in any case.",
    )
    max_bytes: ByteSize = Field(
        default=ByteSize(1 << 30),
        description="Size limit of the journal; beyond it, the requests that ended first are deleted first. At most an "
        "eighth is for the times of steps (swarmctl trace), which are deleted before any request.",
    )
