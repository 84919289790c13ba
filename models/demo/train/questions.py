"""All questions that the corpus asks, each with its one right answer, and which of them are held out.

A question is a pair of a phrasing and an item; one pair in eight is held out, and so is one sum (and one difference)
in ten with all of its phrasings, for sums in both orders.
"""

import random
import zlib
from dataclasses import dataclass
from itertools import product

import world
from stories import HE, OBJECTS, SHE, SPECIES, article

# the README opens with these, so they are always part of the training data
NEVER_HELD_OUT = {"What is the capital of France?", "What is 3 + 4?", "Tell me a story.", "Who are you?", "Hello!",
                  "What colour is the sky?", "What is paged attention?"}


@dataclass(frozen=True)
class Question:
    """One question with its one right answer."""

    topic: str
    item: str
    text: str
    answer: str
    short: str = ""  # the answer in one word; empty where there is none
    follow: str = ""  # the question after another of the same topic ("And Japan?"); empty where there is none
    held_out: bool = False


def one_in(n, *key):
    """Whether the key is the one in n that its checksum picks: the same in every run and on every machine."""
    return zlib.crc32("|".join(key).encode()) % n == 0


def capital_first(text):
    """The text with its first letter in upper case."""
    return text[0].upper() + text[1:]


def _ask(topic, item, texts, answer, short="", follow="", held_out=None):
    """Questions for one item in all its phrasings; held out one by one unless the item decides."""
    for text in texts:
        out = one_in(8, topic, text) if held_out is None else held_out
        yield Question(topic, item, text, answer, short, follow, out and text not in NEVER_HELD_OUT)


def _countries():
    for c, city, continent in world.CAPITALS:
        yield from _ask("capital", c, [
            f"What is the capital of {c}?", f"What's the capital of {c}?", f"Which city is the capital of {c}?",
            f"Name the capital of {c}.", f"Tell me the capital of {c}.", f"What city is the capital of {c}?",
            f"What is {c}'s capital?", f"Do you know the capital of {c}?", f"Can you tell me the capital of {c}?",
            f"The capital of {c}?", f"Capital of {c}?", f"What is the name of the capital of {c}?",
            f"What is the capital city of {c}?", f"Which city is {c}'s capital?",
        ], f"The capital of {c} is {city}.", city, f"And {c}?")
        yield from _ask("country", city, [
            f"Which country has {city} as its capital?", f"{city} is the capital of which country?",
            f"What country is {city} the capital of?", f"Of which country is {city} the capital?",
            f"Which country's capital is {city}?", f"In which country is {city}?", f"Where is {city}?",
            f"What country has the capital {city}?",
        ], f"{city} is the capital of {c}.", capital_first(c), f"And {city}?")
        if continent:
            yield from _ask("continent", c, [
                f"In which continent is {c}?", f"Which continent is {c} in?", f"On which continent is {c}?",
                f"What continent is {c} in?", f"Where is {c}?", f"Where in the world is {c}?",
            ], f"{capital_first(c)} is in {continent}.", continent, f"And {c}?")
    for city, language, name in world.NATIVE:
        yield from _ask("native name", city, [
            f"How do you write {city} in {language}?", f"What is {city} in {language}?",
            f"How is {city} written in {language}?", f"Write {city} in {language}.",
            f"What is the {language} name of {city}?", f"What do people call {city} in {language}?",
        ], f"In {language}, {city} is {name}.", name)


