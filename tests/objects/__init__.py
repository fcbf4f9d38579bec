"""Object stores as roots and paths: a real server, a lax one, and broken networks."""
