"""The gateway's HTTP front: OpenAI's interface, and what vLLM's users add to it."""
