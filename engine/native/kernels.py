"""Python bindings of kernels.cpp: tensors in, tensors out."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p, pointer
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from blocks import Copy
from engine.attention.backend import PagedBatch, Scoring
from engine.attention.cache import CacheGeometry, CacheLayout, head_elements
from engine.native.cpu_class import CpuClass

MAX_HEAD_SIZE = 512
# Attention is fast if block size and head size are multiples of it.
PACKED_SIZE = 16
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODED_TYPES = {torch.bfloat16: 3, torch.float32: 4}  # by what codes are multiplied as
# Shorter rows have other formulas in XXH3.
LEAST_CHECKED = 241
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_POPULATED_BYTES = 64 << 20  # of one call


class _Cache(Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        ("data", c_void_p),
        ("block_stride", c_int64),
        *((name, c_int64) for name in ("value_offset", "key_head_stride", "value_head_stride")),
        *((name, c_int32) for name in ("block_size", "heads", "key_size", "value_size", "type", "kind")),
    ]


class _Places(Structure):
    _fields_: ClassVar[Sequence[Any]] = [("slots", c_void_p), ("tables", c_void_p), ("width", c_int32)]


class _Batch(Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *((name, c_int32) for name in ("tokens", "sequences", "rows")),
        *((name, c_void_p) for name in ("token_ids", "positions", "first", "ends", "places", "kinds")),
    ]
    kept: Any  # what the pointers refer to


class NativeMatrix(Structure):
    """A matrix in one of two layouts, the other null: packed bfloat16, or `count` strips of quantized weights.

    `order`, int32 [inputs], has the input that each column of the strips multiplies; null: each its own.
    """

    _fields_: ClassVar[Sequence[Any]] = [
        ("dense", c_void_p),
        ("strips", c_void_p),
        ("count", c_int64),
        ("order", c_void_p),
    ]


class NativeLayer(Structure):
    """The weights of one layer; pointers to absent ones are null."""

    _fields_: ClassVar[Sequence[Any]] = [
        *((name, NativeMatrix) for name in ("projections", "output", "gates", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "projection_bias", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("output_bias", "sinks", "router", "router_bias", "gates_bias", "down_bias")),
        ("window", c_int32),
    ]


class NativeExperts(Structure):
    """The shape of a model's mixtures of experts; all zero without any."""

    _fields_: ClassVar[Sequence[Any]] = [
        *((name, c_int32) for name in ("count", "chosen", "intermediate", "of_all")),
        ("limit", c_float),
        ("alpha", c_float),
    ]


class NativeModel(Structure):
    """The shape of a model, and pointers to its weights."""

    _fields_: ClassVar[Sequence[Any]] = [
        *(
            (name, c_int32)
            for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "intermediate", "vocabulary")
        ),
        ("epsilon", c_float),
        ("scaling", c_float),
        ("experts", NativeExperts),
        ("layer", POINTER(NativeLayer)),
        *((name, NativeMatrix) for name in ("embedding", "head")),
        *((name, c_void_p) for name in ("final_norm", "cosine", "sine")),
    ]


