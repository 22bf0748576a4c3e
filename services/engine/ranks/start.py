"""Assembles an engine from its settings: one process, or rank 0 of several."""

from pathlib import Path

from services.engine.settings import EngineSettings
from services.engine.startup.parts import Parts
from services.engine.startup.tokenizer_files import check_tokenizer


def assemble(settings: EngineSettings) -> Parts:
    """Load the model. Raises ModelUnsupported, InvalidSetting, or RankFailed if another rank cannot start."""
    check_tokenizer(Path(settings.model))  # before the weights are loaded, which takes longer
    if settings.tensor_parallel > 1:
        from services.engine.ranks.assembly import assemble_ranks

        return assemble_ranks(settings)
    from services.engine.startup import assembly

    return assembly.assemble(settings)
