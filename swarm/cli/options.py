"""Options that several commands share, and their conversion to settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from swarm.client.blocking import Client
    from swarm.config import Settings


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"
    off = "off"


class LogFormat(StrEnum):
    auto = "auto"
    console = "console"
    json = "json"


class Mode(StrEnum):
    auto = "auto"
    batch = "batch"
    overlapped = "overlapped"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Weights(StrEnum):
    auto = "auto"
    int8 = "int8"
    int4 = "int4"
    dense = "dense"


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """Options before the command's name."""

    log_level: LogLevel | None = None
    log_format: LogFormat | None = None

    def overrides(self) -> dict[str, object]:
        return {
            "log.level": self.log_level.value if self.log_level else None,
            "log.format": self.log_format.value if self.log_format else None,
        }


def load_settings(context: typer.Context, config: Path | None, overrides: Mapping[str, object]) -> Settings:
    """Load settings from file, environment and flags. Raises ``BadParameter`` if the flags are wrong, else
    ``ConfigError``."""
    from swarm import config as settings_of
    from swarm.errors import ConfigError

    try:
        return settings_of.load(config, {**common_overrides(context), **overrides})
    except ConfigError as error:
        settings_of.load(config)
        raise typer.BadParameter(str(error)) from None


def settings_readers(
    context: typer.Context, config: Path | None, overrides: Mapping[str, object]
) -> tuple[Callable[[], Settings], Callable[[], Mapping[str, tuple[object, str]]]]:
    """Return two functions: the first loads a process's settings, the second returns each setting's origin.

    They are called at the process's start, and at each reload.
    """
    from swarm.config import origins

    load = partial(load_settings, context, config, overrides)
    return load, partial(origins, config, {**common_overrides(context), **overrides})


def common_overrides(context: typer.Context) -> dict[str, object]:
    """Return the options before the command's name, as settings."""
    common = context.obj if isinstance(context.obj, GlobalOptions) else GlobalOptions()
    return common.overrides()


def open_client(
    context: typer.Context, url: str | None, invitation: str | None = None, *, away_s: float | None = None
) -> Client:
    """Open a client of the broker that flag, environment, settings file or invitation name.

    ``away_s`` limits how long a lost broker is waited for, if the settings allow longer. Raises the errors of
    :func:`load_settings` and of joining.
    """
    from swarm.cli.joining import resolve_client
    from swarm.client.blocking import Client

    settings = load_settings(context, None, {"client.url": url})
    client = settings.client
    return Client(
        resolve_client(settings, invitation),
        connect_timeout_s=client.connect_timeout_s,
        reconnect_timeout_s=min(client.reconnect_timeout_s, away_s or client.reconnect_timeout_s),
    )


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Settings file (TOML). [default: config/swarm.toml, if there is one]"
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="The broker's port for clients. [default: SWARM_URL or tcp://127.0.0.1:5700]"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
PortOption = Annotated[
    int | None,
    typer.Option("--port", metavar="PORT", help="Port for clients; the next one is for workers. [default: 5700]"),
]
StateDirOption = Annotated[
    Path | None, typer.Option("--state-dir", metavar="DIR", help="Directory for state that survives restarts.")
]
ListenOption = Annotated[
    list[str] | None,
    typer.Option(
        "--listen",
        metavar="ADDRESS",
        help="Serve other machines too, at this address or network interface of this one (may be repeated); by keys: "
        "see swarmctl invite.",
        show_default=False,
    ),
]
DiscoverableOption = Annotated[
    bool, typer.Option("--discoverable", help="Let swarm discover find this broker on the local network.")
]
INVITATION_VARIABLE: Final = "SWARM_INVITATION"
JoinOption = Annotated[
    str | None,
    typer.Option(
        "--join",
        metavar="INVITATION",
        envvar=INVITATION_VARIABLE,
        help="Invitation to a swarm on another machine, needed once: a file that contains it, - to read it from stdin, "
        "or the line itself (swarm1:…), which every user of this machine can see in its list of processes.",
        show_default=False,
    ),
]
ModeOption = Annotated[
    Mode | None, typer.Option("--mode", help="Steps in flight: one (batch) or one per stage (overlapped).")
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="MODEL",
        help="Draft model: a small model with the same tokenizer that proposes tokens; DIR, FILE.gguf or a name on the "
        "hub. [default: none]",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:N, mps, or auto (cuda or cpu). [default: cpu]"),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option("--dtype", help="Type of the weights in memory; auto: that of the model's files. float16: on GPUs."),
]
WeightsOption = Annotated[
    Weights | None,
    typer.Option(
        "--weights",
        help="auto: as the model's files have them. int8, int4: quantize a plain checkpoint at load. dense: unpack "
        "quantized files.",
    ),
]
AdapterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=DIR",
        help="LoRA adapter in peft's format, which requests name as their model; DIR may be owner/name on the hub. "
        "May be repeated.",
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Memory of the whole process, per worker, for example 2GiB; about 400 MiB of it are Python and torch. "
        "[default: the free memory]",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads", metavar="N", help="Threads that compute, per worker. [default: an even share of the cores]"
    ),
]


def check_device(name: str) -> str:
    """Return the name of a device, if the setting ``worker.device`` takes it."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?|mps", name):
        raise typer.BadParameter(f"--device takes cpu, cuda, cuda:N, mps or auto, not {name!r}")
    return name


def read_size(text: str) -> int:
    """Parse a size (8GiB → 8 · 2³⁰) as the settings do, so that the same text means the same everywhere."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text.strip()))
    except ValidationError:
        size = 0
    if size <= 0:
        raise typer.BadParameter(f"--memory-limit takes a size like 8GiB or 500MB, not {text!r}")
    return size
