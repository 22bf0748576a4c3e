"""No process may log an error, except those that a scenario causes."""

import logging
from types import TracebackType

from simulation.runner import MadeToFail

# Of a request with which several engines were lost: what the product promises to do.
_EXPECTED = "request given up: it took down several engines"


class ErrorsLogged(logging.Handler):
    """Collects the errors that the product logs within its context."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self._logger = logging.getLogger("quire")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of an error."""
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, MadeToFail) and not record.getMessage().startswith(_EXPECTED):
            self.found.append(f"{record.getMessage()} {error!r}" if error else record.getMessage())

    def __enter__(self) -> "ErrorsLogged":
        self._before = self._logger.level, self._logger.propagate
        self._logger.addHandler(self)
        self._logger.setLevel(logging.ERROR)  # messages that nobody reads cost half of the time
        self._logger.propagate = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._logger.removeHandler(self)
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)
