"""The block map's HTTP server."""

import base64
import json
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvmanager import BlockState, Cell
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc
from tests.certificates import Authority
from tests.running_quire import CALL_SECONDS, START_SECONDS, RunningService, launch
from tests.services.kvmanager.attach_stream import Stream, allocate, commits, extends, pools

Stub = kvmanager_pb2_grpc.KVManagerStub
PINS = [pb.PinChange(pin=pb.Pin(pin_id="acme/pin", sequence=1, block_count=1))]


@pytest.fixture(scope="module")
def manager(service: Callable[..., RunningService]) -> RunningService:
    return service("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0", "--map-listen", "127.0.0.1:0")


@pytest.fixture(scope="module")
def stub(manager: RunningService) -> Stub:
    return Stub(manager.channel)


@pytest.fixture
def http(manager: RunningService) -> Iterator[httpx.Client]:
    url = manager.output.wait_for("block map at ").split(" at ")[1]
    with httpx.Client(base_url=url, timeout=CALL_SECONDS) as client:
        yield client


class Map:
    """An open page without a browser: applies a stream of messages.

    It retries while the server has not yet noticed that an earlier page was closed.
    """

    def __init__(self, http: httpx.Client, engine: str = "engine") -> None:
        self._http = http
        self._path = f"/api/pools/{engine}/live"
        self._lines = iter(())
        self.pool: dict[str, Any] = {}
        self.cells: dict[str, list[int]] = {}
        self.counts: dict[str, Any] = {}
        self.texts: list[str] = []

    def __enter__(self) -> "Map":
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            self._request = self._http.stream("GET", self._path)
            response = self._request.__enter__()
            if response.status_code != HTTPStatus.TOO_MANY_REQUESTS:
                break
            self._request.__exit__(None, None, None)
            assert time.monotonic() < deadline, "no watcher slot became free"
        assert response.status_code == HTTPStatus.OK
        self._lines = response.iter_lines()
        return self

    def __exit__(self, *error: Any) -> None:
        self._request.__exit__(*error)

    def read(self) -> str:
        """Apply one message and return its kind."""
        kind = ""
        for line in self._lines:
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                self._take(kind, json.loads(line.removeprefix("data: ")))
            elif not line and kind:
                return kind
        return ""

    def read_until(self, done: Callable[["Map"], bool]) -> None:
        while not done(self):
            assert self.read(), "the stream has ended"

    def drawn(self) -> "Map":
        while (kind := self.read()) != "drawn":
            assert kind, "the stream has ended"
        return self

    def _take(self, kind: str, value: dict[str, Any]) -> None:
        if kind == "pool":
            self.pool, self.counts = value, value["counts"]
            self.cells = {tier: [0] * (value[f"{tier}_blocks"] + 1) for tier in ("device", "host")}
        elif kind == "cells":
            page = numbers(value["cells"])
            self.cells[value["tier"]][value["first"] : value["first"] + len(page)] = page
        elif kind == "changes":
            self.counts = value.get("counts", self.counts)
            self.texts += [event["text"] for event in value.get("events", [])]
            for tier in ("device", "host"):
                pairs = numbers(value.get(tier, ""))
                for block, packed in zip(pairs[::2], pairs[1::2], strict=True):
                    self.cells[tier][block] = packed

    def states(self, tier: str = "device") -> dict[str, int]:
        """Count the blocks of the map by state."""
        counts = dict.fromkeys(("free", "cached", "held", "withheld"), 0)
        for packed in self.cells[tier][1:]:
            counts[Cell.unpack(packed).state.name.lower()] += 1
        return counts


def numbers(text: str) -> list[int]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def test_pools_are_listed_with_counts_that_sum_to_them(http: httpx.Client, engine: Stream) -> None:
    engine.allocate(1, 9)
    (pool,) = http.get("/api/pools").json()["pools"]
    assert (pool["engine"], pool["device_blocks"], pool["block_size"]) == ("engine", 20, 4)
    assert pool["counts"]["device"] == {"free": 17, "cached": 0, "held": 3, "withheld": 0}


