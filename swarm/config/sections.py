"""Every setting together. Those of commands, gateway and log stand here, others in modules of their own. Pure."""

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
    """The commands that talk to a broker. A program passes the same to ``Client`` and ``AsyncClient``."""

    url: Endpoint = Field(
        default="tcp://127.0.0.1:5700", description="Where the broker is. SWARM_URL says the same for one shell."
    )
    connect_timeout_s: Seconds = Field(
        default=5.0,
        description="Seconds to wait for the broker's first answer: long enough for a busy one, short for a person.",
    )
    reconnect_timeout_s: Seconds = Field(
        default=600.0,
        description="Seconds that a request waits for a broker that went away or stands still, once the broker has "
        "accepted it: long enough for a machine that starts again or sleeps. What it has not accepted yet waits 30 at "
        "most.",
    )


class GatewaySettings(Section):
    """The HTTP gateway."""

    host: Address = Field(
        default="127.0.0.1",
        description="Address to listen on. What other machines can reach needs API keys (keys_file): without keys "
        "anybody could use it up.",
    )
    port: int = Field(default=8000, ge=1, le=65535, description="Port of the HTTP server.")
    keys_file: HomePath | None = Field(
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
    console: bool = Field(
        default=True,
        description="Serve the console, a page that shows the swarm, at /. It costs nothing while nobody looks, and "
        "needs a key where answers do.",
    )
    aliases: list[str] = Field(
        default=[],
        description="Other names that clients may call the model by, since many programs have one built in. *: any.",
    )
    parse_special_tokens: bool = Field(
        default=False,
        description="Whether special tokens that stand in messages, in results of tools and in their descriptions are "
        "read as such, as most servers do. Users could end their message with one, and go on as the assistant. Prompts "
        "of /v1/completions have theirs in any case.",
    )
    traces: str | None = Field(
        default=None,
        examples=["http://127.0.0.1:4318"],
        description="Where traces go, as OpenTelemetry's OTLP over HTTP. Unset: nowhere, and they cost nothing.",
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
        description="Names that clients call models by, and what this server calls them. Such requests go there in any "
        "case.",
    )
    overflow_model: str = Field(
        default="",
        description="Its name for the model that answers what was meant for ours. Empty: our model's own name, so "
        "nothing is passed on before our swarm has served once.",
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
    state_dir: HomePath | None = Field(
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
        "key_file, connect_timeout_s, timeout_s, quiet_timeout_s; docs/how-to/gateway.md says more.",
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
