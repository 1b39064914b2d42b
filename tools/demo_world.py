"""The little world of the demonstration model, and the grammar that writes about it.

A village with six people, ten animals and ten things. What is fixed (the cat is black, Ben is a fisher) is fixed in
every text, so a small model can learn it by heart; what a text states itself ("Clara has a green hat") holds in that
text, so the model must also learn to look it up. ``document(rng)`` writes one text; chats are lists of turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

Turn = tuple[str, str]  # (role, text)


@dataclass(frozen=True)
class Person:
    name: str
    job: str
    home: str
    food: str
    loves: str
    pronoun: str


@dataclass(frozen=True)
class Animal:
    name: str
    colour: str
    home: str
    food: str
    sound: str
    friend: str
    legs: str = "four"


@dataclass(frozen=True)
class Thing:
    name: str
    colour: str
    place: str
    owner: str


PEOPLE = (
    Person("Anna", "baker", "in the old mill", "warm bread", "the smell of the kitchen", "she"),
    Person("Ben", "fisher", "by the river", "fish soup", "the sound of the water", "he"),
    Person("Clara", "teacher", "next to the school", "apple cake", "old books", "she"),
    Person("Otto", "farmer", "on the hill", "cheese", "the early morning", "he"),
    Person("Mia", "painter", "in the tower", "cherries", "the colours of the sky", "she"),
    Person("Tom", "gardener", "behind the garden", "honey", "the quiet of the evening", "he"),
)
ANIMALS = (
    Animal("cat", "black", "in the kitchen", "milk", "meow", "mouse"),
    Animal("dog", "brown", "in front of the mill", "bones", "woof", "horse"),
    Animal("fox", "red", "in the forest", "berries", "yip", "owl"),
    Animal("duck", "white", "on the pond", "bread", "quack", "frog", "two"),
    Animal("owl", "grey", "in the tower", "nuts", "hoo", "fox", "two"),
    Animal("frog", "green", "under the bridge", "flies", "croak", "duck"),
    Animal("horse", "white", "in the barn", "apples", "neigh", "dog"),
    Animal("mouse", "grey", "under the stairs", "cheese", "squeak", "cat"),
    Animal("goat", "brown", "on the hill", "grass", "maa", "sheep"),
    Animal("sheep", "white", "in the meadow", "grass", "baa", "goat"),
)
THINGS = (
    Thing("ball", "red", "under the table", "Tom"),
    Thing("boat", "blue", "on the river", "Ben"),
    Thing("lamp", "yellow", "on the shelf", "Clara"),
    Thing("book", "green", "on the table", "Clara"),
    Thing("kite", "orange", "in the tree", "Mia"),
    Thing("bell", "golden", "in the tower", "Otto"),
    Thing("hat", "purple", "behind the door", "Otto"),
    Thing("basket", "brown", "in the kitchen", "Anna"),
    Thing("cup", "white", "on the shelf", "Anna"),
    Thing("brush", "black", "in the tower", "Mia"),
)
# fmt: off
NATURE = {"sky": "blue", "grass": "green", "snow": "white", "sun": "yellow", "moon": "silver", "night": "black"}
COLOURS = [
    "black", "brown", "red", "white", "grey", "green", "blue", "yellow", "orange", "golden", "purple", "silver",
    "pink",
]
PLACES = [
    "in the kitchen", "by the river", "in the forest", "on the hill", "in the garden", "on the pond", "in the barn",
    "under the bridge", "in the meadow", "at the market", "in the tower", "in the old mill", "near the school",
    "under the stairs", "under the table", "on the shelf", "behind the door", "in the tree",
]
OPPOSITES = (
    "big small;hot cold;old young;day night;up down;fast slow;happy sad;loud quiet;open closed;early late;full empty"
)
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
SIZES = ["little", "big", "small", "young", "old", "clever", "shy", "brave", "friendly"]
TIMES = ("One morning", "One evening", "One warm day", "One cold day", "One quiet night", "One day, after the rain,")
WORKPLACES = (
    "in the garden", "in the kitchen", "at the market", "near the school", "by the river", "on the hill",
    "in the meadow",
)
PLAYS = [
    "sang a song", "played a game", "looked at the clouds", "told old stories", "danced in the grass",
    "shared an apple", "counted the stars", "watched the boats", "built a small house", "slept in the sun",
]
PASTS = ["walked", "ran", "hurried", "wandered", "went"]
# fmt: on


def an(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


# --- stories ----------------------------------------------------------------------------------------------------------


def story(rng: Random) -> str:
    return rng.choice((story_of_a_friend, story_of_a_loss, story_of_a_day))(rng)


def opening(rng: Random, animal: Animal) -> str:
    size = rng.choice(SIZES)
    there = rng.choice(("Once upon a time there was", "Once upon a time, there was", "Long ago there was"))
    return f"{there} {an(size)} {animal.colour} {animal.name} who lived {animal.home}."


def story_of_a_friend(rng: Random) -> str:
    hero, other = rng.sample(ANIMALS, 2)
    when, place, play, later = rng.choice(TIMES), rng.choice(PLACES), rng.choice(PLAYS), rng.choice(PLAYS)
    return " ".join(
        (
            opening(rng, hero),
            f"The {hero.name} liked {hero.food}, but it was often alone.",
            f"{when} the {hero.name} {rng.choice(PASTS)} to a new place and met {an(other.name)} {place}.",
            f'"{capital(hero.sound)}," said the {hero.name}. "{capital(other.sound)}," said the {other.name}.',
            f"They {play} together, and then they {later}.",
            f"From that day on, the {hero.name} and the {other.name} were good friends.",
        )
    )


def story_of_a_loss(rng: Random) -> str:
    person, thing = rng.choice(PEOPLE), rng.choice(THINGS)
    helper = rng.choice(ANIMALS)
    wrong, right = rng.sample(PLACES, 2)
    he = person.pronoun
    start = rng.choice(("Once upon a time", "One day"))
    return " ".join(
        (
            f"{start}, {person.name} the {person.job} could not find the {thing.colour} {thing.name}.",
            f"{capital(he)} looked {wrong}, but the {thing.name} was not there, and {person.name} was sad.",
            f'Then the {helper.colour} {helper.name} came and said: "I saw the {thing.name} {right}."',
            f"{person.name} {rng.choice(PASTS)} there, and the {thing.name} was {right}.",
            f"{person.name} was happy and gave the {helper.name} {helper.food}.",
        )
    )


def story_of_a_day(rng: Random) -> str:
    person, animal = rng.choice(PEOPLE), rng.choice(ANIMALS)
    first, second = rng.choice(WORKPLACES), rng.choice(PLACES)
    he = person.pronoun
    return " ".join(
        (
            f"Once upon a time there was {an(person.job)} called {person.name} who lived {person.home}.",
            f"Every morning {he} ate {person.food}, and then {he} worked {first}.",
            f"{rng.choice(TIMES)} {person.name} met the {animal.name} {second}.",
            f"They {rng.choice(PLAYS)} together, and the {animal.name} was happy.",
            f"In the evening {person.name} went home and thought of {person.loves}.",
        )
    )


# --- facts ------------------------------------------------------------------------------------------------------------


def about_person(rng: Random, person: Person) -> str:
    he = capital(person.pronoun)
    return (
        f"{person.name} is {an(person.job)}. {he} lives {person.home}. "
        f"{he} likes {person.food} and loves {person.loves}."
    )


def about_animal(rng: Random, animal: Animal) -> str:
    return (
        f"The {animal.name} is {animal.colour} and lives {animal.home}. It likes {animal.food} "
        f"and says {animal.sound}. The friend of the {animal.name} is the {animal.friend}."
    )


def about_thing(rng: Random, thing: Thing) -> str:
    return f"The {thing.name} is {thing.colour}. It is {thing.place}. It belongs to {thing.owner}."


def portrait(rng: Random) -> str:
    return about_any(rng)[1]


def about_any(rng: Random) -> tuple[str, str]:
    kind = rng.randrange(3)
    if kind == 0:
        person = rng.choice(PEOPLE)
        return person.name, about_person(rng, person)
    if kind == 1:
        animal = rng.choice(ANIMALS)
        return f"the {animal.name}", about_animal(rng, animal)
    thing = rng.choice(THINGS)
    return f"the {thing.name}", about_thing(rng, thing)


# --- questions --------------------------------------------------------------------------------------------------------

Pair = tuple[str, str]  # (question, answer)


def ask_colour(rng: Random, name: str, colour: str) -> Pair:
    word = rng.choice(("colour", "colour", "colour", "color"))
    forms = (f"What {word} is the {name}?", f"What {word} is the {name}?", f"What is the {word} of the {name}?")
    return rng.choice(forms), f"The {name} is {colour}."


def fixed_question(rng: Random) -> Pair:
    """Write a question about what is always so."""
    return rng.choice(
        (_of_animal, _of_animal, _of_person, _of_person, _of_thing, _of_place, _of_nature, _sum, _opposite)
    )(rng)


def _of_animal(rng: Random) -> Pair:
    a = rng.choice(ANIMALS)
    return rng.choice(
        (
            ask_colour(rng, a.name, a.colour),
            (rng.choice((f"Where does the {a.name} live?", f"Where is the {a.name}?")), f"It lives {a.home}."),
            (
                rng.choice((f"What does the {a.name} like?", f"What does the {a.name} eat?")),
                f"The {a.name} likes {a.food}.",
            ),
            (f"What does the {a.name} say?", f"The {a.name} says {a.sound}."),
            (f"Who is the friend of the {a.name}?", f"The friend of the {a.name} is the {a.friend}."),
            (f"How many legs does the {a.name} have?", f"The {a.name} has {a.legs} legs."),
        )
    )


def _of_person(rng: Random) -> Pair:
    p = rng.choice(PEOPLE)
    return rng.choice(
        (
            (f"Who is {p.name}?", f"{p.name} is the {p.job} of the village."),
            (f"What does {p.name} do?", f"{p.name} is {an(p.job)}."),
            (f"Who is the {p.job}?", f"The {p.job} is {p.name}."),
            (f"Where does {p.name} live?", f"{p.name} lives {p.home}."),
            (
                rng.choice((f"What does {p.name} like?", f"What does {p.name} eat?")),
                f"{p.name} likes {p.food}.",
            ),
            (f"What does {p.name} love?", f"{p.name} loves {p.loves}."),
        )
    )


def _of_thing(rng: Random) -> Pair:
    t = rng.choice(THINGS)
    return rng.choice(
        (
            ask_colour(rng, t.name, t.colour),
            (f"Where is the {t.name}?", f"The {t.name} is {t.place}."),
            (
                rng.choice((f"Whose {t.name} is it?", f"Who has the {t.name}?")),
                f"The {t.name} belongs to {t.owner}.",
            ),
        )
    )


def _of_place(rng: Random) -> Pair:
    place = rng.choice([a.home for a in ANIMALS])
    lodgers = [p.name for p in PEOPLE if p.home == place] + [f"the {a.name}" for a in ANIMALS if a.home == place]
    asked = "in the wood" if place == "in the forest" and rng.random() < 0.5 else place  # two words for one place
    live = "lives" if len(lodgers) == 1 else "live"
    return f"Who lives {asked}?", capital(f"{' and '.join(lodgers)} {live} {place}.")


def _of_nature(rng: Random) -> Pair:
    name = rng.choice(sorted(NATURE))
    return ask_colour(rng, name, NATURE[name])


def _sum(rng: Random) -> Pair:
    a = rng.randrange(6)
    b = rng.randrange(6)
    return (
        rng.choice((f"What is {NUMBERS[a]} and {NUMBERS[b]}?", f"How much is {NUMBERS[a]} plus {NUMBERS[b]}?")),
        f"{capital(NUMBERS[a])} and {NUMBERS[b]} is {NUMBERS[a + b]}.",
    )


def _opposite(rng: Random) -> Pair:
    pair = rng.choice(OPPOSITES.split(";")).split()
    if rng.random() < 0.5:
        pair.reverse()
    return f"What is the opposite of {pair[0]}?", f"The opposite of {pair[0]} is {pair[1]}."


def stated_question(rng: Random) -> tuple[list[str], list[Pair]]:
    """Write one to four statements that hold in this text only, and questions that they answer."""
    statements: list[str] = []
    pairs: list[Pair] = []
    names = rng.sample([x.name for x in THINGS] + [x.name for x in ANIMALS], rng.randint(1, 4))
    people = rng.sample([p.name for p in PEOPLE], len(names))
    for name, person in zip(names, people, strict=True):
        colour, place = rng.choice(COLOURS), rng.choice(PLACES)
        kind = rng.randrange(4)
        if kind == 0:
            statements.append(f"The {name} is {colour}.")
            pairs.append(ask_colour(rng, name, colour))
        elif kind == 1:
            statements.append(f"The {name} is {place}.")
            pairs.append((f"Where is the {name}?", f"The {name} is {place}."))
        elif kind == 2:
            statements.append(f"{person} has {an(colour)} {name}.")
            pairs.append(ask_colour(rng, name, colour))
            pairs.append((f"Who has the {name}?", f"{person} has the {name}."))
            pairs.append((f"What does {person} have?", f"{person} has {an(colour)} {name}."))
        else:
            statements.append(f"{person} is {place}.")
            pairs.append((f"Where is {person}?", f"{person} is {place}."))
    rng.shuffle(pairs)
    return statements, pairs


def questions_and_answers(rng: Random) -> str:
    """Write statements, then questions with their answers, as plain text."""
    if rng.random() < 0.5:
        statements, pairs = stated_question(rng)
    else:
        statements, pairs = [], [fixed_question(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    return "\n".join([*([" ".join(statements)] if statements else []), *(f"{q} {a}" for q, a in pairs)])


# --- chats ------------------------------------------------------------------------------------------------------------

SYSTEM = ("You are a friendly helper.", "You are a helpful assistant.", "Answer in one short sentence.")
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("Hello!", "Hello.", "Hello", "Hi", "Hi!", "Good morning!"), ("Hello! What would you like to know?",)),
    (("How are you?",), ("I am well, thank you. How are you?",)),
    (("Who are you?", "What are you?"), ("I am a very small model, and I know a little world.",)),
    (("What is your name?",), ("I am the demo model of Swarm.",)),
    (
        ("What do you know?", "What can you do?"),
        ("I know six people, ten animals and some things. Ask me about the cat, or let me tell you a story.",),
    ),
    (("Thank you.", "Thanks!", "Thank you!"), ("You are welcome!",)),
    (("Goodbye!", "Bye!", "Good night!"), ("Goodbye! Come back soon.",)),
    (
        ("Who lives in the village?", "Which people do you know?"),
        ("In the village live Anna the baker, Ben the fisher, Clara the teacher, Otto the farmer, Mia the painter "
         "and Tom the gardener.",),
    ),
    (
        ("Which animals do you know?",),
        ("I know the cat, the dog, the fox, the duck, the owl, the frog, the horse, the mouse, the goat and the "
         "sheep.",),
    ),
)  # fmt: skip
STORY_WISHES = ("Tell me a story.", "Tell me a story!", "Please tell me a story.", "Can you tell me a story?")


def chat(rng: Random) -> list[Turn]:
    turns: list[Turn] = [("system", rng.choice(SYSTEM))] if rng.random() < 0.2 else []
    if rng.random() < 0.5:  # once per chat: a second set of statements could contradict the first
        statements, pairs = stated_question(rng)
        turns += _exchange(rng, " ".join([*statements, pairs[0][0]]), pairs[0][1])
        for question, said in pairs[1 : rng.randint(1, len(pairs))]:
            turns += _exchange(rng, question, said)
    while not turns or rng.random() < 0.4:
        turns += rng.choice((_fixed, _fixed, _fixed, _small_talk, _echo, _echo, _story, _portrait))(rng)
    return turns


def _fixed(rng: Random) -> list[Turn]:
    return _exchange(rng, *fixed_question(rng))


def _small_talk(rng: Random) -> list[Turn]:
    asked, said = rng.choice(SMALL_TALK)
    return [("user", rng.choice(asked)), ("assistant", rng.choice(said))]


def _echo(rng: Random) -> list[Turn]:
    """Say words again: nothing teaches looking things up better."""
    nouns = [x.name for x in (*THINGS, *ANIMALS, *PEOPLE)]
    words = " ".join(rng.choice((*nouns, *COLOURS, *NUMBERS)) for _ in range(rng.randint(2, 10)))
    return [("user", f"Say: {words}"), ("assistant", words)]


def _story(rng: Random) -> list[Turn]:
    return [("user", rng.choice(STORY_WISHES)), ("assistant", story(rng))]


def _portrait(rng: Random) -> list[Turn]:
    what, text = about_any(rng)
    return [("user", f"Tell me about {what}."), ("assistant", text)]


def _exchange(rng: Random, question: str, answer: str) -> list[Turn]:
    if rng.random() < 0.1:  # people type carelessly
        question = question.removesuffix("?")
    if rng.random() < 0.1:
        question = question[0].lower() + question[1:]
    return [("user", question), ("assistant", answer)]


def document(rng: Random) -> str | list[Turn]:
    """Write one text, or one chat."""
    kind = rng.random()
    if kind < 0.2:
        return story(rng)
    if kind < 0.25:
        return portrait(rng)
    if kind < 0.4:
        return questions_and_answers(rng)
    return chat(rng)