def test_a_map_is_sent_completely_then_by_its_changes(http: httpx.Client, engine: Stream) -> None:
    engine.allocate(1, 9)
    with Map(http) as shown:
        shown.drawn()
        assert shown.states() == {"free": 17, "cached": 0, "held": 3, "withheld": 0}
        assert Cell.unpack(shown.cells["device"][1]) == Cell(BlockState.HELD, False, False, 1, 1)
        engine.step(commits=commits((1, 0, [1] * 8)), forks=[pb.Fork(parent=1, child=2, length=9)])
        shown.read_until(lambda shown: shown.counts["shared"] == 3)
        assert Cell.unpack(shown.cells["device"][1]) == Cell(BlockState.HELD, True, False, 2, 0)
        engine.step(frees=[pb.Free(sequence=one, reason=pb.FREE_REASON_FINISHED) for one in (1, 2)])
        shown.read_until(lambda shown: shown.counts["device"]["held"] == 0)
        assert shown.states() == {"free": 18, "cached": 2, "held": 0, "withheld": 0} == shown.counts["device"]
        # Events are in the same message as their changes.
        assert "Sequence 1 (request-1) finished and released 3 blocks (1-3)." in shown.texts


def test_a_map_of_many_blocks_comes_in_pages_and_of_both_tiers(
    http: httpx.Client, stream: Callable[[], Stream]
) -> None:
    stream().attach(device_blocks=40_000, host_blocks=30).allocate(1, 400)
    with Map(http) as shown:
        shown.drawn()
        assert shown.states() == {"free": 39_900, "cached": 0, "held": 100, "withheld": 0}
        assert shown.states("host")["free"] == 30


def test_a_map_continues_when_its_engine_attaches_again_and_ends_when_it_detaches(
    http: httpx.Client, stream: Callable[[], Stream]
) -> None:
    first = stream().attach(engine_id="unix:/tmp/engine.sock")
    with Map(http, "unix%3A%2Ftmp%2Fengine.sock") as shown:
        shown.drawn()
        second = stream().attach(engine_id="unix:/tmp/engine.sock", device_blocks=30, incarnation=6)
        shown.drawn()
        assert shown.pool["device_blocks"] == 30
        second.half_close()
        while (kind := shown.read()) != "gone":
            assert kind
    first.break_off()


def test_a_map_opened_later_has_the_changes_made_while_none_was_open(http: httpx.Client, engine: Stream) -> None:
    with Map(http) as shown:
        shown.drawn()
    engine.allocate(1, 9)
    with Map(http) as shown:  # the server may still count the closed one, whose next tick has the change
        shown.drawn().read_until(lambda shown: shown.states()["held"] == 3)


def test_watchers_above_the_maximum_are_rejected_until_one_disconnects(http: httpx.Client, engine: Stream) -> None:
    shown = [Map(http).__enter__() for _ in range(16)]
    refused = http.get("/api/pools/engine/live")
    assert (refused.status_code, refused.json()["error"]["message"]) == (429, "16 pages are open, which is the maximum")
    assert refused.headers["retry-after"] == "1"
    shown.pop().__exit__(None, None, None)
    shown.append(Map(http).__enter__())
    for one in shown:
        one.__exit__(None, None, None)


def test_a_pool_too_large_for_a_map_is_rejected(http: httpx.Client, stream: Callable[[], Stream]) -> None:
    stream().attach(device_blocks=(1 << 20) + 1)
    refused = http.get("/api/pools/engine/live")
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "a pool must have at most 1048576 blocks to be shown, not 1048577"


