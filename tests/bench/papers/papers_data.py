"""A folder with small traces of our own, in the formats of the recorded ones."""

import random
from pathlib import Path


def write_traces(folder: Path) -> Path:
    """Write the files that simulations read: log-normal lengths, as those of chats are."""
    draw = random.Random(1)

    def rows(count: int, prompt: float, output: float) -> str:
        pairs = [(draw.lognormvariate(prompt, 1.0), draw.lognormvariate(output, 1.0)) for _ in range(count)]
        return "".join(f"{1 + int(one) % 1000},{1 + int(other) % 1000}\n" for one, other in pairs)

    columns = {
        "sharegpt_opt_lengths.csv": "prompt_tokens,output_tokens",
        "alpaca_lengths.csv": "prompt_tokens,output_tokens",
        "sharegpt_8k_lengths.csv": "num_prefill_tokens,num_decode_tokens",
    }
    for name, header in columns.items():
        (folder / name).write_text(f"{header}\n{rows(400, 4.6, 5.4)}")
    (folder / "newstest2014_en.txt").write_text("a short sentence of seven words .\n" * 20)
    return folder
