"""What load looks like: when requests arrive, and how long they are."""
