"""`make gpu-check`: what Quire does on a GPU, checked and measured by one command on a machine that has little installed."""
