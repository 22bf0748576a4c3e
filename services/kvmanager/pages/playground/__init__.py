"""A pool that a person drives by hand, beside what contiguous reservation would hold of the same sequences."""
