"""What the target is asked to talk about: conversation scripts made from templates of our own, no data set.

A script is a list of entries, one per step of the generation loop: a token id >= 0 is put down as it is, an
entry < 0 hands the pen to the model until it closes the turn, for -entry tokens at most. Every entry carries a
role and a kind. An empty user turn makes the model invent the question itself; an opener without an end makes it
finish the question.
"""
FORCED, USER, ASSISTANT = 0, 1, 2
KINDS = ["chat", "question", "code", "list", "maths", "translation", "story", "summary", "edit", "follow-up"]
SHARES = [22, 12, 13, 9, 8, 7, 8, 9, 9]  # of conversations; follow-ups come on top
HELD_OUT_EVERY = 5  # the 5th, 10th, ... template of each list is seen in held-out conversations alone

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
OTHER_SYSTEMS = ["You are a helpful assistant.", "You are a concise assistant. Answer briefly.",
                 "You are an expert programmer.", "You are a patient teacher.", "Answer in plain English.",
                 "You are a careful editor who improves texts without changing their meaning.",
                 "You are a friendly travel guide."]

# A template that ends in "..." is finished by the model; {x} is filled from SLOTS.
TEMPLATES = {
    "question": """What is {topic}?
How does {topic} work?
Explain {topic} to a ten-year-old.
Why is {topic} important?
What are the advantages and disadvantages of {topic}?
Tell me about the history of {topic}.
What is the difference between {topic} and {topic}?
How can I learn more about {topic}?
Give me some advice about {task}.
How do I start with {task}?
What...
How...
Why...
Can you...
I need help with...
Who was...
When did...
Is it true that...
I am planning {task}. What should I think of?
What is the capital of {country}, and what is it known for?
Please explain in two sentences what {topic} is.
Write an email to my boss about {task}.
Write a polite letter to a neighbour about...
Describe {place} in one paragraph.
What should I visit in {country}?""",
    "code": """Write a Python function that...
Write a Python function to {code}.
Write a function in {language} to {code}.
Write a C program that...
Write a JavaScript function that...
Implement a class in {language} for...
How do I {code} in {language}?
Write an SQL query that...
Explain what this code does and improve it:\\n\\ndef f(x):\\n...
Write a bash script that...
Write a unit test for a function that should {code}.
Write a short program in {language} that prints...
Fix the bug in this function:\\n\\ndef...
Show me an example of {language} code to {code}.
Write an HTML page with...
Write a recursive function to {code} and explain it.
Write a regular expression that matches...
Give me a {language} program that reads a file and...
Write a Python script to {code}, with comments.
Create a Python class with methods for...""",
    "list": """List five {things}.
List ten {things} with one sentence each.
Give me a list of...
Name three {things} and say why you chose them.
Make a shopping list for {task}.
What are the top 10 {things}?
Give me step-by-step instructions for {task}.
Make a table of...
List the pros and cons of {topic}.
Suggest seven names for...
Write a packing list for a trip to {country}.
What are some {things} that beginners should know?
Give me 8 tips for {task}.
Make a weekly plan for {task}.
Name some {things}, sorted from the oldest to the newest.""",
    "maths": """What is {n} + {n}?
What is {n} times {n}?
Calculate {n} - {n} and show the steps.
Solve for x: {d}x + {n} = {n}.
A shop sells {d} apples for {n} cents. How much do {d} apples cost? Explain step by step.
A train travels {n} km in {d} hours. What is its average speed?
If I save {n} dollars a month, how much do I have after {d} years?
What is {d}% of {n}?
Find the area of a rectangle with sides {n} and {d}.
Solve this word problem:...
What is the derivative of...
Explain how to find the greatest common divisor of {n} and {n}.
Is {n} a prime number? Explain.
Continue the sequence: {d}, {d}, {d}, ...
Write the number {n} in words and as a sum of powers of ten.
Anna has {d} books, Ben has {n}. How many more does Ben have?
Convert {n} minutes into hours and minutes.
What is the probability of...""",
    "translation": """Translate into {tongue}: The weather is beautiful today.
Translate into French:...
Translate into {tongue}: Where is the {place}?
Translate this sentence into {tongue}:...
How do you say "{phrase}" in {tongue}?
Translate into Spanish:...
Translate into German: I would like to talk about {topic}.
Translate to English:...
Give me ten useful {tongue} phrases with their English meaning.
Translate "{phrase}" into {tongue}, Italian and Portuguese.
Traduis en anglais:...
Translate the following text to {tongue}: {phrase} My name is Tom and I am interested in {topic}.""",
    "story": """Write a story about {hero}.
Write a short story about {hero} who...
Write a poem about {topic}.
Tell me a bedtime story about {hero} in {place}.
Write a story that begins with:...
Write a dialogue between {hero} and {hero}.
Write the first chapter of a novel about {hero}.
Write a funny story about {hero} and {topic}.
Write a haiku about {place}.
Write a fairy tale with {hero}, a secret and a happy ending.
Describe a day in the life of {hero}.
Write a scene in which {hero} loses something in {place}.
Write a story in about 200 words:...
Write a song about...""",
    "summary": """Summarize the following text:
Summarise this in one sentence:
Give me the main points of this text as a list:
What is the following text about?
Write a short summary of the text below.
Read this and answer in two sentences what it says.
TL;DR of this:
Write a title and a one-line summary for this text:
Explain the following in simpler words:
What are the three most important facts here?""",
    "edit": """Rewrite the following text in a more formal tone:
Correct any mistakes in this text and return the whole text:
Make this text shorter, keep the meaning:
Repeat the following text exactly:
Rewrite this text in the past tense:
Improve the style of this text:
Replace the first sentence of this text and leave the rest as it is:
Rewrite this for a child:
Turn this text into a list of points, keep the wording:
Edit the following so that it is more polite:
Add a closing sentence to this text and return all of it:
Change all names in this text and return it otherwise unchanged:""",
    "follow-up": """Can you make that shorter?
Thank you! Can you give me an example?
Why?
Please rewrite your answer as a list.
Explain that in simpler words.
Now say the same in a formal tone.
Translate your answer into Spanish.
Are you sure? Please check it again.
Tell me more about the second point.
Continue.
What else should I know?
Rewrite that with more detail.
Can you add comments and explain each step?
Summarize what we have said so far.
Change it so that...
Thanks. Now...
And what about...""",
}

