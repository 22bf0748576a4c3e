"""A gateway of several engines: two of one model, one of another."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import grpc
import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer, RunningService
from tests.scrape import Scrape

PROMPT = "Blocks of keys and values are kept like pages of memory. " * 4
Service = Callable[..., RunningService]


@dataclass
class Several:
    """A KV manager, engines by name, and the arguments of one more; a gateway that knows of all of them."""

    folder: Path
    model: Path
    kvmanager: RunningService
    engines: dict[str, RunningService]
    gateway: RunningService
    service: Service

    @property
    def stub(self) -> gateway_pb2_grpc.GatewayStub:
        return gateway_pb2_grpc.GatewayStub(self.gateway.channel)

    def generate(self, text: str, model: str = "same", max_tokens: int = 4) -> Answer:
        request = prompt_request(text, max_tokens)
        request.model = model
        return Answer.of(self.stub.Generate(request, timeout=CALL_SECONDS))

    def engines_of_same(self) -> int:
        return self.stub.GetModel(gateway_pb2.GetModelRequest(model="same"), timeout=CALL_SECONDS).engines

    def scrape(self) -> Scrape:
        return Scrape.of(self.gateway.metrics_url)


def start_engine(
    service: Service, kvmanager: RunningService, name: str, model: Path, served: str, listen: str = "127.0.0.1:0"
) -> RunningService:
    return service(
        *("engine", "--listen", listen, "--kvmanager", kvmanager.address, "--model", str(model)),
        *("--model-name", served, "--engine-id", name, "--device-blocks", "64", "--device", "cpu", "--threads", "1"),
        *("--heartbeat-seconds", "0.2"),
    )


@pytest.fixture(scope="module")
def several(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, service: Service) -> Several:
    folder = tmp_path_factory.mktemp("several")
    model = tiny_model("llama")
    kvmanager = service("kvmanager", "--listen", "127.0.0.1:0")
    engines = {
        name: start_engine(service, kvmanager, name, model, served)
        for name, served in (("a", "same"), ("b", "same"), ("c", "other"))
    }
    by_name = engines["b"].address.replace("127.0.0.1", "dns:localhost")
    addresses = f"{engines['a'].address},{by_name},{engines['c'].address},unix:{folder}/late.sock"
    gateway = service(
        *("gateway", "--listen", "127.0.0.1:0", "--engines", addresses, "--kvmanager", kvmanager.address),
        *("--discovery-seconds", "0.2"),
    )
    for engine in engines.values():
        gateway.output.wait_for(f"engine at {engine.address} serves ")
    return Several(folder, model, kvmanager, engines, gateway, service)


def test_the_models_of_all_engines_are_listed_with_how_many_serve_each(several: Several) -> None:
    models = several.stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=CALL_SECONDS).models
    assert [(model.model, model.engines) for model in models] == [("other", 1), ("same", 2)]


def test_a_request_that_names_no_model_where_there_are_several_is_told_which(several: Several) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        several.generate("Hello", model="")
    assert failure.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert failure.value.details() == "model must be given: one of 'other', 'same'"


def test_a_prompt_goes_to_the_engine_that_has_its_beginning_and_others_to_the_one_with_less_to_do(
    several: Several,
) -> None:
    first = several.generate(PROMPT + "One")
    assert first.started.cached_tokens == 0
    again = [several.generate(PROMPT + text).started.cached_tokens for text in ("Two", "Three", "Four")]
    assert min(again) > 16
    before = several.scrape().values("quire_routed_requests_total", "engine", model_name="same", reason="new")
    several.generate("Something that nobody has said before, at some length.")
    after = several.scrape().values("quire_routed_requests_total", "engine", model_name="same", reason="new")
    (chosen,) = (engine for engine in after if after[engine] != before.get(engine))
    hits = several.scrape().values("quire_routed_requests_total", "engine", model_name="same", reason="prefix")
    assert chosen not in hits, "it did the work of three prompts' beginnings"


def test_the_manager_knows_of_prefixes_that_came_by_another_gateway(several: Several) -> None:
    other = several.service("gateway", "--listen", "127.0.0.1:0", "--engines", several.engines["b"].address)
    other.output.wait_for("gateway is ready")
    stub = gateway_pb2_grpc.GatewayStub(other.channel)

    def hits() -> float:
        routed = several.scrape().values("quire_routed_requests_total", "engine", model_name="same", reason="prefix")
        return routed.get("b", 0)

    numbers = count()

    def found() -> bool:
        text = f"Prompt {next(numbers)} that another gateway has seen, long enough for some blocks of sixteen."
        Answer.of(stub.Generate(prompt_request(text, 4), timeout=CALL_SECONDS))
        before = hits()
        cached = several.generate(text + "!").started.cached_tokens
        return cached >= 16 and hits() > before

    # A manager that does not answer in time is not waited for, nor asked for a while: then any engine gets a prompt.
    wait_until(found, "the manager has told where the prompt is", CALL_SECONDS)
    assert other.close() == 0


def test_an_operator_pins_at_every_engine_of_the_model(several: Several) -> None:
    pin = gateway_pb2.PinPrompt(name="all", prompt=gateway_pb2.Prompt(text=PROMPT))
    pinned = several.stub.Admin(gateway_pb2.AdminRequest(model="same", pin_prefix=pin), timeout=CALL_SECONDS).pins
    assert [(one.name, one.pinned) for one in pinned] == [("all", True)]
    unpin = gateway_pb2.AdminRequest(model="same")
    unpin.unpin_prefix.name = "all"
    assert not several.stub.Admin(unpin, timeout=CALL_SECONDS).pins
    with pytest.raises(grpc.RpcError) as failure:
        several.stub.Admin(unpin, timeout=CALL_SECONDS)
    assert failure.value.code() == grpc.StatusCode.NOT_FOUND


def test_an_engine_of_another_tokenizer_is_not_used_under_the_same_name_and_one_that_fits_is(several: Several) -> None:
    listen = f"unix:{several.folder}/late.sock"
    strange = several.folder / "strange"
    shutil.copytree(several.model, strange)
    (strange / "chat_template.jinja").write_text("{{ messages }}")
    odd = start_engine(several.service, several.kvmanager, "late", strange, "same", listen)
    said = several.gateway.output.wait_for("is not used")
    assert said.endswith("its tokenizer differs from that of the other engines of model 'same'")
    assert several.engines_of_same() == 2
    odd.close()
    fitting = start_engine(several.service, several.kvmanager, "late", several.model, "same", listen)
    several.gateway.output.wait_for(f"engine at {listen} serves same")
    # Its news is told in the log first.
    wait_until(lambda: several.engines_of_same() == 3, "it counts")
    fitting.close()
