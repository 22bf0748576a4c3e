"""Weights of bitsandbytes: 8 bits (LLM.int8()) and floats of 4 bits (QLoRA)."""
