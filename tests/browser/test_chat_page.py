"""The chat page in a real browser: it streams, shows the blocks of its request, and takes all text as text."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pytest

from quire.v1 import kvmanager_pb2 as pb
from services.gateway.access.api_keys import make_key
from tests.api_keys import write_keys
from tests.browser.conftest import Watched
from tests.load import SLOW_SEED
from tests.running_quire import CALL_SECONDS, RunningQuire, RunningService, start_quire

if TYPE_CHECKING:
    from playwright.sync_api import Route

CHATS = "**/v1/chat/completions"
DRAFT = "Tell me of rivers, bread and the sea"
HTML = "<img src=x onerror='document.title=1'><b>bold</b>"
KEY = make_key()
POOL = ("--device-blocks", "64", "--max-sequences", "8", "--http-listen", "127.0.0.1:0")
TABLE = "() => [...document.querySelectorAll('#table .strip b')].map(one => Number(one.textContent))"
# Contrast, as WCAG defines it, of the text of an element with the nearest background behind it.
CONTRAST = """selector => {
    const element = document.querySelector(selector);
    let behind = element;
    while (getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;
    const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const bright = (colour) => {
        context.fillStyle = colour;
        context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map(one => one / 255)
            .map(one => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
            .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
    };
    const both = [bright(getComputedStyle(element).color), bright(getComputedStyle(behind).backgroundColor)];
    const [low, high] = both.sort((one, other) => one - other);
    return (high + 0.05) / (low + 0.05);
}"""
STORED = """async () => [localStorage.length, sessionStorage.length, document.cookie.length,
    (await indexedDB.databases()).length, (await caches.keys().catch(() => [])).length]"""


@pytest.fixture(scope="module")
def quire(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    one = start_quire("--model", str(tiny_model("llama")), *POOL)
    yield one
    one.close()


@pytest.fixture
def page(quire: RunningQuire, watched: Watched) -> Watched:
    watched.open(f"{quire.http_url}/chat/")
    limit(watched, 24)
    return watched


def limit(watched: Watched, tokens: int) -> None:
    watched.page.evaluate("tokens => { document.querySelector('#limit').value = tokens; }", tokens)


def slow(route: "Route") -> None:
    """Make a request slow, and of as many tokens as it may have."""
    body = route.request.post_data_json
    route.continue_(post_data=json.dumps(body | {"seed": SLOW_SEED, "ignore_eos": True}))


def scripted(*deltas: dict[str, Any], end: str = "stop") -> str:
    """Build the events of an answer; each delta is of one token."""
    rows: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": one}]} for one in deltas]
    rows += [{"choices": [{"index": 0, "delta": {}, "finish_reason": end}]}]
    for count, row in enumerate(rows):
        row["usage"] = {"prompt_tokens": 5, "completion_tokens": min(count + 1, len(deltas))}
    return "".join(f"data: {json.dumps(one)}\n\n" for one in rows) + "data: [DONE]\n\n"


def answer_with(watched: Watched, *events: str) -> list[dict[str, Any]]:
    """Answer the page's chats with these events, one after the other; return the list that gets their bodies."""
    bodies: list[dict[str, Any]] = []
    left = list(events)

    def fulfil(route: "Route") -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(status=200, content_type="text/event-stream", body=left.pop(0))

    watched.page.route(CHATS, fulfil)
    watched.expected = ("404",)  # no such request runs, so none has blocks
    return bodies


def send(watched: Watched, text: str = DRAFT) -> None:
    watched.page.fill("#draft", text)
    watched.page.press("#draft", "Enter")


def test_the_block_table_beside_a_streamed_answer_is_the_managers(quire: RunningQuire, page: Watched) -> None:
    page.page.route(CHATS, slow)
    limit(page, 200)
    send(page)
    page.wait_for("() => document.querySelectorAll('#table .strip li').length >= 3")
    shown = page.evaluate(TABLE)
    listed = quire.kvmanager.ListSequences(pb.ListSequencesRequest(), timeout=CALL_SECONDS).sequences
    (own,) = listed
    assert list(own.block_ids)[: len(shown)] == shown, "a block table only grows"
    page.wait_for("blocks => document.querySelectorAll('#table .strip li').length > blocks", len(shown))
    assert page.page.inner_text("#phase") == "generating"
    page.wait_for("() => / tokens\\/s/.test(document.querySelector('.speed').textContent)")
    drawn = page.evaluate(
        "() => [...window.chatPage.paging.grid.cells.keys()].filter(one => window.chatPage.paging.grid.cells[one])"
    )
    assert sorted(page.evaluate(TABLE)) == drawn or len(drawn) >= len(shown)
    page.page.click("#send")  # stops it
    page.page.wait_for_selector("#paging.over")
    assert page.page.inner_text(".speed").endswith("stopped")
    assert "cached under" in page.page.inner_text("#note")
    assert quire.settled_pool().sequences == 0


def test_a_next_turn_shows_its_hits_and_the_history_is_sent_again(quire: RunningQuire, page: Watched) -> None:
    for turn, text in enumerate((DRAFT, "And of mountains"), 1):
        send(page, text)
        page.wait_for("count => window.chatPage.conversation.length === count", 2 * turn)
    roles = page.evaluate("() => window.chatPage.conversation.map(one => one.role)")
    assert roles == ["user", "assistant"] * 2
    assert page.evaluate("() => window.chatPage.paging.cached.cached") >= 16, "the second prompt begins with the first"


def test_a_draft_shows_the_blocks_of_its_prompt_while_it_is_written(quire: RunningQuire, page: Watched) -> None:
    page.page.type("#draft", DRAFT)
    page.page.wait_for_selector("#planned h3")
    body = {"messages": [{"role": "user", "content": DRAFT}]}
    count = httpx.post(f"{quire.http_url}/tokenize", json=body, timeout=CALL_SECONDS).json()["count"]
    page.wait_for(
        "text => document.querySelector('#planned').textContent.includes(text)", f"a prompt of {count} tokens"
    )
    assert page.page.locator("#planned .plan li").count() == -(-count // 16)
    page.page.fill("#draft", "")
    page.page.wait_for_selector("#planned h3", state="detached")


def test_html_of_a_model_is_text_and_thoughts_are_folded(page: Watched) -> None:
    answer_with(page, scripted({"reasoning": HTML}, {"reasoning": " so"}, {"content": HTML}, {"content": " done"}))
    send(page, HTML)
    page.page.wait_for_selector(".message.whole")
    assert page.page.inner_text(".message.user .text") == HTML
    assert page.page.inner_text(".message.assistant > .text") == f"{HTML} done"
    assert page.evaluate("() => document.querySelectorAll('#messages img, #messages b').length") == 0
    assert page.evaluate("() => document.querySelector('.thought').open") is False
    assert not page.page.is_visible(".thought .text")
    page.page.click(".thought summary")
    assert page.page.inner_text(".thought .text") == f"{HTML} so"
    assert page.page.title() == "Quire: chat"


def test_no_script_can_make_html_of_a_text(page: Watched) -> None:
    page.expected = ("TrustedHTML", "Trusted Type")
    thrown = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (error) { return error.name; } }"
    )
    assert thrown == "TypeError"


def test_calls_of_tools_are_shown_and_their_results_are_sent(page: Watched) -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": '{"city":'}}
    more = {"index": 0, "function": {"arguments": f' "{HTML}"}}'}}
    calling = scripted({"tool_calls": [call]}, {"tool_calls": [more]}, end="tool_calls")
    bodies = answer_with(page, calling, scripted({"content": "Rain."}))
    page.page.click("#options summary")
    page.page.click("#example")
    send(page, "The weather?")
    page.page.wait_for_selector(".results")
    assert page.page.inner_text(".call b").endswith("get_weather")
    assert page.page.inner_text(".call pre") == f'{{"city": "{HTML}"}}'
    page.page.fill(".results textarea", "12 degrees")
    page.page.click(".results button")
    page.page.wait_for_selector(".message.assistant.whole >> text=Rain.")
    assert [one["function"]["name"] for one in bodies[0]["tools"]] == ["get_weather"]
    assert [one["role"] for one in bodies[1]["messages"]] == ["user", "assistant", "tool"]
    assert bodies[1]["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"}
    assert bodies[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == f'{{"city": "{HTML}"}}'


def test_a_refused_message_is_shown_with_the_reason_and_comes_back_as_draft(page: Watched) -> None:
    page.expected = ("400", "404")
    limit(page, 1_000_000)
    send(page)
    page.page.wait_for_selector(".message.error")
    assert "max_completion_tokens" in page.page.inner_text(".message.error")
    assert page.page.input_value("#draft") == DRAFT
    assert page.evaluate("() => window.chatPage.conversation.length") == 0


def test_a_new_chat_before_the_first_token_is_empty(page: Watched) -> None:
    send(page)
    page.wait_for("() => window.chatPage.conversation.length === 2")
    page.page.route(CHATS, lambda _route: None)  # no token arrives
    page.expected = ("404",)
    send(page, "And of mountains")
    page.wait_for("() => window.chatPage.conversation.length === 3")
    page.page.click("#new")
    page.page.wait_for_selector("#send >> text=send")
    assert page.evaluate("() => window.chatPage.conversation") == []
    assert page.page.input_value("#draft") == ""
    page.page.unroute(CHATS)
    send(page)
    page.wait_for("() => window.chatPage.conversation.length === 2")


def test_a_draft_is_counted_with_all_that_its_request_would_have(page: Watched) -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": "{}"}}
    answer_with(page, scripted({"tool_calls": [call]}, end="tool_calls"))
    counted: list[dict[str, Any]] = []

    def count(route: "Route") -> None:
        counted.append(route.request.post_data_json)
        route.fulfill(status=200, json={"count": 10 * len(counted)})

    page.page.route("**/tokenize", count)
    page.page.click("#options summary")
    send(page, "The weather?")
    page.page.wait_for_selector(".results")
    page.page.fill("#draft", DRAFT)
    shows = "text => document.querySelector('#planned').textContent.includes(text)"
    page.wait_for(shows, "a prompt of 10 tokens")
    assert [one["role"] for one in counted[0]["messages"]] == ["user", "assistant", "tool", "user"]
    page.page.select_option("#thinking", "true")
    page.wait_for(shows, "a prompt of 20 tokens")
    assert counted[1]["chat_template_kwargs"] == {"enable_thinking": True}
    page.page.fill("#system", "Be brief")
    page.page.press("#system", "Tab")
    page.wait_for(shows, "a prompt of 30 tokens")
    assert counted[2]["messages"][0] == {"role": "system", "content": "Be brief"}
    page.page.click("#example")
    page.wait_for(shows, "a prompt of 40 tokens")
    assert [one["function"]["name"] for one in counted[3]["tools"]] == ["get_weather"]


def test_an_api_key_that_no_header_can_hold_is_refused_with_the_reason(page: Watched) -> None:
    page.page.click("#options summary")
    page.page.fill("#key", "\u65e5\u672c")
    page.page.press("#key", "Tab")
    page.page.wait_for_selector("#status >> text=the API key is not valid")
    send(page)
    page.page.wait_for_selector(".message.error >> text=the API key must be printable ASCII.")


@pytest.fixture
def keyed_url(quire: RunningQuire, tmp_path: Path) -> Iterator[str]:
    """The page of a gateway that needs API keys, at the same engine."""
    gateway = RunningService(
        *("gateway", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--pages", "chat"),
        *("--engines", quire.addresses["engine"], "--kvmanager", quire.addresses["KV manager"]),
        *("--api-keys", str(write_keys(tmp_path / "keys.toml", {KEY: "tenant = 'page'"}))),
    )
    gateway.output.wait_for("gateway is ready")
    yield gateway.output.wait_for("chat page at ").split(" at ")[1]
    gateway.close()


def test_an_api_key_is_asked_for_and_stored_nowhere(keyed_url: str, watched: Watched) -> None:
    watched.expected = ("401",)
    watched.page.goto(keyed_url)
    watched.page.wait_for_selector("#status >> text=an API key is needed")
    watched.page.fill("#key", KEY)
    watched.page.press("#key", "Tab")
    watched.page.wait_for_selector("html[data-state=live]")
    watched.page.route(CHATS, slow)  # so that its blocks are seen
    limit(watched, 40)
    send(watched)
    watched.page.wait_for_selector("#table .strip li")
    watched.page.wait_for_selector(".message.whole")
    assert watched.evaluate(STORED) == [0] * 5
    assert KEY not in watched.page.content()
    watched.page.reload()
    watched.page.wait_for_selector("#status >> text=an API key is needed")
    assert watched.page.input_value("#key") == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_its_window_and_its_texts_have_contrast(
    page: Watched, scheme: Literal["light", "dark"], width: int
) -> None:
    page.page.set_viewport_size({"width": width, "height": 800})
    page.page.emulate_media(color_scheme=scheme)
    long = "x" * 300
    answer_with(page, scripted({"reasoning": long}, {"content": long}, {"content": " end"}))
    send(page, long)
    page.page.wait_for_selector(".message.whole")
    page.page.click(".thought summary")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    for part in ("#talk", "#paging", "#messages"):
        assert (
            page.evaluate(
                f"() => {{ const one = document.querySelector('{part}'); return one.scrollWidth - one.clientWidth; }}"
            )
            <= 0
        )
    texts = (".message.user .text", ".message.assistant > .text", ".speed", ".thought .text", "#phase", "#send")
    contrasts = {one: page.page.evaluate(CONTRAST, one) for one in texts}
    assert {one: ratio for one, ratio in contrasts.items() if ratio < 4.5} == {}
    for part in ("#draft", "#send", "#phase"):
        box = page.page.locator(part).bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 800, f"{part} is visible without scrolling"
