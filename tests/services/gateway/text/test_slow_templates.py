"""A chat whose template is slow holds up no other chat for long: not those of its model, nor other models and texts."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2
from services.gateway import tokenization
from services.gateway.fleet.fleet import ServedModel
from services.gateway.text.chat_template import ChatTemplate, Conversation
from services.gateway.text.rendering.shares import FirstShareUsed, share_of_chat
from services.gateway.text.rendering.turns import Turns
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.tokenization import PromptTokenizer
from services.runtime.errors import DeadlineExceeded, InvalidField, Overloaded, RejectionReason
from tests.services.gateway.handler_in_process import ACME, HandlerInProcess, handler_in_process
from tests.services.gateway.text.test_detokenizer import byte_level
from tests.services.gateway.text.test_render_process import ENDLESS, TIME

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# Some 0.3 s of processor time.
HEAVY = "{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}"
EITHER = f"{{% if messages[0].content == 'endless' %}}{ENDLESS}{{% endif %}}"
EITHER += f"{{% if messages[0].content == 'heavy' %}}{HEAVY}{{% endif %}}" + PLAIN
Work = asyncio.Task[list[int]]


def served(source: str) -> ServedModel:
    model = ServedModel("m", b"", Tokenizer(byte_level(), ChatTemplate(source, {})))
    model.tokenizer.chat.features.find()
    return model


def chat(*contents: str) -> gateway_pb2.Prompt:
    prompt = gateway_pb2.Prompt()
    for content in contents:
        prompt.chat.messages.add(role="user", content=content)
    return prompt


class Chats:
    """Chats of one model."""

    def __init__(self) -> None:
        self.model, self.prompts = served(EITHER), PromptTokenizer()

    def begin(self, *contents: str, tenant: str = "") -> Work:
        return asyncio.create_task(self.prompts.token_ids(self.model, chat(*contents), tenant=tenant))


@pytest.fixture
def chats() -> Chats:
    return Chats()


def with_whole_time(tasks: list[Work]) -> int:
    """Return how many chats have ended after the whole time of a rendering: 2 s each, one after the other."""
    return sum(task.done() and not task.cancelled() and isinstance(task.exception(), InvalidField) for task in tasks)


@pytest.mark.anyio
async def test_a_good_chat_waits_seconds_behind_40_endless_ones_and_these_end(chats: Chats) -> None:
    bad = [chats.begin("endless") for _ in range(40)]
    assert await chats.begin("Hi")
    assert with_whole_time(bad) <= 4
    ends = await asyncio.gather(*bad, return_exceptions=True)
    assert 1 <= with_whole_time(bad) <= 7
    refused = [end for end in ends if isinstance(end, Overloaded)]
    assert len(refused) + with_whole_time(bad) == 40
    assert all(one.rejection is RejectionReason.CHAT_TEMPLATE and one.retry_seconds >= 1 for one in refused)


@pytest.mark.anyio
async def test_another_tenant_does_not_wait_behind_a_hundred_endless_chats(
    chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What counts is the order: a busy machine takes longer than the limit for it.
    monkeypatch.setattr(tokenization, "MAX_WAIT_SECONDS", 600.0)
    bad = [chats.begin("endless", tenant="bad") for _ in range(100)]
    await asyncio.sleep(0)
    assert await chats.begin("Hi", tenant="good")
    assert with_whole_time(bad) == 0
    assert await chats.begin("heavy", tenant="good")
    assert with_whole_time(bad) <= 2
    for task in bad:
        task.cancel()
    await asyncio.gather(*bad, return_exceptions=True)


@pytest.mark.anyio
async def test_cancelled_chats_leave_the_queue(chats: Chats) -> None:
    bad = [chats.begin("endless") for _ in range(40)]
    await asyncio.sleep(0)
    turns = chats.prompts._turns[chats.model.tokenizer]
    assert turns.first._count() == 38
    for task in bad:
        task.cancel()
    await asyncio.gather(*bad, return_exceptions=True)
    assert turns.first._count() == 0
    assert await chats.begin("Hi")


@pytest.mark.anyio
async def test_256_ordinary_chats_at_once_are_all_rendered(chats: Chats) -> None:
    text = "A sentence of an ordinary message. " * 20
    assert all(await asyncio.gather(*(chats.begin(*[text] * 50) for _ in range(256))))


@pytest.mark.anyio
async def test_chats_that_need_more_than_the_first_share_are_rendered_one_after_the_other(chats: Chats) -> None:
    assert all(await asyncio.gather(*(chats.begin("heavy") for _ in range(4))))


def test_the_renderings_of_a_chat_share_their_time() -> None:
    template, conversation = ChatTemplate(PLAIN, {}), Conversation([{"role": "user", "content": "Hi"}] * 200)

    def often() -> None:
        with share_of_chat(whole=False):
            for _ in range(10_000):
                template.render(conversation)

    with pytest.raises(FirstShareUsed):
        often()
    assert template.render(conversation)


@pytest.mark.anyio
async def test_other_models_and_texts_do_not_wait_for_a_slow_template() -> None:
    slow, quick = served(ENDLESS), served(PLAIN)
    prompts = PromptTokenizer()
    waiting = [asyncio.create_task(prompts.token_ids(slow, chat("Hi"))) for _ in range(3)]
    await asyncio.sleep(0)
    assert await prompts.token_ids(slow, gateway_pb2.Prompt(text="Hi"))
    assert await prompts.token_ids(quick, chat("Hi"))
    assert not any(task.done() for task in waiting)
    waiting.pop().cancel()
    for task in waiting:
        with pytest.raises(InvalidField, match=f"prompt.chat: The chat template cannot render .*{TIME}"):
            await task


async def answer(one: HandlerInProcess, seconds: float) -> None:
    request = gateway_pb2.GenerateRequest(prompt=chat("endless"))
    request.timeout.FromMilliseconds(int(seconds * 1000))
    async for _ in one.handler.generate(request, ACME):
        pass


@pytest.fixture
def model(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(EITHER)
    return folder


def test_the_timeout_of_a_request_ends_its_wait_and_it_holds_nothing(tmp_path: Path, model: Path) -> None:
    async def scenario() -> None:
        async with handler_in_process(tmp_path, model) as one:
            late = asyncio.create_task(answer(one, 0.1))
            with pytest.raises(DeadlineExceeded, match="timeout exceeded before"):
                await late
            await one.assert_nothing_held(late)

    asyncio.run(scenario())


def test_a_request_that_would_wait_too_long_is_refused_with_the_time_to_retry(tmp_path: Path, model: Path) -> None:
    async def scenario() -> None:
        async with handler_in_process(tmp_path, model) as one:
            before = [asyncio.create_task(answer(one, 60)) for _ in range(7)]
            await asyncio.wait(before, return_when=asyncio.FIRST_COMPLETED)  # it shows how long the others take
            last = asyncio.create_task(answer(one, 60))
            with pytest.raises(Overloaded, match="5 chats of the model wait for their template") as refused:
                await last
            assert refused.value.retry_seconds == 10
            await asyncio.gather(*before, return_exceptions=True)
            await one.assert_nothing_held(last)

    asyncio.run(scenario())


# Turns


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


@pytest.mark.anyio
async def test_tenants_take_turns_in_rotation() -> None:
    turns, order = Turns(1, 10), list[str]()

    async def use(tenant: str, name: str) -> None:
        await turns.take(tenant, soon())
        order.append(name)
        turns.give_back(0.0)

    await turns.take("", soon())
    tasks = [asyncio.create_task(use(name[0], name)) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    await asyncio.sleep(0)
    turns.give_back(0.0)
    await asyncio.gather(*tasks)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


@pytest.mark.anyio
async def test_the_tenant_with_most_waiting_chats_loses_its_last_for_another_tenant() -> None:
    turns = Turns(1, 3)
    await turns.take("", soon())
    many = [asyncio.create_task(turns.take("many", soon())) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="3 chats of the model wait for their template; retry in about 1 s"):
        await turns.take("many", soon())
    other = asyncio.create_task(turns.take("other", soon()))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await many[2]
    turns.give_back(0.0)
    turns.give_back(0.0)
    await asyncio.gather(many[0], other)
    assert not many[1].done()
    turns.give_back(0.0)
    await many[1]


@pytest.mark.anyio
async def test_a_turn_that_comes_at_the_end_of_the_wait_is_passed_on() -> None:
    turns = Turns(1, 10)
    await turns.take("", soon())
    late, next_one = (asyncio.create_task(turns.take("", soon())) for _ in range(2))
    await asyncio.sleep(0)
    turns.give_back(0.0)  # to the first
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    await next_one
    expired = asyncio.create_task(turns.take("", soon(0.01)))
    with pytest.raises(Overloaded):
        await expired
    turns.give_back(0.0)
    await turns.take("", soon())


@pytest.mark.anyio
async def test_a_chat_whose_turn_would_come_too_late_is_refused_at_once() -> None:
    turns = Turns(1, 10, refuses_early=True)
    await turns.take("", soon())
    turns.give_back(2.0)
    await turns.take("", soon())
    waiting = [asyncio.create_task(turns.take("", soon())) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 chats of the model wait for their template; retry in about 6 s"):
        await turns.take("", soon())
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
