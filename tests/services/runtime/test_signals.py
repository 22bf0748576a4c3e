"""Signals on an idle event loop."""

import asyncio
import signal
import threading
import time

import pytest

from services.runtime.run_service import _woken_by_signals

MAX_SECONDS = 30


@pytest.mark.anyio
async def test_a_signal_that_another_thread_receives_wakes_an_idle_event_loop() -> None:
    def send() -> None:
        time.sleep(0.1)  # until the event loop is idle
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    received, begun = asyncio.Event(), time.monotonic()
    before = signal.signal(signal.SIGUSR1, lambda *_: received.set())
    try:
        asyncio.get_running_loop().call_later(MAX_SECONDS, received.set)
        with _woken_by_signals():
            threading.Thread(target=send).start()
            await received.wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert time.monotonic() - begun < MAX_SECONDS
