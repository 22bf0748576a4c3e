"""Runs the product's own processes in one thread on virtual time and a virtual network, in an order from one seed."""
