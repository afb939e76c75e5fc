"""What `baton profile --live` makes of what it saw; that it sees anything is tested on a real cluster (tests/e2e)."""

from __future__ import annotations

import pytest

from baton.cli.profile_live import Seen, together


def test_only_gaps_in_which_all_decoded_count():
    """The second begins at 1.0 and ends at 1.3: what came before and after was decoded with fewer rows."""
    first = Seen(0.0, [0.1, 0.2, 1.0, 1.1, 1.2, 1.3, 9.0])
    second = Seen(0.0, [1.0, 1.1, 1.2, 1.3])
    gaps = together([first, second], rows=2, length=16)
    assert gaps.seconds == pytest.approx([0.1] * 5)
    assert (gaps.rows, gaps.context) == (2, 2 * (16 + 5.5 / 2))


def test_requests_that_never_met_count_as_they_are():
    gaps = together([Seen(0.0, [0.1, 0.2]), Seen(0.0, [5.0, 5.3])], rows=2, length=16)
    assert gaps.seconds == pytest.approx([0.1, 0.3])
