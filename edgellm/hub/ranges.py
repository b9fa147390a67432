"""Ranges over plain `http.client` connections: the bytes of a download take one copy on their way, where httpx and h11
take three (measured: 0.5 s of CPU per GB instead of 1.1). Everything else, and every request through a proxy, is
httpx's.

One connection per thread and origin is kept open. No redirect is followed: `Web.locate` did that.
"""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from edgellm.errors import PullError
from edgellm.hub.web import Location, Unreachable, connection_error, is_local, origin, place, proxied, shown

__all__ = ["RangeAnswer", "Ranges", "Stalled"]

_BLOCK = 256 << 10
_CONNECT_S = 15.0


class Stalled(Exception):
    """Nothing arrived for the time-out."""


@dataclass(frozen=True)
class RangeAnswer:
    """Status, headers (lower case) and the body in blocks, as they arrive."""

    status: int
    headers: Mapping[str, str]
    blocks: Iterator[bytes]


class Ranges:
    """Asks for ranges from any thread. Raises Stalled, or Unreachable for every other trouble with the line."""

    def __init__(self, client: httpx.Client, timeout: float):
        self._client = client
        self._timeout = timeout
        self._kept = threading.local()
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    @contextmanager
    def open(self, location: Location, start: int, stop: int) -> Iterator[RangeAnswer]:
        """The answer to a request for the bytes start..stop-1."""
        headers = {**location.headers, "Range": f"bytes={start}-{stop - 1}"}
        try:
            with (
                self._through_httpx(location, headers)
                if proxied(location.url)
                else self._direct(location, headers) as answer
            ):
                yield answer
        except (httpx.ReadTimeout, httpx.PoolTimeout, TimeoutError):
            raise Stalled from None
        except (httpx.HTTPError, http.client.HTTPException, OSError) as error:
            raise connection_error(location.url, error) from None

    @contextmanager
    def _through_httpx(self, location: Location, headers: Mapping[str, str]) -> Iterator[RangeAnswer]:
        with self._client.stream("GET", location.url, headers=dict(headers)) as response:
            yield RangeAnswer(response.status_code, dict(response.headers), response.iter_raw())

    @contextmanager
    def _direct(self, location: Location, headers: Mapping[str, str]) -> Iterator[RangeAnswer]:
        connection, response = self._ask(location, headers)
        whole = False
        try:
            told = {key.lower(): value for key, value in response.getheaders()}
            yield RangeAnswer(response.status, told, _blocks(response))
            whole = (response.isclosed() or response.length == 0) and not response.will_close
            response.close()
        finally:
            if not whole:  # what is left of the body must not be taken for the next answer
                connection.close()
                self._connections().pop(origin(location.url), None)

    def _ask(
        self, location: Location, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Sends the request, on a fresh line where the kept one was closed by the other side meanwhile."""
        parts = urlsplit(location.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        key = origin(location.url)
        for kept in (True, False):
            connection = self._connections().pop(key, None) if kept else self._connect(location)
            if connection is None:
                continue
            try:
                connection.request("GET", target, headers={"User-Agent": "edgellm", **headers})
                response = connection.getresponse()
            except (ConnectionError, http.client.RemoteDisconnected):
                connection.close()
                if not kept:
                    raise
                continue
            except BaseException:
                connection.close()
                raise
            self._connections()[key] = connection
            return connection, response
        raise Unreachable(f"cannot reach {place(location.url)}")

    def _connect(self, location: Location) -> http.client.HTTPConnection:
        scheme, host, port = origin(location.url)
        if scheme == "https":
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=_CONNECT_S, context=self._tls()
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=_CONNECT_S)
        try:
            connection.connect()
        except TimeoutError:
            raise Unreachable(f"{place(location.url)} does not answer (timed out)") from None
        connection.sock.settimeout(self._timeout)
        if not location.local and is_local(connection.sock.getpeername()[0]):
            connection.close()  # the name leads elsewhere than when it was looked up
            raise PullError(f"{shown(location.url)} leads to an address inside this network, which is refused")
        return connection

    def _connections(self) -> dict[tuple[str, str, int], http.client.HTTPConnection]:
        if not hasattr(self._kept, "connections"):
            self._kept.connections = {}
        connections: dict[tuple[str, str, int], http.client.HTTPConnection] = self._kept.connections
        return connections

    def _tls(self) -> ssl.SSLContext:
        """The context that httpx would use: its certificates, or those of SSL_CERT_FILE."""
        with self._lock:
            self._context = self._context or httpx.create_ssl_context()
            return self._context


def _blocks(response: http.client.HTTPResponse) -> Iterator[bytes]:
    expected = response.length
    came = 0
    while block := response.read1(_BLOCK):
        came += len(block)
        yield block
    if expected is not None and came < expected:
        raise http.client.IncompleteRead(b"", expected - came)
