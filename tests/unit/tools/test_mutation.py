"""The mutants of a small module: listed, sampled by seed, and compiled with their one change."""

from typing import Any

from tools.mutation.mutants import compiled, mutants, sample

SOURCE = """
class Limit:
    def over(self, value):
        if value > 3:
            return True
        return False
"""


def test_each_place_has_a_mutant_with_its_own_id() -> None:
    found = mutants("limit.py", SOURCE)
    assert sorted(m.kind for m in found) == ["compare", "condition"] + ["constant"] * 3 + ["return"] * 2
    assert len({m.id for m in found}) == len(found)


def test_a_seed_gives_the_same_sample() -> None:
    found = mutants("limit.py", SOURCE)
    assert sample(found, 3, 7) == sample(list(reversed(found)), 3, 7)
    assert len(sample(found, 99, 7)) == len(found)


def test_every_mutant_of_the_module_answers_something_else() -> None:
    def answers(code: Any) -> list[object]:
        names: dict[str, Any] = {}
        exec(code, names)
        return [names["Limit"]().over(value) for value in (2, 3, 4)]

    right = answers(SOURCE)
    assert right == [False, False, True]
    assert all(answers(compiled(mutant, SOURCE)) != right for mutant in mutants("limit.py", SOURCE))
