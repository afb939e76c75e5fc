"""The tasks of the three ways: answers and thoughts by independent evaluation, in the tokenizer of models/coin."""

import random
import re
from pathlib import Path

import pytest

from models import thinking_model
from models.demo_tokenizer import load_tokenizer
from models.tasks import two_hop
from models.tasks.registry import KINDS, TASKS, answer_of, completion
from models.thinking_phrases import NAMES
from models.thinking_tokenizer import gold, thought_ids

COIN = Path(thinking_model.__file__).parent / "coin"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(COIN)


def fresh(task):
    rng = random.Random(7)
    training = [TASKS[task].training(rng, 5) for _ in range(200)]
    return [*training, *(sample for steps in TASKS[task].lengths for sample in TASKS[task].samples(steps, 3, 9))]


def test_programs_run_as_python():
    for sample in fresh("variables"):
        [(text, asked)] = re.findall(r"(.*)\. What is (.)\? A:", sample.prompt)
        values, thoughts = dict[str, int](), list[str]()
        for number, line in enumerate(text.split(",")):
            exec(line, {"__builtins__": {}}, values)
            thoughts += ["".join(str(values[name] % 10) for name in "abc")] if number > 2 else []
        assert (sample.answer, sample.thoughts) == (f" {values[asked] % 10}.", tuple(thoughts))


def hops_of(sample):
    """Return the people on the way, from the graph, and the relations."""
    people, relations = re.findall(r"from (\w+)", sample.prompt), re.findall(r"to the (\w+)", sample.prompt)
    for relation in relations:
        people.append(two_hop.graph()[relation][people[-1]])
    return people, relations


def test_hops_follow_the_graph_and_training_has_no_held_out_triple():
    assert all(sorted(ends.values()) == sorted(ends) for ends in two_hop.graph().values())
    for sample in fresh("two-hop"):
        people, _ = hops_of(sample)
        assert sample.thoughts == tuple(f" {person}" for person in people[1:])
        assert sample.answer == f" {people[-1]}."
    held, rng = two_hop.held_out(), random.Random(3)
    assert 0.1 < len(held) / (40 * 16) < 0.3
    for _ in range(300):
        people, relations = hops_of(two_hop.training_sample(rng, 5))
        assert not held & set(zip(people, relations, relations[1:], strict=False))
    for sample in two_hop.samples(2, 20, 1):
        people, relations = hops_of(sample)
        assert (people[0], *relations) in held


@pytest.mark.parametrize("task", TASKS)
def test_the_tokenizer_of_the_coin_model_covers_every_task(tokenizer, task):
    """Each event ends in its own chunk, thoughts fit into the model's limit, and text survives the tokenizer."""
    most = thinking_model.Thinking().max_thought_tokens
    assert all(len(tokenizer.encode(f" {word}").ids) == 1 for word in (*NAMES, *two_hop.RELATIONS))
    for sample in fresh(task):
        ids, thoughts = gold(tokenizer, sample)
        assert tuple(filter(None, thoughts)) == sample.thoughts
        assert all(len(thought_ids(tokenizer, thought)) <= most for thought in thoughts)
        for kind in KINDS:
            text = completion(sample, kind)
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
            assert answer_of(text) == sample.answer
        assert tokenizer.decode(ids) == sample.prompt


def test_training_has_at_most_ten_steps():
    rng = random.Random(5)
    for task in TASKS.values():
        assert {len(task.training(rng, 3).thoughts) for _ in range(500)} == set(range(11))
