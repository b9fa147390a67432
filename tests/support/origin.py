"""A local HTTP origin (T3) that serves files by range and can misbehave: wrong bytes, no ranges, cut lines, silence,
redirects, expiring addresses. Every request is recorded. Data goes out through sendfile.

    with Origin() as origin:
        origin.file("/x.gguf", path)
        origin.misbehave("/x.gguf", Flip(at=7))
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Request:
    """One request as it came."""

    method: str
    path: str
    query: str
    headers: dict[str, str]

    @property
    def range(self) -> tuple[int, int] | None:
        """First and last byte asked for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(match[1]), int(match[2])) if match else None


@dataclass
class Reply:
    """An answer given as it is. `body` may be shorter than a Content-Length among the headers."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Behaviour:
    """How a file is served. Counters are used up request by request."""

    ranges: bool = True
    cut_after: int | None = None
    """Close the line after so many bytes of a body ..."""
    cuts: int = 1 << 30
    """... for this many answers."""
    silent_after: int | None = None
    """Send so many bytes, then nothing more ..."""
    silences: int = 1 << 30
    flip_at: int | None = None
    """The byte at this place of the file is sent with all bits turned."""
    rate: float = 0.0
    """Bytes per second and connection; 0: no limit."""


Handler = Callable[[Request], Reply | None]


class Origin:
    """Listens on a free port of 127.0.0.1. `requests`: what came, in order."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.files: dict[str, tuple[Path, Behaviour]] = {}
        self.handlers: list[Handler] = []
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Origin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening and cuts all lines.

        No socket is closed while a thread waits in it: after SIGSTOP and SIGCONT the system goes on waiting at that
        number, which may be another origin's by then.
        """
        if self._closing:
            return
        self._closing = True
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._accepting.join()
        self._socket.close()
        with self._lock:
            for line in self._open:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)  # its own thread closes it

    def file(self, path: str, source: Path, **behaviour: Any) -> Behaviour:
        """Serves a file under a path."""
        how = Behaviour(**behaviour)
        self.files[path] = (source, how)
        return how

    def handle(self, handler: Handler) -> None:
        """Asks `handler` first; None passes the request on."""
        self.handlers.append(handler)

    def asked(self, path: str) -> int:
        """Bytes asked for by ranges of a path, single-byte probes left out."""
        spans = [r.range for r in self.requests if r.path == path and r.method == "GET" and r.range]
        return sum(last - first + 1 for first, last in spans if (first, last) != (0, 0))

    def _accept(self) -> None:
        while True:
            line, _ = self._socket.accept()
            if self._closing:
                line.close()
                return
            with self._lock:
                self._open.add(line)
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        buffer = b""
        try:
            while True:
                while b"\r\n\r\n" not in buffer:
                    data = line.recv(65536)
                    if not data:
                        return
                    buffer += data
                head, _, buffer = buffer.partition(b"\r\n\r\n")
                request = self._parse(head.decode("latin-1"))
                self.requests.append(request)
                length = int(request.headers.get("content-length", 0))
                while len(buffer) < length:
                    buffer += line.recv(65536)
                buffer = buffer[length:]
                if not self._answer(line, request):
                    return
        except OSError:
            pass
        finally:
            with self._lock:
                self._open.discard(line)
            line.close()

    def _parse(self, head: str) -> Request:
        first, *rest = head.split("\r\n")
        method, target, _ = first.split(" ")
        if target.startswith("http://"):  # asked as a proxy
            target = "/" + target.split("/", 3)[3]
        path, _, query = target.partition("?")
        headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in rest)}
        return Request(method, path, query, headers)

    def _answer(self, line: socket.socket, request: Request) -> bool:
        for handler in self.handlers:
            reply = handler(request)
            if reply is not None:
                headers = {"Content-Length": str(len(reply.body)), **reply.headers}
                line.sendall(_head(reply.status, headers) + (b"" if request.method == "HEAD" else reply.body))
                return headers["Content-Length"] == str(len(reply.body))
        if request.path not in self.files:
            line.sendall(_head(404, {"Content-Length": "0"}))
            return True
        return self._send_file(line, request, *self.files[request.path])

    def _send_file(self, line: socket.socket, request: Request, source: Path, how: Behaviour) -> bool:
        size = source.stat().st_size
        first, last = (request.range if how.ranges else None) or (0, size - 1)
        last = min(last, size - 1)
        n = last - first + 1
        headers = {"Content-Length": str(n), "ETag": '"e"'}
        partial = how.ranges and request.range is not None
        if partial:
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        line.sendall(_head(206 if partial else 200, headers))
        if request.method == "HEAD":
            return True
        stop = self._stop_after(how, n)
        self._send_bytes(line, source, first, min(n, stop if stop is not None else n), how)
        if stop is None:
            return True
        if how.silent_after is not None:
            line.settimeout(30)
            line.recv(1)  # silent until the client goes
        return False

    def _stop_after(self, how: Behaviour, n: int) -> int | None:
        with self._lock:
            if how.cut_after is not None and how.cuts > 0 and n > how.cut_after:
                how.cuts -= 1
                return how.cut_after
            if how.silent_after is not None and how.silences > 0 and n > how.silent_after:
                how.silences -= 1
                return how.silent_after
        return None

    def _send_bytes(self, line: socket.socket, source: Path, first: int, n: int, how: Behaviour) -> None:
        with open(source, "rb") as file:
            if how.flip_at is not None and first <= how.flip_at < first + n:
                file.seek(first)
                data = bytearray(file.read(n))
                data[how.flip_at - first] ^= 0xFF
                line.sendall(data)
                return
            place, end = first, first + n
            while place < end:
                step = min(end - place, 65536 if how.rate else 1 << 24)
                place += os.sendfile(line.fileno(), file.fileno(), place, step)
                if how.rate:
                    time.sleep(step / how.rate)


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} X", *(f"{key}: {value}" for key, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
