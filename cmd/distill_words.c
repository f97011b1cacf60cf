/* Words of made facts: see distill_words.h. */
#include "cmd/distill_words.h"

#define WORDS(list)                                                                                \
    const struct distill_words distill_##list = {sizeof(list) / sizeof((list)[0]), list}

static const char *const onsets[] = {
    "b", "br", "d", "dr", "f",  "g", "gl", "h", "k", "kr", "l",  "m",
    "n", "p",  "r", "s",  "st", "t", "tr", "v", "w", "z",  "sh", "ch",
};
WORDS(onsets);

static const char *const nuclei[] = {
    "a", "e", "i", "o", "u", "ai", "ea", "io", "au", "ee",
};
WORDS(nuclei);

static const char *const codas[] = {
    "", "", "", "l", "n", "r", "s", "th", "nd", "x", "m", "ck",
};
WORDS(codas);

static const char *const first_names[] = {
    "Abigail", "Albert",  "Anders",   "Beatrice", "Boris",  "Carmen",  "Cedric", "Chen",
    "Clara",   "Daniel",  "Deborah",  "Diego",    "Edith",  "Elena",   "Emil",   "Esther",
    "Felix",   "Fiona",   "Frank",    "Gemma",    "Georg",  "Greta",   "Harold", "Helga",
    "Hugo",    "Irene",   "Isaac",    "Ivan",     "Jacob",  "Janet",   "Jorge",  "Judith",
    "Karim",   "Kirsten", "Lars",     "Laura",    "Louis",  "Lucia",   "Magnus", "Margaret",
    "Mario",   "Marta",   "Miguel",   "Mohammed", "Nancy",  "Nikolai", "Nora",   "Oliver",
    "Olga",    "Oscar",   "Pablo",    "Paula",    "Peter",  "Quentin", "Rachel", "Ravi",
    "Rebecca", "Robert",  "Rosa",     "Ruth",     "Samuel", "Sarah",   "Simon",  "Sofia",
    "Stefan",  "Susan",   "Theodore", "Teresa",   "Ursula", "Victor",  "Viola",  "Walter",
    "Wei",     "William", "Yvonne",
};
WORDS(first_names);

static const char *const family_names[] = {
    "Abbott",   "Alvarez", "Andersson", "Baker",    "Bauer",      "Becker",   "Bennett", "Bianchi",
    "Campbell", "Carter",  "Cohen",     "Costa",    "Dawson",     "Diaz",     "Duval",   "Edwards",
    "Eriksen",  "Evans",   "Fischer",   "Fletcher", "Garcia",     "Gibson",   "Gupta",   "Haas",
    "Hansen",   "Hughes",  "Ibrahim",   "Ivanov",   "Jensen",     "Johnson",  "Kaplan",  "Keller",
    "Kim",      "Klein",   "Kowalski",  "Larsen",   "Lee",        "Lopez",    "Martin",  "Mendoza",
    "Meyer",    "Miller",  "Moreau",    "Morris",   "Murphy",     "Nakamura", "Newton",  "Nguyen",
    "Novak",    "Okafor",  "Olsen",     "Palmer",   "Park",       "Pereira",  "Petrov",  "Quinn",
    "Ramirez",  "Reed",    "Richter",   "Rossi",    "Santos",     "Schmidt",  "Singh",   "Smith",
    "Tanaka",   "Taylor",  "Thompson",  "Turner",   "Vargas",     "Vogel",    "Walker",  "Weber",
    "Wilson",   "Wong",    "Young",     "Zhang",    "Zimmermann",
};
WORDS(family_names);

static const char *const titles[] = {
    "Doctor", "Professor", "Captain",   "Mrs",     "Mr",   "Sister",
    "Aunt",   "Uncle",     "Inspector", "Colonel", "Miss", "Judge",
};
WORDS(titles);

