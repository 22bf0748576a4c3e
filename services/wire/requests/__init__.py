"""What requests and their outputs are as messages."""
