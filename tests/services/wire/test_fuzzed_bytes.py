"""Random bytes at the KV manager's port, while another engine continues undisturbed."""

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from blocks import Allocate, Commit, Pin, Step
from kvmanager import Pool, PoolSpec, report_of
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc
from services.wire.report import pages_of
from services.wire.step import step_message
from tests.running_quire import CALL_SECONDS, RunningService
from tests.services.kvmanager.attach_stream import Stream, commits, extends, pools, register
from tests.services.wire.test_step import steps

_SERVICE = pb.DESCRIPTOR.services_by_name["KVManager"]
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SOCKET_SECONDS = 60

OK = grpc.StatusCode.OK
# The statuses of calls with valid messages, and with malformed ones.
EXPECTED_CODES = {OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED}


class Bystander:
    """Another engine, with its own pool at the same manager."""

    def __init__(self, running: RunningService) -> None:
        self.running = running
        self._stub = kvmanager_pb2_grpc.KVManagerStub(running.channel)
        self._stream = Stream(self._stub).attach(engine_id="bystander")
        self._stream.allocate(1, 6)
        self._expected = self._pool()

    def _pool(self) -> pb.PoolInfo:
        pool = self._stub.GetPool(pb.GetPoolRequest(engine_id="bystander"), timeout=CALL_SECONDS).pool
        steps = pool.totals.steps
        pool.totals.Clear()  # the audit changes the others at any time
        pool.totals.steps = steps
        return pool

    def assert_undisturbed(self) -> None:
        assert self.running.process.poll() is None
        assert self._pool() == self._expected
        self._stream.step()
        self._expected.totals.steps += 1
        assert self._pool() == self._expected

    def close(self) -> None:
        """Half-close the stream, after a check that no other engine is attached."""
        assert [pool.engine_id for pool in pools(self._stub)] == ["bystander"]
        assert self._stream.half_close() == []


@pytest.fixture(scope="module")
def running(service: Callable[..., RunningService]) -> Iterator[RunningService]:
    one = service("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0")
    yield one
    assert one.close() == 0


@pytest.fixture
def bystander(running: RunningService) -> Iterator[Bystander]:
    one = Bystander(running)
    yield one
    one.close()


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        print_blob=True,
        phases=[phase for phase in Phase if phase is not Phase.explain],  # it takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def attach(bystander: Bystander, *messages: bytes) -> list[pb.PoolResponse]:
    """Send bytes as the messages of a stream, and half-close it; return the results before it ends."""
    stub: Any = bystander.running.channel.stream_stream(f"/{_SERVICE.full_name}/Attach")
    call = stub(iter(messages), timeout=CALL_SECONDS)
    results: list[pb.PoolResponse] = []
    with suppress(grpc.RpcError):
        for result in call:
            results.append(pb.PoolResponse.FromString(result))
    assert_clear(call)
    bystander.assert_undisturbed()
    return results


def assert_clear(call: grpc.Call) -> None:
    """Check that a call has ended with an expected status and a short message."""
    code, details = call.code(), call.details() or ""
    assert code in EXPECTED_CODES, (code, details)
    assert "Traceback" not in details
    assert len(details) < 1000


def request(**kind: Any) -> bytes:
    return pb.PoolRequest(**kind).SerializeToString()


# Streams


REGISTER = request(register=register(engine_id="fuzzed", host_blocks=6))
EMPTY_REPORT = request(report=pb.ReportPage(last=True))
# Two of the three blocks of sequence 1 are committed, and no block of sequences 2 and 3.
BEFORE = [
    request(
        step=pb.Step(
            step=1,
            allocates=[
                pb.Allocate(group=1, sequence=1, request_id="a", token_ids=[1] * 9, compute_tokens=9),
                pb.Allocate(group=2, sequence=2, request_id="b", token_ids=[2] * 5, compute_tokens=5),
                pb.Allocate(group=3, sequence=3, request_id="c", token_ids=[3] * 5, compute_tokens=5),
            ],
        )
    ),
    request(step=pb.Step(step=2, commits=commits((1, 0, [1] * 8)))),
]
STEP = request(
    step=pb.Step(
        step=3,
        condemns=pb.Condemns(
            sequences=[1, 0],
            reasons=[pb.CONDEMN_REASON_HIT, pb.CONDEMN_REASON_COPY],
            tiers=[pb.TIER_DEVICE, pb.TIER_HOST],
            kinds=[0, 0],
            block_counts=[2, 1],
            block_ids=[19, 20, 6],
        ),
        commits=commits((2, 0, [2] * 4)),
        pins=[pb.PinChange(pin=pb.Pin(pin_id="pin", sequence=1, block_count=1)), pb.PinChange(reset=True)],
        forks=[pb.Fork(parent=1, child=4, length=7)],
        frees=[pb.Free(sequence=3, reason=pb.FREE_REASON_PREEMPTED, preempted_for_group=1)],
        swap_outs=[2],
        swap_ins=[2],
        extends=extends((1, [(1, 12), (4, 10)])),
        allocates=[pb.Allocate(group=5, sequence=5, request_id="e", salt=b"s", token_ids=[5] * 6, compute_tokens=6)],
        length_sequences=[1, 2],
        length_tokens=[10, 5],
    )
)
UNPIN = request(step=pb.Step(step=4, pins=[pb.PinChange(unpin="pin")], swap_outs=[1]))


@st.composite
def damaged(draw: st.DrawFn, message: bytes) -> bytes:
    """Flip bits, and drop, repeat, insert or truncate bytes, one to four times."""
    data = message
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        end = place + draw(st.integers(1, 20))
        part, rest = data[place:end], data[end:]
        flipped = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in part[:1]) + part[1:]
        inserted = draw(st.binary(min_size=1, max_size=10)) + part
        data = data[:place] + draw(st.sampled_from([flipped + rest, rest, part * 2 + rest, inserted + rest, b""]))
    return data