static const char *const towns[] = {
    "Adelaide",   "Ankara",    "Athens", "Austin",    "Baku",      "Basel",     "Belfast",
    "Bordeaux",   "Boston",    "Brno",   "Calgary",   "Caracas",   "Chicago",   "Cologne",
    "Cork",       "Dallas",    "Delhi",  "Denver",    "Dresden",   "Dublin",    "Durban",
    "Florence",   "Geneva",    "Ghent",  "Glasgow",   "Graz",      "Havana",    "Helsinki",
    "Houston",    "Innsbruck", "Kiel",   "Krakow",    "Lagos",     "Leeds",     "Leipzig",
    "Lyon",       "Madrid",    "Manila", "Marseille", "Melbourne", "Memphis",   "Montreal",
    "Nagoya",     "Naples",    "Odessa", "Osaka",     "Ottawa",    "Palermo",   "Perth",
    "Plymouth",   "Prague",    "Rabat",  "Reykjavik", "Rotterdam", "Salzburg",  "Santiago",
    "Sapporo",    "Sarajevo",  "Sofia",  "Stockholm", "Sydney",    "Tallinn",   "Toledo",
    "Toronto",    "Trieste",   "Turin",  "Uppsala",   "Valencia",  "Vancouver", "Venice",
    "Wellington", "York",      "Zurich",
};
WORDS(towns);

static const char *const firms[] = {
    "& Sons",      "Brothers", "Ltd",      "Industries", "Bank",      "Press",
    "Foods",       "Motors",   "Textiles", "Software",   "Shipping",  "Brewery",
    "Instruments", "Partners", "Mining",   "Airlines",   "Insurance", "Records",
};
WORDS(firms);

static const char *const projects[] = {
    "ship",  "project",   "operation", "expedition", "satellite", "steamer",
    "dam",   "bridge",    "treaty",    "foundation", "festival",  "mission",
    "study", "orchestra", "estate",    "hotel",      "school",    "valley",
};
WORDS(projects);

static const char *const nouns[] = {
    "acorn",    "anchor",    "anvil",    "apron",    "arrow",   "autumn",    "badge",     "bamboo",
    "barrel",   "basket",    "beacon",   "bell",     "blanket", "bottle",    "branch",    "bucket",
    "butter",   "button",    "cable",    "candle",   "canyon",  "carpet",    "castle",    "cellar",
    "chalk",    "chimney",   "circle",   "cliff",    "clover",  "coal",      "coin",      "copper",
    "coral",    "corner",    "cotton",   "cradle",   "crystal", "curtain",   "daisy",     "desert",
    "diamond",  "dolphin",   "drawer",   "eagle",    "ember",   "engine",    "envelope",  "feather",
    "fence",    "ferry",     "field",    "flame",    "flute",   "forest",    "fountain",  "frost",
    "garden",   "glacier",   "glove",    "granite",  "hammer",  "harvest",   "helmet",    "hollow",
    "honey",    "horizon",   "island",   "ivy",      "jacket",  "jigsaw",    "kettle",    "ladder",
    "lagoon",   "lantern",   "leather",  "lemonade", "letter",  "lightning", "lilac",     "linen",
    "locket",   "lotus",     "lumber",   "magnet",   "maple",   "marble",    "meadow",    "mercury",
    "midnight", "mirror",    "monsoon",  "mountain", "mustard", "needle",    "nutmeg",    "ocean",
    "olive",    "opal",      "otter",    "owl",      "paddle",  "pebble",    "pepper",    "phoenix",
    "pillar",   "pillow",    "pirate",   "planet",   "plaster", "pollen",    "prairie",   "pyramid",
    "quill",    "rainbow",   "raven",    "ribbon",   "river",   "rocket",    "rooster",   "saddle",
    "sandal",   "satin",     "scissors", "shadow",   "silver",  "slipper",   "snowflake", "spiral",
    "sponge",   "spruce",    "starling", "stone",    "sugar",   "summit",    "sunrise",   "swallow",
    "tablet",   "teapot",    "temple",   "thistle",  "thunder", "timber",    "tower",     "trumpet",
    "tulip",    "tundra",    "turnip",   "twilight", "valley",  "velvet",    "vinegar",   "violet",
    "wagon",    "waterfall", "whistle",  "willow",   "window",  "winter",    "yarn",
};
WORDS(nouns);

