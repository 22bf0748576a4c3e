"""Every causal model type of transformers as tiny random checkpoints, compared with transformers' own `generate`."""