SLOTS = {
    "topic": """photosynthesis|gravity|the Roman Empire|machine learning|inflation|climate change|the water cycle|jazz|
chess|democracy|black holes|vaccines|electric cars|the French Revolution|meditation|recycling|bees|the stock market|
solar energy|volcanoes|DNA|the Internet|Shakespeare|yoga|coffee|plate tectonics|cryptography|the Moon|antibiotics|
impressionism|supply and demand|neural networks|the Renaissance|coral reefs|sleep|Buddhism|the periodic table|
time zones|compost|the immune system|blockchain|rainbows|steam engines|sourdough bread|public transport|migration of
birds|the printing press|quantum computing|ocean tides|minimalism""",
    "task": """a birthday party|learning to cook|moving to a new city|a job interview|writing a novel|
running a marathon|a small garden|saving money|learning a language|a camping trip|a science fair|adopting a dog|
a book club|starting a small business|giving a speech|a vegetarian dinner|cleaning the house|a long bike tour|
studying for an exam|painting a
room|a school project|repairing a bicycle|working from home|a family reunion""",
    "things": """fruits|programming languages|inventions|healthy breakfasts|books|mountains|board games|musical
instruments|animals that live in the sea|ways to relax|famous scientists|card games|spices|rivers in Europe|kinds of
clouds|hobbies|tools for a workshop|vegetables|data structures|old films|plants for a balcony|good habits|planets and
moons|painters|trees""",
    "code": """reverse a string|sort a list of numbers|find the largest element in an array|check whether a number is
prime|compute the factorial of a number|read a CSV file|count the words in a text|merge two sorted lists|remove
duplicates from a list|find the shortest path in a graph|parse a date|convert Celsius to Fahrenheit|generate random
passwords|implement binary search|compute Fibonacci numbers|flatten a nested list|download a web page|connect to a
database|transpose a matrix|validate an email address|build a simple calculator|find anagrams|compress a string""",
    "language": "Python|Python|Python|JavaScript|Java|C|C++|Go|Rust|Ruby|SQL|TypeScript|PHP|Swift",
    "country": """France|Japan|Brazil|Kenya|Canada|Italy|Egypt|India|Norway|Peru|Australia|Spain|Vietnam|Greece|Mexico|
Germany|Morocco|Poland|South Korea|Argentina""",
    "place": """a small harbour|the old library|a forest in winter|a busy market|the train station|a lighthouse|the
desert|a mountain village|an empty theatre|the city at night|a kitchen|a space station|the museum|a quiet beach|
school""",
    "hero": """a young fox|an old sailor|a robot|a girl called Mira|two brothers|a lonely dragon|a baker|a detective|a
talking cat|a clockmaker|an astronaut|a lost dog|a king|a gardener|a boy who could not sleep|a wizard|a teacher|
a mouse""",
    "tongue": "French|Spanish|German|Italian|French|Spanish|Portuguese|Dutch|Latin",
    "phrase": """Good morning|How are you today?|I would like a cup of tea, please.|Where is the train station?|
Thank you very much for your help.|The book is on the table.|See you tomorrow|
My brother lives in a small house near the sea.|I do not understand this question.|We will meet at eight o'clock.""",
}
SLOTS = {k: [" ".join(x.split()) for x in v.replace("\n", " ").split("|")] for k, v in SLOTS.items()}
TEMPLATES = {k: [t.replace("\\n", "\n") for t in v.split("\n")] for k, v in TEMPLATES.items()}


