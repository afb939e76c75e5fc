"""The wordings of the coin stories.

In an event the bar follows the word that completes it: the coin is turned from there on. `{n}` is someone, `{m}`
someone else, `{s}` a side of the coin, `{S}` the same at the start of a sentence.
"""

from __future__ import annotations

NAMES = """Alice Bob Carol Dave Eve Frank Grace Henry Iris Jack Karen Liam Mona Nick Olga Paul Rita Sam Tina Victor
Wendy Zoe Anna Ben Clara Dan Ella Finn Hugo Julia Kate Leo Maria Noah Oscar Peter Ruth Sara Tom Lucy""".split()
PEOPLE = [
    *("the teacher", "the old man", "a girl", "the boy", "my sister", "her brother", "the captain", "a stranger"),
    *("the cook", "our neighbour", "he", "she", "someone", "the driver", "a friend", "the nurse"),
]
SYLLABLES = """ba be bri da do fe ga gre ha ja ka ki la li lo ma mi mo na ne no pa pe qua ra ri ro sa sha ta te tri
va vi xa yu za""".split()

OPENINGS = """
    A coin's state is {s}.
    The coin's state is {s}.
    The state of the coin is {s}.
    The state of a coin is {s}.
    A coin shows {s}.
    The coin shows {s} at first.
    The coin starts as {s}.
    A coin starts at {s}.
    There is a coin on the table. It shows {s}.
    A coin lies on the desk with {s} up.
    {N} has a coin. Its state is {s}.
    {N} puts a coin on the table, {s} up.
    At the start the coin is {s}.
    In the beginning the coin shows {s}.
    A coin is {s} up.
    {S} is what the coin shows.
    {S} is the state of the coin.
    Initially, the coin is {s}.
    The coin is now {s}.
    Here is a coin. It is {s}.
"""
EVENTS = """
    {n} flips|
    {n} flips|
    {n} flips| it
    {n} flips| the coin
    {n} flips| the coin
    {n} flips| the coin again
    {n} flips| the coin on the table
    {n} flips| it once
    {n} quickly flips| it
    {n} takes the coin and flips| it
    {n} waits a moment and flips| the coin
    {n} also flips|
    {n} flipped| the coin
    {n} flipped| it
    {n} turns the coin over|
    {n} turns it over|
    {n} turned the coin over|
    the coin is flipped| by {n}
    the coin is flipped|
    it is flipped| by {n}
    the coin gets flipped|
    the coin is turned over| by {n}
    {n} gives the coin a flip|
    {n} gives it a flip|
    they flip| the coin
    I flip| it
    we flip| the coin together
    {n} and {m} flip| the coin together
"""
# Clauses about the coin in which nothing happens to it.
IDLE = """
    {n} does not flip
    {n} does not flip the coin
    {n} does not flip it
    {n} doesn't flip
    {n} doesn't flip the coin
    {n} did not flip the coin
    {n} never flips it
    {n} will not flip it
    {n} won't flip the coin
    {n} does not turn the coin over
    {n} doesn't turn it over
    the coin is not flipped by {n}
    the coin is not flipped
    they do not flip it
    I don't flip the coin
    nobody flips the coin
    nobody flips
    no one flips it
    nobody turns it over
    {n} looks at the coin
    {n} leaves the coin alone
    {n} touches the coin
    {n} passes the coin to {m}
    {n} gives the coin to {m}
    {n} talks about the coin with {m}
    {n} wants to flip the coin but does not
    {n} thinks of flipping the coin
    {n} is not allowed to flip it
    {n} could flip it
    {n} would flip the coin
    {n} may flip the coin later
    {n} might turn it over
    {n} must not flip it
    {n} says that nobody will flip it
    {n} tells {m} that he cannot flip the coin
    {n} asks {m} not to flip the coin
    {n} bets on {s}
    {n} hopes for {s}
    {n} likes {s} better
    the coin stays where it is
    nothing happens to the coin
    {n} does nothing
    {n} waits
"""
# Clauses about other things. The words in braces are in FILLERS_OF.
OTHER = """
    {n} drinks {drink}
    {n} drinks {drink} in the {room}
    {n} reads a book about {things}
    {n} goes to the {room}
    {n} sits in the {room} and reads
    {n} opens the {opened}
    {n} closes the {opened}
    {n} turns on the lamp
    {n} turns to {m}
    {n} looks for {things}
    {n} gives {m} some {drink}
    {n} tells {m} about {things}
    {n} takes a {colour} hat and leaves
    {n} sings a song
    {n} eats a {colour} apple
    {n} sells {things} in the {room}
    {n} and {m} talk about {things}
    {n} has a {colour} {pet}
    the {pet} sleeps in the {room}
    the {pet} sees {m}
    a {colour} {pet} walks over the table
    it rains
    it is a {weather} day
    the wind is {weather}
    there are {things} in the {room}
    the {opened} is {colour}
    the clock on the wall is {colour}
"""
FILLERS_OF = {
    "drink": "tea milk water coffee juice soup".split(),
    "room": "kitchen garden park school library forest market station office hall".split(),
    "things": "ships horses trains flowers stars books stones birds apples maps rivers".split(),
    "opened": "door window box bag letter drawer".split(),
    "colour": "red blue green yellow black white brown".split(),
    "pet": "cat dog bird horse mouse".split(),
    "weather": "warm cold dark long quiet strange".split(),
}
# A join with a full stop begins a sentence. After other joins, the clause continues in lower case.
JOINS = [
    ". ",
    ". ",
    ". ",
    ". ",
    ". Then ",
    ". Next, ",
    ". After that, ",
    ", then ",
    ", then ",
    ", and ",
    " and then ",
    ". Later ",
]
QUESTIONS = """
    What's the state? A:
    What's the state? A:
    What's the state of the coin? A:
    What is the state? A:
    What is the state of the coin? A:
    What is the coin's state now? A:
    What does the coin show? A:
    What does the coin show now? A:
    Which side is up? A:
    Is it heads or tails? A:
    Heads or tails? A:
    Q: What's the state? A:
    Q: Which side of the coin is up now? A:
    Question: what is the state of the coin? Answer:
    What's the state? Answer:
    The state of the coin is
    The coin's state is now
    Now the coin shows
    In the end the coin is
"""


def lines(block: str) -> list[str]:
    """Return the lines of a table above."""
    return [line.strip() for line in block.strip().splitlines()]
