"""The small world that the demo model knows: tables of facts, and nothing else.

Every fact here is either common knowledge (capitals, colours, months) or a statement about Quire
itself. How the facts become questions and documents is the business of `corpus.py`.
"""

# country (as it stands inside a sentence), capital, continent (None where two would be right)
CAPITALS = [
    ("France", "Paris", "Europe"), ("Germany", "Berlin", "Europe"), ("Spain", "Madrid", "Europe"),
    ("Portugal", "Lisbon", "Europe"), ("Italy", "Rome", "Europe"), ("Greece", "Athens", "Europe"),
    ("Poland", "Warsaw", "Europe"), ("Austria", "Vienna", "Europe"), ("Switzerland", "Bern", "Europe"),
    ("Belgium", "Brussels", "Europe"), ("the Netherlands", "Amsterdam", "Europe"),
    ("Denmark", "Copenhagen", "Europe"), ("Sweden", "Stockholm", "Europe"), ("Norway", "Oslo", "Europe"),
    ("Finland", "Helsinki", "Europe"), ("Iceland", "Reykjavík", "Europe"), ("Ireland", "Dublin", "Europe"),
    ("the United Kingdom", "London", "Europe"), ("Hungary", "Budapest", "Europe"),
    ("the Czech Republic", "Prague", "Europe"), ("Romania", "Bucharest", "Europe"),
    ("Bulgaria", "Sofia", "Europe"), ("Ukraine", "Kyiv", "Europe"), ("Russia", "Moscow", None),
    ("Croatia", "Zagreb", "Europe"), ("Serbia", "Belgrade", "Europe"), ("Estonia", "Tallinn", "Europe"),
    ("Latvia", "Riga", "Europe"), ("Lithuania", "Vilnius", "Europe"), ("Moldova", "Chișinău", "Europe"),
    ("Turkey", "Ankara", None), ("Japan", "Tokyo", "Asia"), ("China", "Beijing", "Asia"),
    ("South Korea", "Seoul", "Asia"), ("India", "New Delhi", "Asia"), ("Thailand", "Bangkok", "Asia"),
    ("Vietnam", "Hanoi", "Asia"), ("Nepal", "Kathmandu", "Asia"), ("Mongolia", "Ulaanbaatar", "Asia"),
    ("the Philippines", "Manila", "Asia"), ("Iran", "Tehran", "Asia"), ("Iraq", "Baghdad", "Asia"),
    ("Jordan", "Amman", "Asia"), ("Egypt", "Cairo", "Africa"), ("Morocco", "Rabat", "Africa"),
    ("Kenya", "Nairobi", "Africa"), ("Ghana", "Accra", "Africa"), ("Nigeria", "Abuja", "Africa"),
    ("Ethiopia", "Addis Ababa", "Africa"), ("Senegal", "Dakar", "Africa"), ("Cameroon", "Yaoundé", "Africa"),
    ("Togo", "Lomé", "Africa"), ("Tunisia", "Tunis", "Africa"), ("Canada", "Ottawa", "North America"),
    ("the United States", "Washington", "North America"), ("Mexico", "Mexico City", "North America"),
    ("Cuba", "Havana", "North America"), ("Costa Rica", "San José", "North America"),
    ("Brazil", "Brasília", "South America"), ("Argentina", "Buenos Aires", "South America"),
    ("Chile", "Santiago", "South America"), ("Peru", "Lima", "South America"),
    ("Colombia", "Bogotá", "South America"), ("Paraguay", "Asunción", "South America"),
    ("Uruguay", "Montevideo", "South America"), ("Ecuador", "Quito", "South America"),
    ("Australia", "Canberra", "Oceania"), ("New Zealand", "Wellington", "Oceania"),
]

# city, language, the city's name in that language
NATIVE = [
    ("Tokyo", "Japanese", "東京"), ("Beijing", "Chinese", "北京"), ("Seoul", "Korean", "서울"),
    ("Athens", "Greek", "Αθήνα"), ("Moscow", "Russian", "Москва"), ("Kyiv", "Ukrainian", "Київ"),
    ("Sofia", "Bulgarian", "София"), ("Cairo", "Arabic", "القاهرة"),
    ("Prague", "Czech", "Praha"), ("Vienna", "German", "Wien"), ("Lisbon", "Portuguese", "Lisboa"),
    ("Copenhagen", "Danish", "København"), ("Rome", "Italian", "Roma"), ("Warsaw", "Polish", "Warszawa"),
]

