"""A KV manager as a process: `python -m bench.gpu_check.pools.manager_process SOCKET` serves until its input ends."""

import asyncio
import sys

from services.kvmanager.server import KVManagerService
from services.kvmanager.settings import KVManagerSettings


async def main() -> None:
    """Serve, report readiness, and stop when standard input closes."""
    service = KVManagerService(
        KVManagerSettings(listen=f"unix:{sys.argv[1]}", map_listen="", lease_seconds=0, grace_seconds=0)
    )
    await service.start()
    running = asyncio.create_task(service.run())
    print("serving", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    running.cancel()
    await service.stop()


if __name__ == "__main__":
    asyncio.run(main())
