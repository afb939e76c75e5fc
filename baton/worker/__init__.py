"""The host process of a worker: step loop, control streams, registration, heartbeat."""
