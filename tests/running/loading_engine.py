"""`python -m tests.running.loading_engine engine ARGUMENTS...` is `quire engine` whose model is never loaded."""

import time
from typing import NoReturn

from services.cli.main import main
from services.engine.ranks import start
from services.engine.settings import EngineSettings


def _load_for_ever(_settings: EngineSettings) -> NoReturn:
    while True:
        time.sleep(1)


if __name__ == "__main__":
    start.assemble = _load_for_ever
    main()