def _arithmetic():
    w = world.words
    for a, b in product(range(21), range(21)):
        low, high = sorted((a, b))
        out = one_in(10, "sum", str(low), str(high)) and {a, b} != {3, 4}
        yield from _ask("sum", f"{a} + {b}", [
            f"What is {a} + {b}?", f"{a} + {b}", f"{a} + {b} =", f"{a}+{b}", f"{a}+{b}=", f"What's {a} + {b}?",
            f"Calculate {a} + {b}.", f"How much is {a} + {b}?", f"What is {a} plus {b}?", f"Add {a} and {b}.",
            f"What is the sum of {a} and {b}?", f"{a} plus {b}?", f"What is {a}+{b}?", f"How much is {a} plus {b}?",
        ], f"{a} + {b} = {a + b}.", str(a + b), f"And {a} + {b}?", out)
        if a <= 12 and b <= 12:
            yield from _ask("sum in words", f"{a} + {b}", [
                f"What is {w(a)} plus {w(b)}?", f"{capital_first(w(a))} plus {w(b)}?",
                f"How much is {w(a)} plus {w(b)}?", f"Add {w(a)} and {w(b)}.",
                f"What is the sum of {w(a)} and {w(b)}?",
            ], f"{a} + {b} = {a + b}.", str(a + b), f"And {w(a)} plus {w(b)}?", out)
        out = one_in(10, "difference", str(a), str(b))
        if a < b:
            yield from _ask("negative difference", f"{a} - {b}", [
                f"What is {a} - {b}?", f"{a} - {b}", f"{a} - {b} =", f"{a}-{b}", f"What is {a} minus {b}?",
                f"Take {b} from {a}.", f"Calculate {a} - {b}.", f"How much is {a} - {b}?",
            ], f"{a} - {b} = -{b - a}.", f"-{b - a}", f"And {a} - {b}?", out)
        else:
            yield from _ask("difference", f"{a} - {b}", [
                f"What is {a} - {b}?", f"{a} - {b}", f"{a} - {b} =", f"{a}-{b}", f"{a}-{b}=", f"What's {a} - {b}?",
                f"Calculate {a} - {b}.", f"How much is {a} - {b}?", f"What is {a} minus {b}?",
                f"Take {b} from {a}.", f"Subtract {b} from {a}.", f"{a} minus {b}?", f"What is {a}-{b}?",
            ], f"{a} - {b} = {a - b}.", str(a - b), f"And {a} - {b}?", out)
            if a <= 12:
                yield from _ask("difference in words", f"{a} - {b}", [
                    f"What is {w(a)} minus {w(b)}?", f"{capital_first(w(a))} minus {w(b)}?",
                    f"How much is {w(a)} minus {w(b)}?", f"Take {w(b)} from {w(a)}.",
                ], f"{a} - {b} = {a - b}.", str(a - b), f"And {w(a)} minus {w(b)}?", out)
    for n in range(1, 50):
        yield from _ask("next number", f"after {n}", [
            f"What number comes after {n}?", f"Which number comes after {n}?", f"What comes after {n}?",
            f"What is the next number after {n}?", f"Which number follows {n}?",
        ], f"{n + 1} comes after {n}.", str(n + 1), f"And after {n}?")
        yield from _ask("next number", f"before {n}", [
            f"What number comes before {n}?", f"Which number comes before {n}?", f"What comes before {n}?",
        ], f"{n - 1} comes before {n}.", str(n - 1), f"And before {n}?")


def _things():
    for thing, verb, colour in world.COLOURS:
        yield from _ask("colour", thing, [
            f"What colour {verb} {thing}?", f"What color {verb} {thing}?", f"Which colour {verb} {thing}?",
            f"Which color {verb} {thing}?", f"Tell me the colour of {thing}.", f"What is the colour of {thing}?",
            f"What is the color of {thing}?", f"Do you know the colour of {thing}?",
            f"What colour does {thing} have?" if verb == "is" else f"What colour do {thing} have?",
        ], f"{capital_first(thing)} {verb} {colour}.", colour, f"And {thing}?")
    for a, b in world.OPPOSITES:
        for x, y in ((a, b), (b, a)):
            yield from _ask("opposite", x, [
                f"What is the opposite of {x}?", f"What's the opposite of {x}?", f"Tell me the opposite of {x}.",
                f"Which word is the opposite of {x}?", f"Opposite of {x}?", f"What is the contrary of {x}?",
            ], f"The opposite of {x} is {y}.", y, f"And of {x}?")


