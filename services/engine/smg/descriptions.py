"""What smg asks an engine about its model and itself when it adds it to its workers."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

from quire.v1 import decoding_pb2, engine_pb2
from services.models.files.bounded_json import InvalidModelFile, read_configuration

_CONFIG = "config.json"
# A path that exists nowhere. smg would take a tokenizer from a folder of its own machine, or from the Hugging Face Hub
# by a name; after looking for this one in vain it asks the engine.
_NO_PATH = "/nonexistent/"


def model_info(
    engine: engine_pb2.GetEngineResponse, folder: Path, eos_token_ids: Collection[int]
) -> smg_pb.GetModelInfoResponse:
    """Describe the model. Its paths lead nowhere, so that smg receives the tokenizer from the engine."""
    config = _configuration(folder / _CONFIG)
    return smg_pb.GetModelInfoResponse(
        model_path=_NO_PATH + engine.model,
        is_generation=True,
        max_context_length=engine.context_tokens,
        vocab_size=engine.vocabulary_size,
        served_model_name=engine.model,
        tokenizer_path=_NO_PATH + engine.model,
        model_type=str(config.get("model_type", "")),
        architectures=_texts(config.get("architectures")),
        eos_token_ids=sorted(eos_token_ids),
        pad_token_id=_token_id(config.get("pad_token_id")),
        bos_token_id=_token_id(config.get("bos_token_id")),
        max_req_input_len=engine.context_tokens,
        default_sampling_params_json=_defaults(engine.generation_defaults),
    )


def server_info(engine: engine_pb2.GetEngineResponse, running: int, uptime: float) -> smg_pb.GetServerInfoResponse:
    """Describe the engine, which has run for `uptime` seconds.

    Grammars begin at the first token, also for models that think.
    """
    return smg_pb.GetServerInfoResponse(
        active_requests=running,
        uptime_seconds=uptime,
        server_type="vllm-grpc",
        data_parallel_size=1,
        kv_cache_dtype=engine.kv_dtype or engine.dtype,
        block_size=engine.block_size,
        model_dtype=engine.dtype,
        max_num_seqs=engine.max_sequences,
        constrained_decoding_start="first_token",
    )


def _configuration(path: Path) -> Mapping[str, Any]:
    try:
        return read_configuration(path) if path.is_file() else {}
    except InvalidModelFile:  # the model was loaded from other files
        return {}


def _texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _token_id(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else 0


def _defaults(defaults: decoding_pb2.GenerationDefaults) -> str:
    """Return the model's values for what requests leave out, which smg fills in; empty without any."""
    given = {field.name: value for field, value in defaults.ListFields() if field.name != "max_tokens"}
    return json.dumps(given) if given else ""
