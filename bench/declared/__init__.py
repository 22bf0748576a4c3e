"""What is declared once: the tables made from it, and how many files one more of a kind costs."""
