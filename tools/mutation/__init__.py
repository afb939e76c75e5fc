"""Mutation testing: small seeded changes of functions that the tests should notice."""
