"""What must be true: of managers, engines, and what clients receive."""
