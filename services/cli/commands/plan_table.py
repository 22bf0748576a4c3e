"""The table of `quire plan`: each figure with its derivation."""

from collections import Counter
from collections.abc import Mapping
from shlex import quote

from rich.console import Console
from rich.table import Table

from blocks import WindowKind
from engine.attention.cache import SCALE_BYTES, LayerShape
from engine.kinds.layer_kinds import layer_kinds, one_kind
from engine.model.memory_plan import MemoryPlan
from engine.model.model_shape import ModelShape
from engine.model.sizing import cache_bytes

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def show(
    model: str, type_name: str, shape: ModelShape, plan: MemoryPlan, ranks: int, formats: Mapping[str, str]
) -> None:
    """Print a plan, of each of several ranks, and the options that make it so; `formats` are some of them."""
    title = f"{model} in {type_name}" + (f", on each of {ranks} ranks" if ranks > 1 else "")
    chosen = "".join(f" --{name} {value}" for name, value in formats.items() if value != "auto")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in (*_memory(shape, plan, ranks), *_requests(plan), *_host(plan), *_kept(plan, ranks)):
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    if shape.text_part_of:
        console.print(f"\nonly the text part of this image-text model ({shape.text_part_of}) is served", soft_wrap=True)
    parallel = f" --tensor-parallel {ranks}" if ranks > 1 else ""
    served = "" if model == "demo" else f" --model {quote(model)}"
    options = f"--dtype {type_name}{chosen} {_engine_options(plan)}{parallel}"
    console.print(f"\nquire engine{served} {options}", soft_wrap=True)
    console.print(f"quire gateway --max-requests {plan.max_requests}   # for one such engine", soft_wrap=True)


def _memory(shape: ModelShape, plan: MemoryPlan, ranks: int) -> list[tuple[str, str, str]]:
    rows = [
        ("memory", _size(plan.memory_bytes), f"{plan.memory_utilization:.0%} of it is planned with"),
        ("weights", _size(plan.weights_bytes), _weights(shape, plan, ranks)),
        ("one step", _size(plan.step_bytes), f"at most, with {plan.max_sequences:,} sequences sampled"),
        ("one token", _size(plan.token_bytes), _token(shape, plan)),
        ("one block", _size(plan.block_bytes), f"{plan.block_size} tokens"),
        ("cache", _size(plan.cache_bytes), "the blocks, and one for padding"),
        ("blocks", f"{plan.device_blocks:,}", "of the layers that keep all tokens" if plan.windows else ""),
        ("tokens", f"{plan.pool.tokens:,}", ""),
        *map(_window, plan.windows),
    ]
    if shape.latent_elements:
        latent = shape.latent_elements * (1 if _in_8_bits(shape, plan) else shape.element_bytes)
        times = f"{plan.token_bytes / latent:.0f} times the {_size(latent)} of its latents"
        rows.insert(4, ("", "", f"its attention is latent: K and V of all heads are cached, {times}"))
    if plan.process_bytes:
        rows.insert(2, ("process", _size(plan.process_bytes), "Python and its libraries"))
    return rows


def _window(kind: WindowKind) -> tuple[str, str, str]:
    size = _size(cache_bytes(kind.device_blocks, kind.block_bytes))
    return f"{kind.name} blocks", f"{kind.device_blocks:,}", f"{size} for what {kind.layers} layers see"


def _token(shape: ModelShape, plan: MemoryPlan) -> str:
    """Say what the bytes of a token's K and V are made of, for each kind of layer."""
    layers = _layers_of_kind_0(shape, plan)
    if not layers:
        return "all layers have windows"
    scale = SCALE_BYTES if _in_8_bits(shape, plan) else 0
    return " + ".join(_layers(one, count, shape.element_bytes, scale) for one, count in Counter(layers).items())


def _layers_of_kind_0(shape: ModelShape, plan: MemoryPlan) -> list[LayerShape]:
    kinds = layer_kinds(shape.geometry, shape.context_tokens) if plan.windows else one_kind(shape.geometry)
    return [one._replace(window=0) for one in kinds[0].geometry(shape.geometry).layers]


