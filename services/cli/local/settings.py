"""Settings of `quire serve` itself, beside those of its services."""

import re
from dataclasses import dataclass

from services.runtime.settings import InvalidSetting, check, setting

_MOST_ENGINES = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class LocalSettings:
    """How many engines run, how often a service is started again, and what the whole is called."""

    engines: int = setting(
        1,
        "Engines to start, all of one model. They share --cache-mib, --device-blocks and --host-blocks, and the cores "
        "unless --threads says how many each has; every other limit is each engine's own.",
        least=1,
        most=_MOST_ENGINES,
    )
    instance: str = setting(
        "", "Name by which commands on this machine find these services: --instance. Empty: the process id."
    )
    max_restarts: int = setting(
        5,
        "Times that a service that ended by itself is started again. One more end stops all services, with status 1.",
        least=0,
    )
    restart_reset_seconds: float = setting(
        300.0, "Seconds that a service has to be ready for its restarts to be counted from 0 again.", least=0
    )

    def __post_init__(self) -> None:
        """Raise InvalidSetting."""
        check(self)
        if self.instance and not _NAME.fullmatch(self.instance):
            raise InvalidSetting(
                f"instance is {self.instance!r}, it must be 1 to 64 letters, digits, dots, dashes and underscores"
            )
