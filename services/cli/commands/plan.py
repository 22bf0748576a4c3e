"""`quire plan`: the number of KV blocks that fit into a memory and their capacity, or the memory that they need."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.cli.options import FiniteFloat, warn_of_unused_variables
from services.engine.settings import (
    CPU_CACHE_MIB,
    CPU_MAX_SEQUENCES,
    CPU_TOKEN_BUDGET,
    GPU_MAX_SEQUENCES,
    GPU_MEMORY_UTILIZATION,
    GPU_TOKEN_BUDGET,
    EngineSettings,
)
from services.runtime.settings import unmet_requirements

if TYPE_CHECKING:
    from engine.kinds.layer_kinds import LayerKind
    from engine.model.memory_plan import MemoryPlan
    from engine.model.model_shape import ModelShape

_AT_LEAST_1 = click.IntRange(min=1)
_MIB = 1 << 20
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineSettings)}
_MOST: dict[str, int] = {field.name: field.metadata["most"] for field in fields(EngineSettings)}
_GOALS = ("gpu_memory", "memory", "device_blocks", "requests")
_SERVED = "served"  # the goal without any: the pool of `quire serve` on this machine


class _Size(click.ParamType[int]):
    name = "SIZE"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        from pydantic import ByteSize, TypeAdapter, ValidationError

        try:
            size = int(TypeAdapter(ByteSize).validate_python(value))
        except ValidationError:
            self.fail(f"must be a size such as 80GiB or 24GB, not {value!r}", parameter, context)
        if size < _MIB:
            self.fail(
                f"must be a size with its unit, such as 80GiB, and at least 1MiB, not {value!r}", parameter, context
            )
        return size


class _Lengths(click.ParamType[tuple[int, int]]):
    name = "PROMPT,ANSWER"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            prompt, answer = (int(text) for text in value.split(","))
        except ValueError:
            prompt = answer = 0
        if min(prompt, answer) < 1:
            self.fail(f"must be two numbers of tokens above 0, such as 161,338, not {value!r}", parameter, context)
        return prompt, answer


@click.command()
@click.option(
    "--model",
    default="demo",
    show_default=True,
    help="Model: demo, a local folder, a .gguf file, or a hub id. Only its configuration is read.",
)
@click.option(
    "--gpu-memory", type=_Size(), help="Memory of the GPU, such as 80GiB. The plan shows how many blocks fit."
)
@click.option(
    "--memory",
    type=_Size(),
    help="Memory that an engine on a CPU may take, such as 16GiB. The plan shows how many blocks fit.",
)
@click.option(
    "--device-blocks",
    type=click.IntRange(1, _MOST["device_blocks"]),
    help="Blocks of the pool. The plan shows how much memory they need.",
)
@click.option(
    "--requests",
    type=_AT_LEAST_1,
    help="Requests at the same time. The plan shows the blocks and the memory they need.",
)
@click.option(
    "--device",
    type=click.Choice(("cuda", "cpu")),
    help="With --device-blocks or --requests: device of the model. Default: cuda. Without any of these: the device "
    "that `quire serve` would use.",
)
@click.option(
    "--memory-utilization",
    "--gpu-memory-utilization",
    "memory_utilization",
    type=FiniteFloat(0.01, 1),
    default=GPU_MEMORY_UTILIZATION,
    show_default=True,
    help="Fraction of the memory to plan with. The rest is for a GPU's context, libraries and fragmentation.",
)
@click.option(
    "--host-memory",
    type=_Size(),
    help="Host memory for blocks of preempted requests, of all kinds together, such as 32GiB.",
)
@click.option(
    "--dtype",
    type=click.Choice(("auto", "float32", "bfloat16", "float16")),
    default="auto",
    show_default=True,
    help="Type of weights that are not quantized, and of the cache without --kv-dtype; auto is bfloat16, but float32 "
    "for a CPU if this machine's has no kernels.",
)
@click.option(
    "--weights",
    type=click.Choice(("auto", "bf16", "int8", "int4")),
    default="auto",
    show_default=True,
    help="Format of the weights on a CPU in bfloat16; auto is that of the files. int8 and int4 imply bfloat16.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(("auto", "int8")),
    default="auto",
    show_default=True,
    help="Type of the KV cache; auto is that of --dtype. int8 is for engines on a CPU.",
)
@click.option(
    "--kinds",
    type=click.Choice(("auto", "off")),
    default="auto",
    show_default=True,
    help="Kinds of blocks of an engine on a CPU: auto, layers with a window keep what they see; off, all tokens.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1, 4096),
    default=_DEFAULTS["block_size"],
    show_default=True,
    help="Tokens that one block holds.",
)
@click.option(
    "--token-budget",
    type=click.IntRange(1, _MOST["token_budget"]),
    help=f"Tokens fed in one step at most. Default: {CPU_TOKEN_BUDGET}, on a GPU {GPU_TOKEN_BUDGET}.",
)
@click.option(
    "--max-sequences",
    type=click.IntRange(1, _MOST["max_sequences"]),
    help="Maximum number of running sequences. Default: as many as fit.",
)
@click.option("--context", type=_AT_LEAST_1, help="Tokens of the longest request. Default: the model's context.")
@click.option(
    "--tokens-per-request",
    type=_Lengths(),
    help="Tokens of a usual request, prompt and answer, such as 161,338. Default: those of the longest request.",
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1, _MOST["tensor_parallel"]),
    default=1,
    show_default=True,
    help="Ranks that share the model. All memory figures are per rank.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, in bytes.")
def plan(model: str, dtype: str, as_json: bool, **values: Any) -> None:
    """Print the number of KV blocks that fit, and their capacity.

    With --gpu-memory or --memory it shows how many blocks fit beside the weights and a step's buffers; with
    --device-blocks or --requests, how much memory they need. Without any of these it shows the plan of `quire serve`
    with its defaults on this machine. It reads no weights and needs no GPU.
    """
    warn_of_unused_variables("engine", "serve")
    goal = _goal(values)
    on_gpu = goal == "gpu_memory" or (goal != "memory" and values["device"] != "cpu")
    type_name = _type_name(dtype, values["weights"], on_gpu=on_gpu)
    required = _required_settings(type_name, values, on_gpu=on_gpu)
    values["token_budget"] = values["token_budget"] or (GPU_TOKEN_BUDGET if on_gpu else CPU_TOKEN_BUDGET)
    shape, kinds = _shape(model, type_name, values, on_gpu=on_gpu)
    _check_sequences(values)
    found = _found(goal, shape, kinds, type_name, values, on_gpu=on_gpu)
    if found.max_sequences > _MOST["max_sequences"]:
        limited = values | {"max_sequences": _MOST["max_sequences"]}
        found = _found(goal, shape, kinds, type_name, limited, on_gpu=on_gpu)
    if as_json:
        named = {"model": model, "dtype": type_name, "kv_dtype": values["kv_dtype"], "parameters": shape.parameters}
        named["weights"] = shape.packed.format or type_name
        named["stored_weights"] = shape.stored or None
        named["text_part_of"] = shape.text_part_of or None
        named["kept_bytes"] = found.kept_bytes(values["tensor_parallel"])
        click.echo(json.dumps(named | found.figures()))
        return
    from services.cli.commands.plan_table import show

    chosen = {"weights": values["weights"], "kv-dtype": values["kv_dtype"], "kinds": values["kinds"], **required}
    chosen |= {} if on_gpu else {"device": "cpu"}
    show(model, type_name, shape, found, values["tensor_parallel"], chosen)


def _goal(values: dict[str, Any]) -> str:
    """Return what is given, or the goal of a plan for this machine, whose values are added."""
    given = [name for name in _GOALS if values[name] is not None]
    if len(given) > 1:
        raise click.UsageError("give one of --gpu-memory, --memory, --device-blocks and --requests")
    if not given:
        return _of_this_machine(values)
    if values["device"] and given[0] not in ("device_blocks", "requests"):
        raise click.UsageError(
            "--device is only for --device-blocks and --requests: --gpu-memory and --memory imply the device"
        )
    return given[0]


def _of_this_machine(values: dict[str, Any]) -> str:
    """Add the values with which `quire serve` starts an engine here, and return the goal."""
    import torch

    on_gpu = values["device"] != "cpu" and torch.cuda.is_available()
    if values["device"] == "cuda" and not on_gpu:
        raise click.UsageError("--device is cuda, but torch found no GPU: give --gpu-memory")
    values["device"] = "cuda" if on_gpu else "cpu"
    usual = GPU_MAX_SEQUENCES if on_gpu else CPU_MAX_SEQUENCES
    values["max_sequences"] = values["max_sequences"] or min(usual, values["token_budget"] or usual)
    if not on_gpu:
        return _SERVED
    values["gpu_memory"] = torch.cuda.get_device_properties(0).total_memory
    return "gpu_memory"


def _type_name(dtype: str, weights: str, *, on_gpu: bool) -> str:
    """Return the type that an engine chooses."""
    from engine.native.cpu_class import supported

    if dtype != "auto":
        return dtype
    return "bfloat16" if on_gpu or weights != "auto" or supported() else "float32"


def _required_settings(type_name: str, values: dict[str, Any], *, on_gpu: bool) -> dict[str, str]:
    """Return further options that such an engine needs.

    Raises click.UsageError for options that it refuses together, whatever the others are.
    """
    required = {}
    given = {name: values[name] for name in ("weights", "kv_dtype", "tensor_parallel")}
    given |= {"dtype": type_name, "device": "cuda" if on_gpu else "cpu"}
    for unmet in unmet_requirements(EngineSettings, _DEFAULTS | given):
        if unmet.requirement.other in given:
            raise click.UsageError(unmet.sentence(given, lambda name: f"--{name.replace('_', '-')}"))
        required[unmet.requirement.other.replace("_", "-")] = str(unmet.requirement.among[0])
    return required


def _check_sequences(values: dict[str, Any]) -> None:
    from services.runtime.settings import InvalidSetting

    try:
        EngineSettings(token_budget=values["token_budget"], max_sequences=values["max_sequences"] or 0)
    except InvalidSetting as error:
        raise click.UsageError(str(error)) from error


def _shape(
    model: str, type_name: str, values: dict[str, Any], *, on_gpu: bool
) -> "tuple[ModelShape, tuple[LayerKind, ...]]":
    """Return the shape with the context that an engine serves, and the kinds of blocks that it has."""
    import torch
    from transformers.utils import logging

    from engine.errors import ModelUnsupported
    from engine.model.model_shape import read_shape
    from services.cli.local_model import fetch_configuration
    from services.engine.startup.device import context_tokens_of, kinds_of
    from services.models.model_store import ModelUnavailable
    from services.runtime.settings import InvalidSetting

    if not model:
        raise click.UsageError("--model must not be empty")
    logging.set_verbosity_error()
    try:
        source: Path = fetch_configuration(model)
        shape = read_shape(source, getattr(torch, type_name), values["weights"])
        shape = shape.of_rank(values["tensor_parallel"])
        given = {name: values[name] for name in ("kinds", "tensor_parallel", "block_size")}
        settings = EngineSettings(device="cuda" if on_gpu else "cpu", **given)
        kinds = kinds_of(settings, shape)
    except (ModelUnavailable, ModelUnsupported, InvalidSetting) as error:
        raise click.UsageError(f"--model {model}: {error}") from error
    return replace(shape, context_tokens=context_tokens_of(settings, shape)), kinds


def _found(
    goal: str,
    shape: "ModelShape",
    kinds: "tuple[LayerKind, ...]",
    type_name: str,
    values: dict[str, Any],
    *,
    on_gpu: bool,
) -> "MemoryPlan":
    import torch

    from engine.model.memory_plan import Planner, Workload
    from engine.model.sizing import DoesNotFit

    context = values["context"] or shape.context_tokens
    if context > shape.context_tokens:
        raise click.UsageError(f"--context is {context}, but the model's context has {shape.context_tokens} tokens")
    lengths = values["tokens_per_request"]
    if lengths and sum(lengths) > context:
        raise click.UsageError(f"--tokens-per-request is {sum(lengths)} tokens, more than the longest, {context}")
    limits = values["block_size"], values["token_budget"], context, values["max_sequences"]
    # `quire serve` splits for half the context.
    workload = Workload(*limits, lengths, max(1, context // 2) if goal == _SERVED and not lengths else None)
    kv_dtype = None if values["kv_dtype"] == "auto" else getattr(torch, values["kv_dtype"])
    planner = Planner(shape, getattr(torch, type_name), workload, on_gpu=on_gpu, kv_dtype=kv_dtype, kinds=kinds)
    utilization, host_memory = values["memory_utilization"], values["host_memory"] or 0
    _check_blocks("--host-memory", planner.host_blocks_within(host_memory))
    if goal == _SERVED:
        return planner.for_cache(CPU_CACHE_MIB * _MIB, utilization, host_memory)
    if goal in ("device_blocks", "requests"):
        blocks = values["device_blocks"] or planner.blocks_for(values["requests"])
        if blocks > _MOST["device_blocks"]:
            raise click.UsageError(f"--requests need {blocks} blocks, but a pool has at most {_MOST['device_blocks']}")
        return planner.for_blocks(blocks, utilization, host_memory)
    option = f"--{goal.replace('_', '-')}"
    try:
        found = planner.for_memory(values[goal], utilization, host_memory)
    except DoesNotFit as error:
        raise click.ClickException(f"{option} is too small: {error}") from error
    _check_blocks(option, found.device_blocks)
    return found


def _check_blocks(option: str, blocks: int) -> None:
    most = _MOST["device_blocks"]
    if blocks > most:
        raise click.UsageError(f"{option} has room for {blocks} blocks, but a pool has at most {most}")
