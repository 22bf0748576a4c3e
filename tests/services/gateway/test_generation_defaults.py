"""Requests get a model's defaults for what they leave out, and their own values otherwise."""

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest

from bench.loads.null_engine import NullOptions
from quire.v1 import engine_pb2, engine_pb2_grpc, gateway_pb2
from quire.v1.decoding_pb2 import GenerationDefaults, Sampling
from services.gateway.observe.observer import GatewayObserver
from services.gateway.request_checks import checked, fill_defaults
from services.runtime import transport
from tests.running_quire import CALL_SECONDS
from tests.services.gateway.handler_in_process import (
    ACME,
    MODEL,
    HandlerInProcess,
    handler_in_process,
    kv_manager,
    null_engine,
    running_handler,
)

Request = gateway_pb2.GenerateRequest

OF_MODEL = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.3, max_tokens=7)
CONTEXT = 16384  # of the null engines


def request(**fields: Any) -> Request:
    return Request(prompt={"text": "On"}, **fields)  # type: ignore[arg-type]


def filled(given: Request, of_model: GenerationDefaults = OF_MODEL) -> tuple[Request, GenerationDefaults]:
    made = checked(given)
    return made, fill_defaults(made, of_model)


def test_a_request_that_leaves_everything_out_gets_the_models_values() -> None:
    made, taken = filled(request())
    assert taken == OF_MODEL
    expected = Sampling(temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, sample_count=1, top_n_sigma=0)
    expected.seed = made.sampling.seed
    assert made.sampling == expected
    assert made.logit_rules.repetition_penalty == 1.3
    assert not made.stopping.HasField("max_tokens")


def test_values_of_the_request_win_also_where_they_are_the_defaults_of_the_rules() -> None:
    own = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    made, taken = filled(request(sampling=own, logit_rules={"repetition_penalty": 1.0}, stopping={"max_tokens": 500}))
    assert taken == GenerationDefaults()
    assert {name: getattr(made.sampling, name) for name in own} == own
    assert (made.logit_rules.repetition_penalty, made.stopping.max_tokens) == (1.0, 500)


def test_one_value_of_the_request_leaves_the_others_to_the_model() -> None:
    made, taken = filled(request(sampling={"temperature": 0.0}))
    assert (made.sampling.temperature, made.sampling.top_k) == (0.0, 20)
    assert not taken.HasField("temperature")


def test_a_model_without_values_leaves_the_defaults_of_the_rules() -> None:
    made, taken = filled(request(), GenerationDefaults())
    assert taken == GenerationDefaults()
    assert (made.sampling.temperature, made.sampling.top_k, made.sampling.top_p) == (1.0, 0, 1.0)
    assert not made.HasField("logit_rules") or not made.logit_rules.HasField("repetition_penalty")


def test_a_beam_search_gets_no_values_of_sampling() -> None:
    made, taken = filled(request(beam_search={"width": 2}))
    assert taken == GenerationDefaults(repetition_penalty=1.3, max_tokens=7)
    assert (made.sampling.temperature, made.sampling.top_k) == (0.0, 0)


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny model whose authors recommend OF_MODEL."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    values = {field.name: value for field, value in OF_MODEL.ListFields()}
    values["max_new_tokens"] = values.pop("max_tokens")
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


async def answered(one: HandlerInProcess, given: Request) -> tuple[gateway_pb2.Started, gateway_pb2.Finished]:
    async with aclosing(one.handler.generate(given, ACME)) as responses:
        seen = [response async for response in responses]
    return seen[0].started, seen[-1].finished


def test_the_start_of_an_answer_says_which_values_are_the_models(model: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with handler_in_process(tmp_path, model) as one:
            started, finished = await answered(one, request(sampling={"top_k": 3}))
            expected = GenerationDefaults()
            expected.CopyFrom(OF_MODEL)
            expected.ClearField("top_k")
            assert started.model_defaults == expected
            assert (started.sampling.temperature, started.sampling.top_k, started.max_tokens) == (0.6, 3, 7)
            assert finished.usage.generated_tokens == 7
            assert one.handler.model("").generation_defaults == OF_MODEL

    asyncio.run(run())


@pytest.mark.parametrize(
    ("given", "max_tokens"),
    [
        (request(stopping={"max_tokens": 3}), 3),
        (request(stopping={"min_tokens": 9}), 9),
        (Request(prompt=gateway_pb2.Prompt(token_ids={"ids": [5] * (CONTEXT - 4)})), 4),  # type: ignore[arg-type]
    ],
    ids=["own", "min_tokens", "what fits"],
)
def test_max_tokens_of_the_model_gives_way_to_the_request_and_to_what_fits(
    model: Path, tmp_path: Path, given: Request, max_tokens: int
) -> None:
    async def run() -> None:
        async with handler_in_process(tmp_path, model) as one:
            started, finished = await answered(one, given)
            assert started.max_tokens == finished.usage.generated_tokens == max_tokens

    asyncio.run(run())


async def usable(one: HandlerInProcess, engines: int) -> None:
    async with asyncio.timeout(CALL_SECONDS):
        while one.fleet.usable_engines().get(MODEL) != engines:
            await one.fleet.wait_for_change()


def test_the_engine_that_connects_last_has_the_defaults_until_it_leaves(
    model: Path, tiny_model: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    canary = tmp_path / "canary"
    shutil.copytree(tiny_model("llama"), canary)
    (canary / "generation_config.json").write_text('{"top_k": 4}')
    options = NullOptions(CONTEXT, 384, 100, 20.0, "nothing")

    async def run() -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(kv_manager(tmp_path))
            await stack.enter_async_context(null_engine(tmp_path, model, "one", options))
            addresses = f"unix:{tmp_path}/one.sock,unix:{tmp_path}/two.sock"
            one = await stack.enter_async_context(running_handler(tmp_path, addresses, GatewayObserver(), 1))
            async with null_engine(tmp_path, canary, "two", options):
                await usable(one, 2)
                assert one.handler.model("").generation_defaults == GenerationDefaults(top_k=4)
            await usable(one, 1)
            assert one.handler.model("").generation_defaults == OF_MODEL

    with caplog.at_level(logging.WARNING, "quire.gateway"):
        asyncio.run(run())
    sentence = "engine two of model m differs from engine one in generation_defaults: answers depend on the engine"
    assert sentence in caplog.messages


def test_an_engine_of_an_older_version_leaves_the_defaults(model: Path, tmp_path: Path) -> None:
    """It announces none, and gets the values in its requests."""

    async def run() -> None:
        async with handler_in_process(tmp_path, model) as one:
            link = one.fleet.links()[0]
            joining = engine_pb2.GetEngineResponse()
            joining.CopyFrom(link.description())
            joining.engine_id = "three"
            joining.ClearField("generation_defaults")
            async with transport.channel(link.address) as channel:
                await one.fleet.on_engine(joining, engine_pb2_grpc.EngineStub(channel))
            assert one.handler.model("").generation_defaults == OF_MODEL

    asyncio.run(run())
