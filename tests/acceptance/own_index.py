"""Our listener of KV events as a process: `python -m tests.acceptance.own_index EVENTS REPLAY`, both host:port.

A line on standard input is answered by a line of JSON, as by routers/vllm_index.py.
"""

import asyncio
import json
import sys

from services.engine.events.zeromq.listener import EventListener, Publication


async def main(events: str, replay: str) -> None:
    """Follow the events, and answer lines until the standard input ends."""
    listener = EventListener(Publication(events, replay))
    following = asyncio.create_task(listener.run())
    _answer("ready")
    while await asyncio.to_thread(sys.stdin.readline):
        following.done() and following.result()
        _answer(_state(listener))
    following.cancel()


def _state(listener: EventListener) -> dict[str, object]:
    follower = listener.follower
    blocks = [(one, medium, kind) for (kind, medium), held in follower.held.places.items() for one in held]
    counts = {"lost": follower.lost, "restarts": follower.restarts, "replays": listener.replays}
    return {"last": (follower.expected or 0) - 1, "blocks": blocks, "invalid": listener.invalid, **counts}


def _answer(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
