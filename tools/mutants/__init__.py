"""Mutation testing: change one expression or statement of the product, and check that a test fails.

`sites` lists the possible changes, `session` runs tests on them in forks of one collected pytest, and `__main__` is the
program.
"""
