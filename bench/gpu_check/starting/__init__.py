"""What the part `start` needs: a checkpoint on disk, the stages of a start with their memory, and steps."""
