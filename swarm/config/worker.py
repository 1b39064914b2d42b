"""Settings of a worker: its device, its memory, its sockets. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from swarm.config.values import Adapters, AddressOrAuto, AddressOrNone, PortRange, Seconds, Section, WeightGroup

MAX_WORKER_NAME = 119  # its incarnation appends nine characters, and names in messages have at most 128


class WorkerSettings(Section):
    """A worker: its device, its memory and its sockets."""

    name: Annotated[str, Field(max_length=MAX_WORKER_NAME)] = Field(
        default="", description="Name in lists and plans. Empty: the machine's name and the process number."
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")] = Field(
        default="cpu",
        description="Device that computes: cpu, cuda, cuda:N or mps; without that device the worker does not start. "
        "auto: cuda if it is there and worker.bits is not portable, else cpu.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the weights in memory. auto: the type of the model's files where the device is fast at it,"
        " otherwise float32; if the swarm computes in another type (broker.dtype), that type. float16 needs a GPU: "
        "CPUs compute files of float16 in float32, which has the same values.",
    )
    weights: Literal["auto", "int8", "int4", "dense"] = Field(
        default="auto",
        description="How the weights are stored in memory, the same for all workers of the swarm. auto: as in the "
        "model's files. int8, int4: quantized when they are loaded from a plain checkpoint, to a half or a quarter of "
        "bfloat16. dense: quantized files are unpacked to worker.dtype.",
    )
    weight_group: WeightGroup = Field(
        default=32,
        description="Weights that share a scale where worker.weights quantizes them. 128 saves a twelfth of int4's "
        "memory, at the cost of precision.",
    )
    embedding: Literal["auto", "int8", "int6", "int4", "dense"] = Field(
        default="auto",
        description="How the embedding of a plain checkpoint is stored. auto: as worker.weights has it.",
    )
    head: Literal["auto", "int8", "int6", "int4", "dense"] = Field(
        default="auto",
        description="How the head of a plain checkpoint is stored, or the table that serves as both. auto: "
        "as worker.weights has it; int6 with int4, because errors of the head change tokens the most.",
    )
    activations: Literal["auto", "int8"] = Field(
        default="auto",
        description="Numbers that products with quantized weights read, the same for all workers of the swarm. auto: "
        "those of worker.dtype. int8: rounded to 8 bits, with a scale for each group: faster in prompts, less "
        "precise, and with the same bits on every processor.",
    )
    images: bool = Field(
        default=True,
        description="Load the vision tower of a model that has one, the same for all workers of the swarm. false: text "
        "only, which saves the tower's memory on the first stage.",
    )
    adapters: Adapters = Field(
        default=(),
        description="LoRA adapters, the same for all workers of the swarm: NAME=DIR, a folder in peft's format, or "
        "a name on a hub. A request names one as its model. Each takes memory in every layer that it changes.",
    )
    packed_cache_bytes: ByteSize = Field(
        default=ByteSize(64 << 30),
        description="Bytes of disk for quantized weights as the kernels read them, in packed in the user's cache "
        "directory ($SWARM_CACHE). They make the next start quick, and workers of one machine share their memory. The "
        "least recently used ones are removed; a twentieth of the disk stays free. 0: none.",
    )
    memory_limit: ByteSize | None = Field(
        default=None,
        examples=["8GiB"],
        description="Bytes for the whole process: the interpreter and its libraries (about 400 MiB), weights, KV and "
        "log. On a GPU: bytes of its memory, for weights and KV. Unset: the memory that is free at the "
        "start.",
    )
    kv_share: Annotated[float, Field(ge=0.01, le=0.8)] = Field(
        default=0.25,  # equal to wire.messages.KV_SHARE, as a test checks
        description="Share of the memory left by the weights that keys and values may take. A larger share allows more "
        "or longer sequences at a time; the rest is for computing, for standby layers (plan.standby) and "
        "for the heap. swarmctl nodes shows the number of positions.",
    )
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0,
        description="Threads that compute. 0: the machine's cores; swarm up divides them among its workers.",
    )
    kernels: Literal["auto", "amx", "avx512bf16", "avx512", "avx2", "neonbf16", "neon", "portable", "torch"] = Field(
        default="auto",
        description="Kernels that compute. auto: the fastest of Swarm's own kernels that the processor can run and "
        "worker.bits allows; torch's where there are none. A kernel's name, for comparisons: portable runs "
        "on any processor, slowly; torch always means torch's.",
    )
    bits: Literal["auto", "fast", "portable"] = Field(
        default="auto",
        description="Whose last bits the results have. fast: those of the fastest kernels; processors with instructions"
        " for bfloat16 have their own. portable: the same on every processor, so that layers can move "
        "between different machines without a trace in the answers; then all workers of a swarm should use "
        "it. auto: fast. swarmctl plan shows the bits of each stage and warns where they differ.",
    )
    program: Literal["auto", "off"] = Field(
        default="auto",
        description="How a step of a model is computed if all of its parts are supported. auto: as one call of Swarm's "
        "own kernels. off: module by module, for comparisons; the bits are the same. swarmctl nodes shows "
        "why it is off.",
    )
    host: AddressOrAuto = Field(
        default="auto",
        description="Address for data from other workers. auto: this machine's address on the route to the broker. "
        "Beyond loopback, only workers whose keys the plan names are accepted.",
    )
    advertise: AddressOrNone = Field(
        default="",
        description="Address that other workers get, if it differs from worker.host: for example behind a forwarded "
        "port.",
    )
    data_ports: PortRange = Field(
        default="20000-29999",
        description="Ports for the two data sockets: steps, and copies of keys and values. Below the range from which "
        "systems assign client ports, so that no other process holds one by accident.",
    )
    log_bytes: ByteSize = Field(
        default=ByteSize(256 << 20),
        description="Bytes for the activation log, which can rebuild the next stage; at most an eighth of the memory "
        "limit, and a quarter of what the process itself leaves of it. Until a rebuilt log is complete, "
        "lost positions are computed again from the tokens.",
    )
    spill: ByteSize = Field(
        default=ByteSize(0),
        examples=["20GiB"],
        description="Bytes of disk for keys and values of long sequences, in kv in the user's cache directory "
        "($SWARM_CACHE), which the workers of a machine share. After a restart of everything, or for another request "
        "that begins alike, they are read instead of computed. The files reveal prompts, and only their owner may "
        "read them. They stay until others need the space, the least recently used ones first (with 0: until a worker "
        "starts and they were not used for a day); a twentieth of the disk stays free. Takes effect "
        "when it is set on all workers of a plan. 0: none.",
    )
    spill_from: Annotated[int, Field(ge=256, le=1 << 20)] = Field(
        default=1024, description="Positions from which on a sequence is written to disk, or looked for there."
    )
    beat_interval_s: Annotated[float, Field(ge=0.01, le=60)] = Field(
        default=0.1,
        description="Seconds between two heartbeats; several fit into health.beat_timeout_s, so one may be lost. The "
        "broker's value counts: it sends it to each worker that joins.",
    )
    lease_s: Seconds = Field(
        default=10.0,
        description="Seconds without a message from the broker after which a worker parks: it keeps everything and "
        "sends nothing. The broker's value counts.",
    )
    max_sequences: Annotated[int, Field(ge=1, le=1 << 16)] = Field(
        default=64,
        description="Sequences that a stage holds at a time; bounds its tables, KV memory is limited separately. The "
        "broker's value counts.",
    )
