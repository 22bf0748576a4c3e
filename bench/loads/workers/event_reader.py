"""Subscribes to KV events: `python -m bench.loads.workers.event_reader ADDRESS read|unread`, until it is ended.

An `unread` subscriber has a queue of one message and never takes it.
"""

import signal
import sys

import zmq


def main(address: str, how: str) -> None:
    """Subscribe, and read all messages or none."""
    socket = zmq.Context().socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.subscribe(b"")
    socket.connect(f"tcp://{address}")
    print("subscribed", flush=True)
    while how == "read":
        socket.recv_multipart()
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
