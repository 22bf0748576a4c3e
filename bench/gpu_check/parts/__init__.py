"""The measurements of `make gpu-check`: a module for each part, see bench.gpu_check.budgets."""
