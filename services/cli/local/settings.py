"""Settings of `quire serve` itself."""

import re
from dataclasses import dataclass

from services.runtime.settings import InvalidSetting, check, setting

_MOST_ENGINES = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class LocalSettings:
    """The number of engines, the limits of restarts, and the name of the instance."""

    engines: int = setting(
        1,
        "Engines to start, all of one model. They divide --cache-mib, --device-blocks and --host-blocks among them, "
        "and the cores unless --threads sets those of each. Every other limit is per engine.",
        least=1,
        most=_MOST_ENGINES,
    )
    instance: str = setting("", "Name of this instance for --instance of other commands. Empty: the process id.")
    max_restarts: int = setting(
        5,
        "Maximum number of restarts of a service. If it ends once more, all services stop, with status 1.",
        least=0,
    )
    restart_reset_seconds: float = setting(
        300.0, "Seconds of readiness after which the count of restarts begins again.", least=0
    )

    def __post_init__(self) -> None:
        """Raise InvalidSetting."""
        check(self)
        if self.instance and not _NAME.fullmatch(self.instance):
            raise InvalidSetting(
                f"instance is {self.instance!r}, it must be 1 to 64 letters, digits, dots, dashes and underscores"
            )
