"""One Kafka broker on this machine, for tests and for trying things out. Loopback only, nothing replicated."""
