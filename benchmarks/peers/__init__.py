"""One process for each engine that Baton is compared with, each in its own environment."""
