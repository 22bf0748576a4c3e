"""Runs of the product's scheduler and block manager on a virtual clock, without a model."""
