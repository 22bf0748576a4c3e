"""The simulated processes: the product's own services on simulated loops, without files and sockets."""
