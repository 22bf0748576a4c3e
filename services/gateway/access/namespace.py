"""Keeps tenants apart at the engines they share: in the prefix cache by salts, among live requests by ids.

Where nobody is asked for an API key there is one tenant without a name, whose salts and ids are as clients give them.
"""

from dataclasses import dataclass

from quire.v1 import gateway_pb2
from services.gateway.access.api_keys import is_tenant_name
from services.runtime.errors import InvalidField

MAX_SALT_BYTES = 256
# No text in UTF-8 has this byte, so no client's own salt is one of a tenant's.
_TENANTS_SALT = b"\xff"


@dataclass(frozen=True)
class Namespace:
    """Makes salts. `separate`: tenants share no prefixes."""

    separate: bool

    def salt(self, tenant: str, given: str) -> bytes:
        """Return what enters the keys of blocks: where tenants are separate, equal for one tenant's only."""
        if not self.separate:
            return given.encode()
        name = tenant.encode()
        return _TENANTS_SALT + bytes([len(name)]) + name + given.encode()

    def salt_of_pin(self, pin: gateway_pb2.PinPrompt) -> bytes:
        """Return the salt of the requests that shall share a pin. Raises InvalidField."""
        if self.separate and not is_tenant_name(pin.tenant):
            fault = f"is {pin.tenant!r}, which is no tenant's name" if pin.tenant else "is missing: whose prefix is it?"
            raise InvalidField(f"pin_prefix.tenant {fault}", "pin_prefix.tenant")
        if pin.tenant and not self.separate:
            raise InvalidField("pin_prefix.tenant is given, but tenants share prefixes here", "pin_prefix.tenant")
        return self.salt(pin.tenant, checked_salt(pin.salt, "pin_prefix.salt"))


def qualified(tenant: str, request_id: str) -> str:
    """Return the name of a request at engines and in their KV manager's ledger; names of tenants have no slash."""
    return f"{tenant}/{request_id}" if tenant else request_id


def checked_salt(given: str, field: str) -> str:
    """Return a salt. Raises InvalidField for one that engines would not take."""
    size = len(given.encode())
    if size > MAX_SALT_BYTES:
        raise InvalidField(f"{field} has {size} bytes, the most is {MAX_SALT_BYTES}", field)
    return given
