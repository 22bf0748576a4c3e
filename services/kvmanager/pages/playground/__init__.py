"""The sandbox: a pool operated by hand, compared with contiguous reservation for the same sequences."""
