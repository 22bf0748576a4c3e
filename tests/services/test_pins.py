"""Pinned prefixes: administrative calls, the command line and the file of prompts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from quire.v1 import engine_pb2, gateway_pb2, pins_pb2
from services.cli.main import cli
from services.gateway.pinned_prompts import read
from services.runtime.settings import InvalidSetting
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import START_SECONDS, RunningQuire, launch
from tests.services.runtime.test_statuses import failure_of
from tests.timing import standing_still

Status = grpc.StatusCode
INVALID = Status.INVALID_ARGUMENT
TEXT = "You are a careful assistant, who answers in whole sentences and never makes anything up. "
BLOCK_SIZE = 16


def admin(quire: RunningQuire, **action: Any) -> list[pins_pb2.PinnedPrefix]:
    response: gateway_pb2.AdminResponse = quire.gateway.Admin(gateway_pb2.AdminRequest(**action), timeout=60)
    return list(response.pins)


def pinned(quire: RunningQuire, name: str = "p", text: str = TEXT, salt: str = "") -> list[pins_pb2.PinnedPrefix]:
    return admin(quire, **pin_action(name, text, salt))


def pin_action(name: str = "p", text: str = TEXT, salt: str = "") -> dict[str, Any]:
    return {"pin_prefix": gateway_pb2.PinPrompt(name=name, prompt=gateway_pb2.Prompt(text=text), salt=salt)}


def cached(quire: RunningQuire, text: str = TEXT + "Why?", salt: str = "") -> int:
    return quire.generate(prompt_request(text, 2, salt=salt)).started.cached_tokens


@pytest.fixture
def quire(tiny_quire: RunningQuire) -> Iterator[RunningQuire]:
    """A Quire of 64 blocks with no pinned or cached prefix."""
    unpin_all(tiny_quire)
    assert admin(tiny_quire, reset_prefix_cache={}) == []
    yield tiny_quire
    pins = admin(tiny_quire, list_pinned={})
    held = tiny_quire.settled_pool().device.held
    unpin_all(tiny_quire)
    assert held == sum(len(pin.block_ids) for pin in pins)


def unpin_all(quire: RunningQuire) -> None:
    for pin in admin(quire, list_pinned={}):
        admin(quire, unpin_prefix={"name": pin.name})


class TestAdmin:
    def test_a_prefix_is_pinned_listed_hit_and_unpinned(self, quire: RunningQuire) -> None:
        (pin,) = pinned(quire)
        assert (pin.name, pin.pinned, pin.token_count) == ("p", True, BLOCK_SIZE * len(pin.block_ids))
        assert quire.settled_pool().device.held == len(pin.block_ids) > 0
        assert pinned(quire) == [pin] == admin(quire, list_pinned={})
        assert cached(quire) == pin.token_count
        assert admin(quire, unpin_prefix={"name": "p"}) == []
        assert quire.settled_pool().device.held == 0
        assert cached(quire) >= pin.token_count, "the prefix is no longer cached"

    def test_a_pin_with_a_salt_is_hit_with_that_salt_only(self, quire: RunningQuire) -> None:
        (pin,) = pinned(quire, salt="tenant")
        assert pin.salt == b"tenant"
        assert (cached(quire), cached(quire, salt="tenant")) == (0, pin.token_count)

    def test_a_reset_empties_the_cache_and_recomputes_pins(self, quire: RunningQuire) -> None:
        (pin,) = pinned(quire)
        assert (cached(quire, "x" * 40), cached(quire, "x" * 40)) == (0, 32)
        (listed,) = admin(quire, reset_prefix_cache={})
        assert (listed.name, listed.token_count) == ("p", pin.token_count)
        (again,) = pinned(quire)  # returns when the prefix is pinned again
        assert again.pinned
        assert cached(quire, "x" * 40) == 0
        assert cached(quire) == pin.token_count

    def test_a_request_without_max_tokens_fits_beside_pinned_blocks(self, quire: RunningQuire) -> None:
        (pin,) = pinned(quire, text="y" * 700)
        request = prompt_request("a" * 300)
        request.stopping.ClearField("max_tokens")
        answer = quire.generate(request)
        blocks = -(-(answer.started.prompt_tokens + answer.started.max_tokens - 1) // BLOCK_SIZE)
        assert blocks <= 64 - len(pin.block_ids)

    @pytest.mark.parametrize(
        ("action", "code", "field", "words"),
        [
            ({}, INVALID, "action", "must be given: one of pin_prefix, unpin_prefix"),
            (pin_action(""), INVALID, "pin_prefix.name", "name must have between 1 and 128 bytes, not 0"),
            (pin_action(text=""), INVALID, "pin_prefix.prompt.text", "must not be empty"),
            (pin_action(text="Hi"), INVALID, "pin_prefix.prompt", "must have at least 16 tokens"),
            (
                pin_action("other", TEXT[1:]),
                Status.ALREADY_EXISTS,
                "pin_prefix.name",
                "is in use for a prefix with other tokens",
            ),
            ({"unpin_prefix": {"name": "q"}}, Status.NOT_FOUND, "unpin_prefix.name", "name 'q' is not pinned"),
            ({"list_pinned": {}, "model": "unknown"}, Status.NOT_FOUND, "model", "not 'unknown'"),
        ],
    )
    def test_an_invalid_action_is_refused_by_its_field(
        self, quire: RunningQuire, action: dict[str, Any], code: Status, field: str, words: str
    ) -> None:
        pinned(quire, "other")
        failure = failure_of(quire.gateway.Admin, gateway_pb2.AdminRequest(**action))
        assert (failure.code, failure.field) == (code, field)
        assert words in failure.detail

    def test_a_pin_larger_than_the_free_pool_is_refused_with_both_numbers(self, quire: RunningQuire) -> None:
        pinned(quire, "large", "y" * 600)
        failure = failure_of(quire.gateway.Admin, gateway_pb2.AdminRequest(**pin_action("larger", "z" * 600)))
        assert failure.code is Status.RESOURCE_EXHAUSTED
        assert "unpinned" in failure.detail

    def test_a_pin_whose_call_exceeds_its_deadline_is_still_made(self, quire: RunningQuire) -> None:
        request = gateway_pb2.AdminRequest(**pin_action())
        with standing_still(quire.children()["kvmanager"]):
            code = quire.gateway.Admin.future(request, timeout=1.5).code()
        assert code is Status.DEADLINE_EXCEEDED
        wait_until(lambda: [pin.pinned for pin in pinned(quire)] == [True], "the pin is made")

    def test_an_engine_pins_token_ids(self, quire: RunningQuire) -> None:
        pin = engine_pb2.PinTokens(name="ids", token_ids=range(40))
        response = quire.engine.Admin(engine_pb2.EngineAdminRequest(pin_prefix=pin), timeout=60)
        assert [(one.name, one.token_count) for one in response.pins] == [("ids", 32)]
        assert response.request_blocks == 62
        failure = failure_of(quire.engine.Admin, engine_pb2.EngineAdminRequest())
        assert (failure.code, failure.detail) == (INVALID, "action is missing")


class TestCommands:
    def run(self, quire: RunningQuire, *arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(cli, [*arguments, "--address", quire.addresses["gateway"]], **options)

    def test_pin_list_unpin_and_reset(self, quire: RunningQuire, tmp_path: Path) -> None:
        assert self.run(quire, "pins").output == "no prefix is pinned\n"
        file = tmp_path / "system.txt"
        file.write_text(TEXT)
        output = self.run(quire, "pin", "mine", "--file", str(file)).output
        (pin,) = admin(quire, list_pinned={})
        assert output == f"mine: {pin.token_count} tokens, in {len(pin.block_ids)} blocks\n"
        assert self.run(quire, "pin", "mine", TEXT).output == output == self.run(quire, "pins").output
        assert self.run(quire, "pin", "mine", "-", input=TEXT).output == output
        assert self.run(quire, "reset-cache").output.startswith(f"mine: {pin.token_count} tokens")
        assert self.run(quire, "unpin", "mine").output == "no prefix is pinned\n"

    def test_a_failure_is_reported_in_one_line(self, quire: RunningQuire) -> None:
        refused = self.run(quire, "unpin", "unknown")
        assert (refused.exit_code, "NOT_FOUND: name 'unknown' is not pinned" in refused.output) == (1, True)
        assert self.run(quire, "pin", "mine").exit_code == 2


def line(**fields: Any) -> str:
    return json.dumps(fields) + "\n"


class TestFile:
    def read(self, folder: Path, text: str) -> list[gateway_pb2.PinPrompt]:
        path = folder / "prompts.jsonl"
        path.write_text(text)
        return read(str(path))

    def test_each_line_is_a_prompt_of_one_kind(self, tmp_path: Path) -> None:
        chat = [{"role": "system", "content": "Be brief."}]
        lines = line(name="a", text="A") + "\n" + line(name="b", chat=chat, salt="s") + line(name="c", token_ids=[1, 2])
        text, conversation, ids = self.read(tmp_path, lines)
        assert (text.name, text.prompt.text) == ("a", "A")
        assert (conversation.salt, conversation.prompt.chat.messages[0].content) == ("s", "Be brief.")
        assert list(ids.prompt.token_ids.ids) == [1, 2]
        assert read("") == []

    @pytest.mark.parametrize(
        ("wrong", "words"),
        [
            ("x\n", "Expecting value"),
            ("[]\n", "the line must be a JSON object"),
            (line(name="a"), "one of text, chat and token_ids"),
            (line(name="a", text="A", token_ids=[1]), "one of text, chat and token_ids"),
            (line(text="A"), "name must be given"),
            (line(name=3, text="A"), "name must be a string, not 3"),
            (line(name="a", text=3), "text must be a string, not 3"),
            (line(name="a", text="A", slat="s"), "unknown field 'slat'"),
            (line(name="a", text=""), "prompt.text must not be empty"),
            (line(name="a", token_ids=["x"]), "token_ids: "),
            (line(name="a", chat=[{"role": "user", "contents": "x"}]), "chat: "),
            (line(name="ok", text="A"), "name must be unique, 'ok' appears twice"),
        ],
    )
    def test_an_invalid_line_is_named(self, tmp_path: Path, wrong: str, words: str) -> None:
        with pytest.raises(InvalidSetting, match="line 3: ") as refused:
            self.read(tmp_path, line(name="ok", text="A") + "\n" + wrong)
        assert words in str(refused.value)

    def test_a_gateway_does_not_start_with_an_invalid_file(self, tmp_path: Path) -> None:
        process = launch("gateway", "--pinned-prompts", str(tmp_path / "none"))
        output, _ = process.communicate(timeout=START_SECONDS)
        assert process.returncode == 1
        assert f"pinned_prompts: cannot read '{tmp_path}/none'" in output
