from collections.abc import Callable, Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.tokenizer import Tokenizer

LINES = ["the cat sat on the mat", "Grüße aus Köln", "你好 世界", "🙂🙃 ¡olé!", "  two  spaces, then more"]
SPECIAL = [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]


def byte_level() -> tokenizers.Tokenizer:
    """Like GPT-2, Llama 3, Qwen and SmolLM: each token is a string of bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens(["�"])
    return backend


def byte_level_without_first_space() -> tokenizers.Tokenizer:
    """The text of a token depends on its place, although the vocabulary is byte-level."""
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """Like Llama 2 and Gemma: words marked with the space before them, and byte tokens for unknown characters."""
    pieces = ["<unk>", "▁", "a", "b", "▁a", "▁the", "▁▁", "é", "好", "�"] + [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


def metaspace() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("a", -1.0), ("▁a", -1.0)], 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(SPECIAL)
    return backend


def word_pieces() -> tokenizers.Tokenizer:
    vocabulary = {piece: index for index, piece in enumerate(["[UNK]", "un", "##able", "##.", "do", ".", "'", "s"])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(SPECIAL)
    return backend


def without_decoder() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    backend.add_special_tokens(SPECIAL)
    return backend


KINDS: list[Callable[[], tokenizers.Tokenizer]] = [
    byte_level,
    byte_level_without_first_space,
    byte_fallback,
    metaspace,
    word_pieces,
    without_decoder,
]
BACKENDS = {kind.__name__: kind() for kind in KINDS}
TOKENIZERS = {kind: Tokenizer(backend, ChatTemplate(None, {})) for kind, backend in BACKENDS.items()}


class CountingTokenizer(Tokenizer):
    decoded_tokens = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded_tokens += len(ids)
        return super().decode(ids, skip_special_tokens)


def ids_of_byte_tokens(data: bytes) -> list[int]:
    vocabulary = BACKENDS["byte_fallback"].get_vocab()
    return [vocabulary[f"<0x{byte:02X}>"] for byte in data]


def ids_of_bytes(data: bytes) -> list[int]:
    """Return one byte-level token for each byte, without merges."""
    vocabulary, letters = BACKENDS["byte_level"].get_vocab(), dict(letters_of_bytes())
    return [vocabulary[letters[byte]] for byte in data]


REPLACEMENT = BACKENDS["byte_fallback"].get_vocab()["�"]


def letters_of_bytes() -> list[tuple[int, str]]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [(byte, chr(byte)) for byte in printable] + [(byte, chr(256 + n)) for n, byte in enumerate(others)]


def streamed(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True) -> list[str]:
    """Return the text of one push for each token, then that of `finish`."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_streamed_text_equals_the_text_of_all_ids_decoded_at_once(
    kind: str, data: st.DataObject, skip_special_tokens: bool
) -> None:
    tokenizer = TOKENIZERS[kind]
    some_ids = st.lists(st.integers(0, tokenizer.vocabulary_size + 2), max_size=9)
    pushes = data.draw(st.lists(some_ids, max_size=9))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    pieces = [detokenizer.push(ids) for ids in pushes]
    everything = [token_id for ids in pushes for token_id in ids]
    assert "".join(pieces) + detokenizer.finish() == tokenizer.decode(everything, skip_special_tokens)


@given(st.lists(st.sampled_from(["好".encode(), "🙂".encode(), b"\x80", b"\xf0\x9f", b"a"]), max_size=30).map(b"".join))
def test_valid_and_invalid_bytes_stream_as_they_are_decoded_at_once(data: bytes) -> None:
    for kind, ids in [("byte_level", ids_of_bytes(data)), ("byte_fallback", ids_of_byte_tokens(data))]:
        assert "".join(streamed(TOKENIZERS[kind], ids)) == TOKENIZERS[kind].decode(ids)


