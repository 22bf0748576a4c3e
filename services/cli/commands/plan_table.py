"""The table of `quire plan`: each figure with its derivation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from shlex import quote

from rich.console import Console
from rich.table import Table

from blocks import WindowKind, counted
from engine.attention.cache import SCALE_BYTES, LayerShape
from engine.kept.seals import SEAL
from engine.kinds.layer_kinds import LayerKind, layer_kinds, one_kind
from engine.model.memory_plan import MemoryPlan
from engine.model.model_shape import ModelShape
from engine.model.sizing import cache_bytes
from kvmanager import limits

Row = tuple[str, str, str]

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def show(
    model: str, type_name: str, shape: ModelShape, plan: MemoryPlan, ranks: int, options: Mapping[str, str]
) -> None:
    """Print a plan, of each of several ranks, and the options that make it so; `options` are some of them."""
    title = f"{model} in {type_name}" + (f", on each of {ranks} ranks" if ranks > 1 else "")
    chosen = "".join(f" --{name} {value}" for name, value in options.items() if value != "auto")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    memory = _memory(shape, plan, ranks, in_8_bits=options["kv-dtype"] == "int8")
    for row in (*memory, *_requests(plan), *_host(plan), *_kept(plan, ranks)):
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    if shape.text_part_of:
        console.print(f"\nonly the text part of this image-text model ({shape.text_part_of}) is served", soft_wrap=True)
    parallel = f" --tensor-parallel {ranks}" if ranks > 1 else ""
    served = "" if model == "demo" else f" --model {quote(model)}"
    printed = f"--dtype {type_name}{chosen} {_engine_options(plan)}{parallel}"
    console.print(f"\nquire engine{served} {printed}", soft_wrap=True)
    console.print(f"quire gateway --max-requests {plan.max_requests}   # for one such engine", soft_wrap=True)
    if plan.all_blocks > limits.MAX_BLOCKS:
        console.print(f"quire kvmanager --max-blocks {plan.all_blocks}   # for one such engine", soft_wrap=True)


def _memory(shape: ModelShape, plan: MemoryPlan, ranks: int, *, in_8_bits: bool) -> list[Row]:
    rows = [
        ("memory", _size(plan.memory_bytes), f"{plan.memory_utilization:.0%} of it is planned with"),
        ("weights", _size(plan.weights_bytes), _weights(shape, plan, ranks)),
    ]
    if plan.process_bytes:
        rows.append(("process", _size(plan.process_bytes), "Python and its libraries"))
    rows.append(("one step", _size(plan.step_bytes), f"at most, with {plan.max_sequences:,} sequences sampled"))
    rows += _tokens(shape, plan, in_8_bits=in_8_bits)
    return [*rows, *_blocks(plan)]


def _tokens(shape: ModelShape, plan: MemoryPlan, *, in_8_bits: bool) -> list[Row]:
    """Say what the K and V of a token take in the layers of each kind."""
    scale = SCALE_BYTES if in_8_bits else 0
    kinds = _kinds(shape, plan)
    of_kinds = [kind for kind in kinds if kind.layers]
    block_bytes = {kind.name: kind.block_bytes for kind in plan.windows}
    rows = []
    for number, kind in enumerate(of_kinds):
        size = block_bytes.get(kind.name, plan.block_bytes) // plan.block_size
        of = f"in {_layers_of(kind)}: " if plan.windows else ""
        derived = _derivation(kind.geometry(shape.geometry).layers, shape.element_bytes, scale)
        rows.append(("" if number else "one token", _size(size), of + derived))
    if shape.latent_elements:
        latent = shape.latent_elements * (1 if in_8_bits else shape.element_bytes)
        times = f"{plan.token_bytes / latent:.0f} times the {_size(latent)} of its latents"
        rows.append(("", "", f"its attention is latent: K and V of all heads are cached, {times}"))
    if not plan.windows and len(layer_kinds(shape.geometry, shape.context_tokens)) > 1:
        where = (
            "--kinds off" if plan.process_bytes and shape.ranks == 1 else "kinds of blocks are for CPUs without ranks"
        )
        rows.append(("", "", f"layers with windows keep all tokens, too: {where}"))
    return rows


def _kinds(shape: ModelShape, plan: MemoryPlan) -> tuple[LayerKind, ...]:
    return layer_kinds(shape.geometry, shape.context_tokens) if plan.windows else one_kind(shape.geometry)


def _layers_of(kind: LayerKind) -> str:
    return f"layers of {kind.name}" if kind.tokens else "layers that keep all tokens"


def _blocks(plan: MemoryPlan) -> list[Row]:
    """Return the rows of a block's size, and of the blocks of each kind."""
    if not plan.windows:
        return [
            ("one block", _size(plan.block_bytes), f"{plan.block_size} tokens"),
            ("cache", _size(plan.cache_bytes), "the blocks, and one for padding"),
            ("blocks", f"{plan.device_blocks:,}", ""),
            ("tokens", f"{plan.pool.tokens:,}", ""),
        ]
    sizes = [(plan.block_bytes, "layers that keep all tokens")] if plan.block_bytes else []
    sizes += [(kind.block_bytes, f"layers of {kind.name}") for kind in plan.windows]
    (first, layers), *others = [(_size(size), f"in {layers}") for size, layers in sizes]
    return [
        ("one block", first, f"{plan.block_size} tokens {layers}"),
        *[("", size, layers) for size, layers in others],
        ("cache", _size(plan.cache_bytes), "the blocks of all kinds, and one of each for padding"),
        ("blocks", f"{plan.device_blocks:,}", _of_kind_0(plan, plan.device_blocks)),
        ("tokens", f"{plan.pool.tokens:,}", "in these blocks"),
        *map(_window, plan.windows),
    ]


