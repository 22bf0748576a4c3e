"""Signals on an idle event loop."""

import asyncio
import signal
import threading
import time

from services.runtime.run_service import _woken_by_signals

MAX_SECONDS = 30


def test_a_signal_that_another_thread_receives_wakes_an_idle_event_loop() -> None:
    def send() -> None:
        time.sleep(0.1)  # until the event loop is idle
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    async def wait() -> float:
        received = asyncio.Event()
        signal.signal(signal.SIGUSR1, lambda *_: received.set())
        begun = time.monotonic()
        asyncio.get_running_loop().call_later(MAX_SECONDS, received.set)
        with _woken_by_signals():
            threading.Thread(target=send).start()
            await received.wait()
        return time.monotonic() - begun

    before = signal.getsignal(signal.SIGUSR1)
    try:
        assert asyncio.run(wait()) < MAX_SECONDS
    finally:
        signal.signal(signal.SIGUSR1, before)
