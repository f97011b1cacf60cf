"""Twenty fixed prompts of 8 to about 2,000 tokens: chat, code, lists, numbers, several scripts. Texts are ours."""
import random

SENTENCES = """The lighthouse keeper counted the ships before breakfast and wrote the number on the wall.
Nobody had told the new clerk that the ledger was kept in two currencies at once.
Rain fell on the slate roofs all week, and the river rose to the third step of the old stair.
A good map leaves out almost everything, which is why two good maps of one town can disagree.
She tuned the violin by the hum of the refrigerator, half a tone below what the score asked for.
In the spring of 1931 the bridge was closed for repairs that lasted until the following winter.
The experiment failed twice before anyone noticed that the thermometer was mounted upside down.
Copper wire stretches a little each time it is bent, and after some hundred bends it breaks.
Our train was late because a herd of goats had decided that the track was the driest place to sleep.
He answered every letter on the day it came, in green ink, and kept no copies.
The committee agreed on the colour of the door after four meetings and one resignation.
Bread rises faster near the stove, but the crust suffers, as my grandmother never tired of saying.
If the key is lost, the lock can still be opened from inside by lifting the bar and pushing hard.
Three of the twelve jars held salt, eight held sugar, and the last one had lost its label.
The astronomer slept by day, which made it difficult to explain the eclipse to her neighbours.
Every autumn the geese crossed the valley from north to south, a day earlier each decade.
A program that counts from one is not wrong, it only begins at another place.
The price of tin doubled, and suddenly the roof of the chapel was the richest thing in the village.
They measured the field with a rope of fifty knots, each knot a hand and a half from the next.
When the museum caught fire, the guards carried out the smallest paintings first.""".split("\n")
CODE = '''def merge(left, right):
    out, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            out.append(left[i]); i += 1
        else:
            out.append(right[j]); j += 1
    return out + left[i:] + right[j:]

for (int i = 0; i < n; i++) { sum += a[i] * b[i]; }
SELECT name, COUNT(*) FROM visits WHERE day >= '2024-03-01' GROUP BY name ORDER BY 2 DESC;
'''


def chat(user, system="You are a helpful AI assistant named SmolLM, trained by Hugging Face"):
    return (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
            "<|im_start|>assistant\n")


def prose(seed, n):
    r = random.Random(seed)
    return " ".join(r.choice(SENTENCES) for _ in range(n))


def prompts():
    out = [
        "The capital of France is",
        chat("What is the largest planet?"),
        chat("Write a function that merges two sorted lists."),
        chat("List five fruits and one use of each."),
        "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144,",
        CODE,
        "Größe, naïve café, 東京は日本の首都です。 Привет, мир! 😀 مرحبا",
        chat("Translate into French: " + SENTENCES[2]),
        "        if x == 0:\n            return None\n\n\n\n        return 1.0 / x  # 12345 67890",
        chat("Summarise in one sentence: " + prose(1, 8)),
    ]
    for i, n in enumerate([10, 15, 20, 25, 30, 40, 50, 60, 75, 88]):
        text = prose(100 + i, n)
        out.append(chat("Read this and name one animal in it.\n" + text) if i % 2 else
                   text + "\n" + CODE)
    return out
