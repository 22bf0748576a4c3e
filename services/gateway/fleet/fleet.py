"""All engines of a gateway and their models."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from quire.v1 import decoding_pb2
from quire.v1 import engine_pb2 as pb
from quire.v1 import engine_pb2_grpc as pb_grpc
from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.selection import UNSELECTED, DialectSelection
from services.gateway.fleet.discovery import ServiceAddresses, watch_addresses
from services.gateway.fleet.engine_link import EngineLink, LinkOptions
from services.gateway.fleet.load_estimate import CurrentLoad
from services.gateway.fleet.retention import MAX_RETAINED_MODELS, Retention
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tokenizer_store import TokenizerStore
from services.runtime.errors import InvalidField, RejectionReason, Unavailable, UnknownModel
from services.runtime.service import Readiness

# What engines of one model should have in common.
_SHARED = ("model_fingerprint", "dtype", "weights", "kv_dtype", "generation_defaults")

log = logging.getLogger("quire.gateway")


@dataclass
class ServedModel:
    """A model, its tokenizer, its defaults for requests, and the links to the engines that currently serve it."""

    name: str
    digest: bytes
    tokenizer: Tokenizer
    links: list[EngineLink] = field(default_factory=list)
    in_flight: int = 0  # admitted requests that have not ended
    # Descriptions of engines by their ids, the latest to connect last; only the last one may have disconnected.
    engines: dict[str, pb.GetEngineResponse] = field(default_factory=dict)

    @property
    def defaults(self) -> decoding_pb2.GenerationDefaults:
        """Defaults for requests: of the connected engine that connected last, of the last one if none is left."""
        known = [one for one in self.engines.values() if one.HasField("generation_defaults")]  # older engines have none
        connected = self._connected_ids()
        latest = [one for one in known if one.engine_id in connected] or known
        return latest[-1].generation_defaults if latest else decoding_pb2.GenerationDefaults()

    def add_engine(self, description: pb.GetEngineResponse) -> None:
        """Take the description of an engine that connects, and log in what it differs from the other engines."""
        connected = self._connected_ids()
        self.engines = {
            name: one for name, one in self.engines.items() if name in connected and name != description.engine_id
        }
        for name, other in self.engines.items():
            if different := [one for one in _SHARED if getattr(other, one) != getattr(description, one)]:
                sentence = "engine %s of model %s differs from engine %s in %s: answers depend on the engine%s"
                apart = ", and requests of one do not continue on the other" if _SHARED[0] in different else ""
                log.warning(sentence, description.engine_id, self.name, name, ", ".join(different), apart)
        self.engines[description.engine_id] = description

    def _connected_ids(self) -> set[str]:
        return {link.description().engine_id for link in self.links if link.readiness.ready}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request in flight, so that the model is not pruned."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def ready_links(self) -> dict[str, EngineLink]:
        """Return the links that accept requests by engine id; an engine with two addresses appears once."""
        return {link.description().engine_id: link for link in self.links if link.accepts_requests}

    def check_ready(self) -> None:
        """Raise Unavailable if no engine accepts requests."""
        if not self.ready_links():
            without = any(link.without_kvmanager for link in self.links if not link.draining)
            cause = ": the connected engines have lost their KV manager" if without else ""
            raise Unavailable(
                f"no engine of model {self.name!r} accepts requests{cause}", rejection=RejectionReason.UNAVAILABLE
            )

    def request_blocks(self) -> int:
        """Return the maximum blocks of one request at any engine. Raises Unavailable without an engine."""
        self.description()
        return min(link.request_blocks for link in self.links if link.readiness.ready)

    def description(self) -> pb.GetEngineResponse:
        """Return the description by the engine with the largest pool. Raises Unavailable without an engine."""
        descriptions = [link.description() for link in self.links if link.readiness.ready]
        if not descriptions:
            raise Unavailable(f"no engine of model {self.name!r} is connected", rejection=RejectionReason.UNAVAILABLE)
        return max(descriptions, key=lambda one: one.device_blocks)


class Fleet:
    """Keeps a link to each discovered engine and the models they serve. Ready while an engine accepts requests."""

    def __init__(
        self,
        engines: ServiceAddresses,
        discovery_seconds: float,
        options: LinkOptions,
        selection: DialectSelection = UNSELECTED,
    ) -> None:
        """`run` resolves DNS names again every `discovery_seconds`."""
        self._addresses = engines
        self._discovery_seconds = discovery_seconds
        self._options = options
        self._tokenizers = TokenizerStore(selection)
        self._links: dict[str, EngineLink] = {}
        self._models: dict[str, ServedModel] = {}
        self._retention = Retention[str](max_absent=MAX_RETAINED_MODELS)
        self._changed = asyncio.Event()
        self.readiness = Readiness()

    def model(self, name: str) -> ServedModel:
        """Return a model by name; an empty name selects the only model.

        Raises UnknownModel, Unavailable before any engine has connected, and InvalidField for an empty name if there
        are several models.
        """
        if name in self._models:
            return self._models[name]
        known = ", ".join(map(repr, sorted(self._models)))
        if not known:
            raise Unavailable("no engine has connected yet", rejection=RejectionReason.UNAVAILABLE)
        if name:
            raise UnknownModel(f"model must be one of {known}, not {name!r}", "model")
        if len(self._models) > 1:
            raise InvalidField(f"model must be given: one of {known}", "model")
        return next(iter(self._models.values()))

    def models(self) -> list[ServedModel]:
        """Return the models of connected engines, ordered by name."""
        connected = [model for model in self._models.values() if any(link.readiness.ready for link in model.links)]
        return sorted(connected, key=lambda model: model.name)

    def links(self) -> list[EngineLink]:
        """Return the links to connected engines."""
        return [link for model in self._models.values() for link in model.links]

    def engines(self) -> set[tuple[str, str]]:
        """Return the model and id of each connected engine."""
        connected = [link.description() for link in self.links() if link.readiness.ready]
        return {(one.model, one.engine_id) for one in connected}

    def model_names(self) -> set[str]:
        """Return the names of all known models, with or without an engine."""
        return set(self._models)

    def usable_engines(self) -> dict[str, int]:
        """Return the number of engines that accept requests, for each known model."""
        return {name: len(model.ready_links()) for name, model in self._models.items()}

    def loads(self) -> list[CurrentLoad]:
        """Return the loads of the engines that accept requests, ordered by model and engine id."""
        engines = [link for model in self.models() for _, link in sorted(model.ready_links().items())]
        return [link.current_load() for link in engines]

    def prune(self, now: float) -> None:
        """Drop the oldest models without engines and requests, if there are too many. `now` is in seconds."""
        in_use = {name for name, model in self._models.items() if model.links or model.in_flight}
        for name in self._retention.expired(self._models, in_use, now):
            del self._models[name]
            log.info("model %s dropped: more than %s models have no engine", name, MAX_RETAINED_MODELS)
        self._tokenizers.prune({model.digest for model in self._models.values()})

    async def wait_for_change(self) -> None:
        """Return when the state of any link has changed: connected, draining, or its KV manager lost or back."""
        await self._changed.wait()

    async def on_engine(self, description: pb.GetEngineResponse, stub: "pb_grpc.EngineAsyncStub") -> None:
        """Take a new engine's tokenizer, and its defaults for requests, which hold for the whole model.

        Raises Unavailable if other engines of the model use a different tokenizer. Files may differ in other things, as
        configurations of quantized weights do.
        """
        name, digest = description.model, description.tokenizer_digest
        tokenizer = await self._tokenizers.tokenizer(digest, stub)
        model = self._models.get(name)
        same = model is not None and model.tokenizer.identity == tokenizer.identity
        if model and not same and any(link.readiness.ready for link in model.links):
            raise Unavailable(f"its tokenizer differs from that of the other engines of model {name!r}")
        if not same:
            _log_dialect(name, tokenizer.chat.dialect)
        if model is None:
            model = self._models[name] = ServedModel(name, digest, tokenizer)
        model.digest, model.tokenizer = digest, tokenizer
        model.add_engine(description)

    async def run(self) -> None:
        """Discover engines and keep links to them, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            running: dict[EngineLink, asyncio.Task[None]] = {}
            async for addresses in watch_addresses(self._addresses, self._discovery_seconds):
                for address in sorted(addresses.keys() - self._links.keys()):
                    link = self._links[address] = self._new_link(address, addresses[address])
                    running[link] = tasks.create_task(self._maintain(link, tasks))
                for address in sorted(self._links.keys() - addresses.keys()):
                    link = self._links.pop(address)
                    log.info("engine at %s is no longer listed", address)
                    tasks.create_task(self._retire(link, running.pop(link)))

    def _new_link(self, address: str, name: str) -> EngineLink:
        return EngineLink(address, self._options, self, name)

    async def _maintain(self, link: EngineLink, tasks: asyncio.TaskGroup) -> None:
        follower = tasks.create_task(self._follow(link))
        try:
            await link.run()
        finally:
            follower.cancel()
            self._list(link, connected=False)

    async def _follow(self, link: EngineLink) -> None:
        listed = None
        async for _ in link.changes():
            # Its last request's end is no change: a request that it refused would be sent to it again at once.
            state = link.sessions, link.readiness.ready, link.accepts_requests
            if state != listed:
                listed = state
                self._list(link, connected=link.readiness.ready)

    async def _retire(self, link: EngineLink, keeper: "asyncio.Task[None]") -> None:
        """Drain the link, and end it when it is idle or broken."""
        link.retire()
        async for _ in link.changes():
            if link.idle or not link.readiness.ready:
                keeper.cancel()
                return

    def _list(self, link: EngineLink, *, connected: bool) -> None:
        """List a connected link under its model only."""
        for model in self._models.values():
            if link in model.links:
                model.links.remove(link)
        if connected:
            self._models[link.description().model].links.append(link)
        self._announce()

    def _announce(self) -> None:
        self.readiness.set(any(link.accepts_requests for link in self.links()))
        self._changed.set()
        self._changed = asyncio.Event()


def _log_dialect(model: str, dialect: Dialect) -> None:
    calls = dialect.calls.name if dialect.calls else "of no known form, so they stay text"
    thoughts = dialect.thought.name if dialect.thought else "none"
    log.info("model %s: tool calls: %s; thinking: %s", model, calls, thoughts)