def test_a_block_is_described_with_its_holders_key_and_last_events(http: httpx.Client, engine: Stream) -> None:
    engine.allocate(1, 9)
    engine.step(commits=commits((1, 0, [1] * 8)), length_sequences=[1], length_tokens=[9])
    engine.step(forks=[pb.Fork(parent=1, child=2, length=9)], pins=PINS)
    block = http.get("/api/pools/engine/blocks/1").json()
    assert (block["state"], block["count"], block["pins"], len(block["key"])) == ("held", 3, 1, 64)
    assert block["holders"] == [
        {"sequence": number, "request": "request-1", "logical": 0, "tokens": 4} for number in (1, 2)
    ]
    assert [event["text"].split(":")[0] for event in block["events"]] == [
        "Sequence 1 (request-1) was forked",
        "Block 1 of sequence 1 (request-1) was pinned.",
        "Sequence 1 (request-1) committed 2 blocks (1-2) to the prefix cache.",
        "Sequence 1 (request-1) was allocated 3 blocks (1-3).",
    ]
    assert http.get("/api/pools/engine/blocks/3").json()["holders"][0]["tokens"] == 1
    assert http.get("/api/pools/engine/blocks/20").json()["state"] == "free"


def test_a_sequence_is_described_with_its_table_and_explained(http: httpx.Client, engine: Stream, stub: Stub) -> None:
    engine.allocate(1, 9)
    engine.step(commits=commits((1, 0, [1] * 8)), forks=[pb.Fork(parent=1, child=2, length=9)])
    engine.step(extends=extends((1, [(2, 10)])), length_sequences=[2], length_tokens=[9])
    sequence = http.get("/api/pools/engine/sequences/2").json()
    assert (sequence["table"], sequence["counts"], sequence["keyed"]) == ([1, 2, 4], [2, 2, 1], [1, 1, 0])
    assert (sequence["tokens"], sequence["room"], sequence["siblings"]) == (9, 12, [1])
    assert sequence["explain"] == stub.Explain(pb.ExplainRequest(request_id="request-1")).summary
    listed = http.get("/api/pools/engine/sequences").json()["sequences"]
    assert [(one["sequence"], one["blocks"]) for one in listed] == [(2, 3), (1, 3)]


def test_an_ended_sequence_is_described_as_not_live(http: httpx.Client, engine: Stream) -> None:
    assert http.get("/api/pools/engine/sequences/7").json() == {"sequence": 7, "live": False}


def test_no_answer_names_a_tenant(http: httpx.Client, engine: Stream) -> None:
    def prompt(sequence: int, tenant: str) -> pb.Allocate:
        return allocate(sequence, [sequence] * 60, request_id=f"{tenant}/r{sequence}", salt=tenant.encode())

    with Map(http) as shown:
        shown.drawn()
        engine.step(allocates=[prompt(1, "acme")])
        engine.apply(allocates=[prompt(2, "umbrella")])
        engine.step(commits=commits((1, 0, [1] * 60)), pins=PINS)
        engine.step(frees=[pb.Free(sequence=1, reason=pb.FREE_REASON_PREEMPTED, preempted_for_group=2)])
        engine.step(allocates=[prompt(2, "umbrella")])
        shown.read_until(lambda shown: any("was allocated" in text and "r2" in text for text in shown.texts))
        answers = [
            *shown.texts,
            http.get("/api/pools/engine/sequences/2").text,
            http.get("/api/pools/engine/sequences").text,
        ]
    answers += [http.get(f"/api/pools/engine/blocks/{block}").text for block in range(1, 21)]
    assert "Request r1 was preempted for it" in " ".join(answers)
    assert [text for text in answers if "acme" in text or "umbrella" in text] == []


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/pools/nobody/live", 404, "engine 'nobody' is not attached (attached: engine)"),
        ("/api/pools/nobody/sequences", 404, "engine 'nobody' is not attached (attached: engine)"),
        ("/api/pools/engine/blocks/0", 400, "block must be between 1 and 20, not 0"),
        ("/api/pools/engine/blocks/21", 400, "block must be between 1 and 20, not 21"),
        ("/api/pools/engine/blocks/1?tier=host", 400, "tier must be device, because the pool has no host blocks"),
        ("/api/pools/engine/blocks/1?tier=attic", 400, "tier must be device or host, not 'attic'"),
        ("/api/sandbox/none", 404, "this sandbox does not exist any more: create a new one"),
        ("/nothing", 404, "Not Found"),
    ],
)
def test_unknown_paths_and_blocks_are_rejected_with_a_message(
    http: httpx.Client, engine: Stream, path: str, status: int, message: str
) -> None:
    refused = http.get(path)
    assert (refused.status_code, refused.json()["error"]["message"]) == (status, message)


