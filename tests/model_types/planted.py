"""Judges that misbehave, for tests of the processes: here, because processes import them by name."""

import os
import signal
import time
from pathlib import Path

from tests.model_types.cases import Case
from tests.model_types.judgement import Judgement


def fine(_case: Case, folder: Path) -> Judgement:
    return Judgement("equal", tokens=len(folder.name))


def hanging(_case: Case, _folder: Path) -> Judgement:
    os.fork()  # a child hangs too
    while True:
        time.sleep(60)


def raising(_case: Case, _folder: Path) -> Judgement:
    raise AssertionError("blocks\nare held")


def aborting(_case: Case, _folder: Path) -> Judgement:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def leaving(_case: Case, _folder: Path) -> Judgement:
    os._exit(3)


def hungry(_case: Case, _folder: Path) -> Judgement:
    return Judgement("equal", tokens=len(bytearray(1 << 31)))