@pytest.mark.parametrize(
    ("kind", "ids", "pieces"),
    [
        ("byte_level", ids_of_bytes("é🙂".encode()), ["", "é", "", "", "", "🙂", ""]),
        ("byte_level", ids_of_bytes(b"\x80\x80ab"), ["", "�", "�a", "b", ""]),
        ("byte_level", ids_of_bytes("a🙂".encode()[:-1]), ["a", "", "", "", "�"]),
        ("byte_fallback", [*ids_of_byte_tokens("🙂".encode()), 4], ["", "", "", "", "🙂 a", ""]),
        (
            "byte_fallback",
            [*ids_of_byte_tokens(b"\xe5\xa5\xbd\x80\x80a"), 4],
            ["", "", "", "����", "�", "�", " a", ""],
        ),
        ("byte_fallback", [REPLACEMENT, *ids_of_byte_tokens(b"\x80")], ["�", "�", ""]),
        ("byte_fallback", [4, 4, 1, 4], ["a", " a", " ", " a", ""]),
        ("metaspace", [3, 3, 1, 3], ["a", " a", " ", " a", ""]),
    ],
    ids=[
        "a character of several tokens is returned with its last token",
        "invalid bytes are returned with the next token",
        "an incomplete character is returned by finish",
        "a run of byte tokens is returned when it ends",
        "a run of byte tokens is returned with its first invalid byte",
        "a generated replacement character is kept before an invalid run",
        "only the first space of a stream is dropped",
        "only the first space of a stream is dropped by metaspace",
    ],
)
def test_text_is_returned_as_soon_as_it_is_final(kind: str, ids: list[int], pieces: list[str]) -> None:
    assert streamed(TOKENIZERS[kind], ids) == pieces


def test_tokens_of_complete_characters_are_returned_at_once() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("the cat sat on the mat")
    assert streamed(tokenizer, ids) == [*(tokenizer.decode([token_id]) for token_id in ids), ""]


def test_a_second_finish_returns_nothing() -> None:
    detokenizer = Detokenizer(TOKENIZERS["byte_level"])
    detokenizer.push(ids_of_bytes(b"\xf0"))
    assert (detokenizer.finish(), detokenizer.finish()) == ("�", "")


def test_special_tokens_are_returned_on_request() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [0, *ids_of_bytes(b"a"), 1]
    assert streamed(tokenizer, ids, skip_special_tokens=True) == ["", "a", "", ""]
    assert streamed(tokenizer, ids, skip_special_tokens=False) == ["<s>", "a", "</s>", ""]


@pytest.mark.parametrize(
    ("kind", "ids_of"),
    [("byte_level", ids_of_bytes), ("byte_fallback", ids_of_byte_tokens)],
)
def test_the_cost_of_a_token_does_not_depend_on_the_length_of_the_stream(
    kind: str, ids_of: Callable[[bytes], list[int]]
) -> None:
    tokenizer = CountingTokenizer(BACKENDS[kind], ChatTemplate(None, {}))
    plain = [tokenizer.vocabulary_size - 3]
    ids = ids_of(b"\x80" * 1000) + plain + ids_of("🙂".encode() * 500) + plain * 1000
    streamed(tokenizer, ids)
    assert 0 < tokenizer.decoded_tokens < 10 * len(ids)


def test_a_byte_level_token_of_complete_characters_is_decoded_once() -> None:
    tokenizer = CountingTokenizer(BACKENDS["byte_level"], ChatTemplate(None, {}))
    ids = tokenizer.encode("the cat") * 100
    assert "".join(streamed(tokenizer, ids)) == "the cat" * 100
    assert tokenizer.decoded_tokens == len(set(ids))


def test_unknown_ids_have_no_text_and_are_not_stored() -> None:
    texts = TOKENIZERS["byte_level"].texts(skip_special_tokens=True)
    known = len(texts)
    assert [texts[TOKENIZERS["byte_level"].vocabulary_size + offset] for offset in range(3)] == [""] * 3
    assert len(texts) == known
