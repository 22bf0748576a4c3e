"""A random model of Llama-3-8B's shape, its decoders and its runner. Needs neither gRPC nor protobuf."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.gpu_check.cases import BLOCK_SIZE
from bench.gpu_check.timing import recorder
from blocks import blocks_for
from engine.attention.interface import ATTENTION_NAME, register
from engine.gpu.graphs import RecordedDecoder
from engine.gpu.llama import LlamaDecoder
from engine.gpu.piecewise import PiecewiseDecoder
from engine.gpu.triton_backend import TritonBackend
from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loaded import LoadedModel
from engine.model.loading import take
from engine.run.device_sampler import DeviceSampler
from engine.run.runner import ModelRunner
from engine.schedule.step_plan import Launched, Sampled, StepPlan
from services.engine.startup.backends import gpu_decoder

# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
# https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
LLAMA_1B = LLAMA_3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
TINY = LLAMA_3_8B | {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def random_model(config: dict[str, Any], device: torch.device) -> LoadedModel:
    """Create the model on its device, because 8 billion random numbers take minutes on the host."""
    register()
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = AutoModelForCausalLM.from_config(LlamaConfig(**config), attn_implementation=ATTENTION_NAME)
    finally:
        torch.set_default_dtype(before)
    return take(model.eval(), "random")


class Decoders(NamedTuple):
    """The decoder of a model over a backend, and the same with recorded decoding steps."""

    backend: TritonBackend
    eager: Decoder
    recorded: RecordedDecoder


def decoders(
    loaded: LoadedModel, blocks: int, batches: Sequence[int], device: torch.device, host_blocks: int = 0
) -> Decoders:
    """Allocate a cache, and record decoding steps of these batch sizes. Raises AssertionError without fused decoder."""
    backend = TritonBackend(loaded.geometry, BLOCK_SIZE, blocks, loaded.dtype, device, host_blocks)
    modules = ModulesDecoder(loaded, backend)
    eager = gpu_decoder(loaded, backend, modules)
    assert eager is not modules, "the fused decoder differs from the model's modules"
    width = blocks_for(loaded.context_tokens, BLOCK_SIZE)
    recorded = RecordedDecoder(eager, recorder(device), BLOCK_SIZE, width, batches, device)
    recorded.prepare(lambda done, of: print(f"recorded {done} of {of} batch sizes", flush=True))
    return Decoders(backend, eager, recorded)


def device_sampler(sequences: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> DeviceSampler:
    """Return the sampler of a GPU, with compiled kernels; on a CPU they are interpreted."""
    sampler = DeviceSampler(sequences, vocabulary, device)
    sampler.compile(dtype)
    return sampler


def runner_of(loaded: LoadedModel, made: Decoders, sequences: int) -> ModelRunner:
    """Return the runner of an engine on a GPU, for steps of at most this many sequences."""
    sampler = device_sampler(sequences, loaded.vocabulary_size, loaded.dtype, loaded.device)
    return ModelRunner(loaded, made.backend, BLOCK_SIZE, decoder=made.recorded, sampler=sampler)


def piecewise(made: Decoders, sizes: Sequence[int], device: torch.device) -> PiecewiseDecoder:
    """Record steps with prompts by pieces, for these numbers of tokens; the decoding steps are those of `made`."""
    assert isinstance(made.eager, LlamaDecoder), "only the fused decoder has pieces"
    pieces = PiecewiseDecoder(made.eager, made.recorded, recorder(device), sizes)
    pieces.prepare(lambda done, of: print(f"recorded pieces of {done} of {of} sizes", flush=True))
    return pieces


@dataclass
class TimedRunner:
    """A runner that adds up the seconds in which the host waited for the device."""

    runner: ModelRunner
    device: torch.device
    waited: float = 0.0

    def launch(self, plan: StepPlan) -> Launched:
        """Launch a step."""
        return _TimedStep(self, self.runner.launch(plan))


class _TimedStep(NamedTuple):
    watch: TimedRunner
    launched: Launched

    def result(self) -> list[Sampled]:
        begun = time.perf_counter()
        try:
            return self.launched.result()
        finally:
            self.watch.waited += time.perf_counter() - begun

    def sample_seconds(self) -> float:
        return self.launched.sample_seconds()
