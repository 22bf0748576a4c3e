"""An index of KV events made of vLLM's own structs: `python vllm_index.py PUB_ENDPOINT REPLAY_ENDPOINT`.

It follows vLLM's example of a subscriber (examples/online_serving/kv_events_subscriber.py): a gap in the sequence
numbers is filled through the replay socket, and an answer counts if its number is above the last one. Beyond the
example it asks for a replay from 0 when it starts, keeps the blocks, and trusts no replay without its end. A line on
standard input is answered by a line of JSON.
"""

import json
import sys
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

_REPLAY_MILLISECONDS = 5_000
_decoder = msgspec.msgpack.Decoder(type=KVEventBatch)


class Index:
    """The blocks of an engine, and the position in its stream."""

    def __init__(self, replay: Any) -> None:
        self.blocks: set[tuple[int, str, int]] = set()
        self.last = -1
        self.counts = {"batches": 0, "events": 0, "gaps": 0, "replayed": 0, "cut_short": 0}
        self._replay = replay

    def take(self, number: int, payload: bytes) -> None:
        """Apply a batch of the PUB socket, after those that were missed before it."""
        if number > self.last + 1:
            self.counts["gaps"] += 1
            if not self._fill_gap():
                self.counts["cut_short"] += 1  # the next batch reveals the gap again
                return
        if number > self.last:
            self._apply(payload)
            self.last = number

    def _fill_gap(self) -> bool:
        """Apply the answers to a request for what follows the last batch; return whether their end arrived."""
        position = self.last
        self._replay.send_multipart([b"", (position + 1).to_bytes(8, "big")])
        while self._replay.poll(_REPLAY_MILLISECONDS):
            *_, number, payload = self._replay.recv_multipart()
            if not payload:
                self.last = position
                return True
            if int.from_bytes(number, "big") > position:
                position = int.from_bytes(number, "big")
                self._apply(payload)
                self.counts["replayed"] += 1
        return False

    def _apply(self, payload: bytes) -> None:
        batch = _decoder.decode(payload)
        self.counts["batches"] += 1
        self.counts["events"] += len(batch.events)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockStored):
                self.blocks |= _places(event)
            elif isinstance(event, BlockRemoved):
                self.blocks -= _places(event)


def _places(event: BlockStored | BlockRemoved) -> set[tuple[int, str, int]]:
    return {(one, event.medium, event.group_idx or 0) for one in event.block_hashes}


def main(pub: str, replay: str) -> None:
    """Follow the events, and answer lines until the standard input ends."""
    context = zmq.Context()
    subscriber, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    for socket in (subscriber, dealer):
        socket.set_hwm(0)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(pub)
    dealer.connect(replay)
    index = Index(dealer)
    poller = zmq.Poller()
    poller.register(subscriber, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    _answer("ready")
    while True:
        ready = dict(poller.poll())
        if subscriber in ready:
            _, number, payload = subscriber.recv_multipart()
            index.take(int.from_bytes(number, "big"), payload)
        elif not sys.stdin.readline():
            return
        else:
            _answer({"last": index.last, "blocks": sorted(index.blocks), **index.counts})


def _answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
