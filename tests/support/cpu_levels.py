"""Marks that run tests of compiled kernels at each level of instructions."""

import pytest


def on_levels(*levels: str) -> list[pytest.MarkDecorator]:
    """Return the marks for these levels on one thread, and for the best one of the machine also on two. Single kernels
    are short enough for that during other tests.
    """
    runs = [*((level, 1) for level in levels), ("native", 2)]
    return [
        pytest.mark.slow,
        pytest.mark.usefixtures("level", "threads"),
        pytest.mark.parametrize(
            ("level", "threads"), runs, ids=[f"{level}, {n} threads" for level, n in runs], indirect=True
        ),
    ]
