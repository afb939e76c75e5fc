import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.ordered import Heap, PrefixSums

STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "remove"]), st.integers(0, 12), st.integers(-5, 5)))


@given(STEPS)
def test_a_heap_has_the_least_first_whatever_was_put_moved_or_removed(steps):
    heap, keys = Heap[int](), dict[int, tuple[int, int]]()
    for act, item, key in steps:
        if act == "put":
            keys[item] = key, item
            heap.put(item, keys[item])
        elif item in keys:
            assert heap.remove(item) == keys.pop(item)
        assert len(heap) == len(keys)
        assert (item in heap) == (item in keys)
        if keys:
            assert (heap.least, heap.first) == min((key, item) for item, key in keys.items())
    rest = [heap.remove(heap.first) for _ in range(len(heap))]
    assert rest == sorted(keys.values())


def test_who_is_not_in_a_heap_cannot_leave_it():
    with pytest.raises(KeyError):
        Heap[int]().remove(1)


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9), st.booleans())))
def test_sums_below_a_key(steps):
    sums, amounts = PrefixSums(), list[tuple[int, int]]()
    for key, amount, leaves in steps:
        if leaves and amounts:
            gone, less = amounts.pop(amount % len(amounts))
            sums.add(gone, -less)
        sums.add(key, amount)
        amounts.append((key, amount))
        assert sums.total == sum(amount for _, amount in amounts)
        for at in (1, key, key + 1, 150, 301, 10**6):
            assert sums.below(at) == sum(amount for key, amount in amounts if key < at)
    for key, amount in amounts:
        sums.add(key, -amount)
    assert not sums._tree or not any(sums._tree.values())
