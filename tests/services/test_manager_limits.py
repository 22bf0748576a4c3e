"""The KV manager accepts every Step of an engine: their limits agree."""

from collections import Counter

import pytest

from engine.model.loaded import MAX_CONTEXT_TOKENS
from engine.schedule.pool.pins import MAX_NAME_BYTES, MAX_SALT_BYTES, PinnedPrefix, request_of
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.sequence_group import Group
from kvmanager import limits
from quire.v1 import decoding_pb2, engine_pb2
from services.engine.settings import EngineSettings
from services.gateway.access.api_keys import is_tenant_name
from services.gateway.access.namespace import MAX_SALT_BYTES as MAX_CLIENT_SALT_BYTES
from services.gateway.access.namespace import Namespace, qualified
from services.gateway.request_checks import MAX_REQUEST_ID_BYTES
from services.wire.field_rules import declared_fields
from services.wire.requests.request import check
from services.wire.wire_fields import ENTRY_BYTES

BUDGET, SEQUENCES = (
    EngineSettings.__dataclass_fields__[name].metadata["most"] for name in ("token_budget", "max_sequences")
)
MAX_REQUEST_ID_BYTES_OF_ENGINES = declared_fields(engine_pb2.Submission.DESCRIPTOR)["request_id"].rules.max_bytes
LARGEST_ID = (1 << 63) - 1
TENANT = "t" * 64


def build_request(request_id: str, salt: bytes) -> Request:
    return Request(request_id, (1,), Sampling(), Stopping(1), salt=salt, prompt_logprobs=0)


@pytest.mark.parametrize("tenant", ["", TENANT])
@pytest.mark.parametrize("separate", [True, False])
def test_engines_accept_the_longest_ids_and_salts_of_a_gateway(tenant: str, separate: bool) -> None:
    assert is_tenant_name(TENANT)
    assert not is_tenant_name(TENANT + "t")
    request_id = qualified(tenant, "i" * MAX_REQUEST_ID_BYTES)
    salt = Namespace(separate).salt(tenant, "s" * MAX_CLIENT_SALT_BYTES)
    check(engine_pb2.Submission(request_id=request_id, salt=salt, stopping=decoding_pb2.Stopping(max_tokens=1)))


def test_the_kv_manager_accepts_the_longest_ids_and_salts_of_an_engine() -> None:
    group = Group(LARGEST_ID, build_request("i" * MAX_REQUEST_ID_BYTES_OF_ENGINES, bytes(MAX_SALT_BYTES)))
    assert declared_fields(engine_pb2.Submission.DESCRIPTOR)["salt"].rules.max_bytes == MAX_SALT_BYTES
    pin = PinnedPrefix("p" * MAX_NAME_BYTES, (1,), b"")
    assert len(group.salt) > MAX_SALT_BYTES
    assert len(group.salt) <= limits.MAX_SALT_LENGTH
    assert len(group.request.request_id) <= limits.MAX_ID_LENGTH
    assert len(request_of(pin, 0.0).request_id) <= limits.MAX_ID_LENGTH
    assert len(pin.name) <= limits.MAX_PIN_ID_LENGTH
    # Together, with a trace_parent and the names of all fields, they are one entry of a Step and of a report.
    assert MAX_REQUEST_ID_BYTES_OF_ENGINES + limits.MAX_SALT_LENGTH + 55 + 256 <= ENTRY_BYTES


def test_the_kv_manager_accepts_the_most_items_of_a_step() -> None:
    items = Counter(
        commits=SEQUENCES,
        forks=SEQUENCES,
        extends=SEQUENCES,
        allocates=SEQUENCES,
        frees_and_moves=limits.MAX_SEQUENCES,  # one for each sequence at most
        pins=limits.MAX_PINS + 1 + SEQUENCES,  # each unpinned, a reset, and each computed again
    )
    assert items.total() <= limits.MAX_ITEMS


def test_the_kv_manager_accepts_the_longest_prompts_of_a_step() -> None:
    assert BUDGET - 1 + MAX_CONTEXT_TOKENS <= limits.MAX_PROMPT_TOKENS
