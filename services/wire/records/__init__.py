"""Records of operations and of requests: files of messages, written on their own thread, and read for replay."""