def _of_kind_0(plan: MemoryPlan, blocks: int) -> str:
    if not plan.block_bytes:
        return "without memory: all layers have windows, so these blocks only count tokens"
    return f"{_size(cache_bytes(blocks, plan.block_bytes))} for layers that keep all tokens"


def _window(kind: WindowKind) -> Row:
    size = _size(cache_bytes(kind.device_blocks, kind.block_bytes))
    return f"{kind.name} blocks", f"{kind.device_blocks:,}", f"{size} for what {counted(kind.layers, 'layer')} see"


def _derivation(layers: Sequence[LayerShape], element_bytes: int, scale_bytes: int) -> str:
    """Say what the bytes of a token's K and V are made of, for each shape of layers."""
    shapes = Counter(one._replace(window=0, chunked=False) for one in layers)
    return " + ".join(_layers(one, count, element_bytes, scale_bytes) for one, count in shapes.items())


def _layers(one: LayerShape, count: int, element_bytes: int, scale_bytes: int) -> str:
    heads = f"{counted(count, 'layer')} x {counted(one.kv_heads, 'KV head')}"
    if one.key_size == one.value_size:
        return f"2 (K and V) x {heads} x {_head(one.key_size, element_bytes, scale_bytes)}"
    key, value = (_head(size, element_bytes, scale_bytes) for size in (one.key_size, one.value_size))
    return f"{heads} x (K: {key}, V: {value})"


def _head(size: int, element_bytes: int, scale_bytes: int) -> str:
    return f"({size} bytes and {scale_bytes} of a scale)" if scale_bytes else f"{size} elements x {element_bytes} bytes"


def _weights(shape: ModelShape, plan: MemoryPlan, ranks: int) -> str:
    words, packed = f"{shape.parameters:,} x {shape.element_bytes} bytes", shape.packed
    if packed.format and plan.weights_bytes == packed.packed + packed.loaded:
        kept = f"{_size(packed.packed)} for {shape.parameters:,}, the matrices in {packed.format}"
        dense = packed.loaded == shape.weights_bytes
        return f"{kept}; and {words} while a first start checks the CPU's kernels" if dense else kept
    if shape.stored:
        words += f", dequantized from {shape.stored}"
    if ranks > 1:
        return f"{words}, shared by {ranks} ranks; what is not sliced is whole on each"
    if plan.weights_bytes > shape.weights_bytes:
        return f"{words}, and a second copy while the CPU's kernels pack them"
    return words


def _requests(plan: MemoryPlan) -> list[Row]:
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


def _host(plan: MemoryPlan) -> list[Row]:
    if not plan.host_blocks:
        return []
    whole = plan.host_blocks / plan.device_blocks
    size = _size(plan.host_cache_bytes)
    if not plan.windows:
        return [("host blocks", f"{plan.host_blocks:,}", f"{size} of the host's memory, {whole:.0%} of the pool")]
    rows = [("host cache", size, "of the host's memory: the host blocks of all kinds, and one of each for padding")]
    rows.append(("host blocks", f"{plan.host_blocks:,}", _of_kind_0(plan, plan.host_blocks)))
    for kind in plan.windows:
        blocks = f"{kind.host_blocks:,}"
        rows.append((f"{kind.name} host blocks", blocks, _size(cache_bytes(kind.host_blocks, kind.block_bytes))))
    return rows


def _kept(plan: MemoryPlan, ranks: int) -> list[Row]:
    kept = plan.kept_bytes(ranks)
    if not kept:
        return []
    tmpfs = f"a tmpfs needs size={kept >> 20}m"
    return [
        (
            "if blocks are kept",
            _size(kept),
            f"in place of the cache, with {SEAL.itemsize} bytes for each block; {tmpfs}",
        )
    ]


def _engine_options(plan: MemoryPlan) -> str:
    memory = f"--device-blocks {plan.device_blocks}"
    if plan.windows:
        pool = f"--cache-mib {plan.cache_mib}" if plan.cache_mib else memory
        memory = f"{pool} --typical-tokens {plan.split_tokens}"
    options = f"{memory} --block-size {plan.block_size}"
    options += f" --max-sequences {plan.max_sequences} --token-budget {plan.token_budget}"
    return f"{options} --host-blocks {plan.host_blocks}" if plan.host_blocks else options


def _size(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), (1, "bytes"))
    return f"{size / unit:,.1f} {name}" if unit > 1 else f"{size} bytes"
