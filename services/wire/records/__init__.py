"""Records of operations and of requests: files of messages, written on a thread of their own and read again."""
