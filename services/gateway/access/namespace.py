"""Separates tenants at shared engines: their prefix caches by salts, their live requests by ids.

Without API keys there is one tenant with an empty name, and salts and ids are used as given.
"""

from dataclasses import dataclass

from quire.v1 import gateway_pb2
from services.gateway.access.api_keys import is_tenant_name
from services.runtime.errors import InvalidField
from services.wire.field_rules import declared_fields

MAX_SALT_BYTES = declared_fields(gateway_pb2.CacheOptions.DESCRIPTOR)["salt"].rules.max_bytes
# UTF-8 never contains this byte, so no client's salt equals a tenant's.
_TENANT_PREFIX = b"\xff"


@dataclass(frozen=True)
class Namespace:
    """Makes salts for the prefix cache. `separate`: tenants share no prefixes."""

    separate: bool

    def salt(self, tenant: str, given: str) -> bytes:
        """Return the salt of block keys. If tenants are separate, no two tenants have the same."""
        if not self.separate:
            return given.encode()
        name = tenant.encode()
        return _TENANT_PREFIX + bytes([len(name)]) + name + given.encode()

    def salt_of_pin(self, pin: gateway_pb2.PinPrompt) -> bytes:
        """Return the salt of the requests that share a pin. Raises InvalidField."""
        if self.separate and not is_tenant_name(pin.tenant):
            value = f", not {pin.tenant!r}" if pin.tenant else ""
            raise InvalidField(f"pin_prefix.tenant must name a tenant{value}", "pin_prefix.tenant")
        if pin.tenant and not self.separate:
            fault = f"must be empty because all tenants share prefixes, not {pin.tenant!r}"
            raise InvalidField(f"pin_prefix.tenant {fault}", "pin_prefix.tenant")
        return self.salt(pin.tenant, checked_salt(pin.salt, "pin_prefix.salt"))


def qualified(tenant: str, request_id: str) -> str:
    """Return a request's id at engines and in the KV manager's ledger. Tenants' names contain no slash."""
    return f"{tenant}/{request_id}" if tenant else request_id


def checked_salt(given: str, field: str) -> str:
    """Return a salt. Raises InvalidField if it is too long for engines."""
    size = len(given.encode())
    if size > MAX_SALT_BYTES:
        raise InvalidField(f"{field} must have at most {MAX_SALT_BYTES} bytes, not {size}", field)
    return given