def numbers(bits: int) -> st.SearchStrategy[int]:
    """Small numbers, some of which are ids in use, and the extremes of this width."""
    return st.integers(0, 8) | st.sampled_from([-(1 << bits - 1), -1, (1 << bits - 1) - 1])


IN_USE = st.sampled_from(["", "a", "pin"])
STEPS = steps(st.just(3), numbers(64), numbers(32), IN_USE, 3).map(lambda step: step_message(step).SerializeToString())


@pytest.mark.parametrize("before", [(), (REGISTER,), (REGISTER, EMPTY_REPORT)], ids=["first", "report", "step"])
def test_random_bytes_end_a_stream_unless_they_are_the_expected_message(
    bystander: Bystander, before: tuple[bytes, ...]
) -> None:
    expected = (REGISTER, EMPTY_REPORT, STEP)[len(before)]

    @examples(30)
    @given(st.binary(max_size=100))
    @example(b"")
    @example(b"\xff" * 100)
    @example(REGISTER)
    @example(EMPTY_REPORT)
    @example(STEP)
    @example(expected[:-1])
    def send(data: bytes) -> None:
        results = attach(bystander, *before, data)
        assert len(results) <= min(len(before), 1) + (data == expected)

    send()


@examples(40)
@given(damaged(REGISTER))
@example(request(register=register(engine_id="fuzzed", device_blocks=2**31 - 1)))
@example(request(register=register(engine_id="fuzzed", host_blocks=2**31 - 1)))
@example(request(register=register(engine_id="fuzzed", device_blocks=-1)))
def test_a_damaged_registration_is_refused_or_valid(bystander: Bystander, data: bytes) -> None:
    attach(bystander, data, EMPTY_REPORT)


def report() -> bytes:
    """Return the report of a pool with sequences, keys, a pin and host blocks, in one page."""
    pool = Pool(PoolSpec("fuzzed", 5, "m", 4, 20, 6))
    pool.apply(Step(1, allocates=[Allocate(1, 1, "a", b"s", [7] * 9, 9), Allocate(2, 2, "b", b"", [1] * 5, 5)]))
    pool.apply(Step(2, commits=[Commit(1, 0, [7] * 8), Commit(2, 0, [1] * 4)], swap_outs=[2], pins=[Pin("pin", 1, 1)]))
    whole = pb.ReportPage()
    for page in pages_of(report_of(pool)):
        whole.MergeFrom(page)
    return request(report=whole)


REPORT = report()


@examples(60)
@given(damaged(REPORT))
@example(REPORT)
def test_a_damaged_report_is_refused_or_valid(bystander: Bystander, data: bytes) -> None:
    attach(bystander, REGISTER, data, request(step=pb.Step(step=3)))


def test_the_steps_are_applied_in_full_if_undamaged(bystander: Bystander) -> None:
    results = attach(bystander, REGISTER, EMPTY_REPORT, *BEFORE, STEP, UNPIN)
    assert [len(result.result.refusals) for result in results[1:]] == [0, 0, 0, 0]


@examples(80)
@given(damaged(STEP))
@example(STEP * 2)
@example(STEP[: len(STEP) // 2])
def test_a_damaged_step_is_applied_or_refused_or_ends_the_stream(bystander: Bystander, data: bytes) -> None:
    results = attach(bystander, REGISTER, EMPTY_REPORT, *BEFORE, data, UNPIN)
    assert [result.result.step for result in results[1:3]] == [1, 2]


@examples(50)
@given(STEPS)
@example(request(step=pb.Step(step=3, allocates=[pb.Allocate(sequence=9, waited=Duration(seconds=-1, nanos=1))])))
@example(request(step=pb.Step(step=3, pins=[pb.PinChange(pin=pb.Pin(pin_id="\U0001f512", sequence=1))])))
def test_items_with_random_numbers_are_applied_or_refused(bystander: Bystander, data: bytes) -> None:
    results = attach(bystander, REGISTER, EMPTY_REPORT, *BEFORE, data, UNPIN)
    assert [result.result.step for result in results[1:3]] == [1, 2]


# Other calls


OF_THE_BYSTANDER = pb.GetPoolRequest(engine_id="bystander").SerializeToString()


@pytest.mark.parametrize("method", [one for one in _SERVICE.methods if one.name != "Attach"], ids=lambda one: one.name)
def test_a_call_with_random_bytes_is_refused_or_answered(bystander: Bystander, method: MethodDescriptor) -> None:
    stub: Any = bystander.running.channel.unary_stream(f"/{_SERVICE.full_name}/{method.name}")

    @examples(15)
    @given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda data: OF_THE_BYSTANDER + data))
    def send(data: bytes) -> None:
        call = stub(data, timeout=CALL_SECONDS)
        try:
            next(call)
        except grpc.RpcError:
            assert_clear(call)
        call.cancel()  # a stream would continue
        bystander.assert_undisturbed()

    send()


# The port


@examples(30)
@given(st.binary(min_size=1, max_size=200) | st.binary(max_size=200).map(lambda data: _PREFACE + data))
@example(b"GET /metrics HTTP/1.1\r\nHost: quire\r\n\r\n")
@example(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))  # the beginning of a ClientHello of TLS
@example(_PREFACE + b"\xff\xff\xff" + bytes(6))  # a frame of 16 MB
def test_a_connection_without_http_2_is_closed(bystander: Bystander, data: bytes) -> None:
    host, _, port = bystander.running.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=_SOCKET_SECONDS) as connection,
        suppress(ConnectionResetError, BrokenPipeError),  # closed before all was sent
    ):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    bystander.assert_undisturbed()
