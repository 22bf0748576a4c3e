"""Seeded faults in the product's syntax trees, and the share of them that the tests find."""
