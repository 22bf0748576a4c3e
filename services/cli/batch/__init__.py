"""`quire run-batch`: a file of requests in OpenAI's batch format, and its answers."""
