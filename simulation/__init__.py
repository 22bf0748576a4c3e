"""Runs the product's own processes in one thread on a virtual clock and a virtual network, in an order from one seed."""
