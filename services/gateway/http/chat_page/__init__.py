"""The chat page: a conversation, and the blocks that its requests hold while they run."""
