"""How the server is set up: flags first, then EDGELLM_* variables, then Ollama's own names."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from edgellm.errors import RequestError
from edgellm.server.durations import keep_alive_seconds

__all__ = ["DEFAULT_PORT", "ServerSettings", "http_address", "parse_host"]

DEFAULT_PORT = 11434
_SCHEME_PORTS = {"http": 80, "https": 443}
_log = logging.getLogger("edgellm.server")


@dataclass(frozen=True)
class ServerSettings:
    """Everything `edgellm serve` can be told. Times in seconds, sizes in bytes."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    """Origins allowed beside the built-in ones; `*` allows all."""
    keep_alive: float = 300.0
    load_timeout: float = 300.0
    max_loaded: int = 3
    max_queue: int = 512
    """Requests waiting in one model's queue, or for a load; one more is answered 503."""
    max_seqs: int | None = None
    ctx: int | None = None
    memory: int | None = None
    """Budget for all loaded models together; None: from the machine."""
    kv_type: str = "f16"
    backend: str = "auto"
    threads: int | None = None
    draft: str | None = None
    max_body: int = 32 << 20
    body_timeout: float = 30.0
    """Longest wait for the next piece of a request body."""
    send_timeout: float = 60.0
    """Longest wait for a client that does not read its answer."""
    grace: float = 20.0
    """How long running answers may go on once the server was told to stop."""
    debug: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More keyword arguments for every `LLM` made."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    def at(self, host: str | None, port: int | None) -> ServerSettings:
        """The settings with an address that was given by hand: `host` as `parse_host` reads it, `port` before it."""
        name, own_port = (self.host, self.port) if host is None else parse_host(host, self.port)
        return replace(self, host=name, port=own_port if port is None else port)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> ServerSettings:
        """Defaults with the environment laid over them. Raises RequestError that names a bad variable."""
        env = os.environ if environ is None else environ
        settings = cls()
        found = _get(env, "HOST")
        if found:
            host, port = parse_host(found[1])
            settings = replace(settings, host=host, port=port)
        for name, field_name, convert in _VARIABLES:
            found = _get(env, name)
            if found is None:
                continue
            try:
                value = convert(found[1])
            except (ValueError, RequestError) as error:
                raise RequestError(f"{found[0]}={found[1]}: {error}") from None
            if value is not None:
                settings = replace(settings, **{field_name: value})
        return settings


def parse_host(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Host and port of `[scheme://]host[:port][/path]`; an IPv6 address may do without its brackets. A scheme without a
    port brings its own (80, 443); a bad port gives 11434, with a warning. Raises RequestError for what is no address.
    """
    scheme, separator, rest = text.strip().partition("://")
    if not separator:
        scheme, rest = "", text.strip()
    if _is_ipv6(rest):
        return rest, _SCHEME_PORTS.get(scheme, default_port)
    try:
        parts = urlsplit(f"//{rest}")
    except ValueError as error:
        raise RequestError(f"{text!r} is no address: {error}") from None
    default = _SCHEME_PORTS.get(scheme, default_port)
    try:
        port = parts.port if parts.port is not None else default
    except ValueError:
        _log.warning("bad port in %r, using %d", text, DEFAULT_PORT)
        port = DEFAULT_PORT
    return parts.hostname or "127.0.0.1", port


def http_address(host: str, port: int) -> str:
    """The address as a browser takes it."""
    return f"http://[{host}]:{port}" if _is_ipv6(host) else f"http://{host}:{port}"


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _get(env: Mapping[str, str], name: str) -> tuple[str, str] | None:
    """The variable's full name and its trimmed value; EDGELLM_ goes before OLLAMA_. Empty means not set."""
    for prefix in ("EDGELLM_", "OLLAMA_"):
        value = env.get(prefix + name, "").strip().strip("\"'").strip()
        if value:
            return prefix + name, value
    return None


def _whole(text: str) -> int | None:
    number = int(text)
    if number < 0:
        raise ValueError("must not be negative")
    return number or None


def _keep_alive(text: str) -> float | None:
    return keep_alive_seconds(text, bare_numbers=True)


def _origins(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _kv_type(text: str) -> str | None:
    if text.lower() in ("f32", "f16", "q8_0"):
        return text.lower()
    _log.warning("KV cache type %r is not known here (f32, f16, q8_0 are); using f16", text)
    return None


def _flag(text: str) -> bool:
    return text.lower() not in ("0", "false", "no", "off")


_VARIABLES: tuple[tuple[str, str, Any], ...] = (
    ("API_KEY", "api_key", str),
    ("ORIGINS", "origins", _origins),
    ("KEEP_ALIVE", "keep_alive", _keep_alive),
    ("LOAD_TIMEOUT", "load_timeout", _keep_alive),
    ("MAX_LOADED_MODELS", "max_loaded", _whole),
    ("MAX_QUEUE", "max_queue", _whole),
    ("NUM_PARALLEL", "max_seqs", _whole),
    ("CONTEXT_LENGTH", "ctx", _whole),
    ("KV_CACHE_TYPE", "kv_type", _kv_type),
    ("DEBUG", "debug", _flag),
)
