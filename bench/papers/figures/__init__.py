"""One module for each group of figures: its cases, its rows and its picture."""
