"""`python -m tests.damaged_kvmanager kvmanager ARGUMENTS...` is `quire kvmanager` with broken memory.

At SIGUSR1 a block of each pool that is in use gets a holder that there is not, as a bug or bad memory would make them.
"""

import asyncio
import signal
from typing import Any

from services.cli.main import main
from services.kvmanager.server import KVManagerService

_start = KVManagerService.start


async def _started(service: KVManagerService) -> str:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _damage, service)
    return await _start(service)


def _damage(service: KVManagerService) -> None:
    for session in service.manager.sessions():
        pool: Any = session.pool
        for sequence in list(pool.sequences.values())[:1]:
            pool.device.hold(sequence.table[0])  # by nobody


if __name__ == "__main__":
    KVManagerService.start = _started  # type: ignore[method-assign]
    main()
