"""What every service needs to run as a process."""
