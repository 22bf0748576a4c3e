"""Removes what makes each step of transformers' modules wait for a GPU although it changes nothing here."""

from typing import Any

# Rotations that transformers computes again for positions behind the context that is served (`context_tokens`). It
# compares them with the positions of each step.
_VARYING = ("dynamic", "longrope")


def avoid_waits(model: Any) -> None:
    """Let the modules of a served model neither check their rotations nor search their tokens for padding."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fixed(kinds)
        elif isinstance(kinds, dict):
            module.rope_type = {layer: _fixed(kind) for layer, kind in kinds.items()}
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None


def _fixed(kind: str) -> str:
    return "default" if any(name in kind for name in _VARYING) else kind
