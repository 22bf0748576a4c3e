"""`python -m tests.running.damaged_kvmanager kvmanager ARGUMENTS...` is `quire kvmanager` with damaged pools.

At SIGUSR1 the count of a cached block of every pool rises without a holder, as by a bug.
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
        pool.device.hold([pool.device.eviction_order()[-1]])  # without a holder


if __name__ == "__main__":
    KVManagerService.start = _started  # type: ignore[assignment,method-assign]
    main()
