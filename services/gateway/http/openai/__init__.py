"""OpenAI's API: request and response bodies, and their translation to the gateway's requests."""
