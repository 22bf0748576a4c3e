"""Memory of KV blocks that describes itself, so that it can be used again when its engine has ended."""
