"""Every setting: its type, its range, its default, and in words its unit and the reason. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

MAX_WORKER_NAME = 119  # its process adds nine characters of its own, and messages carry names of 128


def _loopback(host: str) -> str:
    if host == "localhost":
        return host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{host!r} is not an IP address; use 127.0.0.1") from None
    if not address.is_loopback:
        raise ValueError(
            f"{host} can be reached from other machines and no keys are set; without keys, only 127.0.0.1 is allowed"
        )
    return host


def _address(host: str) -> str:
    try:
        return host if host == "localhost" else str(ipaddress.ip_address(host))
    except ValueError:
        raise ValueError(f"{host!r} is not an IP address; use 127.0.0.1, or 0.0.0.0 with keys") from None


def _address_or_auto(host: str) -> str:
    return host if host == "auto" else _address(host)


def _address_or_none(host: str) -> str:
    return host and _address(host)


def _listened(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        if _INTERFACE.fullmatch(text):
            return text
        raise ValueError(f"{text!r} is neither an IP address nor a network interface; say 192.0.2.1 or eth0") from None
    if address.is_loopback or address.is_unspecified:
        raise ValueError(f"{text} is no address that another machine could name: give this machine's own, or eth0")
    return str(address)


def _advertised(text: str) -> str:
    if not _ADVERTISED.fullmatch(text):
        raise ValueError(f"{text!r} is no place to connect to; write HOST or HOST:PORT")
    return text


_INTERFACE = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,14}")
_ADVERTISED = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]{1,253})(:[0-9]{1,5})?")


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?"""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def _http_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("write it as http://HOST:PORT/v1, or https")
    return url.rstrip("/")


def _port_range(text: str) -> str:
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and 1024 <= int(low) <= int(high) <= 65535):
        raise ValueError("write it as LOW-HIGH with 1024 <= LOW <= HIGH <= 65535, for example 20000-29999")
    return text


def _layers(text: str) -> str:
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else True) and int(first) <= int(last or first)):
        raise ValueError("write it as FIRST-LAST, both included, for example 0-10")
    return text


