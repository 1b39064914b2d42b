"""All settings together. The sections of clients, gateway and log are defined here, the others in modules of their own.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from swarm.config.broker import BrokerSettings, HealthSettings, JournalSettings, RecoverySettings
from swarm.config.plan import PlanSettings
from swarm.config.values import Address, Count, Endpoint, HomePath, HttpUrl, Seconds, Section
from swarm.config.worker import WorkerSettings


class ClientSettings(Section):
    """The commands that connect to a broker. A program passes the same to ``Client`` and ``AsyncClient``."""

    url: Endpoint = Field(
        default="tcp://127.0.0.1:5700", description="Address of the broker. SWARM_URL sets the same for one shell."
    )
    connect_timeout_s: Seconds = Field(
        default=5.0,
        description="Seconds to wait for the broker's first answer: long enough for a busy broker, short for a person.",
    )
    reconnect_timeout_s: Seconds = Field(
        default=600.0,
        description="Seconds that an accepted request waits for a broker that went away or stands still: long enough "
        "for a machine that restarts or sleeps. A request that is not accepted yet waits 30 seconds at "
        "most.",
    )


class GatewaySettings(Section):
    """The HTTP gateway."""

    host: Address = Field(
        default="127.0.0.1",
        description="Address to listen on. An address that other machines can reach needs API keys (keys_file): without"
        " keys, anyone could use up the swarm.",
    )
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the HTTP server.")
    keys_file: HomePath | None = Field(
        default=None,
        examples=["~/.config/swarm/keys.json"],
        description="File of the API keys, which swarmctl keys writes. Unset: keys.json in the state directory, if "
        "there is one. While the file does not exist, clients on this machine need no key.",
    )
    cors_origins: list[str] = Field(
        default=[],
        description="Web pages that may read answers: origins such as https://example.org. *: any. Usually none, since "
        "a web page should not hold a key.",
    )
    max_body: ByteSize = Field(
        default=ByteSize(16 << 20),
        description="Bytes of a request's body. Far above any prompt; below what would hurt when many arrive together.",
    )
    max_images: int = Field(default=16, ge=0, le=64, description="Images in a request.")
    max_image_pixels: int = Field(
        default=32_000_000,
        ge=1,
        description="Pixels of a request's images as they come, together; more are refused before any is decoded. "
        "Decoding takes up to 16 bytes for each of an image's.",
    )
    image_tokens: int = Field(
        default=512,
        ge=1,
        le=4096,
        description="Tokens of an image; a larger one is shrunk. More show smaller details, as in scanned pages; the "
        "time grows faster than the tokens.",
    )
    head_timeout_s: Seconds = Field(
        default=10.0, description="Seconds that a client may take to send the head of a request."
    )
    body_timeout_s: Seconds = Field(
        default=60.0, description="Seconds that a client may take to send the body of a request."
    )
    write_timeout_s: Seconds = Field(
        default=75.0,
        description="Seconds without a byte read by a client that has data waiting, until its connection is closed.",
    )
    max_connections: Count = Field(
        default=1024, description="Connections at a time; beyond, they are refused with 503. Each costs a descriptor."
    )
    console: bool = Field(
        default=True,
        description="Serve the console, a page that shows the swarm, at /. It costs nothing while no page is open, and "
        "requires a key where answers do.",
    )
    aliases: list[str] = Field(
        default=[],
        description="Other names that clients may use for the model, since many programs have one built in. *: any.",
    )
    parse_special_tokens: bool = Field(
        default=False,
        description="Whether special tokens in messages, in tool results and in tool descriptions are parsed as such, "
        "as most servers do. Users could then end their message with one and continue as the assistant. In "
        "prompts of /v1/completions they are always parsed.",
    )
    unknown_fields: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="What a field that the gateway does not know in a body does. refuse: the request gets a 400 that "
        "names the field, since it may be meant to change the answer. ignore: nothing. Known fields that cannot be "
        "honoured are refused in any case.",
    )
    default_max_tokens: int | None = Field(
        default=None,
        examples=[1024],
        ge=1,
        le=1_000_000,
        description="Most tokens of an answer to a request that gives no length. Unset: what the context leaves, and "
        "16 for /v1/completions, as the API documents. Requests that are passed on keep the other server's default.",
    )
    default_temperature: float = Field(
        default=1.0,
        ge=0,
        le=100,
        description="Temperature of a request that gives none. 1 is what the APIs document. Requests that are passed "
        "on keep the other server's default.",
    )
    traces: str | None = Field(
        default=None,
        examples=["http://127.0.0.1:4318"],
        description="Where traces are sent, as OpenTelemetry's OTLP over HTTP. Unset: traces are off and cost nothing.",
    )


class SwarmSettings(Section):
    """One of several swarms behind a gateway."""

    url: str = Field(description="Its broker's port for clients, or the name of a swarm that this machine has joined.")
    aliases: list[str] = Field(default=[], description="Other names that clients may use for its model.")


class BatchSettings(Section):
    """Batches of requests at the gateway, which need a state directory."""

    in_flight: Count = Field(
        default=32,
        description="Lines of all batches that run at a time, with the lowest priority. More fill larger steps, which "
        "take longer for the answers beside them.",
    )
    max_file: ByteSize = Field(default=ByteSize(200 << 20), description="Bytes of an input file.")
    max_lines: Count = Field(default=50_000, description="Requests of one batch.")
    max_stored: ByteSize = Field(
        default=ByteSize(4 << 30),
        description="Bytes of all stored files and answers. Beyond, uploads are refused until files are deleted; "
        "answers are always stored.",
    )
    max_age_days: int = Field(
        default=30,
        ge=1,
        le=3650,
        description="Days after which uploads and answers of batches are deleted. Callers may ask for fewer.",
    )


class UpstreamSettings(Section):
    """Another OpenAI-compatible server that takes whole requests."""

    url: HttpUrl = Field(description="Its base URL, as clients write it: http://HOST/v1.")
    key_env: str = Field(default="", description="Environment variable with its API key.")
    key_file: HomePath | None = Field(
        default=None,
        description="File with its API key; a name without a slash is one of the service manager's credentials.",
    )
    models: dict[str, str] = Field(
        default={},
        description="Model names that clients use, each with this server's own name. Such requests are always passed to"
        " it.",
    )
    overflow_model: str = Field(
        default="",
        description="Its name for the model that answers requests for our model. Empty: our model's own name, so "
        "nothing is passed on before our swarm has served once.",
    )
    when: Literal["never", "busy", "down"] = Field(
        default="never",
        description="When it gets requests for our model: busy, when the swarm is full or down; down, when nothing "
        "serves; never, only requests that name one of its models.",
    )
    connect_timeout_s: Seconds = Field(default=5.0, description="Seconds to wait for a connection.")
    timeout_s: Seconds = Field(default=600.0, description="Seconds for a whole answer.")
    quiet_timeout_s: Seconds = Field(default=120.0, description="Seconds without a byte of an answer.")


class LogSettings(Section):
    """The log, written to stderr."""

    level: Literal["debug", "info", "warning", "error", "off"] = Field(
        default="info", description="Lowest level that is logged: debug, info, warning, error or off."
    )
    format: Literal["auto", "console", "json"] = Field(
        default="auto",
        description="auto: readable lines on a terminal, JSON lines elsewhere. console, json: always this format.",
    )
    profile_every: Annotated[int, Field(ge=0, le=1 << 30)] = Field(
        default=0,
        description="Steps between two profile lines (mean times and sizes since the last one) of the broker and of "
        "each worker. 0: none; swarmctl stats --all shows the same on demand.",
    )


class Settings(BaseSettings):
    """All settings. ``Settings()`` has the defaults; :func:`load` reads the file and the environment."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, validate_default=True, env_prefix="SWARM_")

    model: str | None = Field(
        default=None,
        examples=["/models/llama"],
        description="Directory of the model, or its name on the hub. Unset: the embedded demonstration model.",
    )
    state_dir: HomePath | None = Field(
        default=None,
        examples=["~/.local/state/swarm"],
        description="Directory of the state and, under swarm up, the logs; one broker at a time uses it. Unset: swarm "
        "up uses a temporary one, swarm broker none.",
    )
    broker: BrokerSettings = BrokerSettings()
    plan: PlanSettings = PlanSettings()
    worker: WorkerSettings = WorkerSettings()
    health: HealthSettings = HealthSettings()
    recovery: RecoverySettings = RecoverySettings()
    journal: JournalSettings = JournalSettings()
    client: ClientSettings = ClientSettings()
    gateway: GatewaySettings = GatewaySettings()
    batch: BatchSettings = BatchSettings()
    log: LogSettings = LogSettings()
    swarm: list[SwarmSettings] = Field(
        default=[],
        description="The swarms behind the gateway, if there are several: the model that a request names selects one, "
        "and the first is the default. Each is a table [[swarm]] with url and aliases. Empty: the swarm of client.url.",
    )
    upstream: list[UpstreamSettings] = Field(
        default=[],
        description="Other OpenAI-compatible servers to which the gateway passes requests: the first available one gets"
        " it. Each is a table [[upstream]] with url, when (never, busy, down), models, overflow_model, "
        "key_env or key_file, connect_timeout_s, timeout_s, quiet_timeout_s; see docs/how-to/gateway.md.",
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
        """Read no sources here: ``load`` reads them one by one, so that an error can name a value's origin."""
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
