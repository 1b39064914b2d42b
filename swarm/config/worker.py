"""Settings of a worker: its device, its memory, its sockets. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from swarm.config.values import AddressOrAuto, AddressOrNone, PortRange, Seconds, Section

MAX_WORKER_NAME = 119  # its incarnation appends nine characters, and names in messages have at most 128


class WorkerSettings(Section):
    """A worker: its device, its memory and its sockets."""

    name: Annotated[str, Field(max_length=MAX_WORKER_NAME)] = Field(
        default="", description="Name in lists and plans. Empty: the machine's name and the process number."
    )
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?|mps)$")] = Field(
        default="cpu", description="Device that computes: cpu, cuda, cuda:N or mps. The CPU is always there."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of the weights in memory. auto: what the model's files say, where the device is quick at "
        "it, else float32; and that of the swarm, if it computes in another (broker.dtype).",
    )
    memory_limit: ByteSize | None = Field(
        default=None,
        examples=["8GiB"],
        description="Bytes for the whole process: the interpreter and its libraries (about 400 MiB), weights, KV and "
        "log. On a GPU: of its memory, for weights and KV. Unset: what is free at the start.",
    )
    kv_share: Annotated[float, Field(ge=0.01, le=0.8)] = Field(
        default=0.25,  # equal to wire.messages.KV_SHARE, as a test checks
        description="The part of what the weights leave of the memory that keys and values may take. More lets more or "
        "longer sequences in at a time; the rest is for what computing takes, for layers kept warm for others "
        "(plan.standby) and for the heap. swarmctl nodes says how many positions that is.",
    )
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0,
        description="Threads that compute. 0: the machine's cores; swarm up shares them out among its workers.",
    )
    kernels: Literal["auto", "amx", "avx512bf16", "avx512", "avx2", "neonbf16", "neon", "portable", "torch"] = Field(
        default="auto",
        description="What computes. auto: the quickest of Swarm's own kernels that the processor can run and "
        "worker.bits allows; torch's where there are none. One by its name, for comparisons: portable runs on any "
        "processor, slowly; torch is always torch's.",
    )
    bits: Literal["auto", "fast", "portable"] = Field(
        default="auto",
        description="Whose last bits the results have. fast: those of the quickest kernels; processors with "
        "instructions for bfloat16 have their own. portable: the same on every processor, so that layers can move "
        "between unlike machines without a trace in the answers; all workers of a swarm should say so then. auto: "
        "fast. swarmctl plan names the bits of each stage and warns where they differ.",
    )
    program: Literal["auto", "off"] = Field(
        default="auto",
        description="How a step of a model whose parts are all known computes. auto: as one call of Swarm's own "
        "kernels. off: module by module, for comparisons; the bits are the same. swarmctl nodes says why it is off.",
    )
    host: AddressOrAuto = Field(
        default="auto",
        description="Address for data from other workers. auto: that of this machine which reaches the broker. "
        "Beyond loopback only those are heard whose key the plan names.",
    )
    advertise: AddressOrNone = Field(
        default="",
        description="Address that others are told for it, if it is another one: behind a forwarded port, say.",
    )
    data_ports: PortRange = Field(
        default="20000-29999",
        description="Ports to take the data socket from. Below the range from which systems lend ports to clients, "
        "so that no stranger holds one.",
    )
    log_bytes: ByteSize = Field(
        default=ByteSize(256 << 20),
        description="Bytes for the log of what was sent on; at most an eighth of the memory limit, and a quarter of "
        "what the process itself leaves of it. The log can rebuild the next stage; until that is done, what a stage "
        "that was lost held is computed again from the tokens.",
    )
    beat_interval_s: Annotated[float, Field(ge=0.01, le=60)] = Field(
        default=0.1,
        description="Seconds between two beats; several fit into health.beat_timeout_s, so one may be lost. The "
        "broker's value counts: it tells each worker that joins.",
    )
    lease_s: Seconds = Field(
        default=10.0,
        description="Seconds without a word from the broker after which a worker parks: keeps all, sends nothing. The "
        "broker's value counts.",
    )
    max_sequences: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        default=64,
        description="Sequences that a stage holds at a time; bounds its tables, KV memory is counted apart. The "
        "broker's value counts.",
    )