def _in_8_bits(shape: ModelShape, plan: MemoryPlan) -> bool:
    elements = sum(one.kv_heads * (one.key_size + one.value_size) for one in _layers_of_kind_0(shape, plan))
    return plan.token_bytes != elements * shape.element_bytes


def _layers(one: LayerShape, count: int, element_bytes: int, scale_bytes: int) -> str:
    heads = f"{count} layers x {one.kv_heads} KV heads"
    if one.key_size == one.value_size:
        return f"2 (K and V) x {heads} x {_head(one.key_size, element_bytes, scale_bytes)}"
    key, value = (_head(size, element_bytes, scale_bytes) for size in (one.key_size, one.value_size))
    return f"{heads} x (K: {key}, V: {value})"


def _head(size: int, element_bytes: int, scale_bytes: int) -> str:
    return f"({size} bytes and {scale_bytes} of a scale)" if scale_bytes else f"{size} elements x {element_bytes} bytes"


def _weights(shape: ModelShape, plan: MemoryPlan, ranks: int) -> str:
    words, packed = f"{shape.parameters:,} x {shape.element_bytes} bytes", shape.packed
    if packed.format and plan.weights_bytes == packed.packed + packed.loaded:
        dense = packed.loaded == shape.weights_bytes
        beside = f", and {words} while a first start checks the CPU's kernels" if dense else ""
        return f"{shape.parameters:,} in {packed.format}{beside}"
    if ranks > 1:
        return f"{words}, shared by {ranks} ranks; what is not sliced is whole on each"
    if plan.weights_bytes > shape.weights_bytes:
        return f"{words}, and a second copy while the CPU's kernels pack them"
    return words


def _requests(plan: MemoryPlan) -> list[tuple[str, str, str]]:
    pool, context, usual = plan.pool, plan.context_tokens, plan.typical_tokens
    reserved = pool.reserved_requests(context)
    rows = [(f"requests of {context:,} tokens", f"{plan.requests(context):,}", "the longest, all at the same time")]
    if not plan.requests(context):
        rows[0] = (rows[0][0], "0", f"a request may have {pool.tokens + 1:,} tokens at most")
    if usual != context:
        times = f"{plan.requests(usual) / reserved:.1f} times as many" if reserved else "none fits"
        rows += [
            (f"requests of {usual:,} tokens", f"{plan.requests(usual):,}", "in blocks, none of them shared"),
            ("the same without paging", f"{reserved:,}", f"each reserves {context:,} tokens: in blocks {times}"),
        ]
    waste = pool.last_block_waste()
    rows.append(("empty slots per request", f"{waste:.1f}", f"in the last block, {waste / (usual + waste):.1%}"))
    return rows


def _host(plan: MemoryPlan) -> list[tuple[str, str, str]]:
    if not plan.host_blocks:
        return []
    whole = plan.host_blocks / plan.device_blocks
    size = _size(plan.host_cache_bytes)
    return [("host blocks", f"{plan.host_blocks:,}", f"{size} of the host's memory, {whole:.0%} of the pool")]


def _kept(plan: MemoryPlan, ranks: int) -> list[tuple[str, str, str]]:
    kept = plan.kept_bytes(ranks)
    if not kept:
        return []
    tmpfs = f"a tmpfs needs size={kept >> 20}m"
    return [("if blocks are kept", _size(kept), f"in place of the cache, with 64 bytes for each block; {tmpfs}")]


def _engine_options(plan: MemoryPlan) -> str:
    memory = f"--device-blocks {plan.device_blocks}"
    if plan.windows:  # an engine splits the same memory in the same way
        memory = f"--cache-mib {-(-plan.cache_bytes >> 20)} --typical-tokens {plan.typical_tokens}"
    options = f"{memory} --block-size {plan.block_size}"
    options += f" --max-sequences {plan.max_sequences} --token-budget {plan.token_budget}"
    return f"{options} --host-blocks {plan.host_blocks}" if plan.host_blocks else options


def _size(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), (1, "bytes"))
    return f"{size / unit:,.1f} {name}" if unit > 1 else f"{size} bytes"
