"""Outputs of models in all dialects, as Quire and vLLM read them, and why they differ."""
