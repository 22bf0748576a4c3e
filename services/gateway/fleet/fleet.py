"""All engines of a gateway, and the models that they serve."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from quire.v1 import engine_pb2 as pb
from quire.v1 import engine_pb2_grpc as pb_grpc
from services.gateway.fleet.discovery import EngineAddresses, discovered
from services.gateway.fleet.engine_link import EngineLink, LinkOptions
from services.gateway.fleet.retention import MAX_RETAINED_MODELS, Retention
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.text.tokenizer_store import TokenizerStore
from services.runtime.errors import InvalidField, RejectionReason, Unavailable, UnknownModel
from services.runtime.service import Readiness

log = logging.getLogger("quire.gateway")


@dataclass
class ServedModel:
    """A model, its tokenizer, and the links to the engines that serve it; they come and go."""

    name: str
    digest: bytes
    tokenizer: Tokenizer
    links: list[EngineLink] = field(default_factory=list)
    under_way: int = 0  # requests that were let in and have not ended

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the model from being forgotten, as for a request that was let in and has not ended."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1

    def ready(self) -> dict[str, EngineLink]:
        """Return the links to engines that take requests by the engines' ids: one that has two addresses is one."""
        return {link.description().engine_id: link for link in self.links if link.accepts_requests}

    def check_ready(self) -> None:
        """Raise Unavailable where no engine takes requests, with what they lack."""
        if not self.ready():
            without = any(link.without_kvmanager for link in self.links if not link.draining)
            why = ": those that are there are without their KV manager" if without else ""
            raise Unavailable(
                f"no engine of model {self.name!r} takes requests{why}", rejection=RejectionReason.UNAVAILABLE
            )

    def request_blocks(self) -> int:
        """Return how many blocks one request can have at most, at any engine. Raises Unavailable without an engine."""
        self.description()
        return min(link.request_blocks for link in self.links if link.readiness.ready)

    def description(self) -> pb.GetEngineResponse:
        """Describe the model as its engines do; blocks are the largest pool's. Raises Unavailable without an engine."""
        descriptions = [link.description() for link in self.links if link.readiness.ready]
        if not descriptions:
            raise Unavailable(f"no engine of model {self.name!r} is there", rejection=RejectionReason.UNAVAILABLE)
        return max(descriptions, key=lambda one: one.device_blocks)


class Fleet:
    """Keeps a link to each engine that is found, and knows what they serve. Ready while one takes requests."""

    def __init__(self, places: EngineAddresses, discovery_seconds: float, options: LinkOptions) -> None:
        """Remember where engines are; `run` looks for them, again after so many seconds."""
        self._places = places
        self._discovery_seconds = discovery_seconds
        self._options = options
        self._tokenizers = TokenizerStore()
        self._links: dict[str, EngineLink] = {}
        self._models: dict[str, ServedModel] = {}
        self._departed_models = Retention[str](most=MAX_RETAINED_MODELS)
        self._changed = asyncio.Event()
        self.readiness = Readiness()

    def model(self, name: str) -> ServedModel:
        """Return a model by its name; an empty one means the only one.

        Raises UnknownModel for one that was never there, Unavailable before any was, InvalidField for an empty name
        where there are several.
        """
        if name in self._models:
            return self._models[name]
        known = ", ".join(map(repr, sorted(self._models)))
        if not known:
            raise Unavailable("no engine is there yet", rejection=RejectionReason.UNAVAILABLE)
        if name:
            raise UnknownModel(
                f"model {name!r} is not served, {known} {'are' if len(self._models) > 1 else 'is'}", "model"
            )
        if len(self._models) > 1:
            raise InvalidField(f"model is missing: {known} are served", "model")
        return next(iter(self._models.values()))

    def models(self) -> list[ServedModel]:
        """Return the models that an engine is there for, in order of their names."""
        there = [model for model in self._models.values() if any(link.readiness.ready for link in model.links)]
        return sorted(there, key=lambda model: model.name)

    def links(self) -> list[EngineLink]:
        """Return the links to the engines that are there."""
        return [link for model in self._models.values() for link in model.links]

    def engines(self) -> set[tuple[str, str]]:
        """Return the engines that are there, each by its model and id."""
        there = [link.description() for link in self.links() if link.readiness.ready]
        return {(one.model, one.engine_id) for one in there}

    def names(self) -> set[str]:
        """Return the names of the models that are known, whether an engine is there or not."""
        return set(self._models)

    def forget(self, now: float) -> None:
        """Forget models without engines and requests, where there are too many of them. `now` is in seconds."""
        needed = {name for name, model in self._models.items() if model.links or model.under_way}
        for name in self._departed_models.due(self._models, needed, now):
            del self._models[name]
            log.info("model %s is forgotten: more than %s models are without engines", name, MAX_RETAINED_MODELS)
        self._tokenizers.prune({model.digest for model in self._models.values()})

    async def wait_for_change(self) -> None:
        """Return when an engine came, went, began to drain, or began or ceased to be without its KV manager."""
        await self._changed.wait()

    async def on_engine(self, description: pb.GetEngineResponse, stub: "pb_grpc.EngineAsyncStub") -> None:
        """Have the tokenizer of an engine that is new. Raises Unavailable when it does not fit to the others."""
        name, digest = description.model, description.tokenizer_digest
        tokenizer = await self._tokenizers.tokenizer(digest, stub)
        model = self._models.get(name)
        if model and model.digest != digest and any(link.readiness.ready for link in model.links):
            raise Unavailable(f"its tokenizer is not that of the other engines of model {name!r}")
        if model is None:
            self._models[name] = ServedModel(name, digest, tokenizer)
        else:
            model.digest, model.tokenizer = digest, tokenizer

    async def run(self) -> None:
        """Look for engines, and keep the links to them, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            running: dict[EngineLink, asyncio.Task[None]] = {}
            async for addresses in discovered(self._places, self._discovery_seconds):
                for address in sorted(addresses.keys() - self._links.keys()):
                    link = self._links[address] = self._new_link(address, addresses[address])
                    running[link] = tasks.create_task(self._keep(link, tasks))
                for address in sorted(self._links.keys() - addresses.keys()):
                    link = self._links.pop(address)
                    log.info("engine at %s is no longer listed", address)
                    tasks.create_task(self._retire(link, running.pop(link)))

    def _new_link(self, address: str, name: str) -> EngineLink:
        return EngineLink(address, self._options, self, name)

    async def _keep(self, link: EngineLink, tasks: asyncio.TaskGroup) -> None:
        follower = tasks.create_task(self._follow(link))
        try:
            await link.run()
        finally:
            follower.cancel()
            self._place(link, present=False)

    async def _follow(self, link: EngineLink) -> None:
        async for _ in link.changes():
            self._place(link, present=link.readiness.ready)

    async def _retire(self, link: EngineLink, keeper: "asyncio.Task[None]") -> None:
        """Give it no more requests, and end it when it has none left, or breaks."""
        link.retire()
        async for _ in link.changes():
            if link.idle or not link.readiness.ready:
                keeper.cancel()
                return

    def _place(self, link: EngineLink, *, present: bool) -> None:
        """List the link where its engine's model is, and nowhere else."""
        for model in self._models.values():
            if link in model.links:
                model.links.remove(link)
        if present:
            self._models[link.description().model].links.append(link)
        self._announce()

    def _announce(self) -> None:
        self.readiness.set(any(link.accepts_requests for link in self.links()))
        self._changed.set()
        self._changed = asyncio.Event()
