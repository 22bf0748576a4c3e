"""The gateway's HTTP API: OpenAI's endpoints with vLLM's extensions."""
