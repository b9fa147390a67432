"""Requests to registries and hubs: which redirects are followed, who gets the token, and what an error means.

Proxies and certificates come from the usual variables (HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE). Rules for each hop:
never from https to plain http; never from a public host to a loopback, private or link-local address; `Authorization`
goes only to the origin (scheme, host and port) it was meant for.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from edgellm.errors import PullError

__all__ = [
    "Answer",
    "Location",
    "Unreachable",
    "Web",
    "connection_error",
    "is_local",
    "origin",
    "place",
    "proxied",
    "shown",
]

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_HOPS = 8
_LARGEST_ANSWER = 64 << 20
_REASON = 2000
"""Bytes of a refusal that are read for what it says."""


class Unreachable(PullError):
    """No answer came: the network, the host or the proxy. Another try may help."""


@dataclass(frozen=True)
class Location:
    """Where a file's bytes can be asked for right now: the end of the redirects, and the headers that belong there."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    size: int | None = None
    """Whole size in bytes, where the answers told."""
    etag: str = ""
    ranges: bool = True
    """Whether the server answered a range with a range."""
    local: bool = False
    """Whether the bytes come from this machine or network, as the user named it."""


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise PullError(f"{shown(url)} is no usable address: {error}") from None
    try:
        port = parts.port or (443 if parts.scheme.lower() == "https" else 80)
    except ValueError:
        raise PullError(f"{shown(url)} has no valid port") from None
    return parts.scheme.lower(), (parts.hostname or "").lower(), port


def place(url: str) -> str:
    """Host for a message, with its port where that is not the usual one."""
    scheme, host, port = origin(url)
    return host if port == (443 if scheme == "https" else 80) else f"{host}:{port}"


