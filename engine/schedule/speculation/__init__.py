"""Speculation without a second model: n-grams propose tokens, and the step after verifies them (decision 52)."""