def _animals():
    for animal, sound, home, young, legs in world.ANIMALS:
        one = article(animal)
        if sound:
            yield from _ask("animal", f"{animal} says", [
                f"What does {one} say?", f"What sound does {one} make?", f"Which sound does {one} make?",
                f"What noise does {one} make?", f"How does {one} sound?", f"What does the {animal} say?",
            ], f"{capital_first(one)} says {sound}.", sound)
        yield from _ask("animal", f"{animal} lives", [
            f"Where does {one} live?", f"What is the home of {one}?", f"Where can I find {one}?",
            f"Where does the {animal} live?", f"Tell me where {one} lives.",
        ], f"{capital_first(one)} lives {home}.")
        if young:
            yield from _ask("animal", f"young {animal}", [
                f"What is a young {animal} called?", f"What is a baby {animal} called?",
                f"What do you call a young {animal}?", f"What do you call a baby {animal}?",
                f"What is the name for a young {animal}?",
            ], f"A young {animal} is called {article(young)}.", young)
        yield from _ask("animal", f"{animal} legs", [
            f"How many legs does {one} have?", f"How many legs has {one}?", f"How many legs does the {animal} have?",
            f"What is the number of legs of {one}?",
        ], f"{capital_first(one)} has {legs} legs.", legs)


def _calendar():
    for kind, names in (("day", world.DAYS), ("month", world.MONTHS)):
        n = len(names)
        for i, name in enumerate(names):
            after, before = names[(i + 1) % n], names[(i - 1) % n]
            yield from _ask("day and month", f"after {name}", [
                f"What {kind} comes after {name}?", f"Which {kind} comes after {name}?", f"What comes after {name}?",
                f"Which {kind} follows {name}?", f"What is the {kind} after {name}?", f"Which {kind} is after {name}?",
            ], f"{after} comes after {name}.", after, f"And after {name}?")
            yield from _ask("day and month", f"before {name}", [
                f"What {kind} comes before {name}?", f"Which {kind} comes before {name}?",
                f"What comes before {name}?", f"What is the {kind} before {name}?", f"Which {kind} is before {name}?",
            ], f"{before} comes before {name}.", before, f"And before {name}?")
    lists = [(["Name the days of the week.", "What are the days of the week?", "List the days of the week.",
               "Tell me the days of the week.", "Which days does a week have?"], ", ".join(world.DAYS) + ".", ""),
             (["Name the months of the year.", "What are the months of the year?", "List the months.",
               "Tell me the months of the year.", "Which months does a year have?", "Name the twelve months."],
              ", ".join(world.MONTHS) + ".", ""),
             (["How many days are in a week?", "How many days does a week have?", "How long is a week?"],
              "A week has seven days.", "seven"),
             (["How many months are in a year?", "How many months does a year have?", "How long is a year?"],
              "A year has twelve months.", "twelve"),
             (["How many hours are in a day?", "How many hours does a day have?", "How long is a day?"],
              "A day has 24 hours.", "24"),
             (["How many minutes are in an hour?", "How many minutes does an hour have?", "How long is an hour?"],
              "An hour has 60 minutes.", "60")]
    for texts, answer, short in lists:
        yield from _ask("day and month", answer, texts, answer, short)


def _counting():
    def numbers(span):
        return ", ".join(map(str, span)) + "."

    w = world.words
    for b in range(2, 21):
        texts = [f"Count to {b}.", f"Count up to {b}.", f"Count from 1 to {b}.", f"Can you count to {b}?",
                 f"Count to {w(b)}.", f"Can you count to {w(b)}?", f"Please count to {b}."]
        yield from _ask("counting", f"to {b}", texts, numbers(range(1, b + 1)))
        yield from _ask("counting", f"down {b}", [
            f"Count down from {b}.", f"Count backwards from {b}.", f"Count down from {w(b)}.",
        ], numbers(range(b, 0, -1)))
        for a in range(2, b - 1):
            yield from _ask("counting", f"{a} to {b}", [
                f"Count from {a} to {b}.", f"Count from {w(a)} to {w(b)}.", f"Can you count from {a} to {b}?",
            ], numbers(range(a, b + 1)))