static const char *const adjectives[] = {
    "ancient", "bent",   "blue",   "bright",   "broken", "carved", "cheap",   "clean",   "cracked",
    "crooked", "dark",   "dusty",  "empty",    "faded",  "fancy",  "flat",    "foreign", "fragile",
    "frozen",  "gilded", "green",  "heavy",    "hidden", "hollow", "huge",    "iron",    "large",
    "leather", "light",  "little", "loose",    "lost",   "modern", "narrow",  "old",     "orange",
    "painted", "pale",   "plain",  "polished", "purple", "quiet",  "red",     "round",   "rusty",
    "shiny",   "silent", "small",  "soft",     "square", "stolen", "striped", "sturdy",  "tall",
    "thin",    "tiny",   "wide",   "wild",     "wooden", "worn",
};
WORDS(adjectives);

static const char *const objects[] = {
    "accordion",
    "alarm clock",
    "armchair",
    "atlas",
    "axe",
    "backpack",
    "barometer",
    "bicycle",
    "binoculars",
    "bookshelf",
    "bowl",
    "broom",
    "camera",
    "candlestick",
    "canoe",
    "cello",
    "chain",
    "clarinet",
    "coat",
    "cupboard",
    "diary",
    "dictionary",
    "drill",
    "easel",
    "encyclopedia",
    "fan",
    "filing cabinet",
    "flag",
    "frying pan",
    "globe",
    "guitar",
    "hammer",
    "harp",
    "helmet",
    "jar",
    "kettle",
    "lamp",
    "ledger",
    "loom",
    "map",
    "mattress",
    "microscope",
    "mirror",
    "notebook",
    "oar",
    "padlock",
    "piano",
    "plough",
    "projector",
    "quilt",
    "ring",
    "rope",
    "rug",
    "saddle",
    "safe",
    "saw",
    "scale",
    "shovel",
    "sledge",
    "stove",
    "suitcase",
    "sundial",
    "table",
    "teapot",
    "telescope",
    "tent",
    "toolbox",
    "tractor",
    "trunk",
    "typewriter",
    "umbrella stand",
    "vase",
    "wardrobe",
    "watch",
    "wheelbarrow",
    "wrench",
};
WORDS(objects);

static const char *const animals[] = {
    "badger",  "beaver", "bison",   "buffalo",  "camel",   "canary", "cat",    "cheetah",
    "cobra",   "cow",    "crane",   "crow",     "deer",    "dog",    "donkey", "duck",
    "elk",     "falcon", "ferret",  "fox",      "frog",    "gecko",  "goat",   "goose",
    "hamster", "hare",   "hawk",    "hedgehog", "heron",   "horse",  "hyena",  "jackal",
    "koala",   "lama",   "lizard",  "lynx",     "magpie",  "mole",   "moose",  "mouse",
    "mule",    "newt",   "ostrich", "owl",      "ox",      "panda",  "parrot", "penguin",
    "pig",     "pigeon", "pony",    "quail",    "rabbit",  "rat",    "salmon", "seal",
    "sheep",   "snail",  "spider",  "squirrel", "stork",   "swan",   "tiger",  "toad",
    "trout",   "turkey", "turtle",  "viper",    "vulture", "walrus", "weasel", "wolf",
    "zebra",
};
WORDS(animals);

