"""One model on one accelerator group: the queue, the batch, the KV bytes, paged attention, sampling.

Synchronous, without network or clock of its own: what it needs from a block manager is the protocol of `blocks`.
"""
