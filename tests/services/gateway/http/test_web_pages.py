"""Web pages of other origins, and connections that stay open between requests."""

import socket
from collections.abc import Callable, Iterator

import httpx
import pytest

from services.gateway.access.api_keys import make_key
from services.gateway.access.origins import check_origins
from services.gateway.settings import GatewaySettings
from services.runtime.settings import InvalidSetting
from tests.api_keys import write_keys
from tests.running_quire import CALL_SECONDS, RunningQuire, RunningService

KEY = make_key()
KNOWN = {"authorization": f"Bearer {KEY}"}
PAGE = "https://chat.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
IDLE_SECONDS = 1


@pytest.fixture(scope="module")
def url(
    tiny_quire: RunningQuire, service: Callable[..., RunningService], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A gateway that needs keys, serves two origins, and closes idle connections soon."""
    keys = write_keys(tmp_path_factory.mktemp("pages") / "keys.toml", {KEY: "tenant = 'page'"})
    gateway = service(
        *("gateway", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--api-keys", str(keys)),
        *("--engines", tiny_quire.addresses["engine"], "--allowed-origins", f"{PAGE}, http://[::1]:3000"),
        *("--http-idle-seconds", str(IDLE_SECONDS)),
    )
    gateway.output.wait_for("gateway is ready")
    return gateway.output.wait_for("gateway listens for HTTP at ").split(" at ")[1]


@pytest.fixture
def page(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=CALL_SECONDS, headers={"origin": PAGE}) as client:
        yield client


def test_a_preflight_needs_no_key(page: httpx.Client) -> None:
    answer = page.options(PATH, headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(answer.headers["access-control-allow-headers"].split(","))


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        (PATH, CHAT, KNOWN, 200),
        (PATH, {**CHAT, "stream": True}, KNOWN, 200),
        (PATH, CHAT, {}, 401),
        (PATH, {**CHAT, "n": 0}, KNOWN, 400),
        ("/v1/nothing", CHAT, KNOWN, 404),
    ],
    ids=["answer", "stream", "no key", "invalid field", "unknown path"],
)
def test_every_response_to_the_page_of_an_origin_can_be_read(
    page: httpx.Client, path: str, body: object, headers: dict[str, str], status: int
) -> None:
    answer = page.post(path, json=body, headers=headers)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_pages_of_other_origins_cannot_call(url: str, http: httpx.Client) -> None:
    for origin in ("https://evil.example", "http://chat.example", "https://chat.example:8443", "null"):
        foreign = {"origin": origin}
        assert httpx.options(url + PATH, headers=PREFLIGHT | foreign).status_code == 400
        answer = httpx.post(url + PATH, json=CHAT, headers=KNOWN | foreign, timeout=CALL_SECONDS)
        assert "access-control-allow-origin" not in answer.headers
    assert http.options(PATH, headers=PREFLIGHT | {"origin": PAGE}).status_code == 405  # off by default
    assert "access-control-allow-origin" not in http.post(PATH, json=CHAT, headers={"origin": PAGE}).headers


@pytest.mark.parametrize(
    "text", ["chat.example", "https://chat.example/", "https://a b", "*.example", "https://", ",", "http://a:0"]
)
def test_an_origin_that_no_browser_sends_is_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match="must have origins"):
        check_origins("allowed_origins", text)
    check_origins("allowed_origins", "http://localhost:3000,*, https://[::1]:1,tauri://localhost")


def test_a_connection_is_closed_when_it_was_idle_for_long(url: str) -> None:
    assert GatewaySettings().http_idle_seconds > 90  # Go's clients keep theirs for 90 s
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=CALL_SECONDS) as connection:
        for _ in range(2):  # the connection can be used again before
            connection.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b'{"status": "alive"}'):
                answer += (piece := connection.recv(4096))
                assert piece
        assert connection.recv(1) == b""
