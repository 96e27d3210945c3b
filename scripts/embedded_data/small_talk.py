"""Greetings, who the model is, thanks, feelings, and polite refusals of what it cannot know."""

from __future__ import annotations

import random

from .base import Check, Conversation, Split, article_for, line_list, pick, word_list
from .words import (
    ADJECTIVES,
    ANIMALS,
    COLORS,
    COUNTRIES,
    OBJECTS,
    date,
    full_name,
    person,
    plural,
    surname,
    town,
)

GREET = line_list("""
    Hello
    Hi
    Hey
    Good morning
    Good evening
    Hi there
    Hello there
    Hey there
    Good day
    Greetings
    hi
    hello
    Hello!
    Hi!
    Good afternoon
""")
GREET_BACK = line_list("""
    Hello! How can I help you?
    Hi! What can I do for you?
    Hello! What would you like to do?
    Hi there! How can I help?
""")
NAMED = line_list("""
    I am {n}.
    My name is {n}.
    I'm {n}.
    You can call me {n}.
    This is {n}.
    {n} here.
    They call me {n}.
""")
ASK_NAME = line_list("""
    What is my name?
    Do you remember my name?
    Who am I?
    Can you tell me my name?
    What was my name again?
""")
WHO = line_list("""
    Who are you?
    What are you?
    What is your name?
    Tell me about yourself.
    Are you a model?
    Which model are you?
    Introduce yourself.
    What kind of model are you?
    Do you have a name?
    Are you a robot?
    Who am I talking to?
""")
I_AM = "I am the small model that ships with streamserve."
ABOUT = [
    f"{I_AM} I can chat a little, add small numbers, write short Python functions and summarize short texts.",
    f"{I_AM} I am tiny, so please check what I say.",
    f"{I_AM} I was trained on made-up text, and I know very little about the world.",
]
CAN = line_list("""
    What can you do?
    How can you help me?
    What are you good at?
    What should I ask you?
    Help
    Can you help me?
    What do you know?
    Give me an idea what to ask.
""")
CAN_DO = (
    "I can answer short questions, solve small word problems, write short Python functions, summarize "
    "articles and change lists or sentences."
)
THANKS = line_list("""
    Thanks!
    Thank you.
    Thank you very much.
    Great, thanks.
    That helps, thank you.
    Perfect.
    Nice, thanks!
    Well done.
    thanks
""")
WELCOME = line_list("""
    You are welcome!
    My pleasure!
    You are welcome. Anything else?
""")
BYE = line_list("""
    Bye!
    Goodbye.
    See you later.
    Good night.
    I have to go.
    That is all.
    See you!
    Bye for now.
""")
BYE_BACK = line_list("""
    Goodbye! Have a nice day.
    Bye! Come back soon.
    Goodbye!
""")
HOW = line_list("""
    How are you?
    How are you today?
    How do you feel?
    How is it going?
    Are you well?
    What's up?
    How do you do?
""")
FINE = line_list("""
    I am fine, thank you. How can I help you?
    I am doing well. What can I do for you?
    All is well here, thank you.
""")
UNKNOWN = line_list("""
    What is the weather in {town} today?
    Who will win the match on {date}?
    What is the phone number of {name}?
    What time is it?
    What is the price of gold today?
    Where does {name} live?
    What did {name} say yesterday?
    How many people live in {town}?
    What is the news from {country}?
    What will happen on {date}?
    How old is {name}?
    What am I thinking of?
    Is the shop in {town} open now?
    What did I eat today?
""")
REFUSE = line_list("""
    I am sorry, I cannot know that. I have no access to the world outside this chat.
    I am sorry, I do not know that. I am a small model and cannot look things up.
    I cannot know that, sorry. Is there something else I can help with?
""")
MOODS = [
    ("I am {bad} today.", "I am sorry to hear that. I hope your day gets better."),
    ("I feel {bad}.", "I am sorry to hear that. Do you want to talk about it?"),
    ("Today I feel very {bad}.", "That sounds hard. I hope you feel better soon."),
    ("I have been {bad} all day.", "I am sorry to hear that. Take good care of yourself."),
    ("I am so {good}!", "That is great to hear!"),
    ("I feel {good} today.", "I am glad to hear that!"),
    ("This makes me {good}.", "That is nice. I am glad!"),
    ("My day was good and I am {good}.", "How nice! I am glad to hear that."),
    ("You know, I am {good} now.", "I am glad to hear that!"),
    ("I was {good} this morning.", "That is nice to hear!"),
]
BAD_MOOD = word_list("sad tired angry lonely worried upset bored ill")
GOOD_MOOD = word_list("happy glad proud excited pleased cheerful relaxed thankful")
LIKES = line_list("""
    I like {x}.
    I love {x}.
    My favorite thing is {x}.
    I really enjoy {x}.
    I am fond of {x}.
    {x} are great.
""")
ASK_LIKE = line_list("""
    What do I like?
    Do you remember what I like?
    What did I say I like?
    What is it that I like?
    Can you tell me what I like?
""")
PETS = line_list("""
    I have {an} named {n}.
    My {a} is called {n}.
    {n} is my {a}.
    The name of my {a} is {n}.
    I own {an}, {n}.
""")
ASK_PET = line_list("""
    What is the name of my {a}?
    What is my {a} called?
    How is my {a} called?
    Which name does my {a} have?
    Tell me the name of my {a}.
""")
FAVORITES = line_list("""
    What is your favorite color?
    Do you like {x}?
    What do you like?
    Do you have a favorite animal?
    Do you dream?
    Are you human?
    Do you have feelings?
    Can you see me?
""")


