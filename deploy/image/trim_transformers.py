"""Removes the code of transformers that no causal language model can reach.

transformers has one package for each of some 500 architectures, most of them for images, audio and encoders. An engine
loads any architecture that `AutoModelForCausalLM` has, so those stay whole, with all that they import or name as parts.
Of the others, configurations and tokenizers stay: models share tokenizers, and a model that is not served is refused by
the name of its class.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Imports of another architecture, and configurations of parts, such as the vision tower of a model for images and text.
_IMPORT = re.compile(r"from \.\.([a-z0-9_]+)(?:\.\w+)* import|transformers\.models\.([a-z0-9_]+)")
_PART = re.compile(r"""(?:CONFIG_MAPPING\[|model_type["']?\s*[:=,]\s*|AutoConfig\.for_model\()["']([\w-]+)["']""")
_UNREACHED = (
    "modeling_",
    "generation_",
    "processing_",
    "image_processing_",
    "video_processing_",
    "feature_extraction_",
)
# From which transformers' developers generate the other files.
_SOURCES = "modular_*.py"


def unreached(models: Path) -> Iterator[Path]:
    """Yield the files below `models`, the folder of all architectures, that no causal language model reaches."""
    kept = _reached(models, {_package(models, name) for name in _causal_types()} | {"auto", "deprecated"})
    for package in sorted(models.iterdir()):
        if package.is_dir():
            yield from package.glob(_SOURCES)
            if package.name not in kept:
                yield from (file for file in sorted(package.glob("*.py")) if file.name.startswith(_UNREACHED))


def _causal_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _package(models: Path, model_type: str) -> str:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    name = model_type_to_module_name(model_type)
    return name if (models / name).is_dir() else ""


def _reached(models: Path, packages: set[str]) -> set[str]:
    """Return the packages, and those that they import or name, directly or not."""
    reached, pending = set[str](), packages - {""}
    while pending:
        package = pending.pop()
        reached.add(package)
        pending |= _named_by(models, package) - reached
    return reached


def _named_by(models: Path, package: str) -> set[str]:
    found = set[str]()
    for file in (models / package).glob("*.py"):
        if package == "auto":  # it names all, and imports each only when it is asked for
            continue
        text = file.read_text(encoding="utf-8")
        found |= {one or other for one, other in _IMPORT.findall(text)}
        found |= {_package(models, name) for name in _PART.findall(text)}
    return {name for name in found if name and (models / name).is_dir()}


def trim() -> None:
    """Delete the files, and print their size."""
    import transformers

    files = list(unreached(Path(transformers.__file__).parent / "models"))
    size = sum(file.stat().st_size for file in files)
    for file in files:
        file.unlink()
    sys.stderr.write(f"{len(files)} files of transformers, {size / 1e6:.1f} MB, are left out\n")


if __name__ == "__main__":
    trim()
