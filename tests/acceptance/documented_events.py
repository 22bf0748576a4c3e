"""A publisher of KV events that is not ours: the bytes that vLLM documents, from a thread of the test.

PUB: topic, number (8 bytes, big-endian), msgpack. Replay: a ROUTER answers `[b"", first number]` with batches, then an
end.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

Event = dict[str, Any] | list[Any]
Answer = tuple[int, bytes]

CLEARED: Event = {"type": "AllBlocksCleared"}
END = b"\xff" * 8
_HOST = "tcp://127.0.0.1"
_encode = msgspec.msgpack.Encoder().encode


def stored(
    hashes: Sequence[int | bytes],
    parent: int | bytes | None,
    token_ids: Sequence[int],
    medium: str | None = "GPU",
    block_size: int = 4,
    **more: Any,
) -> Event:
    """Return a BlockStored as of vLLM 0.24, a map whose first seven fields are always there."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **more,
    }


def removed(hashes: Sequence[int | bytes], medium: str | None = "GPU", **more: Any) -> Event:
    """Return a BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}


def batch(*events: Event, rank: int = 0) -> bytes:
    """Return a batch as vLLM's publisher encodes it."""
    return _encode([1.5, events, rank])


def raw(value: object) -> bytes:
    """Return any value as msgpack."""
    return _encode(value)


class DocumentedPublisher:
    """PUB and replay sockets. `answers` makes what a replay from a number is answered with."""

    def __init__(self, first: int = 0, topic: bytes = b"", pub_port: int = 0, replay_port: int = 0) -> None:
        self.next = first
        self.topic = topic
        self.asked: list[int] = []
        self.answers: Callable[[int], list[Answer]] = self._kept
        self._history: list[Answer] = []
        self._context = zmq.Context()
        self._pub = self._bound(zmq.PUB, pub_port)
        self._replay = self._bound(zmq.ROUTER, replay_port)
        self.pub = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def send(self, *events: Event, lost: bool = False) -> None:
        """Publish events in a batch, or lose it: then only a replay has it. No events make a heartbeat."""
        self.send_bytes(batch(*events), lost=lost)

    def send_bytes(self, payload: bytes, *, lost: bool = False) -> None:
        """Publish a payload."""
        self._history.append((self.next, payload))
        if not lost:
            self._pub.send_multipart([self.topic, self.next.to_bytes(8, "big"), payload])
        self.next += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _bound(self, kind: int, port: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(f"{_HOST}:{port or '*'}")
        return socket

    def _kept(self, first: int) -> list[Answer]:
        return [one for one in self._history if one[0] >= first]

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._replay.poll(50):
                continue
            client, empty, number = self._replay.recv_multipart()
            self.asked.append(int.from_bytes(number, "big"))
            for position, payload in self.answers(self.asked[-1]):
                self._replay.send_multipart([client, empty, self.topic, position.to_bytes(8, "big"), payload])
            self._replay.send_multipart([client, empty, b"", END, b""])