static const char *const jobs[] = {
    "accountant",   "architect",   "astronomer",  "baker",       "barber",        "beekeeper",
    "blacksmith",   "bookbinder",  "botanist",    "bricklayer",  "butcher",       "carpenter",
    "cartographer", "chemist",     "clockmaker",  "cobbler",     "dentist",       "detective",
    "diplomat",     "electrician", "engraver",    "farmer",      "firefighter",   "gardener",
    "geologist",    "glazier",     "hairdresser", "interpreter", "jeweller",      "journalist",
    "judge",        "lawyer",      "librarian",   "locksmith",   "mathematician", "mechanic",
    "midwife",      "miller",      "miner",       "musician",    "nurse",         "optician",
    "painter",      "pastor",      "pilot",       "plumber",     "poet",          "porter",
    "potter",       "printer",     "sailor",      "sculptor",    "shepherd",      "singer",
    "surgeon",      "surveyor",    "tailor",      "teacher",     "translator",    "vet",
    "waiter",       "weaver",      "welder",
};
WORDS(jobs);

static const char *const colours[] = {
    "amber",   "black",   "blue",   "bronze",    "brown",  "chestnut", "copper", "cream",
    "crimson", "emerald", "golden", "green",     "grey",   "indigo",   "ivory",  "lilac",
    "maroon",  "navy",    "ochre",  "orange",    "pink",   "purple",   "red",    "rose",
    "scarlet", "silver",  "teal",   "turquoise", "violet", "white",    "yellow",
};
WORDS(colours);

static const char *const materials[] = {
    "aluminium", "bamboo",   "bone",        "brass",    "brick",   "bronze",    "canvas",
    "cardboard", "cedar",    "clay",        "concrete", "copper",  "cork",      "cotton",
    "ebony",     "felt",     "flint",       "glass",    "gold",    "granite",   "iron",
    "lead",      "leather",  "linen",       "mahogany", "marble",  "nylon",     "oak",
    "paper",     "pewter",   "pine",        "plaster",  "plastic", "porcelain", "rubber",
    "sandstone", "silk",     "silver",      "slate",    "steel",   "straw",     "teak",
    "tin",       "titanium", "walnut wood", "wax",      "wool",    "zinc",
};
WORDS(materials);

static const char *const foods[] = {
    "barley soup",    "bean stew",      "black bread",
    "blue cheese",    "boiled eggs",    "brown rice",
    "buttermilk",     "cabbage rolls",  "carrot cake",
    "cheese toast",   "chestnut puree", "chocolate",
    "cider",          "coffee",         "corn chowder",
    "crab cakes",     "custard",        "dumplings",
    "fish pie",       "fried noodles",  "garlic bread",
    "ginger tea",     "goat curry",     "green tea",
    "ham sandwiches", "hot milk",       "lamb chops",
    "lentils",        "liquorice",      "marzipan",
    "meatballs",      "mint tea",       "mushroom risotto",
    "mutton",         "oatmeal",        "onion soup",
    "pancakes",       "pea soup",       "pickled herring",
    "plum brandy",    "popcorn",        "porridge",
    "potato salad",   "pumpkin pie",    "raisin buns",
    "roast duck",     "rye bread",      "salted almonds",
    "sardines",       "sausages",       "scrambled eggs",
    "spinach",        "tomato juice",   "trout",
    "vanilla ice",    "waffles",        "white wine",
    "yoghurt",
};
WORDS(foods);

static const char *const days[] = {
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
};
WORDS(days);

static const char *const months[] = {
    "January", "February", "March",     "April",   "May",      "June",
    "July",    "August",   "September", "October", "November", "December",
};
WORDS(months);

static const char *const coins[] = {
    "dollars", "euros",     "pounds", "francs",   "crowns", "yen",
    "rupees",  "shillings", "pesos",  "guilders", "cents",
};
WORDS(coins);

static const char *const units[] = {
    "kilograms", "metres", "miles", "litres", "minutes", "hours",  "days",    "feet",   "tons",
    "degrees",   "pages",  "acres", "watts",  "grams",   "inches", "barrels", "people", "steps",
};
WORDS(units);

static const char *const code_shapes[] = {
    "AA-000", "A00",  "AAA 0000", "00-A-00", "A0A-0A0", "0000-AA",  "AA00AA", "#00000",
    "A-0",    "0A00", "AAAA",     "00/000",  "No. 00A", "AA.00.00", "0A-A0",
};
WORDS(code_shapes);
