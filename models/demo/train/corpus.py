"""Makes the demo model's corpus: chats and plain documents over the world of `world.py` and `stories.py`.

Everything is drawn from one seed. No held-out question and no held-out sum is in any chat or document, so that
`accuracy.py` can measure with them what the model has learned beyond reciting.

    python corpus.py [COUNT] [SEED]     prints COUNT samples (default 20)
"""

import random
import sys

import world
from questions import all_questions, capital_first, one_in
from stories import OBJECTS, SPECIES, story

DOCUMENT_SHARE = 0.3
# how often each topic opens a chat
WEIGHTS = {
    "capital": 9, "country": 6, "continent": 3, "native name": 2, "sum": 18, "difference": 12,
    "negative difference": 6, "sum in words": 7, "difference in words": 5, "next number": 3, "colour": 4,
    "animal": 5, "opposite": 3, "day and month": 4, "counting": 8, "paged attention": 7, "about itself": 6,
    "greeting": 5, "outside": 11, "cannot": 3, "memory": 9, "repeating": 6, "story": 12,
}


def write_story(rng, question):
    """A story that answers a request: `item` is "species|object|name", each part optional."""
    species, obj, name = (question.item.split("|") + ["", ""])[:3]
    return story(rng, species or None, obj or None, name or None)