def _endpoint(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme == "ipc" and separator and rest:
        return url
    if scheme == "tcp" and host and colon and port.isdecimal() and 1 <= int(port) <= 65535:
        return url
    raise ValueError("write it as tcp://HOST:PORT, for example tcp://127.0.0.1:5700")


Host = Annotated[str, AfterValidator(_loopback)]
Listened = Annotated[str, AfterValidator(_listened)]
Advertised = Annotated[str, AfterValidator(_advertised)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]


class Section(BaseModel):
    """Refuse unknown keys, and changes after loading: common to all sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


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


class PlanSettings(Section):
    """The plan: what load it is made for, what it must keep to, what is decided by hand."""

    objective: Literal["auto", "throughput", "latency"] = Field(
        default="auto",
        description="throughput: the most tokens for all together, so the slowest stage counts. latency: the quickest "
        "single answer, so the sum over stages counts, and fewer workers may be better. auto: throughput; a plan that "
        "followed the load of the minute would move layers to and fro.",
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
    pins: dict[str, Annotated[str, AfterValidator(_layers)]] = Field(
        default={}, description='Layers that a worker gets whatever else, by its name: { "big-one" = "0-10" }.'
    )
    caps: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={}, description='The most layers that a worker gets, by its name: { "laptop" = 8 }.'
    )
    exclude: tuple[str, ...] = Field(
        default=(), description='Names of workers that get no layers, though they may join: ["old-one"].'
    )


class WorkerSettings(Section):
    """A worker: its device, its memory and its sockets."""

    name: Annotated[str, Field(max_length=MAX_WORKER_NAME)] = Field(
        default="", description="Name in lists and plans. Empty: the machine's name and the process number."
    )
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?|mps)$")] = Field(
        default="cpu", description="Device that computes: cpu, cuda, cuda:N or mps. The CPU is always there."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Type of the weights in memory. auto: what the model's files say."
    )
    memory_limit: ByteSize | None = Field(
        default=None,
        examples=["8GiB"],
        description="Bytes for the whole process: the interpreter and its libraries (about 400 MiB), weights, KV and "
        "log. On a GPU: of its memory, for weights and KV. Unset: what is free at the start.",
    )
    kv_share: Annotated[float, Field(ge=0.01, le=0.8)] = Field(
        default=0.25,  # wire.messages.KV_SHARE; a test holds them to each other
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
    host: Annotated[str, AfterValidator(_address_or_auto)] = Field(
        default="auto",
        description="Address for data from other workers. auto: that of this machine which reaches the broker. "
        "Beyond loopback only those are heard whose key the plan names.",
    )
    advertise: Annotated[str, AfterValidator(_address_or_none)] = Field(
        default="",
        description="Address that others are told for it, if it is another one: behind a forwarded port, say.",
    )
    data_ports: Annotated[str, AfterValidator(_port_range)] = Field(
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


class ClientSettings(Section):
    """The commands that talk to a broker. A program passes the same to ``Client`` and ``AsyncClient``."""

    url: Annotated[str, AfterValidator(_endpoint)] = Field(
        default="tcp://127.0.0.1:5700", description="Where the broker is. SWARM_URL says the same for one shell."
    )
    connect_timeout_s: Seconds = Field(
        default=5.0,
        description="Seconds to wait for the broker's first answer: long enough for a busy one, short for a person.",
    )
    reconnect_timeout_s: Seconds = Field(
        default=30.0, description="Seconds to wait for a broker that went away; a restart takes a few."
    )


class GatewaySettings(Section):
    """The HTTP gateway."""

    host: Annotated[str, AfterValidator(_address)] = Field(
        default="127.0.0.1",
        description="Address to listen on. What other machines can reach needs API keys (keys_file): without keys "
        "anybody could use it up.",
    )
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the HTTP server.")
    keys_file: Annotated[Path, AfterValidator(Path.expanduser)] | None = Field(
        default=None,
        examples=["~/.config/swarm/keys.json"],
        description="File of the API keys, which swarmctl keys writes. Unset: keys.json in the state directory, if "
        "there is one. While there is no such file, whoever is on this machine needs no key.",
    )
    cors_origins: list[str] = Field(
        default=[],
        description="Web pages that may read answers: origins such as https://example.org. *: any. None is usual, "
        "since pages have no business with a key.",
    )
    max_body: ByteSize = Field(
        default=ByteSize(16 << 20),
        description="Bytes of a request's body. Far above any prompt; below what would hurt when many come at once.",
    )
    head_timeout_s: Seconds = Field(
        default=10.0, description="Seconds that a client may take to send the head of a request."
    )
    body_timeout_s: Seconds = Field(
        default=60.0, description="Seconds that a client may take to send the body of a request."
    )
    write_timeout_s: Seconds = Field(
        default=75.0,
        description="Seconds that a client may take nothing of what waits for it, until its connection is ended.",
    )
    max_connections: Count = Field(
        default=1024, description="Connections at a time; beyond, they are refused with 503. Each costs a descriptor."
    )
    aliases: list[str] = Field(
        default=[],
        description="Other names that clients may call the model by, since many programs have one built in. *: any.",
    )
    traces: str | None = Field(
        default=None,
        examples=["http://127.0.0.1:4318"],
        description="Where traces go, as OpenTelemetry's OTLP over HTTP. Unset: nowhere, and they cost nothing.",
    )


class UpstreamSettings(Section):
    """Another OpenAI-compatible server that takes whole requests."""

    url: Annotated[str, AfterValidator(_http_url)] = Field(
        description="Its base URL, as clients write it: http://HOST/v1."
    )
    key_env: str = Field(default="", description="Environment variable with its API key.")
    key_file: Annotated[Path, AfterValidator(Path.expanduser)] | None = Field(
        default=None,
        description="File with its API key; a name without a slash is one of the service manager's credentials.",
    )
    models: dict[str, str] = Field(
        default={},
        description="Names that clients call models by, and what this server calls them. Such requests go there in any "
        "case.",
    )
    overflow_model: str = Field(
        default="", description="Its name for the model that answers what was meant for ours. Empty: the same name."
    )
    when: Literal["never", "busy", "down"] = Field(
        default="never",
        description="When it gets requests meant for our model: busy, when the swarm is full or down; down, when "
        "nothing serves; never, only what names one of its models.",
    )
    connect_timeout_s: Seconds = Field(default=5.0, description="Seconds to wait for a connection.")
    timeout_s: Seconds = Field(default=600.0, description="Seconds for a whole answer.")
    quiet_timeout_s: Seconds = Field(default=120.0, description="Seconds without a byte of an answer.")


class LogSettings(Section):
    """What is logged, to stderr."""

    level: Literal["debug", "info", "warning", "error", "off"] = Field(
        default="info", description="The least that is logged: debug, info, warning, error or off."
    )
    format: Literal["auto", "console", "json"] = Field(
        default="auto",
        description="auto: readable lines on a terminal, JSON lines elsewhere. console, json: always that.",
    )
    profile_every: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        default=0,
        description="Steps between two profile lines (mean times and sizes since the last one) of the broker and of "
        "each worker. 0: none, as swarmctl stats shows the same when it is wanted.",
    )


class Settings(BaseSettings):
    """Everything that can be set. ``Settings()`` is the defaults; :func:`load` reads the file and the environment."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True, env_prefix="SWARM_")

    model: str | None = Field(
        default=None,
        examples=["/models/llama"],
        description="Directory of the model, or its name on the hub. Unset: the embedded demonstration model.",
    )
    state_dir: Annotated[Path, AfterValidator(Path.expanduser)] | None = Field(
        default=None,
        examples=["~/.local/state/swarm"],
        description="Directory of the state and, under swarm up, the logs; one broker at a time uses it. Unset: swarm "
        "up uses one of its own that is gone at the end, swarm broker none.",
    )
    broker: BrokerSettings = BrokerSettings()
    plan: PlanSettings = PlanSettings()
    worker: WorkerSettings = WorkerSettings()
    health: HealthSettings = HealthSettings()
    recovery: RecoverySettings = RecoverySettings()
    journal: JournalSettings = JournalSettings()
    client: ClientSettings = ClientSettings()
    gateway: GatewaySettings = GatewaySettings()
    log: LogSettings = LogSettings()
    upstream: list[UpstreamSettings] = Field(
        default=[],
        description="Other OpenAI-compatible servers to which the gateway passes requests on, the first that is fit "
        "first. Each is a table [[upstream]] with url, when (never, busy, down), models, overflow_model, key_env or "
        "key_file, connect_timeout_s, timeout_s, quiet_timeout_s; docs/gateway.md says more.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read no sources here: ``load`` reads them one by one, so that an error can say where a value came from."""
        return (init_settings,)


def get(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def defaults() -> dict[str, Any]:
    return Settings().model_dump(mode="json")


def sections() -> Iterator[str]:
    return (name for name, field in Settings.model_fields.items() if isinstance(field.default, Section))


def setting_names() -> Iterator[str]:
    for name, field in Settings.model_fields.items():
        if isinstance(field.default, Section):
            yield from (f"{name}.{key}" for key in type(field.default).model_fields)
        else:
            yield name