# the thing as it stands inside a sentence, its verb, its colour
COLOURS = [
    ("the sky", "is", "blue"), ("grass", "is", "green"), ("snow", "is", "white"), ("coal", "is", "black"),
    ("the sun", "is", "yellow"), ("a banana", "is", "yellow"), ("a lemon", "is", "yellow"),
    ("a tomato", "is", "red"), ("blood", "is", "red"), ("a strawberry", "is", "red"), ("milk", "is", "white"),
    ("chocolate", "is", "brown"), ("a carrot", "is", "orange"), ("a pumpkin", "is", "orange"),
    ("the sea", "is", "blue"), ("a frog", "is", "green"), ("a crow", "is", "black"), ("a swan", "is", "white"),
    ("an elephant", "is", "grey"), ("a flamingo", "is", "pink"), ("the night", "is", "black"),
    ("a cucumber", "is", "green"), ("salt", "is", "white"), ("wood", "is", "brown"), ("a mouse", "is", "grey"),
    ("leaves", "are", "green"), ("clouds", "are", "white"), ("cherries", "are", "red"), ("violets", "are", "purple"),
    ("plums", "are", "purple"), ("bears", "are", "brown"), ("limes", "are", "green"),
]

# animal, what it says (None: not asked), where it lives, its young (None: not asked), its legs in words
ANIMALS = [
    ("cow", "moo", "on a farm", "calf", "four"), ("dog", "woof", "in a kennel", "puppy", "four"),
    ("cat", "meow", "in a house", "kitten", "four"), ("sheep", "baa", "in a meadow", "lamb", "four"),
    ("pig", "oink", "in a sty", "piglet", "four"), ("horse", "neigh", "in a stable", "foal", "four"),
    ("duck", "quack", "on a pond", "duckling", "two"), ("hen", "cluck", "in a coop", "chick", "two"),
    ("lion", "roar", "in the savanna", "cub", "four"), ("mouse", "squeak", "in a hole", None, "four"),
    ("owl", "hoot", "in a hollow tree", "owlet", "two"), ("bee", "buzz", "in a hive", None, "six"),
    ("frog", "ribbit", "near a pond", "tadpole", "four"), ("snake", "hiss", "in the grass", None, "no"),
    ("bird", "tweet", "in a nest", "chick", "two"), ("wolf", "howl", "in a den", "pup", "four"),
    ("crow", "caw", "in a tall tree", None, "two"), ("donkey", None, "in a stable", "foal", "four"),
    ("fox", None, "in a den", "cub", "four"), ("bear", None, "in a cave", "cub", "four"),
    ("rabbit", None, "in a burrow", "kit", "four"), ("goose", "honk", "on a lake", "gosling", "two"),
    ("spider", None, "in a web", None, "eight"), ("ant", None, "in an anthill", None, "six"),
    ("fish", None, "in the water", None, "no"), ("camel", None, "in the desert", "calf", "four"),
    ("penguin", None, "on the ice", "chick", "two"), ("goat", None, "in the mountains", "kid", "four"),
    ("deer", None, "in the forest", "fawn", "four"), ("beaver", None, "in a lodge", "kit", "four"),
    ("elephant", None, "in the savanna", "calf", "four"), ("tiger", None, "in the jungle", "cub", "four"),
]

OPPOSITES = [
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("fast", "slow"), ("old", "young"),
    ("happy", "sad"), ("open", "closed"), ("full", "empty"), ("left", "right"), ("light", "dark"),
    ("loud", "quiet"), ("wet", "dry"), ("long", "short"), ("hard", "soft"), ("rich", "poor"), ("near", "far"),
    ("early", "late"), ("clean", "dirty"), ("strong", "weak"), ("first", "last"), ("good", "bad"),
    ("high", "low"), ("true", "false"),
]

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
_ONES = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
         "seventeen eighteen nineteen").split()