class Corpus:
    """All questions by topic, and an endless stream of training texts."""

    def __init__(self, seed=0):
        self.rng = random.Random(seed)
        self.train, self.held_out = all_questions()
        # by item first, so that an item with many phrasings is not asked more often than others
        self.by_item = {}
        for topic, questions in self.train.items():
            items = {}
            for q in questions:
                items.setdefault(q.item, []).append(q)
            self.by_item[topic] = list(items.values())

    def _draw(self, topic):
        if topic in ("story", "outside"):
            return self.rng.choice(self.train[topic])
        return self.rng.choice(self.rng.choice(self.by_item[topic]))

    def _worn(self, text):
        """A question as people type it: sometimes in lower case, without its mark, or with a polite word."""
        r = self.rng.random()
        if r < 0.10:
            text = text.lower()
        elif r < 0.18:
            text = text.rstrip("?.!")
        elif r < 0.24:
            text = text.lower().rstrip("?.!")
        elif r < 0.34:
            text = self.rng.choice(["Please tell me: ", "Hello! ", "Hi, ", "A question: ", "Now tell me: ",
                                    "I have a question. ", "Ok. ", "Thanks. "]) + text
        elif r < 0.36:
            text += self.rng.choice([" Thanks.", " Please."])
        return text

    def _name(self):
        if self.rng.random() < 0.6:
            return self.rng.choice(world.PEOPLE)
        return capital_first("".join(self.rng.choice("bdfgklmnprstvz") + self.rng.choice("aeiou")
                                     for _ in range(self.rng.randrange(2, 4))))

    def _memory(self, one_word):
        """Turns in which the user tells a name and asks for it later."""
        name, rng = self._name(), self.rng
        ask = rng.choice(["What is my name?", "Do you remember my name?", "Who am I?", "What was my name?"])
        if rng.random() < 0.15:
            return [(ask, "I do not know your name.")]
        tell = rng.choice(["My name is {n}.", "I am {n}.", "Hello, I am {n}.", "Hi, my name is {n}.", "I'm {n}.",
                           "Hello! My name is {n}.", "You can call me {n}."]).format(n=name)
        turns = [(tell, f"Hello {name}, nice to meet you.")]
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
            turns.append(self._turn(rng.choice(["sum", "capital", "colour", "animal"]), one_word)[0])
        turns.append((ask, name if one_word else f"Your name is {name}."))
        return turns

    def repeating(self):
        """A turn that asks for the very words it holds."""
        rng = self.rng
        pools = [[o[0] for o in OBJECTS], SPECIES, world.DAYS, [c[2] for c in world.COLOURS], world.PEOPLE,
                 [c[1] for c in world.CAPITALS], [str(n) for n in range(30)], [self._name()]]
        words = " ".join(rng.choice(rng.choice(pools)) for _ in range(rng.choice([1, 1, 2, 3, 4, 5])))
        return rng.choice(["Repeat: {w}", "Say: {w}", "Repeat after me: {w}", "Please repeat: {w}",
                           "Repeat these words: {w}"]).format(w=words), words

    def _turn(self, topic, one_word):
        q = self._draw(topic)
        answer = write_story(self.rng, q) if topic == "story" else q.short if one_word and q.short else q.answer
        return (self._worn(q.text), answer), q

    def chat(self):
        """Messages of one chat of mostly one to three turns: [(role, content), ...]."""
        rng, messages = self.rng, []
        one_word = rng.random() < 0.08
        if one_word:
            messages.append(("system", rng.choice(world.SYSTEM_ONE_WORD)))
        elif rng.random() < 0.3:
            messages.append(("system", rng.choice(world.SYSTEM)))
        turns, wanted = [], rng.choice([1, 1, 1, 1, 2, 2, 2, 3, 3, rng.randrange(4, 9)])
        previous = None
        while len(turns) < wanted:
            if previous and previous.follow and rng.random() < 0.4:
                q = self._draw(previous.topic)
                if q.follow and not one_in(8, "follow", previous.item, q.item):
                    answer = q.short if one_word and q.short else q.answer
                    turns.append((rng.choice([q.follow, q.follow, q.follow.replace("And", "What about", 1)]), answer))
                    previous = q
                    continue
            topic = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
            if topic == "memory":
                turns += self._memory(one_word)
                previous = None
            elif topic == "repeating":
                turns.append(self.repeating())
                previous = None
            else:
                turn, previous = self._turn(topic, one_word)
                turns.append(turn)
        for user, assistant in turns:
            messages += [("user", user), ("assistant", assistant)]
        return messages

    def document(self):
        """One plain text: stories, lists of facts, questions with answers."""
        rng, r = self.rng, self.rng.random()
        if r < 0.40:
            return "\n\n".join(story(rng) for _ in range(rng.choice([1, 1, 1, 2, 3])))
        if r < 0.44:
            species, obj = rng.choice(SPECIES), rng.choice(OBJECTS)[0]
            return f"The {capital_first(species)} and the {capital_first(obj)}\n\n{story(rng, species, obj)}"
        if r < 0.56:
            items = rng.sample(world.TERMS, rng.randrange(1, 6))
            return " ".join(answer for _, answer in items)
        if r < 0.84:
            topic = rng.choice(["capital", "capital", "country", "continent", "native name", "sum", "difference",
                                "sum in words", "colour", "animal", "opposite", "day and month", "counting"])
            facts = [self._draw(topic).answer for _ in range(rng.randrange(1, 8))]
            return rng.choice([" ", " ", "\n"]).join(facts)
        user, model = rng.choice([("Q: ", "A: "), ("Question: ", "Answer: "), ("User: ", "Model: ")])
        topics = rng.choices([t for t in WEIGHTS if t in self.train], k=rng.randrange(1, 5))
        return "\n".join(f"{user}{q}\n{model}{a}" for q, a in (self._turn(t, False)[0] for t in topics))

    def sample(self):
        """One training text: ("chat", messages) or ("document", text)."""
        if self.rng.random() < DOCUMENT_SHARE:
            return "document", self.document()
        return "chat", self.chat()


def main():
    count, seed = (int(a) for a in (sys.argv[1:] + ["20", "0"][len(sys.argv) - 1:])[:2])
    corpus = Corpus(seed)
    for topic in corpus.train:
        print(f"{topic}: {len(corpus.train[topic])} questions, {len(corpus.held_out.get(topic, []))} held out")
    for _ in range(count):
        kind, text = corpus.sample()
        print(f"\n[{kind}]")
        print(text if kind == "document" else "\n".join(f"{role}: {content}" for role, content in text))


if __name__ == "__main__":
    main()