def templates_of(kind, held_out):
    return [t for i, t in enumerate(TEMPLATES[kind]) if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out]


class Writer:
    """Writes scripts. `rng` is a random.Random; `pool` holds token lists of earlier answers, the texts that
    summaries and edits are asked of (while it is empty, other kinds stand in)."""

    def __init__(self, tokenizer, rng):
        self.rng, self.pool, self.cache = rng, [], {}
        self.encode_text = lambda s: tokenizer.encode(s, add_special_tokens=False).ids

    def encode(self, text):
        if text not in self.cache:
            self.cache[text] = self.encode_text(text)
        return self.cache[text]

    def fill(self, template):
        while "{" in template:
            a, b = template.index("{"), template.index("}")
            name = template[a + 1:b]
            if name == "n":
                value = str(self.rng.randint(2, 10 ** self.rng.randint(1, 4)))
            elif name == "d":
                value = str(self.rng.randint(2, 12))
            elif name in SLOTS:
                value = self.rng.choice(SLOTS[name])
            else:
                raise KeyError(name)
            template = template[:a] + value + template[b + 1:]
        return template

    def user_turn(self, kind, held_out, head):
        """[(entry, role), ...] from `head` (a string that opens the turn) to the opening of the answer."""
        r, tail = self.rng, "<|im_end|>\n<|im_start|>assistant\n"
        free = [(-r.choice([24, 48, 96, 160]), USER)]
        after = [(i, FORCED) for i in self.encode("\n<|im_start|>assistant\n")]
        if kind == "chat" or (kind == "follow-up" and r.random() < .4):
            return [(i, FORCED) for i in self.encode(head)] + free + after
        template = self.fill(r.choice(templates_of(kind, held_out)))
        if kind in ("summary", "edit"):
            text = r.choice(self.pool)
            text = text[:r.choice([60, 120, 200, 320])]
            ids = self.encode(head + template + r.choice(["\n\n", "\n", " "])) + text + self.encode(tail)
            return [(i, FORCED) for i in ids]
        if template.endswith("..."):
            return [(i, FORCED) for i in self.encode(head + template[:-3])] + free + after
        return [(i, FORCED) for i in self.encode(head + template + tail)]

    def script(self, length, held_out):
        """(entry, role, kind) of one sequence of conversations, enough for about `length` tokens (the last entry
        hands the model the pen for good)."""
        r, out, first = self.rng, [], True
        while len(out) < length // 3 or first:
            kind = r.choices(KINDS[:len(SHARES)], SHARES)[0]
            if kind in ("summary", "edit") and not self.pool:
                kind = "question"
            x = r.random()
            system = (f"<|im_start|>system\n{SYSTEM if x < .8 else r.choice(OTHER_SYSTEMS)}<|im_end|>\n"
                      if x < .9 else "")
            head = ("" if first else "\n") + system + "<|im_start|>user\n"
            first = False
            for turn in range(r.choice([1, 1, 2, 3])):
                k = kind if turn == 0 else "follow-up"
                entries = self.user_turn(k, held_out, head)
                entries.append((-r.choice([96, 192, 320, 512]), ASSISTANT))
                out += [(e, role, KINDS.index(k)) for e, role in entries]
                head = "\n<|im_start|>user\n"
        out.append((-1000000, ASSISTANT, KINDS.index("chat")))
        return out
