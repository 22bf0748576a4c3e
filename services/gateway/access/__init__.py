"""Who may call, and how much at a time."""
