"""CURVE keys of KV events: files of keys, and which clients they admit.

A key is a line of 40 characters in Z85. Lines that are empty, or begin with #, as no key does, are skipped.
Source: ZeroMQ's RFC 26 (CurveZMQ), 27 (ZAP) and 32 (Z85).
"""

import logging
import struct
from typing import NamedTuple

import zmq
from zmq.utils import z85

from services.runtime.bounded_file import read_text
from services.runtime.file_version import version_of
from services.runtime.settings import InvalidSetting

_KEY_CHARACTERS, _KEY_BYTES = 40, 32
_COMMENT = "#"
_MOST_BYTES = 1 << 20

log = logging.getLogger("quire.engine")


class CurveKeys(NamedTuple):
    """A pair of keys, as text in Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> "CurveKeys":
        """Make a pair."""
        return cls(*zmq.curve_keypair())

    @classmethod
    def read(cls, name: str, path: str) -> "CurveKeys":
        """Read the secret key of a file. Raises InvalidSetting, with the name of the setting."""
        secret = read_key(name, path)
        return cls(zmq.curve_public(secret), secret)


def read_key(name: str, path: str) -> bytes:
    """Read the only key of a file. Raises InvalidSetting."""
    keys = read_keys(name, path)
    if len(keys) != 1:
        raise InvalidSetting(f"{name} must have one key, not {len(keys)}: {path!r}")
    return keys[0]


def read_keys(name: str, path: str) -> list[bytes]:
    """Read the keys of a file. Raises InvalidSetting."""
    try:
        lines = read_text(path, _MOST_BYTES, "ascii").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise InvalidSetting(f"{name} cannot be read: {path!r}: {reason}") from error
    found = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = [(number, line) for number, line in found if line and not line.startswith(_COMMENT)]
    for number, key in keys:
        if not _is_key(key):
            raise InvalidSetting(
                f"{name} must have keys of {_KEY_CHARACTERS} characters in Z85: line {number} of {path!r}"
            )
    return [key.encode() for _, key in keys]


def _is_key(text: str) -> bool:
    try:
        return len(text) == _KEY_CHARACTERS and len(z85.decode(text)) == _KEY_BYTES
    except (ValueError, KeyError, struct.error):
        return False


class AllowedClients:
    """The clients of a file of public keys, which is read again when it changes.

    Later, a file without keys admits nobody; one that is missing or invalid leaves the clients unchanged. Both write a
    line to the log. Connections that stand stay.
    """

    def __init__(self, name: str, path: str) -> None:
        """Raises InvalidSetting if the file cannot be used, or has no key."""
        self._name, self._path = name, path
        self._version = version_of(path)
        self._keys = self._read()
        if not self._keys:
            raise InvalidSetting(f"{name} must have at least one key: {path!r}")

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a client with a public key may connect; called by pyzmq's authenticator."""
        if (version := version_of(self._path)) != self._version:
            self._version = version
            self._read_again()
        return key in self._keys

    def _read_again(self) -> None:
        try:
            self._keys = self._read()
        except InvalidSetting as error:
            log.error("KV events: keeping the previous clients: %s", error)
            return
        if not self._keys:
            log.warning("KV events: no new client is admitted: %s has no key: %r", self._name, self._path)

    def _read(self) -> frozenset[bytes]:
        return frozenset(read_keys(self._name, self._path))


class CurveServer:
    """CURVE of listening sockets: their key, and the clients that may connect, None if any may."""

    def __init__(self, key_file: str, clients_file: str) -> None:
        """Read the files of these settings. Raises InvalidSetting."""
        if not zmq.has("curve"):
            raise InvalidSetting("kv_events_curve_key must be empty: the installed libzmq has no CURVE")
        self._keys = CurveKeys.read("kv_events_curve_key", key_file)
        self.clients = AllowedClients("kv_events_curve_clients", clients_file) if clients_file else None

    def protect(self, socket: "zmq.Socket[bytes]") -> None:
        """Encrypt the connections of a socket that is not bound yet."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._keys
