from hypothesis import given
from hypothesis import strategies as st

from kvmanager import PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from services.wire.attach import kind_of, read_register, register_message, registered_message
from services.wire.duration import seconds_of

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
