"""A publisher between an engine and its subscribers that loses a share of the batches."""

import random
import threading

import zmq

_HOST = "tcp://127.0.0.1"


class LossyEvents:
    """Passes an engine's batches on from its own address, except some. It reconnects to an engine that restarts."""

    def __init__(self, engine: str, share: float, seed: int) -> None:
        """Lose a `share` of the batches of the engine at host:port."""
        self.lost = self.passed = 0
        self._draw, self._share = random.Random(seed), share
        self._context = zmq.Context()
        self._from, self._to = (self._context.socket(kind) for kind in (zmq.SUB, zmq.PUB))
        for socket in (self._from, self._to):
            socket.set_hwm(0)
        self._from.setsockopt(zmq.SUBSCRIBE, b"")
        self._from.connect(f"tcp://{engine}")
        self.address = f"127.0.0.1:{self._to.bind_to_random_port(_HOST)}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pass, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _pass(self) -> None:
        while not self._stop.is_set():
            if not self._from.poll(50):
                continue
            frames = self._from.recv_multipart()
            if self._draw.random() < self._share:
                self.lost += 1
            else:
                self._to.send_multipart(frames)
                self.passed += 1