def test_every_answer_forbids_loading_from_other_origins(http: httpx.Client) -> None:
    for path in ("/", "/sandbox", "/map.js", "/style.css", "/api/pools", "/nothing"):
        answer = http.get(path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';"), path
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "http://" not in answer.text.replace("http://www.w3.org/2000/svg", ""), (
            "a page loads from another origin"
        )
        assert "https://" not in answer.text


def test_an_unchanged_page_is_not_sent_again(http: httpx.Client) -> None:
    etag = http.get("/").headers["etag"]
    assert http.get("/", headers={"if-none-match": etag}).status_code == 304


@pytest.mark.parametrize("host", ["rebound.example", "192.0.2.1:8053", "localhost.example:80", ""])
def test_a_loopback_listener_rejects_other_host_names(http: httpx.Client, host: str) -> None:
    assert http.get("/api/pools", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8053"])
def test_a_loopback_listener_accepts_loopback_host_names(http: httpx.Client, host: str) -> None:
    assert http.get("/api/pools", headers={"host": host}).status_code == 200


def test_a_map_stream_ends_with_the_manager(service: Callable[..., RunningService]) -> None:
    one = service("kvmanager", "--listen", "127.0.0.1:0", "--grace-seconds", "0", "--map-listen", "127.0.0.1:0")
    url = one.output.wait_for("block map at ").split(" at ")[1]
    stream = Stream(Stub(one.channel)).attach()
    with httpx.Client(base_url=url, timeout=CALL_SECONDS) as client, Map(client) as shown:
        shown.drawn()
        assert one.close() == 0
        with pytest.raises(httpx.TransportError):
            shown.read_until(lambda _: False)
    stream.break_off()


def test_steps_continue_while_maps_open_and_close(http: httpx.Client, engine: Stream, stub: Stub) -> None:
    for number in range(1, 60):
        with Map(http) as shown:
            engine.step(allocates=[])
            engine.allocate(number, 4)
            engine.step(frees=[pb.Free(sequence=number, reason=pb.FREE_REASON_FINISHED)])
            shown.drawn()
    with Map(http) as shown:
        # The map of a page that was just closed may be a tenth of a second behind.
        shown.drawn().read_until(lambda one: one.states() == {"free": 20, "cached": 0, "held": 0, "withheld": 0})
    assert [pool.device.held for pool in pools(stub)] == [0]


def test_a_port_in_use_is_named_in_the_error(manager: RunningService) -> None:
    taken = manager.output.wait_for("block map at ").split("http://")[1]
    process = launch("kvmanager", "--listen", "127.0.0.1:0", "--map-listen", taken)
    output, _ = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 1
    assert f"cannot listen for HTTP on {taken}: Address already in use" in output


def test_with_a_client_ca_the_page_requires_a_client_certificate(
    service: Callable[..., RunningService], tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    (certificate, key), mine = authority.issue("kvmanager"), authority.issue("somebody")
    files = (
        "--tls-certificate",
        str(certificate),
        "--tls-key",
        str(key),
        "--tls-client-ca",
        str(authority.ca),
    )
    # The port of gRPC has no TLS over a Unix socket; the page has.
    one = service("kvmanager", "--listen", f"unix:{tmp_path}/k.sock", "--map-listen", "localhost:0", *files)
    url = one.output.wait_for("block map at ").split(" at ")[1].replace("127.0.0.1", "localhost")
    assert url.startswith("https://")
    trusting = ssl.create_default_context(cafile=authority.ca)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/api/pools", verify=trusting, timeout=CALL_SECONDS)
    trusting.load_cert_chain(*mine)
    assert httpx.get(f"{url}/api/pools", verify=trusting, timeout=CALL_SECONDS).json() == {"pools": []}


def test_without_map_listen_only_grpc_is_served(service: Callable[..., RunningService]) -> None:
    one = service("kvmanager", "--listen", "127.0.0.1:0")
    assert pools(Stub(one.channel)) == []
    assert not [line for line in one.output.lines if "block map" in line]
    assert isinstance(one.channel, grpc.Channel)