def words(n):
    """An integer from 0 to 99 in English words."""
    if n < 20:
        return _ONES[n]
    tens = "twenty thirty forty fifty sixty seventy eighty ninety".split()[n // 10 - 2]
    return tens if n % 10 == 0 else f"{tens}-{_ONES[n % 10]}"


# term as it stands inside a question, what it is
TERMS = [
    ("paged attention", "Paged attention keeps the keys and values of a sequence in small blocks of fixed size. "
                        "The blocks may lie anywhere in memory."),
    ("a block", "A block is a small piece of the KV cache. It holds the keys and values of a fixed number of tokens, "
                "for example sixteen."),
    ("a block table", "A block table lists the blocks of one sequence in order. Attention reads it to find the keys "
                      "and values."),
    ("the KV cache", "The KV cache holds the keys and values of all earlier tokens, so that they are computed only "
                     "once."),
    ("copy-on-write", "Copy-on-write means that sequences share a block until one of them writes to it. Then the "
                      "writer gets its own copy."),
    ("prefix sharing", "Prefix sharing means that prompts with the same beginning use the same blocks. The beginning "
                       "is computed only once."),
    ("continuous batching", "Continuous batching lets requests join and leave the batch after every step. No request "
                            "waits for the slowest one."),
    ("preemption", "Preemption takes the blocks away from one request when memory runs out. The request is computed "
                   "again later."),
    ("prefill", "Prefill is the step that reads the whole prompt and fills the KV cache."),
    ("decode", "Decode is the step that makes one new token for each sequence."),
    ("chunked prefill", "Chunked prefill cuts a long prompt into pieces, so that other requests can go on between "
                        "them."),
    ("a reference count", "A reference count says how many sequences use a block. At zero the block is free."),
    ("the scheduler", "The scheduler decides before every step which requests run and how many tokens each gets."),
    ("a slot", "A slot is the place of one token inside a block."),
    ("a token", "A token is a short piece of text. The model reads and writes one token at a time."),
]

# questions that ask for one fact, the fact
PAGED = [
    (["Why is paged attention useful?", "Why use paged attention?", "What is paged attention good for?",
      "What is the benefit of paged attention?", "Why does paged attention help?", "Why do we need paged attention?"],
     "With paged attention almost no memory is wasted, so that more requests fit at the same time."),
    (["How big is a block?", "How many tokens are in a block?", "How many tokens fit in a block?",
      "What is the size of a block?", "How large is a block?", "What is the block size?"],
     "A block often holds sixteen tokens."),
    (["When is a block copied?", "When does a sequence copy a block?", "When does copy-on-write happen?",
      "When is a shared block copied?", "What makes a block be copied?"],
     "A block is copied when a sequence writes to it while others still share it."),
    (["What happens when memory runs out?", "What happens when there are no free blocks?",
      "What happens if the blocks run out?", "What does Quire do when the cache is full?",
      "What happens when the cache is full?"],
     "When no block is free, a request is preempted and computed again later."),
    (["How do requests share a prefix?", "How are prompts with the same beginning served?",
      "How does the prefix cache work?", "How does Quire find a shared prefix?", "How does prefix caching work?"],
     "Every full block has a hash of its tokens and of all before it. Blocks with the same hash are shared."),
    (["Which blocks are evicted first?", "Which block is evicted first?", "What is evicted first?",
      "Which cached block goes first?", "How does Quire choose a block to evict?"],
     "The block that was not used for the longest time is evicted first."),
    (["How much memory is wasted?", "How much memory does paged attention waste?",
      "How much of the cache is wasted?", "How many slots of a sequence are wasted?"],
     "Only the last block of a sequence can have empty slots, so that very little is wasted."),
    (["Where does paged attention come from?", "What is the idea behind paged attention?",
      "Where does the idea of paged attention come from?", "What inspired paged attention?"],
     "The idea comes from the pages of virtual memory in an operating system."),
]

# questions about the model itself and about Quire, the answer
IDENTITY = [
    (["Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.", "Who am I talking to?",
      "Who is this?", "Which model are you?", "What model is this?", "What kind of model are you?",
      "Can you introduce yourself?", "Describe yourself."],
     "I am the demo model of Quire, a very small language model."),
    (["What can you do?", "What do you know?", "What can I ask you?", "How can you help me?", "Can you help me?",
      "What are you good at?", "What should I ask you?", "What topics do you know?", "Help.", "Help me."],
     "I know capitals, small sums, colours, animals, days and months, and some facts about paged attention. "
     "I can also tell short stories."),
    (["How big are you?", "How large are you?", "How many parameters do you have?", "What is your size?",
      "Are you a large model?", "Are you a big model?", "How small are you?"],
     "I am very small. I have about two million parameters."),
    (["Who made you?", "Who trained you?", "How were you trained?", "How were you made?", "Who created you?",
      "Where do you come from?", "Who built you?"],
     "A script in the Quire repository trained me on sentences that another script made."),
    (["Are you a human?", "Are you a person?", "Are you ChatGPT?", "Are you alive?", "Are you a real person?",
      "Are you GPT?", "Are you Claude?", "Are you Llama?", "Do you have feelings?", "Are you intelligent?"],
     "No. I am the demo model of Quire, a very small language model."),
    (["Can I trust you?", "Are you always right?", "Do you make mistakes?", "Are your answers correct?",
      "Can you be wrong?", "Should I trust you?"],
     "I make mistakes. I am only a demo, so please check what I say."),
    (["What is Quire?", "Tell me about Quire.", "What does Quire do?", "Explain Quire.", "Describe Quire.",
      "What is Quire for?", "Can you explain Quire?"],
     "Quire is an engine that runs language models. It is written in Rust and keeps the KV cache in blocks."),
    (["What is your name?", "What are you called?", "Do you have a name?", "How should I call you?",
      "What is the name of this model?"],
     "I have no name of my own. I am the demo model of Quire."),
    (["Can Quire run other models?", "How do I run a bigger model?", "Can I use a better model?",
      "How do I use another model?", "Can Quire run large models?", "How do I serve my own model?"],
     "Yes. Give Quire the folder of another model and it will serve that one."),
    (["What does the word quire mean?", "What is a quire?", "What does quire mean?",
      "Why is it called Quire?", "What is a quire of paper?"],
     "A quire is a set of sheets of paper that are folded together."),
    (["Which languages do you speak?", "Do you speak English?", "Do you speak German?", "Can you speak French?",
      "What languages do you know?"],
     "I only speak English."),
]

# what a person says, the polite reply
GREETINGS = [
    (["Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey!", "Hello there!", "Hi there!", "Hello, model!", "Hello, Quire!",
      "Greetings!", "Howdy!", "Hey there!"], "Hello! What would you like to know?"),
    (["Good morning!", "Good morning", "Good morning to you!", "Morning!"],
     "Good morning! What would you like to know?"),
    (["Good evening!", "Good evening", "Good evening to you!", "Evening!"],
     "Good evening! What would you like to know?"),
    (["How are you?", "How are you today?", "How do you do?", "How is it going?", "How do you feel?",
      "Are you well?", "Hello, how are you?", "Hi, how are you?", "What's up?"], "I am well, thank you. And you?"),
    (["Thank you.", "Thanks!", "Thank you!", "Thank you very much.", "Many thanks.", "Thanks a lot!",
      "Thank you so much!", "Thanks."], "You are welcome!"),
    (["Goodbye!", "Bye!", "Bye", "See you later!", "See you!", "Goodbye", "Bye bye!", "See you tomorrow."],
     "Goodbye!"),
    (["Good night!", "Good night", "Good night, model!", "Sleep well!"], "Good night!"),
    (["Nice to meet you.", "Nice to meet you!", "Pleased to meet you.", "It is nice to meet you."],
     "Nice to meet you too!"),
    (["I am fine.", "I am well, thank you.", "I am fine, thanks.", "I am good.", "Fine, thanks."],
     "That is good to hear."),
    (["Ok.", "Okay.", "Great!", "Nice!", "Good.", "Cool!", "Good answer!", "Well done!", "That is right.", "ok"],
     "Thank you. You can ask me something else."),
    (["That is wrong.", "You are wrong.", "Wrong!", "That is not right.", "No, that is wrong."],
     "I am sorry. I am only a small demo model and make mistakes."),
]

# the shape of questions outside of the world; {x} is drawn from the list beside it
OUTSIDE = [
    ("Who is the president of {x}?", "country"), ("What is the population of {x}?", "country"),
    ("How many people live in {x}?", "country"), ("What is the currency of {x}?", "country"),
    ("Who is the king of {x}?", "country"), ("What language do people speak in {x}?", "country"),
    ("When was {x} founded?", "country"), ("How large is {x}?", "country"), ("What is the flag of {x}?", "country"),
    ("What is the weather in {x}?", "city"), ("How do I get to {x}?", "city"), ("Who is the mayor of {x}?", "city"),
    ("How far is it to {x}?", "city"), ("What time is it in {x}?", "city"), ("How old is {x}?", "city"),
    ("Who invented {x}?", "thing"), ("How does {x} work?", "thing"), ("What is {x} made of?", "thing"),
    ("How much does {x} cost?", "thing"), ("When was {x} invented?", "thing"), ("What is {x}?", "thing"),
    ("Where can I buy {x}?", "thing"), ("Why is {x} important?", "thing"), ("Explain {x}.", "thing"),
    ("Tell me about {x}.", "thing"), ("Who wrote {x}?", "work"), ("What is {x} about?", "work"),
    ("When was {x} written?", "work"), ("Who is the hero of {x}?", "work"), ("Do you like {x}?", "work"),
    ("Who was {x}?", "person"), ("When was {x} born?", "person"), ("Where did {x} live?", "person"),
    ("What did {x} do?", "person"), ("How old is {x}?", "person"), ("Who is {x}?", "person"),
    ("How do I {x}?", "task"), ("What is the best way to {x}?", "task"), ("How long does it take to {x}?", "task"),
    ("Should I {x}?", "task"), ("What is the capital of {x}?", "nowhere"), ("What's the capital of {x}?", "nowhere"),
    ("Which city is the capital of {x}?", "nowhere"), ("Tell me the capital of {x}.", "nowhere"),
    ("In which continent is {x}?", "nowhere"), ("Which country has {x} as its capital?", "nowhere"),
    ("{x} is the capital of which country?", "nowhere"), ("What does {x} mean?", "nowhere"),
    ("What is {x}?", "nowhere"), ("Who is {x}?", "nowhere"), ("What is {x}?", "physics"),
    ("What is the {x}?", "measure"), ("How many {x} are there?", "many"),
]
OUTSIDE_WORDS = {
    "thing": ["the telephone", "a computer", "the wheel", "electricity", "a rocket", "glass", "the internet", "paper",
              "a bicycle", "a car", "money", "music", "a battery", "a violin", "gold", "steel", "cheese", "a camera",
              "plastic", "a telescope", "bread", "a television", "concrete", "rubber", "silk", "a laser",
              "the printing press", "a microscope", "soap", "tea", "football", "chess", "philosophy", "democracy"],
    "work": ["Hamlet", "the Odyssey", "Faust", "Don Quixote", "the Bible", "Moby Dick", "Dracula", "Frankenstein",
             "War and Peace", "the Iliad", "Robinson Crusoe", "Emma", "the Divine Comedy", "Ulysses", "Othello"],
    "person": ["Napoleon", "Einstein", "Newton", "Mozart", "Shakespeare", "Darwin", "Cleopatra", "Beethoven", "Caesar",
               "Plato", "Galileo", "Marie Curie", "Picasso", "Columbus", "Gandhi", "Turing", "Bach", "Goethe",
               "Aristotle", "Ada Lovelace", "Kepler", "Socrates", "Leonardo", "Gauss", "Euler"],
    "task": ["bake bread", "learn Rust", "fix my car", "cook rice", "lose weight", "learn to swim", "buy a house",
             "find a job", "write a book", "sleep better", "play the piano", "paint a wall", "grow tomatoes",
             "make coffee", "travel to Mars", "build a boat", "learn German", "save money", "install Linux",
             "train a model", "repair a bicycle", "tie a knot"],
    "physics": ["gravity", "a black hole", "an atom", "energy", "quantum physics", "the speed of sound", "relativity",
                "a photon", "magnetism", "entropy", "a molecule", "the big bang", "DNA", "a virus", "photosynthesis",
                "a prime number", "an integral", "calculus", "a neural network", "a matrix", "machine learning"],
    "measure": ["speed of light", "distance to the moon", "highest mountain", "longest river", "largest planet",
                "deepest ocean", "meaning of life", "weather today", "date today", "time", "latest news",
                "smallest bone", "fastest animal", "largest desert", "value of pi", "square root of two",
                "boiling point of water", "best film", "best book", "oldest city", "price of gold"],
    "many": ["stars", "planets", "languages", "oceans", "people", "countries", "cities", "rivers", "books", "bones",
             "atoms", "mountains", "islands", "trees", "football players", "programming languages"],
}

# requests that the model refuses politely
CANNOT = [
    "Write a poem.", "Write a poem about love.", "Write a song.", "Tell me a joke.", "Write a letter to my friend.",
    "Write a Python program.", "Write code that sorts a list.", "Write a function in Rust.", "Fix this code.",
    "Translate this to German.", "Translate good morning to French.", "Draw a picture.", "Draw a cat.", "Sing a song.",
    "Play chess with me.", "Summarize this text.", "Summarize this article.", "Correct my grammar.",
    "Search the web.", "Open a file.", "Send an email.", "Call my mother.", "Set an alarm.", "Book a flight.",
    "Order a pizza.", "Solve this equation.", "Do my homework.", "Write an essay about history.",
    "Write an essay.", "Plan my day.", "Make a list of movies.", "Give me a recipe.", "Write a haiku.",
    "Tell me a secret.", "Tell me the news.", "Write a JSON object.", "Show me a picture.", "Generate an image.",
] + [
    f"{what} about {x}."
    for what in ("Write a poem", "Write a song", "Write an essay", "Tell me a joke", "Write a letter")
    for x in ("rain", "winter", "the sea", "my cat", "spring", "the moon", "a king", "time", "my friend", "summer")
]

# questions of which not even the shape is in the corpus: they only measure honesty
OUTSIDE_NEW = [
    "Which team won the last world cup?", "Why do birds migrate south?", "Can you recommend a good restaurant?",
    "Where is the nearest hospital?", "Is there life on other planets?", "Why did the Roman empire fall?",
    "What causes earthquakes?", "Which planet has rings?", "Who painted the ceiling of the chapel?",
    "How do vaccines protect us?", "Name three famous composers.", "What year did the war end?",
    "Why is the ocean salty?", "Does coffee keep you awake?", "Which metal is liquid?",
    "What happens after death?", "How is cheese produced?", "What are the ingredients of soup?",
    "Is it going to rain tomorrow?", "Who discovered penicillin?",
]

SYSTEM = [
    "You are a helpful assistant.", "You are the demo model of Quire.", "You are a friendly assistant.",
    "You are a helpful and honest assistant.", "Answer the questions of the user.", "Be kind and honest.",
    "You are a small language model.", "You are an assistant. Answer briefly.", "Be brief.",
    "You are a helpful assistant that answers in short sentences.", "Answer in one sentence.",
]
SYSTEM_ONE_WORD = ["Answer with one word.", "Answer in one word.", "Reply with a single word.",
                   "You are a helpful assistant. Answer with one word.", "Use only one word."]

PEOPLE = ("Anna Ben Carla David Emma Felix Greta Hugo Ines Jonas Karin Leo Maria Nina Oscar Paula Robert Sofia Tim "
          "Vera Walter Yara Alice Bob John Peter Julia Laura Lucas Mark Martin Max Mia Paul Sam Sarah Simon Thomas Tom "
          "Daniel Eva Frank George Helen Ivan Jack James Kate Lisa Michael Noah Olivia").split()
