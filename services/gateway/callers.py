"""Who calls the gateway."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """The one whose API key came with a call. `tenant` is empty where no keys are asked for."""

    tenant: str = ""
    operator: bool = True


ANYONE = Caller()