def shown(url: str) -> str:
    """A URL for a message: without its query (signatures) and user info."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ascii(url.rpartition("@")[2].partition("?")[0])[1:-1][:200]
    return ascii(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")[1:-1][:200]


class Web:
    """One session of requests. `insecure` allows plain http where a user did not name an http address himself."""

    def __init__(self, insecure: bool = False, timeout: float = 30.0):
        self.insecure = insecure
        self.timeout = timeout
        limits = httpx.Limits(max_connections=32, max_keepalive_connections=32)
        try:
            self.client = httpx.Client(
                follow_redirects=False,
                timeout=httpx.Timeout(timeout, connect=15.0),
                limits=limits,
                headers={"User-Agent": "edgellm", "Accept-Encoding": "identity"},
            )
        except (ValueError, ImportError, OSError, httpx.InvalidURL) as error:
            raise PullError(f"the proxy or certificate settings in the environment are not usable: {error}") from None

    def close(self) -> None:
        """Closes all connections."""
        self.client.close()

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def open(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, follow: bool = True
    ) -> Iterator[httpx.Response]:
        """A streamed answer after the redirects that are allowed. Connection trouble is a PullError."""
        first, sent = url, dict(headers or {})
        for _ in range(_MOST_HOPS):
            self._check_target(first, url)
            if origin(url) != origin(first):
                sent = {k: v for k, v in sent.items() if k.lower() != "authorization"}
            try:
                with self.client.stream(method, url, headers=sent) as answer:
                    if answer.status_code in _REDIRECTS and follow and "location" in answer.headers:
                        url = urljoin(url, answer.headers["location"])
                        continue
                    self._check_peer(first, answer)
                    answer.extensions["edgellm.headers"] = sent
                    yield answer
                    return
            except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
                raise connection_error(url, error) from None
            except (UnicodeError, ValueError) as error:
                raise PullError(f"{shown(url)} is no usable address: {error}") from None
        raise PullError(f"{shown(first)} redirects too often")

    def read(self, url: str, headers: Mapping[str, str] | None = None, limit: int = _LARGEST_ANSWER) -> Answer:
        """The whole answer, of at most `limit` bytes."""
        with self.open("GET", url, headers) as response:
            data = bytearray()
            for block in response.iter_bytes():
                data += block
                if len(data) > limit:
                    raise PullError(f"{shown(url)} answered with more than {limit} bytes, which is not expected there")
            return Answer(response.status_code, bytes(data), dict(response.headers), str(response.url))

    def locate(self, url: str, headers: Mapping[str, str] | None = None) -> Location | Answer:
        """Follows the redirects of a file's address to where its bytes are; an Answer where the server refused."""
        with self.open("GET", url, {**(headers or {}), "Range": "bytes=0-0"}) as response:
            if response.status_code not in (200, 206, 416):
                return Answer(response.status_code, _beginning(response), dict(response.headers), str(response.url))
            sent = {k: v for k, v in response.extensions["edgellm.headers"].items() if k.lower() == "authorization"}
            final = str(response.url)
            if "location" in response.headers:  # some hubs give a signed address beside the bytes
                target = urljoin(final, response.headers["location"])
                self._check_target(url, target)
                sent = sent if origin(target) == origin(final) else {}
                final = target
            local = is_local(origin(final)[1], resolve=not proxied(final))
            etag = response.headers.get("etag", "")
            return Location(final, sent, _size(response), etag, response.status_code == 206, local)

    def _check_target(self, first: str, url: str) -> None:
        """Refuses a hop that a server we ask must not be able to send us on."""
        scheme, host, _ = origin(url)
        if scheme not in ("http", "https") or not host:
            raise PullError(f"{shown(url)}: only http and https addresses can be fetched")
        if scheme == "http" and origin(first)[0] == "https":
            raise PullError(f"{shown(first)} redirects from https to plain http ({shown(url)}), which is refused")
        if url != first and not is_local(origin(first)[1]) and is_local(host, resolve=not proxied(url)):
            raise PullError(f"{shown(first)} redirects to an address inside this network ({host}), which is refused")

    def _check_peer(self, first: str, answer: httpx.Response) -> None:
        """The same rule for the address that was really connected to (a name may change between two look-ups)."""
        if origin(str(answer.url))[1] == origin(first)[1]:
            return
        if _leads_inside(answer) and not is_local(origin(first)[1]):
            raise PullError(f"{shown(first)} redirects to an address inside this network, which is refused")

    @contextmanager
    def whole(self, location: Location) -> Iterator[httpx.Response]:
        """The answer to a plain request for a file that was located before. Raises httpx.HTTPError."""
        with self.client.stream("GET", location.url, headers=dict(location.headers)) as answer:
            if not location.local and _leads_inside(answer):
                raise PullError(f"{shown(location.url)} leads to an address inside this network, which is refused")
            yield answer


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes
    headers: dict[str, str]
    url: str

    def json(self) -> Any:
        """The body as JSON; PullError where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise PullError(f"{shown(self.url)} did not answer with JSON; is the address right?") from None

    def reason(self) -> str:
        """What a server said about an error, in one line."""
        text = self.headers.get("x-error-message") or self.body[:_REASON].decode("utf-8", "replace")
        try:
            data = json.loads(self.body)
            errors = data.get("errors") if isinstance(data, dict) else None
            first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], dict) else data
            text = str(first.get("message") or first.get("error") or text) if isinstance(first, dict) else text
        except (ValueError, RecursionError):
            pass
        if "<html" in text.lower():
            text = ""
        return f"{self.status} {' '.join(ascii(text)[1:-1].split())[:200]}".strip()


def connection_error(url: str, error: Exception) -> Unreachable:
    """What to say when no answer came."""
    host = place(url)
    if isinstance(error, (httpx.TimeoutException, TimeoutError)):
        return Unreachable(f"{host} does not answer (timed out)")
    proxy = " (through the proxy of the environment)" if proxied(url) else ""
    words = " ".join(str(error).split()) or type(error).__name__
    if "SSL" in words and ("WRONG_VERSION" in words or "record layer" in words or "unknown protocol" in words):
        return Unreachable(f"{host} does not speak https; if you trust it, use --insecure and http://")
    return Unreachable(f"cannot reach {host}{proxy}: {words[:200]}")


def _leads_inside(answer: httpx.Response) -> bool:
    """Whether the line of an answer goes to this machine or network, and not to a proxy."""
    stream = answer.extensions.get("network_stream")
    peer = stream.get_extra_info("server_addr") if stream else None
    return peer is not None and not proxied(str(answer.url)) and is_local(peer[0])


def _beginning(response: httpx.Response) -> bytes:
    """The first bytes of a refusal; whatever follows is not waited for."""
    data = bytearray()
    for block in response.iter_bytes():
        data += block
        if len(data) >= _REASON:
            break
    return bytes(data[:_REASON])


def _size(response: httpx.Response) -> int | None:
    """The file's whole size: from the range's end, or the length of a full answer."""
    total = response.headers.get("content-range", "").rpartition("/")[2]
    if response.status_code != 200:
        return int(total) if total.isascii() and total.isdigit() and len(total) < 19 else None
    length = response.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None


def proxied(url: str) -> bool:
    """Whether the environment sends requests for this address through a proxy."""
    parts = urlsplit(url)
    return parts.scheme in getproxies() and not proxy_bypass(parts.hostname or "")


def is_local(host: str, resolve: bool = True) -> bool:
    """Whether a host is this machine or inside a private network, by its address."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_global
    except ValueError:
        pass
    if not resolve:
        return False
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False  # the request itself will say that the name is unknown
    return any(not ipaddress.ip_address(str(address).partition("%")[0]).is_global for address in found)
