"""The blocks of one tier: reference counts, keys, marks, and the two queues of the eviction order."""
