"""KV events over ZeroMQ, in the wire format of vLLM: the publisher, and a listener. Needs the extra `routers`."""
