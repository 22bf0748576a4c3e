"""The tokenizer of the simulated model: each token but the last-resort end is a letter."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

_END = "<end>"
LETTERS = "abcdefg"  # of tokens 1 to 7


def write_tokenizer(folder: Path) -> None:
    """Write the files of a tokenizer into a folder."""
    vocabulary = {_END: 0} | {letter: number for number, letter in enumerate(LETTERS, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([_END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END}))


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text of tokens; the end has none."""
    return "".join(LETTERS[token - 1] for token in token_ids if token)
