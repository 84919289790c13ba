"""Short stories of six to ten whole sentences, each with one hero, one place and one object.

A story is drawn from a plot; a plot is a list of moments, and each moment offers a few sentences. The names in
braces are filled from the cast, so that hero, place and object stay the same from the first sentence to the last.
"""

SPECIES = ("fox bear mouse rabbit owl hedgehog cat dog duck frog squirrel beaver goose goat robot badger otter "
           "turtle hen pony deer sparrow snail lion").split()
HE = "Pip Otto Finn Hugo Karl Milo Rufus Toby Bruno Jasper Felix Oscar".split()
SHE = "Mia Lily Nora Ella Ruby Ida Zoe Wanda Greta Hazel Tilda Flora".split()
ADJECTIVES = "small brave young old quiet cheerful shy clever kind sleepy curious gentle".split()
# where the hero lives, and how the place is named later
PLACES = [
    ("in a deep forest", "the forest"), ("in a green valley", "the valley"), ("in a small village", "the village"),
    ("on a little farm", "the farm"), ("by a blue lake", "the lake"), ("near a wide river", "the river"),
    ("at the foot of a mountain", "the mountain"), ("in a quiet garden", "the garden"), ("by the sea", "the beach"),
    ("in an old castle", "the castle"), ("on a sunny hill", "the hill"), ("beside a busy harbour", "the harbour"),
]
# object, the trouble in which it helps, how it helps
OBJECTS = [
    ("lantern", "it grew so dark that nobody could see the path", "lit the {o} and showed everyone the way"),
    ("umbrella", "it began to rain very hard", "opened the {o} and kept everyone dry"),
    ("map", "{f} was lost and did not know the way home", "looked at the {o} and found the way"),
    ("blanket", "{f} was shivering in the cold", "put the {o} around {f} and kept {f} warm"),
    ("bell", "a thick fog came and {f} could not find the way", "rang the {o} until {f} heard it and came back"),
    ("rope", "{f} fell into a deep hole", "threw the {o} down and pulled {f} out"),
    ("boat", "the water rose and {f} could not get across", "took the {o} and carried {f} to the other side"),
    ("basket", "{f} had too many apples to carry", "brought the {o} and put all the apples into it"),
    ("key", "{f} stood before a locked door", "tried the {o} and opened the door"),
    ("ladder", "{f} sat high in a tree and was afraid to climb down", "brought the {o} and helped {f} down"),
    ("drum", "everyone was sad and nobody wanted to dance", "played the {o} until everyone danced"),
    ("book", "{f} could not fall asleep", "read from the {o} until {f} slept"),
    ("kite", "{f} was bored and had nothing to do", "let {f} fly the {o} all afternoon"),
    ("flute", "a little bird was too sad to sing", "played the {o} until the bird sang again"),
    ("pot", "{f} was very hungry", "took the {o} and cooked a soup for {f}"),
    ("hat", "the sun was so hot that {f} could not work", "gave {f} the {o} to wear in the sun"),
]
OPENINGS = [
    "Once upon a time there was {a_hero} called {n} who lived {lives}.",
    "Once upon a time, {a_hero} named {n} lived {lives}.",
    "Once upon a time {a_hero} called {n} lived {lives}.",
    "There was once {a_hero} called {n}. {He} lived {lives}.",
    "{n} was {a_hero} who lived {lives}.",
    "Long ago, {a_hero} named {n} lived {lives}.",
]
PLOTS = {
    "lost": [
        ["{n} had {an_o} and loved it more than anything else.", "{His} favourite thing was {an_o}.",
         "Every day {n} played with {his} {o}."],
        ["One morning the {o} was gone.", "One day {n} lost the {o} near {place}.",
         "But one evening {n} could not find the {o}."],
        ["{n} looked everywhere, but {he} could not find it.", "{He} searched all day and asked everyone {he} met.",
         "{n} sat down and began to cry."],
        ["Then {f} the {fs} came and said, \"I will help you.\"", "Then {f} the {fs} offered to help.",
         "{His} friend {f} the {fs} came to help {him}."],
        ["Together they found the {o} under a tree.", "They found the {o} behind a big stone.",
         "At last they found the {o} in the tall grass."],
        ["{n} thanked {f}, and they went home happy.", "{n} was so glad that {he} hugged {f}.",
         "From that day on, {n} took good care of the {o}."],
    ],
    "help": [
        ["{He} always carried {an_o} with {him}.", "{n} owned nothing but {an_o}.",
         "{His} grandmother had given {him} {an_o}."],
        ["One day {n} went for a walk with {his} friend {f} the {fs}.",
         "One evening {n} met {f} the {fs} near {place}.", "One day {f} the {fs} came to visit {him}."],
        ["Suddenly {trouble}.", "Then {trouble}."],
        ["{n} was not afraid.", "{n} had an idea.", "{n} knew what to do."],
        ["{He} {use}."],
        ["\"Thank you, {n}!\" said {f}.", "{f} thanked {n} with all {fhis} heart."],
        ["From then on they were the best of friends.", "That night everyone near {place} slept well.",
         "And {n} was proud and happy."],
    ],
    "found": [
        ["One day {n} found {an_o} near {place}.", "One morning {he} found {an_o} under a bush."],
        ["{n} wanted to keep it, but {he} knew that it belonged to someone.",
         "\"Whose {o} is this?\" asked {n}."],
        ["So {he} walked around {place} and asked everyone.", "So {he} went from door to door."],
        ["At last {he} met {f} the {fs}, who had lost the {o}.",
         "In the evening {he} met {f} the {fs}, who was looking for it."],
        ["{n} gave the {o} back at once.", "{n} gave it back with a smile."],
        ["{f} was so happy that {fhe} invited {n} to dinner.", "{f} thanked {him}, and they became friends."],
        ["They lived happily ever after.", "After that they met every day."],
    ],
    "broken": [
        ["{n} had {an_o} that was very old.", "{He} was proud of {his} {o}."],
        ["One day the {o} was damaged in a storm.", "One windy day the {o} fell into the mud and was damaged."],
        ["{n} tried to repair it alone, but it did not work.", "{He} did not know how to mend it."],
        ["Then {f} the {fs} came to help.", "{f} the {fs} brought everything they needed."],
        ["They worked until the sun went down.", "They worked together all day."],
        ["In the end the {o} was as good as new.", "At last the {o} was better than before."],
        ["{n} learned that two can do more than one.", "{n} and {f} laughed and went home."],
    ],
    "gift": [
        ["{His} friend {f} the {fs} had a birthday.", "It was the birthday of {his} friend {f} the {fs}."],
        ["{n} wanted to give {f} something special.", "{n} thought for a long time about a gift."],
        ["So {he} made {an_o} with {his} own hands.", "So {he} worked all night and made {an_o}."],
        ["They met in the morning near {place}, and {f} opened the gift.", "The next day {he} brought the {o} to {f}."],
        ["\"This is the best gift of all,\" said {f}.", "{f} jumped for joy."],
        ["They ate cake and sang until the evening.", "Then they danced together under the stars."],
        ["And {n} went home with a warm heart.", "It was the happiest day of the year."],
    ],
}
# moments that a plot may skip without losing its thread (indices into the plot)
SKIPPABLE = {"lost": [2], "help": [3, 5], "found": [2, 6], "broken": [2, 4], "gift": [1, 5]}


