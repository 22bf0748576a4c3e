"""What is sent: prompts, lengths, arrivals."""
