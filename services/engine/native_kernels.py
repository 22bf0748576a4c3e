"""Whether this machine can run the CPU's kernels, and whether they can run a model as a whole."""

import logging
import tempfile
import time
from pathlib import Path

import torch

from engine.attention.backend import PagedBatch
from engine.attention.cpu_backend import CpuBackend
from engine.attention.interface import PagedContext
from engine.model import LoadedModel
from engine.native import Kernels, KernelsUnavailable, NativeDecoder, build, is_llama_shaped
from engine.plan import Work
from engine.request import Sampling
from services.settings import InvalidSetting

# Both round, and not at the same places: logits differ by some hundredths of their spread, at single tokens by more.
_MOST_DIFFERENCE = 0.2
_TRIED_TOKENS = 24

log = logging.getLogger("quire.engine")


def kernels_for(attention: str, device: torch.device, folder: str) -> Kernels | None:
    """Return the kernels for a device if they are wanted and can be built, compiling them into `folder` once.

    Without a folder they are compiled each time. Raises InvalidSetting where they must be used and cannot.
    """
    if attention == "torch" or (attention == "auto" and device.type != "cpu"):
        return None
    if device.type != "cpu":
        raise InvalidSetting(f"attention_backend is 'cpu', but the model runs on {device.type}")
    begun = time.monotonic()
    try:
        kernels = _kept(folder) if folder else _compiled_anew()
    except (KernelsUnavailable, OSError) as missing:
        if attention == "cpu":
            raise InvalidSetting(f"attention_backend is 'cpu', but its kernels cannot be built: {missing}") from missing
        log.warning("the CPU's kernels cannot be built, so attention is torch's, which is slower: %s", missing)
        return None
    log.info("the CPU's kernels are ready after %.1f s", time.monotonic() - begun)
    return kernels


def _kept(folder: str) -> Kernels:
    return Kernels(build(Path(folder)))


def _compiled_anew() -> Kernels:
    with tempfile.TemporaryDirectory() as folder:
        return Kernels(build(Path(folder)))  # once it is loaded, its file is not needed


def decoder_for(kernels: Kernels, loaded: LoadedModel, backend: CpuBackend, threads: int) -> NativeDecoder | None:
    """Return what runs a model's steps as a whole, None where its modules do that one by one.

    The modules' own weights are given up then. The first blocks of the cache are written: nobody may hold any yet.
    """
    if not (kernels.bfloat16 and loaded.dtype == torch.bfloat16 and is_llama_shaped(loaded.model)):
        return None
    decoder = NativeDecoder(kernels, loaded.model, backend.view, loaded.context_tokens, threads)
    difference = _difference(decoder, loaded, backend)
    if not difference < _MOST_DIFFERENCE:
        log.warning("the CPU's kernels do not run this model: their logits are %.2g off", difference)
        return None
    for parameter in loaded.model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    return decoder


def _difference(decoder: NativeDecoder, loaded: LoadedModel, backend: CpuBackend) -> float:
    """Return how far the logits of both are apart, relative to how far they spread: the median of a few tokens."""
    count = min(_TRIED_TOKENS, loaded.context_tokens, (len(backend.cache) - 1) * backend.block_size)
    token_ids = [7919 * number % loaded.vocabulary_size for number in range(count)]
    table = tuple(range(1, -(-count // backend.block_size) + 1))
    work = Work(1, tuple(token_ids), 0, table, True, Sampling())
    batch = PagedBatch.of([work], backend.block_size, torch.device("cpu"))
    places = list(range(count))
    with torch.inference_mode():
        output = loaded.model(
            input_ids=torch.tensor([token_ids]),
            position_ids=torch.tensor([places]),
            use_cache=False,
            logits_to_keep=torch.tensor(places),
            paged=PagedContext(backend, batch),
        )
        theirs: torch.Tensor = output.logits[0].float()
        ours = decoder.logits(token_ids, places, places, batch)
        apart = (ours - theirs).square().mean(dim=1).sqrt() / theirs.std(dim=1)
        return float(apart.nanmedian())  # a token of padding may have logits that are all the same