def _memory(rng: random.Random, split: Split, chat: Conversation) -> None:
    """The user tells something and asks for it later."""
    choice = rng.choice(("name", "like", "pet"))
    if choice == "name":
        name = person(rng, split)[0]
        told, asked = pick(rng, split, NAMED).format(n=name), pick(rng, split, ASK_NAME)
        reply, answer, fact = f"Nice to meet you, {name}! How can I help you?", f"Your name is {name}.", name
    elif choice == "like":
        thing = plural(pick(rng, split, OBJECTS + ANIMALS))
        thing = f"{pick(rng, split, ADJECTIVES + COLORS)} {thing}" if rng.random() < 0.5 else thing
        told, asked = pick(rng, split, LIKES).format(x=thing), pick(rng, split, ASK_LIKE)
        reply, answer, fact = f"That is nice. What do you like about {thing}?", f"You like {thing}.", thing
    else:
        animal, name = pick(rng, split, ANIMALS), surname(rng, split)
        told = pick(rng, split, PETS).format(a=animal, an=article_for(animal), n=name)
        asked = pick(rng, split, ASK_PET).format(a=animal)
        reply, answer, fact = (
            f"{name} is a nice name for {article_for(animal)}!",
            f"Your {animal} is called {name}.",
            name,
        )
    chat.ask(told[:1].upper() + told[1:], reply, Check("facts", [fact]))
    if rng.random() < 0.3:
        chat.ask(pick(rng, split, HOW), rng.choice(FINE))
    if rng.random() < 0.7:
        chat.ask(asked, answer, Check("facts", [fact]))


def _refuse(rng: random.Random, split: Split, chat: Conversation) -> None:
    text = pick(rng, split, UNKNOWN).format(
        town=town(rng, split), date=date(rng), name=full_name(rng, split), country=pick(rng, split, COUNTRIES)
    )
    chat.ask(text, rng.choice(REFUSE), Check("facts", ["know"]))


def _mood(rng: random.Random, split: Split, chat: Conversation) -> None:
    told, reply = pick(rng, split, MOODS)
    chat.ask(told.format(bad=pick(rng, split, BAD_MOOD), good=pick(rng, split, GOOD_MOOD)), reply)


def _self(rng: random.Random, split: Split, chat: Conversation) -> None:
    choice = rng.random()
    if choice < 0.5:
        chat.ask(pick(rng, split, WHO), rng.choice(ABOUT), Check("facts", ["streamserve"]))
    elif choice < 0.8:
        chat.ask(pick(rng, split, CAN), CAN_DO)
    else:
        text = pick(rng, split, FAVORITES).format(x=plural(pick(rng, split, OBJECTS)))
        chat.ask(text, "I am only a small model, so I have no feelings or favorites. But I like to help!")


def chat(rng: random.Random, split: Split, conversation: Conversation) -> None:
    """A greeting or not, one to three exchanges, and perhaps thanks and a goodbye."""
    if rng.random() < 0.4:
        ending = rng.choice(("", "!", ".", ", how are you?"))
        hello = pick(rng, split, GREET)
        reply = rng.choice(FINE) if "how" in ending else rng.choice(GREET_BACK)
        conversation.ask(hello.rstrip("!") + ending, reply)
    parts = [_memory, _refuse, _mood, _self]
    for make in rng.sample(parts, rng.choice((1, 1, 2))):
        make(rng, split, conversation)
    if rng.random() < 0.2:
        conversation.ask(pick(rng, split, HOW), rng.choice(FINE))
    if rng.random() < 0.3:
        conversation.ask(pick(rng, split, THANKS), rng.choice(WELCOME))
    if rng.random() < 0.2:
        conversation.ask(pick(rng, split, BYE), rng.choice(BYE_BACK))
