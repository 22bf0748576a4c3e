"""A gateway with engines of several models, in one process: the engines compute nothing, all else is real."""

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench.loads.null_engine import NullOptions
from quire.v1 import gateway_pb2
from services.engine import server
from services.gateway.access.namespace import Namespace
from services.gateway.administration import FleetAdministration
from services.gateway.fleet import engine_link, prefix_lookup
from services.gateway.observe.observer import GatewayObserver
from services.runtime.errors import InvalidField, Unavailable, UnknownPin
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS
from tests.services.gateway.handler_in_process import HandlerInProcess, kv_manager, null_engine, running_handler

PROMPT = "Blocks of keys and values are kept like pages of memory. " * 4
OPTIONS = NullOptions(2048, 384, token_id=100, microseconds_per_token=0.0)


@dataclass
class Routes(GatewayObserver):
    """Collects the engine and the reason of each routed request."""

    seen: list[tuple[str, str]] = field(default_factory=list)

    def on_routed(self, model_name: str, engine_id: str, reason: str, cached_tokens: int) -> None:
        self.seen.append((engine_id, reason))


@dataclass
class Fleet:
    """Engines `a` and `b` of the model `same`, the latter found by its DNS name, and `c` of the model `other`."""

    runner: asyncio.Runner
    folder: Path
    model: Path
    handler: HandlerInProcess
    address_of_b: str
    routes: Routes

    def generate(
        self, text: str, handler: HandlerInProcess | None = None, model: str = "same", words: Sequence[str] = ()
    ) -> int:
        """Run a request to its end, without `words` in its output; return its cached tokens."""
        request = prompt_request(text, 4)
        request.logit_rules.bad_words.extend(words)
        request.model = model

        async def cached_tokens() -> int:
            responses = [one async for one in (handler or self.handler).handler.generate(request)]
            assert responses[-1].HasField("finished")
            return responses[0].started.cached_tokens

        return self.runner.run(cached_tokens())


