"""Assembles an engine from its settings: one process, or rank 0 of several."""

from services.engine.settings import EngineSettings
from services.engine.startup.parts import Parts


def assemble(settings: EngineSettings) -> Parts:
    """Load the model. Raises ModelUnsupported, InvalidSetting, or RankFailed if another rank cannot start."""
    if settings.tensor_parallel > 1:
        from services.engine.ranks.assembly import assemble_ranks

        return assemble_ranks(settings)
    from services.engine.startup import assembly

    return assembly.assemble(settings)
