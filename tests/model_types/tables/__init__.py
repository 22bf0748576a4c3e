"""Configurations of model types as published, and variants of them."""
