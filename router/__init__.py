"""The router: takes requests, chooses workers, carries each request through its life."""
