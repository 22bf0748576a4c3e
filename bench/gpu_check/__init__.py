"""`make gpu-check`: what Quire does on a GPU, checked and measured by one command where little is installed."""

import os
import sys

# `--dry` does small cases without a GPU: Triton is told so before it is imported.
DRY = "--dry" in sys.argv[1:]
REPETITIONS = 20  # of what kernels are timed by
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
