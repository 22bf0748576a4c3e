"""KV events for foreign routers: which keys the pool holds, as vLLM announces them."""
