"""No configuration declares more layers or tokens than its tensors have, but some types run layers again."""

import re
from pathlib import Path
from typing import Any

import pytest

from services.models.files.bounded_json import InvalidModelFile
from services.models.files.folder_check import check_folder
from tests.sound_folder import write_sound_folder

STACKED = {"model_type": "hrm_text", "rope_theta": None, "num_hidden_layers": 8}


@pytest.mark.parametrize("changed", [STACKED | {"num_layers_per_stack": 1}, {"model_type": "moshi", "vocab_size": 3}])
def test_layers_that_are_run_again_and_rows_of_no_text_are_accepted(changed: dict[str, Any], tmp_path: Path) -> None:
    check_folder(write_sound_folder(tmp_path, **changed))


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        (STACKED | {"num_layers_per_stack": 2}, "num_layers_per_stack is 2, but its files have tensors of 1 layers"),
        (STACKED, "num_hidden_layers is 8, but its files have tensors of 1 layers"),
        (STACKED | {"num_layers_per_stack": 1, "H_cycles": 10**9}, "H_cycles must be at most 1024, not 1000000000"),
        ({"num_hidden_layers": 8, "num_layers_per_stack": 1}, "num_hidden_layers is 8, but its files have tensors"),
        ({"model_type": "moshi"}, r"vocab_size is 4, but tensor model.embed_tokens.weight has shape \[4, 8\]"),
        ({"vocab_size": 3}, r"vocab_size is 3, but tensor model.embed_tokens.weight has shape \[4, 8\]"),
    ],
)
def test_more_layers_or_tokens_than_the_tensors_have_are_refused(
    changed: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModelFile) as refused:
        check_folder(write_sound_folder(tmp_path, **changed))
    assert re.match(f"config.json: {fault}", str(refused.value))
