"""`make gpu-check`: tests and benchmarks on a GPU by one command, with few packages."""

import os
import sys

# `--dry` runs small cases without a GPU: Triton's interpreter must be chosen before its import.
DRY = "--dry" in sys.argv[1:]
REPETITIONS = 20  # used to time kernels
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
