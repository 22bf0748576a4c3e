"""What answers the requests of a batch: an engine of this process, or a running server."""

import ssl
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Protocol

from kvmanager import Ledger
from services.cli.batch.endpoints import Endpoint, HttpServer
from services.cli.batch.run import Window
from services.cli.local_model import engine_with_folder
from services.engine.settings import EngineSettings
from services.runtime.logs.records import logging_to_stderr

Work = Callable[[Endpoint, Window], Awaitable[None]]


class Source(Protocol):
    """Answers requests while it does work."""

    def prepare(self) -> None:
        """Make the slow preparations, before the event loop runs. Raises ModelUnavailable and InvalidSetting."""

    async def serve(self, work: Work) -> None:
        """Do the work with an endpoint. Raises InvalidSetting, Unreachable, and what stopped the engine."""


class RunningServer:
    """A server of OpenAI's API."""

    def __init__(self, base_url: str, api_key: str, context: ssl.SSLContext | None, window: int) -> None:
        """Describe it. Raises ValueError for an invalid URL."""
        self._endpoint = HttpServer(base_url, api_key, context, window)
        self._window = window

    def prepare(self) -> None:
        """See Source."""

    async def serve(self, work: Work) -> None:
        """See Source."""
        with closing(self._endpoint):
            await work(self._endpoint, Window(self._window))


class OwnEngine:
    """An engine of this process."""

    def __init__(self, settings: EngineSettings, window: Callable[[int], int]) -> None:
        """`window` returns how many sequences may be in flight, given the maximum number in one step."""
        self._settings = settings
        self._window = window
        self.ledger = Ledger()  # of its blocks

    def prepare(self) -> None:
        """Fetch the model."""
        self._settings = engine_with_folder(self._settings)

    async def serve(self, work: Work) -> None:
        """Load the model, and serve it."""
        from services.cli.batch.local_services import with_engine  # imports torch
        from services.engine.startup.device import device_of

        settings = self._settings
        sequences = settings.limits(on_gpu=device_of(settings.device).type == "cuda").max_sequences
        window = self._window(sequences)
        with logging_to_stderr("run-batch", settings.log_format, settings.log_level):
            await with_engine(settings, lambda endpoint: work(endpoint, Window(window)), self.ledger)
