"""Tests that share fixtures of a module run on one xdist worker, so that each fixture is made once."""

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test with a fixture of its module into the group of its file, if it is in no other group."""
    for item in items:
        if shares_fixtures(item) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))


def shares_fixtures(item: pytest.Item) -> bool:
    """Return whether a fixture of the test lives as long as its module."""
    used = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    return any(fixture.scope == "module" for fixtures in used for fixture in fixtures)
