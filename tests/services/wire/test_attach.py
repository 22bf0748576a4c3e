import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager import PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import UnsupportedField
from services.wire.attach import kind_of, read_register, register_message, registered_message
from services.wire.duration import seconds_of
from services.wire.features import MANAGER_FEATURES, without_features

NAMES = st.text(st.characters(codec="utf-8"), max_size=200)
SPECS = st.builds(
    PoolSpec,
    engine_id=st.text(st.characters(codec="utf-8"), min_size=1, max_size=200),
    incarnation=st.integers(1, (1 << 63) - 1),
    model_fingerprint=NAMES,
    block_size=st.integers(1, 1 << 16),
    device_blocks=st.integers(1, 1 << 24),
    host_blocks=st.integers(0, 1 << 24),
    model=NAMES,
)


@given(SPECS)
def test_a_registration_round_trips(spec: PoolSpec) -> None:
    data = pb.PoolRequest(register=register_message(spec)).SerializeToString()
    assert kind_of(data) == "register"
    assert read_register(data) == spec


@given(st.integers(0, (1 << 64) - 1), st.integers(1, (1 << 63) - 1), st.integers(0, 86_400))
def test_a_registered_message_round_trips(epoch: int, session: int, lease: int) -> None:
    data = registered_message(epoch, session, lease).SerializeToString()
    registered = pb.PoolResponse.FromString(data).registered
    assert (registered.manager_epoch, registered.session, seconds_of(registered.lease)) == (epoch, session, lease)


def test_a_feature_that_this_version_lacks_is_refused_by_name() -> None:
    spec = PoolSpec("engine", 1, "model", 4, 24)
    known = pb.PoolRequest(register=register_message(spec, MANAGER_FEATURES)).SerializeToString()
    assert read_register(known) == spec
    unknown = pb.PoolRequest(register=register_message(spec, ["step.owners"])).SerializeToString()
    with pytest.raises(
        UnsupportedField, match=r'^register\.needs has "step.owners", which this KV manager lacks'
    ) as found:
        read_register(unknown)
    assert found.value.field == "register.needs"


def test_an_unknown_field_of_a_registration_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """What the engine needs stands in `needs`; a manager cannot announce what it knows before it is registered."""
    register = register_message(PoolSpec("engine", 1, "model", 4, 24))
    register.MergeFromString(b"\xd8\x04\x01")  # number 75
    assert read_register(pb.PoolRequest(register=register).SerializeToString()).engine_id == "engine"
    assert "register has field 75, which this version ignores" in caplog.text


def test_a_manager_announces_the_fields_that_engines_may_send() -> None:
    registered = registered_message(1, 2, 3.0).registered
    assert {"step.allocates.prefix_of", "step.condemns"} <= set(registered.features)
    assert tuple(registered.features) == MANAGER_FEATURES


def test_fields_that_a_manager_lacks_are_left_out() -> None:
    request = pb.PoolRequest(
        step={"step": 1, "allocates": [{"group": 1, "prefix_of": "a"}, {"group": 2, "prefix_of": "b"}]}
    )
    without_features(request, ["register.needs", "step.allocates.prefix_of"])
    assert request == pb.PoolRequest(step={"step": 1, "allocates": [{"group": 1}, {"group": 2}]})