def _told():
    """Topics whose answers are told word by word: Quire, paged attention, greetings."""
    for term, answer in world.TERMS:
        yield from _ask("paged attention", term, [
            f"What is {term}?", f"What's {term}?", f"Explain {term}.", f"Can you explain {term}?",
            f"What does {term} mean?", f"Tell me about {term}.", f"Describe {term}.", f"Define {term}.",
            f"What do you know about {term}?", f"How does {term} work?", f"What is meant by {term}?",
            f"Explain {term} to me.", f"Please explain {term}.", f"Do you know what {term} is?",
        ], answer, "", f"And {term}?")
    for topic, table in (("paged attention", world.PAGED), ("about itself", world.IDENTITY),
                         ("greeting", world.GREETINGS)):
        for texts, answer in table:
            yield from _ask(topic, answer, texts, answer)


def _refusals(rng):
    """Questions from outside of the world. Invented countries teach that an unknown name has no known capital."""
    def invented():
        syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") + rng.choice(["", "", "l", "n", "r", "s"])
                     for _ in range(rng.randrange(2, 4))]
        return capital_first("".join(syllables)) + rng.choice(["", "", "ia", "land", "stan", "ra"])

    words = dict(world.OUTSIDE_WORDS)
    words["country"] = [c for c, _, _ in world.CAPITALS]
    words["city"] = [city for _, city, _ in world.CAPITALS]
    words["nowhere"] = [invented() for _ in range(400)]
    for shape, kind in world.OUTSIDE:
        for x in words[kind]:
            yield from _ask("outside", x, [shape.format(x=x)], "I do not know that.")
    for a, b in product(range(2, 13), range(2, 13)):
        yield from _ask("outside", f"{a} * {b}", [
            f"What is {a} * {b}?", f"{a} * {b}", f"What is {a} times {b}?", f"What is {a} divided by {b}?",
            f"What is {a} / {b}?",
        ], "I can only add and subtract small numbers.")
    for _ in range(300):
        a, b = rng.randrange(21, 1000), rng.randrange(0, rng.choice([21, 100, 1000]))
        yield from _ask("outside", f"{a} {b}", [
            f"What is {a} + {b}?", f"{a} + {b}", f"What is {a} - {b}?", f"{a}+{b}", f"What is {a} plus {b}?",
        ], "I can only add and subtract small numbers.")
    for text in world.CANNOT:
        yield from _ask("cannot", text, [text, f"Please {text[0].lower()}{text[1:]}",
                                         f"Can you {text[0].lower()}{text[1:-1]}?",
                                         f"I want you to {text[0].lower()}{text[1:]}"],
                        "I can not do that. I am only a small demo model.")


def _story_requests():
    for text in ["Tell me a story.", "Tell me a short story.", "Write a story.", "Write a short story.",
                 "Can you tell me a story?", "I would like to hear a story.", "Tell me a bedtime story.",
                 "Please tell me a story.", "Do you know a story?", "A story, please.", "Another story, please.",
                 "Tell me another story."]:
        yield Question("story", "", text, "")
    for species in SPECIES:
        one = article(species)
        for text in [f"Tell me a story about {one}.", f"Write a story about {one}.", f"A story about {one}, please.",
                     f"Can you tell me a story about {one}?", f"Tell me a short story about {one}."]:
            yield Question("story", species, text, "", held_out=one_in(8, "story", text))
        for obj, _, _ in OBJECTS:
            for text in [f"Tell me a story about {one} and {article(obj)}.",
                         f"Write a story about {one} and {article(obj)}."]:
                yield Question("story", f"{species}|{obj}", text, "", held_out=one_in(8, "story", species, obj))
        for name in HE + SHE:
            text = f"Tell me a story about {one} called {name}."
            yield Question("story", f"{species}||{name}", text, "", held_out=one_in(8, "story", text))


def all_questions():
    """(questions to train on, questions held out), each a list by topic."""
    makers = [_countries(), _arithmetic(), _things(), _animals(), _calendar(), _counting(), _told(),
              _refusals(random.Random(1)), _story_requests()]
    train, held_out = {}, {}
    for question in (q for maker in makers for q in maker):
        (held_out if question.held_out else train).setdefault(question.topic, []).append(question)

    # the corpus drops marks and capitals at times, so what differs only in these is not held out
    def bare(question):
        return question.text.lower().rstrip("?.!")

    seen = {bare(q) for questions in train.values() for q in questions}
    return train, {topic: [q for q in questions if bare(q) not in seen] for topic, questions in held_out.items()}
