"""Mutation testing: change one expression or statement of the product, and see whether a test fails.

`sites` lists the possible changes, `session` runs tests on them in forks of one collected pytest. `__main__` is the
program.
"""
