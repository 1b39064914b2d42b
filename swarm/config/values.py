"""Types of settings' values, with their validation: addresses, ports, seconds, counts. Pure."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

_INTERFACE = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,14}")
MAX_ADAPTER_NAME = 100
_ADAPTER_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/-]{{0,{MAX_ADAPTER_NAME - 1}}}")
_ADVERTISED = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]{1,253})(:[0-9]{1,5})?")


def _check_loopback(host: str) -> str:
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


def _check_address(host: str) -> str:
    try:
        return host if host == "localhost" else str(ipaddress.ip_address(host))
    except ValueError:
        raise ValueError(f"{host!r} is not an IP address; use 127.0.0.1, or 0.0.0.0 with keys") from None


def _check_address_or_auto(host: str) -> str:
    return host if host == "auto" else _check_address(host)


def _check_address_or_none(host: str) -> str:
    return host and _check_address(host)


def _check_listen(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        if _INTERFACE.fullmatch(text):
            return text
        raise ValueError(f"{text!r} is neither an IP address nor a network interface; use 192.0.2.1 or eth0") from None
    if address.is_loopback or address.is_unspecified:
        raise ValueError(f"{text} can't be reached from another machine: give this machine's own address, or eth0")
    return str(address)


def _check_network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text))
    except ValueError as error:
        raise ValueError(f"{error}; write a network or an address, for example 10.1.0.0/16 or 192.0.2.7") from None


def _check_advertised(text: str) -> str:
    if not _ADVERTISED.fullmatch(text):
        raise ValueError(f"{text!r} is not an address; write HOST or HOST:PORT")
    return text


def is_loopback(host: str) -> bool:
    """Whether the address can be reached only from this machine."""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def _check_http_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("write it as http://HOST:PORT/v1, or https")
    return url.rstrip("/")


def _check_port_range(text: str) -> str:
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and 1024 <= int(low) <= int(high) <= 65535):
        raise ValueError("write it as LOW-HIGH with 1024 <= LOW <= HIGH <= 65535, for example 20000-29999")
    return text


def _check_layers(text: str) -> str:
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() if dash else True) and int(first) <= int(last or first)):
        raise ValueError("write it as FIRST-LAST, both included, for example 0-10")
    return text


def _check_endpoint(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme == "ipc" and separator and rest:
        return url
    if scheme == "tcp" and host and colon and port.isdecimal() and 1 <= int(port) <= 65535:
        return url
    raise ValueError("write it as tcp://HOST:PORT, for example tcp://127.0.0.1:5700")


def _parse_digits(value: object) -> object:
    """Return the number that a text of digits stands for. Environment variables are text, and pydantic compares a
    literal with the value as it is."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def check_adapter(text: str) -> str:
    """Check NAME=DIR, where DIR may be a name on a hub."""
    name, _, folder = text.partition("=")
    if not _ADAPTER_NAME.fullmatch(name) or not folder:
        raise ValueError(
            f"{text!r} is not NAME=DIR, where NAME has letters, digits and . _ : / -, at most {MAX_ADAPTER_NAME}"
        )
    return text


def _check_adapter_names(adapters: tuple[str, ...]) -> tuple[str, ...]:
    names = [adapter.partition("=")[0] for adapter in adapters]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two adapters are called {min(twice)}, and requests select one by its name: rename one")
    return adapters


Host = Annotated[str, AfterValidator(_check_loopback)]
Address = Annotated[str, AfterValidator(_check_address)]
AddressOrAuto = Annotated[str, AfterValidator(_check_address_or_auto)]
AddressOrNone = Annotated[str, AfterValidator(_check_address_or_none)]
Adapters = Annotated[tuple[Annotated[str, AfterValidator(check_adapter)], ...], AfterValidator(_check_adapter_names)]
ListenAddress = Annotated[str, AfterValidator(_check_listen)]
Network = Annotated[str, AfterValidator(_check_network)]
AdvertisedAddress = Annotated[str, AfterValidator(_check_advertised)]
Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
HttpUrl = Annotated[str, AfterValidator(_check_http_url)]
PortRange = Annotated[str, AfterValidator(_check_port_range)]
Layers = Annotated[str, AfterValidator(_check_layers)]
HomePath = Annotated[Path, AfterValidator(Path.expanduser)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
WeightGroup = Annotated[Literal[32, 128], BeforeValidator(_parse_digits)]
Count = Annotated[int, Field(ge=1, le=1 << 20)]


class Section(BaseModel):
    """Base of all sections: rejects unknown keys, and changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
