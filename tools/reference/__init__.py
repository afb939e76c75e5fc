"""Generates the tables of docs/reference from the code.

    python -m tools.reference             # write them (`make fmt` does)
    python -m tools.reference --check     # exit code 1 if a page is stale

A page holds text by hand and generated parts between two marker lines. `pages` finds and fills the parts; the other
modules make them.
"""
