"""`python -m tests.running.listed_kvmanager kvmanager ARGUMENTS...` is `quire kvmanager` that lists its pools' keys.

At SIGUSR1 it writes a file of JSON into the folder LISTED_KEYS, and prints `keys listed in FILE`: for each engine the
fingerprint, the number of resets, and for each kind the keys (hexadecimal) of each tier.
"""

import asyncio
import json
import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

from services.cli.main import main
from services.kvmanager.server import KVManagerService

FOLDER = "LISTED_KEYS"
LINE = "keys listed in "

_start = KVManagerService.start
_numbers = count()


async def _started(service: KVManagerService) -> str:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _write, service)
    return await _start(service)


def _write(service: KVManagerService) -> None:
    pools = {session.pool.spec.engine_id: _listed(session.pool) for session in service.manager.sessions()}
    file = Path(os.environ[FOLDER]) / f"{os.getpid()}-{next(_numbers)}.json"
    file.write_text(json.dumps(pools))
    sys.stdout.write(f"{LINE}{file}\n")
    sys.stdout.flush()


def _listed(pool: Any) -> dict[str, Any]:
    state = pool.state
    kinds = [{"GPU": _keys(kind.device), "CPU": _keys(kind.host)} for kind in state.kinds]
    return {"fingerprint": state.spec.model_fingerprint, "resets": state.resets, "kinds": kinds}


def _keys(tier: Any) -> list[str]:
    """Return the keys that a prompt would find."""
    return sorted({key.hex() for key, _ in tier.keys.entries() if tier.keys.find(key) is not None})


if __name__ == "__main__":
    KVManagerService.start = _started  # type: ignore[assignment,method-assign]
    main()
