"""A Kafka broker on this machine, for tests and for first experiments. It listens on loopback only and replicates
nothing."""