def packed_size(shape: Sequence[int]) -> int:
    """Return the number of elements of packed weights of a shape, `[outputs, inputs]`: padded to 16 and to 32."""
    outputs, inputs = shape
    return -(-outputs // 16) * 16 * (-(-inputs // 32) * 32)


class CacheView(NamedTuple):
    """A cache tensor in the form of the kernels; valid as long as the tensor. `dtype`: of K, V, queries and outputs.

    `layers` has a description of each layer, whose data begin at its K in block 0.
    """

    cache: torch.Tensor
    layout: CacheLayout
    layers: tuple[_Cache, ...]
    dtype: torch.dtype

    @classmethod
    def of(
        cls, cache: torch.Tensor, geometry: CacheGeometry, layout: CacheLayout, block_size: int, dtype: torch.dtype
    ) -> "CacheView":
        """Describe a cache with the kernels' layout inside each (block, layer).

        `dtype` is the cache's type; of codes (int8) it is what they are multiplied as: bfloat16 or float32.
        """
        number = _CODED_TYPES[dtype] if cache.dtype == torch.int8 else _TYPES[dtype]
        layers = tuple(
            _Cache(
                block_stride=layout.elements,
                value_offset=value.offset - key.offset,
                key_head_stride=head_elements(shape.key_size, block_size, cache.dtype),
                value_head_stride=head_elements(shape.value_size, block_size, cache.dtype),
                block_size=block_size,
                heads=shape.kv_heads,
                key_size=shape.key_size,
                value_size=shape.value_size,
                type=number,
            )
            for shape, (key, value) in zip(geometry.layers, layout.parts, strict=True)
        )
        return cls(cache, layout, layers, dtype).at(cache)

    def at(self, cache: torch.Tensor) -> "CacheView":
        """Let the descriptions be those of another cache of the same shape and type, also where they are in use."""
        for layer, (key, _) in zip(self.layers, self.layout.parts, strict=True):
            layer.data = cache.data_ptr() + key.offset * cache.itemsize
        return self._replace(cache=cache)


# Pointers to the caches of a model's layers, in their order.
LayerCaches = ctypes.Array["ctypes._Pointer[_Cache]"]


def layer_caches(views: Sequence[CacheView], places: Sequence[tuple[int, int]]) -> LayerCaches:
    """Return the caches of a model's layers. `places` has the kind of each layer, and its index among the kind's.

    They stay valid if the views move to other caches (`CacheView.at`).
    """
    found = []
    for kind, index in places:
        views[kind].layers[index].kind = kind
        found.append(pointer(views[kind].layers[index]))
    return (POINTER(_Cache) * len(found))(*found)


def populate(mapped: torch.Tensor) -> None:
    """Allocate all pages of zeros that `Kernels.zeros` has mapped, without changing them.

    Can run on a thread beside their use, because it does not hold the interpreter's lock. Does nothing on a system
    without this call: pages are allocated at their first use then.
    """
    advise = ctypes.CDLL(None).madvise
    end = mapped.data_ptr() + mapped.nbytes
    for start in range(mapped.data_ptr(), end, _POPULATED_BYTES):
        size = min(_POPULATED_BYTES, end - start)
        if advise(c_void_p(start), c_size_t(size), _POPULATE_WRITE):
            return


def return_freed_memory() -> None:
    """Return the memory of freed tensors to the system, which glibc keeps for each thread that allocated it."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


class Kernels:
    """The kernels of one shared library. `name` identifies their sources, flags, compiler and class."""

    def __init__(self, library: Path, cpu: CpuClass) -> None:
        """Load the build of a class. Without the system's permission, a build with tiles uses AVX512-BF16."""
        self._library = ctypes.CDLL(str(library))
        self.name = library.stem
        self.cpu = cpu
        self.tiles = bool(self._library.quire_enable_tiles())

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Map zeros aligned to pages, in large pages if the system has them. Each page is allocated at its first use.

        Raises OSError without enough memory.
        """
        if not prod(shape):  # of a kind without layers
            return torch.zeros(tuple(shape), dtype=dtype)
        # Private, because systems seldom have large pages for shared memory.
        memory = mmap(-1, prod(shape) * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
        mapped = torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(tuple(shape))
        self._library.quire_prefer_large_pages(c_void_p(mapped.data_ptr()), c_int64(mapped.nbytes))
        return mapped

    def pack(self, weights: torch.Tensor, packed: torch.Tensor) -> None:
        """Convert `[outputs, inputs]` weights to bfloat16 in the layout of products, into `packed_size` zeros."""
        outputs, inputs = weights.shape
        plain = weights.detach().to(torch.bfloat16).contiguous()
        self._library.quire_pack(c_void_p(plain.data_ptr()), outputs, inputs, c_void_p(packed.data_ptr()))

    def strip_bytes(self, number: int, inputs: int) -> int:
        """Return the bytes of 16 outputs of quantized weights in a format of the kernels."""
        self._library.quire_strip_bytes.restype = c_int64
        size: int = self._library.quire_strip_bytes(c_int64(number), inputs)
        return size

    def pack_grouped(self, source: Structure, number: int, packed: torch.Tensor, threads: int) -> None:
        """Pack the arrays of a matrix, as x86/grouped/pack.h describes them, into strips of a format."""
        self._library.quire_pack_grouped(byref(source), c_int64(number), c_void_p(packed.data_ptr()), threads)

    def multiply_grouped(
        self, strips: npt.NDArray[np.void], outputs: int, rows: torch.Tensor, threads: int
    ) -> torch.Tensor:
        """Quantize contiguous float32 rows `[rows, inputs]`, and multiply them by strips; return `[rows, outputs]`."""
        count, inputs = rows.shape
        sums = torch.empty(count, outputs)
        self._library.quire_multiply_grouped(
            c_void_p(strips.ctypes.data),
            outputs,
            inputs,
            c_void_p(rows.data_ptr()),
            count,
            c_void_p(sums.data_ptr()),
            threads,
        )
        return sums

    def read_grouped(
        self, strips: npt.NDArray[np.void], inputs: int, output: int, order: npt.NDArray[np.int32] | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the weights of one output, float32 `[inputs]`, as the kernels read an embedding."""
        weights = np.empty(inputs, dtype=np.float32)
        self._library.quire_read_grouped(
            c_void_p(strips.ctypes.data),
            None if order is None else c_void_p(order.ctypes.data),
            inputs,
            output,
            c_void_p(weights.ctypes.data),
        )
        return weights

    def write(self, view: CacheView, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write contiguous `[tokens, kv_heads, size]` K and V of the view's type to slots."""
        self._library.quire_write(
            byref(view.layers[layer]),
            c_void_p(key.data_ptr()),
            c_void_p(value.data_ptr()),
            len(slots),
            c_void_p(slots.data_ptr()),
        )

    def attend(
        self, view: CacheView, layer: int, query: torch.Tensor, batch: PagedBatch, scoring: Scoring, threads: int
    ) -> torch.Tensor:
        """Attend with contiguous `[tokens, heads, key_size]` queries of the view's type.

        Returns `[tokens, heads, value_size]` in the same type.
        """
        described = view.layers[layer]
        output = query.new_empty(*query.shape[:2], described.value_size)
        sinks = None if scoring.sinks is None else scoring.sinks.detach().float().contiguous()
        self._library.quire_attend(
            byref(described),
            byref(_batch(batch)),
            c_void_p(query.data_ptr()),
            c_int64(query.stride(0)),
            c_void_p(output.data_ptr()),
            query.shape[1],
            c_float(scoring.scaling),
            c_float(scoring.softcap or 0.0),
            scoring.window or 0,
            None if sinks is None else c_void_p(sinks.data_ptr()),
            threads,
        )
        return output

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor, copies: Sequence[Copy], threads: int) -> None:
        """Copy rows of one contiguous cache to rows of another, or of the same; no row is both source and destination.

        One call for all rows, because torch would wake its threads once for each block, which takes longer than the
        copy.
        """
        pairs = torch.tensor(copies, dtype=torch.int64)
        self._library.quire_copy(
            c_void_p(source.data_ptr()),
            c_void_p(target.data_ptr()),
            c_void_p(pairs.data_ptr()),
            len(copies),
            c_int64(source[0].nbytes),
            threads,
        )

    def copy_checked(
        self, source: torch.Tensor, target: torch.Tensor, copies: Sequence[Copy], threads: int
    ) -> list[int]:
        """Copy rows of more than LEAST_CHECKED bytes as `copy_blocks` does; return the checksum of each, XXH3."""
        pairs = torch.tensor(copies, dtype=torch.int64)
        checksums = np.empty(len(copies), dtype=np.uint64)
        self._library.quire_copy_checked(
            c_void_p(source.data_ptr()),
            c_void_p(target.data_ptr()),
            c_void_p(pairs.data_ptr()),
            len(copies),
            c_int64(source[0].nbytes),
            c_void_p(checksums.ctypes.data),
            threads,
        )
        found: list[int] = checksums.tolist()
        return found

    def read(self, memory: torch.Tensor, threads: int) -> None:
        """Read a tensor of whole MiB at full memory bandwidth: an upper bound for any kernel."""
        self._library.quire_read(c_void_p(memory.data_ptr()), c_int64(memory.nbytes), threads)

    def multiply(self, rounds: int, threads: int) -> int:
        """Multiply registers at the machine's full speed, an upper bound for any kernel; return the operations."""
        self._library.quire_multiply.restype = c_int64
        operations: int = self._library.quire_multiply(c_int64(rounds), threads)
        return operations

    def multiply_int8(self, rounds: int, threads: int) -> int:
        """Multiply registers of 8-bit integers in the same way; return the operations."""
        self._library.quire_multiply_int8.restype = c_int64
        operations: int = self._library.quire_multiply_int8(c_int64(rounds), threads)
        return operations

    def sample(self, logits: torch.Tensor, draws: bytes, rows: torch.Tensor, threads: int) -> torch.Tensor:
        """Sample a token for each of `rows` `[draws]` int64, rows of contiguous float32 `[rows, vocabulary]` logits.

        `draws` has the fields of RowDraw in x86/sampler.h for each. Returns `[draws]` int64 token ids.
        """
        tokens = torch.empty(len(rows), dtype=torch.int64)
        self._library.quire_sample(
            c_void_p(logits.data_ptr()),
            logits.shape[-1],
            c_char_p(draws),
            c_void_p(rows.data_ptr()),
            len(rows),
            c_void_p(tokens.data_ptr()),
            threads,
        )
        return tokens

    def step(
        self, model: NativeModel, caches: LayerCaches, batch: PagedBatch, tokens: tuple[torch.Tensor, ...], threads: int
    ) -> torch.Tensor:
        """Run a step of a model over the caches of its layers; return `[places, vocabulary]` float32 logits.

        `tokens` are three int32 tensors: token ids, positions, and the indices of the requested logits.
        """
        token_ids, positions, places = tokens
        logits = torch.empty(len(places), model.vocabulary)
        described = _batch(batch)
        described.rows = len(places)
        described.token_ids, described.positions = token_ids.data_ptr(), positions.data_ptr()
        described.places = places.data_ptr()
        self._library.quire_step(byref(model), caches, byref(described), c_void_p(logits.data_ptr()), threads)
        return logits


def _batch(batch: PagedBatch) -> _Batch:
    described = _Batch(len(batch.slots), len(batch.ends))
    described.first, described.ends = batch.first.data_ptr(), batch.ends.data_ptr()
    kinds = (batch, *batch.windows)
    places = (_Places * len(kinds))(
        *(_Places(one.slots.data_ptr(), one.tables.data_ptr(), one.tables.shape[1]) for one in kinds)
    )
    described.kinds = ctypes.addressof(places)
    described.kept = places
    return described
