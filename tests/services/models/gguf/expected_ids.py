"""Makes `expected_ids.json.gz` with llama.cpp: `python -m tests.services.models.gguf.expected_ids FILE...`.

Needs an environment of its own with the packages xllamacpp, gguf and numpy. FILEs are GGUF files to be included beside
the made vocabularies, such as the demo model and `models/ggml-vocab-*.gguf` in xllamacpp's source distribution.
xllamacpp has no call that tokenizes, but exports the functions of llama.cpp's C API.
"""

import ctypes
import gzip
import json
import sys
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.services.models.gguf.made_vocabularies import vocabularies
from tests.services.models.gguf.texts import texts

EXPECTED = Path(__file__).with_name("expected_ids.json.gz")
_DIGEST_BYTES = 4


def digest(ids: Sequence[int]) -> str:
    """Return a short hash of token ids: two differ with a probability of one in 4 billion."""
    return blake2b(json.dumps(list(ids)).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def expected() -> dict[str, Any]:
    """Read the committed file: of each vocabulary digests of ids, the ids of "a" as a prompt, and the ends."""
    read: dict[str, Any] = json.loads(gzip.decompress(EXPECTED.read_bytes()))
    return read


class _Parameters(ctypes.Structure):
    """`llama_model_params` of include/llama.h, of the version that the environment has."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("devices", "overrides")),
        *((name, ctypes.c_int32) for name in ("gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        *((name, ctypes.c_void_p) for name in ("split", "progress", "progress_data", "metadata_overrides")),
        *((name, ctypes.c_bool) for name in ("vocab_only", "check", "extra", "no_host", "no_alloc", "load_mtp")),
    )


class _Llama:
    """The vocabulary of a file, read by llama.cpp."""

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        parameters = library.llama_model_default_params()
        parameters.vocab_only = True
        model = library.llama_model_load_from_file(str(path).encode(), parameters)
        if not model:
            raise ValueError(f"llama.cpp cannot read {path}")
        self._library, self._vocabulary = library, library.llama_model_get_vocab(model)

    def ids(self, text: str, whole_prompt: bool = False) -> list[int]:
        content = text.encode()
        found = (ctypes.c_int32 * (2 * len(content) + 16))()
        count = self._library.llama_tokenize(
            self._vocabulary, content, len(content), found, len(found), whole_prompt, True
        )
        return found[:count]

    def ends(self) -> list[int]:
        tokens = self._library.llama_vocab_n_tokens(self._vocabulary)
        return [token for token in range(tokens) if self._library.llama_vocab_is_eog(self._vocabulary, token)]


def _library() -> ctypes.CDLL:
    import xllamacpp

    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    pointer, number, truth = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
    library.llama_model_default_params.restype = _Parameters
    library.llama_model_load_from_file.argtypes, library.llama_model_load_from_file.restype = (
        [ctypes.c_char_p, _Parameters],
        pointer,
    )
    library.llama_model_get_vocab.argtypes, library.llama_model_get_vocab.restype = [pointer], pointer
    library.llama_tokenize.argtypes = [pointer, ctypes.c_char_p, number, ctypes.POINTER(number), number, truth, truth]
    library.llama_vocab_n_tokens.argtypes = [pointer]
    library.llama_vocab_is_eog.argtypes, library.llama_vocab_is_eog.restype = [pointer, number], truth
    return library


def main() -> None:
    """Write the file."""
    library, cases = _library(), texts()
    with TemporaryDirectory() as folder:
        files = [vocabulary.write(Path(folder, f"{name}.gguf")) for name, vocabulary in vocabularies().items()]
        found = {file.stem: _facts(_Llama(library, file), cases) for file in (*files, *map(Path, sys.argv[1:]))}
    content = {"texts": digest_of_texts(cases), "vocabularies": found}
    EXPECTED.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0))


def digest_of_texts(cases: Sequence[str]) -> str:
    """Return a hash of the texts, which shows that the ids belong to other ones."""
    return blake2b("\0\0".join(cases).encode(), digest_size=16).hexdigest()


def _facts(llama: _Llama, cases: Sequence[str]) -> dict[str, Any]:
    digests = "".join(digest(llama.ids(text)) for text in cases)
    return {"digests": digests, "prompt": llama.ids("a", whole_prompt=True), "ends": llama.ends()}


if __name__ == "__main__":
    main()