def article(noun):
    """The noun with its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def story(rng, species=None, obj=None, name=None):
    """One story; species, object and the hero's name are drawn unless they are given."""
    species = species or rng.choice(SPECIES)
    entry = rng.choice(OBJECTS) if obj is None else next(o for o in OBJECTS if o[0] == obj)
    female = name in SHE if name else rng.random() < 0.5
    name = name or rng.choice(SHE if female else HE)
    friend_female = rng.random() < 0.5
    friend = rng.choice([n for n in (SHE if friend_female else HE) if n != name])
    friend_species = rng.choice([s for s in SPECIES if s != species])
    lives, place = rng.choice(PLACES)
    he, his, him = ("she", "her", "her") if female else ("he", "his", "him")
    cast = dict(n=name, he=he, his=his, him=him, He=he.capitalize(), His=his.capitalize(), f=friend, fs=friend_species,
                fhe="she" if friend_female else "he", fhis="her" if friend_female else "his",
                o=entry[0], an_o=article(entry[0]), lives=lives, place=place,
                a_hero=article(f"{rng.choice(ADJECTIVES)} {species}"))
    cast["trouble"], cast["use"] = entry[1].format(**cast), entry[2].format(**cast)
    plot = rng.choice(list(PLOTS))
    moments = [rng.choice(m) for i, m in enumerate(PLOTS[plot]) if i not in SKIPPABLE[plot] or rng.random() < 0.6]
    return " ".join(s.format(**cast) for s in [rng.choice(OPENINGS), *moments])
