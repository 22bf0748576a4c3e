"""Triton's kernels where tests can run them: on a GPU, else under Triton's interpreter."""

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from engine.attention.triton_backend import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_triton_backend() -> "partial[TritonBackend]":
    """Return what makes a backend of Triton's kernels, or skip the test where there is no Triton."""
    pytest.importorskip("triton")
    from engine.attention.triton_backend import TritonBackend

    return partial(TritonBackend, device=DEVICE)
