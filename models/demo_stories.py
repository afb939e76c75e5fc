"""Small random stories with a question whose answer is in the prompt."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from string import Formatter

from models.demo_orders import NUMBERS
from models.demo_relations import article, ask, capital, plural

BOYS = "Tom Ben Sam Max Leo Jack Paul Dan Finn Noah Adam Peter Hugo Oscar Luke".split()
GIRLS = "Mia Anna Lily Emma Zoe Kate Ruth Nina Sara Lucy Ella Rosa Julia Clara Eva".split()
THINGS = """ball cup hat kite book pen bag box car doll coat shirt boat drum lamp chair bike plate ring spoon
balloon ribbon flower apple key blanket pillow umbrella bottle scarf""".split()
COLOURS = "red blue green yellow black white brown pink orange purple gray".split()
HOLDERS = "basket drawer bucket cupboard suitcase tent pocket cart barrel chest".split()
PLACES = "garden kitchen park school library forest market barn museum office station bakery".split()
FOODS = "tea milk bread soup cheese rice honey cake juice pizza salad chocolate".split()

FRIENDS = (
    "{n} and {m} are good friends. {n} has {c} {t}. {m} wants to play with the {t}. "
    "{n} shares the {t} with {m}. They play all day and they are happy. The end."
)
FOUND = (
    "One day {n} finds {c} {t} in the {r}. {He} picks up the {t} and takes it home. "
    "The mother of {n} says that the {t} is very nice. {n} puts the {t} on the bed. The end."
)

# prompt => answer; see `ask` for the spaces.
TEMPLATES = """
    {n} has {c} {t}. The {t} is => {hue}.
    {n} has {c} {t}. What color is the {t}? => {Hue}
    {n} has {c} {t}. What does {n} have? => {C} {t}
    {n} has {c} {t} and {d} {u}. The {t} is => {hue}.
    {n} has {c} {t} and {d} {u}. The {u} is => {tint}.
    {n} has {c} {t} and {d} {u}. What color is the {u}? => {Tint}
    {n} has {c} {t}. {m} has {d} {u}. The {t} is => {hue}.
    {n} has {c} {t}. {m} has {d} {u}. The {u} is => {tint}.
    {n} has {c} {t}. {m} has {d} {u}. What color is the {t}? => {Hue}
    {n} has {c} {t}. {m} has {d} {u}. Who has the {t}? => {n}
    {n} has {c} {t}. {m} has {d} {u}. Who has the {u}? => {m}
    {n} has {c} {t}. {m} has {d} {u}. What does {n} have? => {C} {t}
    {n} has {c} {t}. {m} has {d} {u}. What does {m} have? => {D} {u}
    {n} has {c} {t}. {m} has {d} {u}. The {t} belongs to => {n}.
    {n} has {c} {t}. {m} has {d} {u}. What do they have? => {n} has {c} {t} and {m} has {d} {u}
    {n} has {c} {t}. {m} has {d} {u}. What colors are the {u} and the {t}? => The {u} is {tint} and the {t} is {hue}
    {n} has {c} {t}. {m} has {d} {u}. What colors are the {t} and the {u}? => The {t} is {hue} and the {u} is {tint}
    {n} has {c} {t}. {m} has {d} {u}. Who has the {u} and who has the {t}? => {m} has the {u} and {n} has the {t}
    {n} has {c} {t} and {d} {u}. Tell me about the {u} and the {t}. => The {u} is {tint} and the {t} is {hue}.
    {n} puts the {t} in the {p}. The {t} is in the => {p}.
    {n} puts the {t} in the {p}. Where is the {t}? => In the {p}
    {n} puts the {t} in the {p} and the {u} in the {q}. Where is the {t}? => In the {p}
    {n} puts the {t} in the {p} and the {u} in the {q}. The {u} is in the => {q}.
    {n} gives the {t} to {m}. Who has the {t} now? => {m}
    {n} gives the {t} to {m}. Now the {t} belongs to => {m}.
    {n} is in the {r}. {m} is in the {s}. Where is {m}? => In the {s}
    {n} is in the {r}. {m} is in the {s}. Who is in the {r}? => {n}
    {n} goes to the {r}. Then {he} goes to the {s}. Now {n} is in the => {s}.
    {n} has {i} {ts}. {m} gives {n} {j} more. Now {n} has => {k} {ts}.
    {n} has {i} {ts}. {m} gives {n} {j} more. How many {ts} does {n} have now? => {K}
    {n} likes {f}. {m} likes {g}. What does {n} like? => {F}
    {n} likes {f}. {m} likes {g}. Who likes {g}? => {m}
    {n} likes {f}. {n} wants to have some => {f}.
    Say hello to {n}. => Hello, {n}!
    My name is {n}. => Hello, {n}!
    My name is {n}. What is my name? => {n}
    Write the word {t} {i} times: => {copies}.
    Repeat after me: {n} has {c} {t}. => {n} has {c} {t}.
    Repeat after me: {n} gives the {t} to {m}. => {n} gives the {t} to {m}.
    Tell a story about {n}, {m} and {c} {t}. => {friends}
    Tell a story about {n} and {c} {t} in the {r}. => {found}
"""

# Combinations that make a story unseen. Those with a held-out hash never occur in training.
COMBINATIONS = ["ntc", "mud", "ntp", "nmt", "nrs", "nfg", "nij", "ntr"]


def draw_fields(rng: random.Random) -> dict[str, str]:
    """Draw random values for every template field."""
    (n, m), (t, u) = rng.sample(BOYS + GIRLS, 2), rng.sample(THINGS, 2)
    (hue, tint), (p, q) = rng.sample(COLOURS, 2), rng.sample(HOLDERS, 2)
    (r, s), (f, g) = rng.sample(PLACES, 2), rng.sample(FOODS, 2)
    i, j = rng.randint(2, 8), rng.randint(2, 8)
    he, c, d = "he" if n in BOYS else "she", f"{article(hue)} {hue}", f"{article(tint)} {tint}"
    fields = {"n": n, "m": m, "t": t, "u": u, "hue": hue, "tint": tint, "p": p, "q": q, "r": r, "s": s, "f": f, "g": g}
    fields |= {"c": c, "d": d, "C": capital(c), "D": capital(d), "Hue": capital(hue), "Tint": capital(tint)}
    fields |= {"i": NUMBERS[i], "j": NUMBERS[j], "k": NUMBERS[i + j], "K": capital(NUMBERS[i + j]), "F": capital(f)}
    fields |= {"ts": plural(t), "he": he, "He": capital(he), "copies": " ".join([t] * i)}
    return fields | {"friends": FRIENDS.format(**fields), "found": FOUND.format(**fields)}


def reserved(prompt: str, fields: dict[str, str]) -> bool:
    """Return whether a combination in this prompt is reserved for the held-out file (about one in ten)."""
    used = {name for _, name, _, _ in Formatter().parse(prompt) if name}
    present = [combination for combination in COMBINATIONS if set(combination) <= used]
    return any(hashlib.sha256("|".join(fields[f] for f in c).encode()).digest()[0] < 26 for c in present)


def stories(rng: random.Random, held_out: bool) -> Iterator[tuple[str, str]]:
    """Yield (prompt, completion) endlessly, cycling through the templates, from one side of the split."""
    while True:
        for line in TEMPLATES.strip().splitlines():
            fields = draw_fields(rng)
            if reserved(line.partition(" => ")[0], fields) == held_out:
                yield from ((fact.prompt, fact.completion) for fact in ask("story", "", line, fields))
