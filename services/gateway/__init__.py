"""The gateway: serves clients over gRPC and HTTP, and sends their requests to engines."""
