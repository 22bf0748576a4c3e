"""Block managers that reserve contiguous memory, as the systems that the PagedAttention paper compares with."""
