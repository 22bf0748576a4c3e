"""Of image-text checkpoints the text part is served: it gives the tokens and logits of transformers' whole model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.attention import TorchBackend
from engine.errors import ModelUnsupported
from engine.model.checkpoint import Checkpoint
from engine.model.loading import load_model
from engine.model.model_shape import read_shape
from engine.native.formats.image_text import IMAGE_TEXT_TYPES, text_name
from engine.native.llama_weights import FileWeights, ModuleWeights
from engine.parallel.loading import ModelFolder
from engine.run.runner import ModelRunner
from engine.schedule.step_plan import Work
from tests.engine.families import CONTEXT, WINDOW
from tests.engine.image_text import IMAGE_TEXT, model_type_of, write_image_text
from tests.engine_in_process import GREEDY, ModelEngine, loaded_model
from tests.reference import near_ties, reference_model

BLOCK_SIZE = 4
MAX_TOKENS = 8
LENGTHS = (1, WINDOW + 1, 40, CONTEXT - MAX_TOKENS)
FEW = 1
CPU = torch.device("cpu")
# transformers' whole models of Cohere leave out the factor of the logits that their text model has.
UNSCALED = ("aya_vision", "cohere2_vision")

Prompt = Callable[[int], list[int]]
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def image_text(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folders: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp("image-text") / case
            write_image_text(case, folders[case])
        return folders[case]

    return make


@pytest.fixture
def llava(image_text: Folder, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(image_text("llava"), tmp_path / "llava"))


def change(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_every_served_type_is_compared() -> None:
    assert {model_type_of(case) for case in IMAGE_TEXT} == IMAGE_TEXT_TYPES


def test_the_documentation_names_every_type() -> None:
    document = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert [kind for kind in IMAGE_TEXT_TYPES if f"`{kind}`" not in document] == []


@pytest.mark.parametrize("case", IMAGE_TEXT)
def test_the_text_part_gives_the_tokens_of_the_whole_model(
    image_text: Folder, random_prompt: Prompt, case: str
) -> None:
    folder, prompts = image_text(case), [random_prompt(length) for length in LENGTHS]
    engine = ModelEngine(folder, block_size=BLOCK_SIZE, token_budget=16)
    answers = engine.generate(prompts, MAX_TOKENS)
    assert near_ties(folder, prompts, answers, MAX_TOKENS) <= FEW
    assert len({token for answer in answers for token in answer}) > MAX_TOKENS, "the checkpoint is degenerate"


@pytest.mark.parametrize("case", IMAGE_TEXT)
def test_the_text_part_gives_the_logits_of_the_whole_model(
    image_text: Folder, random_prompt: Prompt, case: str
) -> None:
    folder, prompt = image_text(case), random_prompt(40)
    loaded = loaded_model(folder)
    runner = ModelRunner(loaded, TorchBackend(loaded.geometry, 64, 2), 64)
    with torch.inference_mode():
        [ours] = runner.forward((Work(1, tuple(prompt), 0, (1,), True, GREEDY),))
        theirs = reference_model(folder)(torch.tensor([prompt])).logits[0, -1]
    factor = loaded.model.config.logit_scale if case in UNSCALED else 1.0
    torch.testing.assert_close(ours, theirs * factor, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", IMAGE_TEXT)
def test_a_plan_counts_the_weights_of_the_text_part(image_text: Folder, case: str) -> None:
    counted = read_shape(image_text(case), torch.float32)
    loaded = loaded_model(image_text(case))
    assert counted.parameters == sum(one.numel() for one in loaded.model.parameters())
    assert counted.parameters < sum(one.numel() for one in reference_model(image_text(case)).parameters())
    assert counted.geometry == loaded.geometry


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.model.model.norm.weight", "model.norm.weight"),
        ("language_model.norm.weight", "model.norm.weight"),
        ("model.text_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.3.self_attn.q_proj.bias", "model.layers.3.self_attn.q_proj.bias"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("visual.blocks.0.attn.qkv.weight", ""),
        ("model.visual.merger.norm.weight", ""),
        ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", ""),
        ("model.vision_model.embeddings.patch_embedding.weight", ""),
        ("model.connector.modality_projection.proj.weight", ""),
        ("model.image_newline", ""),
    ],
)
def test_tensors_are_named_as_in_a_text_model(name: str, expected: str) -> None:
    assert text_name(name) == expected


def test_the_tensors_of_a_vision_tower_are_not_read(llava: Path) -> None:
    tensors = stored(llava)
    vision = [name for name in tensors if "vision_tower" in name]
    change(llava, tensors | {name: torch.full_like(tensors[name], torch.nan) for name in vision})
    assert vision
    load_model(llava, torch.float32, CPU)
    names = Checkpoint(llava).names
    assert [name for name in names if not name.startswith(("model.layers.", "model.embed_tokens.", "model.norm."))] == [
        "lm_head.weight"
    ]


def test_a_tensor_of_the_text_part_that_its_model_lacks_is_refused(llava: Path) -> None:
    bias = "language_model.model.layers.0.self_attn.q_proj.bias"
    change(llava, stored(llava) | {bias: torch.ones(64)})
    with pytest.raises(ModelUnsupported, match=r"unknown tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_model(llava, torch.float32, CPU)


def test_a_missing_tensor_of_the_text_part_is_named(llava: Path) -> None:
    change(llava, {name: one for name, one in stored(llava).items() if not name.endswith("model.norm.weight")})
    with pytest.raises(ModelUnsupported, match=r"lack the tensor model\.norm\.weight"):
        load_model(llava, torch.float32, CPU)


@pytest.mark.parametrize("tied", [True, False])
def test_the_outer_configuration_ties_the_embeddings(tmp_path: Path, random_prompt: Prompt, tied: bool) -> None:
    inner = IMAGE_TEXT["mistral3"]["text_config"] | {"tie_word_embeddings": not tied}
    write_image_text("mistral3", tmp_path, tie_word_embeddings=tied, text_config=inner)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ("language_model.lm_head.weight" in file.keys()) is not tied  # noqa: SIM118 - it is no dictionary
    prompts = [random_prompt(40)]
    answers = ModelEngine(tmp_path, block_size=BLOCK_SIZE).generate(prompts, MAX_TOKENS)
    assert near_ties(tmp_path, prompts, answers, MAX_TOKENS) <= FEW


def test_what_the_text_configuration_does_not_say_has_the_defaults_of_its_class(
    llava: Path, random_prompt: Prompt
) -> None:
    path = llava / "config.json"
    config = json.loads(path.read_text())
    for name in ("model_type", "rms_norm_eps", "rope_parameters", "hidden_act"):
        del config["text_config"][name]
    path.write_text(json.dumps(config))
    prompts = [random_prompt(40)]
    answers = ModelEngine(llava, block_size=BLOCK_SIZE).generate(prompts, MAX_TOKENS)
    assert near_ties(llava, prompts, answers, MAX_TOKENS) <= FEW


def test_a_configuration_without_a_part_for_text_is_read_as_by_transformers(
    image_text: Folder, tmp_path: Path, random_prompt: Prompt
) -> None:
    folder = Path(shutil.copytree(image_text("qwen2_vl"), tmp_path / "qwen2_vl"))
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rotation = text.pop("rope_parameters")
    flat = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": rotation["mrope_section"]}}
    (folder / "config.json").write_text(json.dumps(text | config | flat))
    prompts = [random_prompt(40)]
    answers = ModelEngine(folder, block_size=BLOCK_SIZE).generate(prompts, MAX_TOKENS)
    assert near_ties(folder, prompts, answers, MAX_TOKENS) <= FEW


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, r"quantized \(hqq, 4 bits\)"),
        ({"text_config": {"model_type": "mllama_text_model"}}, "text part of type 'mllama_text_model'"),
        ({"rms_norm_eps": 1e-05}, "has rms_norm_eps 1e-05, but its text_config 1e-06"),
        ({"model_type": "blip-2"}, "models of type 'blip-2' are no causal language models"),
    ],
)
def test_other_checkpoints_are_refused(llava: Path, changed: dict[str, object], message: str) -> None:
    path = llava / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(ModelUnsupported, match=message):
        load_model(llava, torch.float32, CPU)
    with pytest.raises(ModelUnsupported, match=message):
        read_shape(llava, torch.float32)


def test_the_decoder_of_a_cpu_reads_the_tensors_of_the_text_part(image_text: Folder) -> None:
    folder = image_text("qwen2_5_vl")
    files, modules = FileWeights(folder), ModuleWeights(loaded_model(folder).model)
    for name, one in loaded_model(folder).model.named_parameters():
        assert torch.equal(files.tensor(name), one), name  # type: ignore[arg-type]
    assert files.tied() == modules.tied()


def test_several_ranks_can_share_llama_shaped_text_parts_only(image_text: Folder) -> None:
    ModelFolder(image_text("qwen2_5_vl"), 2)
    with pytest.raises(ModelUnsupported, match="several ranks can share Llama-shaped text parts only"):
        ModelFolder(image_text("paligemma"), 2)
