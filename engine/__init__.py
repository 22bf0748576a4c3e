"""One model on one accelerator group: the queue, the batch, the KV bytes, paged attention, sampling.

Synchronous, without network and clock. It needs a block manager with the protocol of `blocks`.
"""
