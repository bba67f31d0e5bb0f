"""What passes between a server and the processes that read its requests (`reading`): jobs, results, large arrays."""

from __future__ import annotations

import errno
import io
import mmap
import os
import pickle
import socket
import struct
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spyglass.config.model import ModelConfig
from spyglass.errors import SpyglassError
from spyglass.prompt.build import Pixels
from spyglass.prompt.decode import ImageRules
from spyglass.prompt.tokenizer import PromptTokenizer
from spyglass.prompt.tokens import ImagePlan
from spyglass.server.exchange import Call, Immediate, Served

_SHARED = 1 << 18  # bytes of arrays that go through shared memory and not through the socket
_HEAD = struct.Struct("<QI")
Passed = bytes | memoryview | pickle.PickleBuffer  # a `PickleBuffer` is passed as arrays are, and arrives as memory
_KNOWN = {PromptTokenizer: "tokenizer", ModelConfig: "config", Served: "served"}  # what both sides have


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBody:
    """A body to be parsed by the endpoint of a path. `adapters` are served now. `remote` images are what was fetched of
    their addresses; None = this server fetches none."""

    path: str
    body: Passed
    adapters: tuple[str, ...]
    remote: Mapping[str, Passed | SpyglassError] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackImage:
    """An image whose patches are wanted."""

    file: Passed
    rules: ImageRules
    plan: ImagePlan
    name: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Addresses of images that must be fetched before a body can be read."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error on its way between processes: its class and what it holds, since some classes are made of other
    arguments than they keep."""

    kind: type[Exception]
    args: tuple[Any, ...]
    state: Mapping[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        """The error, or what a log should say of one that is a fault of ours."""
        if isinstance(error, SpyglassError):
            return cls(type(error), error.args, error.__dict__)
        return cls(RuntimeError, ("".join(traceback.format_exception(error)),), {})

    def error(self) -> Exception:
        made = self.kind.__new__(self.kind)
        made.args = self.args
        made.__dict__.update(self.state)
        return made


Result = Call | Immediate | Wanted | Pixels | Refusal


def send(channel: socket.socket, payload: bytes, *fds: int) -> None:
    """One message, with open files."""
    head = _HEAD.pack(len(payload), len(fds))
    if fds:
        socket.send_fds(channel, [head], list(fds))
    else:
        channel.sendall(head)
    channel.sendall(payload)


def receive(channel: socket.socket) -> tuple[bytearray, list[int]]:
    """One message.

    Raises:
        EOFError: the other side is gone.
        OSError: there can be no more open files.
    """
    head, fds, flags, _ = socket.recv_fds(channel, _HEAD.size, 1)
    if flags & socket.MSG_CTRUNC:  # it lies there and cannot be had
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    while 0 < len(head) < _HEAD.size:
        head += channel.recv(_HEAD.size - len(head)) or b"\0" * _HEAD.size
    if len(head) != _HEAD.size:
        raise EOFError
    payload = bytearray(_HEAD.unpack(head)[0])
    rest = memoryview(payload)
    while rest:
        count = channel.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return payload, fds


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        return _KNOWN.get(type(value))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, known: Mapping[str, Any], buffers: list[memoryview]) -> None:
        super().__init__(file, buffers=buffers)
        self._known = known

    def persistent_load(self, name: str) -> Any:
        return self._known[name]


def send_value(channel: socket.socket, value: object) -> None:
    """A job, or a result; large bodies and arrays in memory that both sides see, since what is larger than the buffer
    of a socket has to wait for both processes again and again."""
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    _Pickler(out, protocol=5, buffer_callback=buffers.append).dump(value)
    views = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in views]
    fd = _shared(views) if sum(sizes) > _SHARED else -1
    try:
        send(channel, pickle.dumps((sizes, out.tell())), *([fd] if fd >= 0 else []))
    finally:
        if fd >= 0:
            os.close(fd)
    send(channel, out.getbuffer() if fd >= 0 else b"".join([out.getbuffer(), *views]))  # type: ignore[arg-type]


def receive_value(channel: socket.socket, known: Mapping[str, Any]) -> Any:
    """What `send_value` sent; `known` is what both sides have.

    Raises:
        EOFError: the other side is gone.
        OSError: there can be no more open files.
    """
    head, fds = receive(channel)
    sizes, length = pickle.loads(head)
    shared: memoryview | None = None
    for fd in fds:
        shared = memoryview(mmap.mmap(fd, sum(sizes)))  # stays as long as an array lies in it
        os.close(fd)
    payload, _ = receive(channel)
    source, place = (memoryview(payload)[length:], 0) if shared is None else (shared, 0)
    buffers = []
    for size in sizes:
        buffers.append(source[place : place + size])
        place += size
    return _Unpickler(io.BytesIO(memoryview(payload)[:length]), known, buffers).load()


def _shared(views: list[memoryview]) -> int:
    """An open file of memory that holds these, -1 where there is none to be had: then a socket carries them."""
    if not hasattr(os, "memfd_create"):
        return -1
    fd = -1
    try:
        fd = os.memfd_create("spyglass", os.MFD_CLOEXEC)
        for view in views:
            rest = memoryview(view).cast("B")
            while rest:
                rest = rest[os.write(fd, rest) :]
    except OSError:
        if fd >= 0:
            os.close(fd)
        return -1
    return fd