@pytest.fixture(scope="module")
def fleet(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder, model, routes = tmp_path_factory.mktemp("fleet"), tiny_model("llama"), Routes()

    async def start(stack: AsyncExitStack) -> tuple[HandlerInProcess, str]:
        await stack.enter_async_context(kv_manager(folder))
        addresses = {
            name: await stack.enter_async_context(null_engine(folder, model, name, OPTIONS, 64, served, listen))
            for name, served, listen in (("a", "same", ""), ("b", "same", "127.0.0.1:0"), ("c", "other", ""))
        }
        by_name = addresses["b"].replace("127.0.0.1", "dns:localhost")
        listed = f"{addresses['a']},{by_name},{addresses['c']},unix:{folder}/late.sock"
        return await stack.enter_async_context(running_handler(folder, listed, routes, 3)), addresses["b"]

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setattr(engine_link, "_RETRY_SECONDS", (0.01,))
        patch.setattr(prefix_lookup, "_TIMEOUT_SECONDS", CALL_SECONDS)
        stack = AsyncExitStack()
        handler, address_of_b = runner.run(start(stack))
        yield Fleet(runner, folder, model, handler, address_of_b, routes)
        runner.run(stack.aclose())


def test_models_are_listed_with_their_number_of_engines(fleet: Fleet) -> None:
    assert [(one.model, one.engines) for one in fleet.handler.handler.models()] == [("other", 1), ("same", 2)]


def test_a_request_without_a_model_is_rejected_with_the_names_of_the_models(fleet: Fleet) -> None:
    with pytest.raises(InvalidField, match="model must be given: one of 'other', 'same'"):
        fleet.generate("Hello", model="")


def test_a_cached_prefix_decides_the_engine_and_otherwise_the_load(fleet: Fleet) -> None:
    before = len(fleet.routes.seen)
    assert fleet.generate(PROMPT + "One") == 0
    cached = [fleet.generate(PROMPT + text) for text in ("Two", "Three", "Four")]
    assert min(cached) > 16
    fleet.generate("A prompt without a cached prefix, at some length.")
    (first, _), *repeated, (last, reason) = fleet.routes.seen[before:]
    assert repeated == [(first, "prefix")] * 3
    assert (last != first, reason) == (True, "new")


def test_prefixes_cached_through_another_gateway_are_found_at_the_kv_manager(fleet: Fleet) -> None:
    text = "A prompt that only another gateway has sent, long enough for some blocks of sixteen tokens."

    async def start(stack: AsyncExitStack) -> HandlerInProcess:
        return await stack.enter_async_context(running_handler(fleet.folder, fleet.address_of_b, Routes(), 1))

    stack = AsyncExitStack()
    other = fleet.runner.run(start(stack))
    fleet.generate(text, other)
    assert fleet.generate(text + "!") >= 16
    assert fleet.routes.seen[-1] == ("b", "prefix")
    fleet.runner.run(stack.aclose())


def test_the_end_of_an_engines_last_request_is_no_change_of_the_fleet(fleet: Fleet) -> None:
    async def change() -> "asyncio.Task[None]":
        task = asyncio.create_task(fleet.handler.fleet.wait_for_change())
        await asyncio.sleep(0)
        return task

    waiting = fleet.runner.run(change())
    fleet.generate("A request, after which its engine is idle.")
    assert [link for link in fleet.handler.fleet.links() if not link.idle] == []
    assert not waiting.done()
    waiting.cancel()


def test_an_operator_pins_at_every_engine_of_the_model(fleet: Fleet) -> None:
    administration = FleetAdministration(fleet.handler.fleet, fleet.handler.handler, Namespace(separate=False))

    def administer(request: gateway_pb2.AdminRequest) -> list[tuple[str, bool]]:
        pins = fleet.runner.run(administration.administer(request, CALL_SECONDS)).pins
        return [(one.name, one.pinned) for one in pins]

    pin = gateway_pb2.PinPrompt(name="all", prompt=gateway_pb2.Prompt(text="Pinned: " + PROMPT))
    assert administer(gateway_pb2.AdminRequest(model="same", pin_prefix=pin)) == [("all", True)]
    unpin = gateway_pb2.AdminRequest(model="same")
    unpin.unpin_prefix.name = "all"
    assert administer(unpin) == []
    with pytest.raises(UnknownPin):
        administer(unpin)


def test_a_request_goes_only_to_engines_that_support_all_its_fields(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FEATURES", ())  # as in version 0.1.0

    def engines(words: list[str]) -> set[str]:
        before = len(fleet.routes.seen)
        for number in range(4):
            fleet.generate(f"{number} of {len(words)}: no other prompt begins so, and it is long.", words=words)
        return {engine for engine, _ in fleet.routes.seen[before:]}

    async def start(stack: AsyncExitStack, model: str, ready: int) -> None:
        await stack.enter_async_context(null_engine(fleet.folder, fleet.model, "late", OPTIONS, 64, model))
        await fleet.handler.wait_for_engines(ready)

    stack = AsyncExitStack()
    fleet.runner.run(start(stack, "same", 4))
    assert "late" in engines([])
    assert engines(["word"]) <= {"a", "b"}
    fleet.runner.run(stack.aclose())
    fleet.runner.run(start(stack, "old", 4))
    refusal = "no engine of model 'old' accepts requests with bad_words: they are of an older version"
    with pytest.raises(Unavailable, match=refusal):
        fleet.generate("Hello", model="old", words=["word"])
    assert fleet.generate("Hello", model="old") == 0
    fleet.runner.run(stack.aclose())


def test_engines_whose_configurations_differ_in_quantization_only_have_one_tokenizer(fleet: Fleet) -> None:
    quantized = fleet.folder / "quantized"
    shutil.copytree(fleet.model, quantized)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))

    async def start_both() -> None:
        async with null_engine(fleet.folder, quantized, "late", OPTIONS, 64, "same"):
            await fleet.handler.wait_for_engines(4)
            assert fleet.handler.handler.model("same").engines == 3

    fleet.runner.run(start_both())


def test_an_engine_with_another_tokenizer_gets_no_requests_until_it_has_the_same(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    different = fleet.folder / "different"
    shutil.copytree(fleet.model, different)
    (different / "chat_template.jinja").write_text("{{ messages }}")
    rejected = "its tokenizer differs from that of the other engines of model 'same'"

    async def start_both() -> None:
        async with null_engine(fleet.folder, different, "late", OPTIONS, 64, "same"), asyncio.timeout(CALL_SECONDS):
            while rejected not in caplog.text:
                await asyncio.sleep(0.01)
        assert fleet.handler.handler.model("same").engines == 2
        async with null_engine(fleet.folder, fleet.model, "late", OPTIONS, 64, "same"):
            await fleet.handler.wait_for_engines(4)
            assert fleet.handler.handler.model("same").engines == 3

    with caplog.at_level(logging.INFO, "quire.gateway"):
        fleet.runner.run(start_both())
    assert "tool calls" not in caplog.text  # logged once for a model, not at every attempt to connect
