"""Authentication, limits of tenants, admission control, slow clients."""
