"""Greetings, who the model is, thanks, feelings, and polite refusals of what it cannot know."""

from __future__ import annotations

import random

from .base import Check, Conversation, Split, article_for, line_list, pick, word_list, wording
from .words import (
    ADJECTIVES,
    ANIMALS,
    COUNTRIES,
    OBJECTS,
    date,
    filler,
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
    [Hello, |Hi, |Hey, |]I am {n}[.| and I am new here.|, nice to meet you.]
    [Hello, |Hi, |]my name is {n}[.|, by the way.]
    [I'm|This is|I am called|They call me|Everyone calls me|You can call me] {n}.
    {n} here[.|!| again.]
    The name is {n}.
""")
ASK_NAME = line_list("""
    [What is|What was|Do you remember|Do you know|Do you still know] my name[?| again?]
    [Who am I|What am I called|How am I called][?| again?]
    @do [tell me|say|repeat|give me] my name.
""")
WHO = line_list("""
    [Who|What] are you[?|, please?| exactly?]
    [What is your name|Do you have a name|What are you called][?|, please?]
    @do [tell me about|introduce|describe] yourself.
    [Are you|So you are] a [model|robot|machine|computer|program|human]?
    [Which|What kind of|What] model are you?
    [Who|What] am I [talking|speaking|chatting|writing] [to|with]?
""")
I_AM = "I am the small model that ships with streamserve."
ABOUT = [
    f"{I_AM} I can chat a little, add small numbers, write short Python functions and summarize short texts.",
    f"{I_AM} I am tiny, so please check what I say.",
    f"{I_AM} I was trained on made-up text, and I know very little about the world.",
]
CAN = line_list("""
    What can you do[?| for me?| here?]
    How can you [help|help me|be of use]?
    What are you [good at|able to do|made for]?
    What [should|can|could] I ask you?
    [Help|Help, please|Can you help me?|I need help]
    What [do you know|are your skills|do you do best]?
    @do give me an idea what to ask.
""")
CAN_DO = (
    "I can answer short questions, solve small word problems, write short Python functions, summarize "
    "articles and change lists or sentences."
)
THANKS = line_list("""
    [Thanks|Thank you|thanks|Many thanks|Thank you very much|Thanks a lot][!|.|, that helps.|, very good.]
    [Great|Nice|Perfect|Good|Super], [thanks|thank you][!|.]
    [Perfect|Well done|Very good|That is right|Nice work][.|!]
    That [helps|is good|is great], thank you.
""")
WELCOME = line_list("""
    You are welcome!
    My pleasure!
    You are welcome. Anything else?
""")
BYE = line_list("""
    [Bye|Goodbye|See you|See you later|See you soon|Good night|Farewell][!|.| then.|, friend.]
    I have to [go|leave|stop][.| now.]
    That is all[.| for today.| for now.]
    Bye for now.
""")
BYE_BACK = line_list("""
    Goodbye! Have a nice day.
    Bye! Come back soon.
    Goodbye!
""")
HOW = line_list("""
    How are you[?| today?| doing?| feeling?]
    How [do you feel|is it going|is life|goes it|is your day][?| today?]
    [Are you well|Are you fine|Is all well][?| today?]
    [What's up|How do you do]?
""")
FINE = line_list("""
    I am fine, thank you. How can I help you?
    I am doing well. What can I do for you?
    All is well here, thank you.
""")
UNKNOWN = line_list("""
    [What is|How is|Do you know] the weather in {town} [today|now|tomorrow|on {date}]?
    Who will win the [match|race|election|game] [on {date}|in {town}|in {country}]?
    What is the [phone number|address|birthday|job|salary] of {name}?
    [What time is it|What day is today|What is the date][?| now?| in {country}?]
    What is the price of [gold|bread|oil|a house] [today|in {country}|in {town}]?
    [Where does {name} live|What did {name} say yesterday|How old is {name}|What does {name} do]?
    How many people [live in|work in|visit] {town}?
    What is the [latest |]news from [{country}|{town}]?
    What will happen [on {date}|in {country}|in {town}]?
    What [am I thinking of|did I eat today|is in my pocket|did I dream last night]?
    Is the [shop|bank|museum|station] in {town} open [now|today|on {date}]?
""")
REFUSE = line_list("""
    I am sorry, I cannot know that. I have no access to the world outside this chat.
    I am sorry, I do not know that. I am a small model and cannot look things up.
    I cannot know that, sorry. Is there something else I can help with?
""")
SORRY = (
    "I am sorry to hear that. I hope your day gets better.",
    "That sounds hard. I hope you feel better soon.",
)
GLAD = ("That is great to hear!", "I am glad to hear that!", "How nice! I am glad to hear that.")
MOODS = line_list("""
    I [am|feel|am so|feel so|am very|feel very] {mood}[.|!| today.| now.]
    [Today|Now|This morning] I [am|feel|was] [very |a bit |so |]{mood}.
    I have been {mood} [all day|today|since yesterday].
    [My day was long|It was a long week] and I am {mood}.
""")
BAD_MOOD = word_list("""
    sad tired angry lonely worried upset bored ill nervous unhappy exhausted afraid hurt gloomy
""")
GOOD_MOOD = word_list("""
    happy glad proud excited pleased cheerful relaxed thankful joyful hopeful content lucky
""")
LIKES = line_list("""
    I [like|love|really enjoy|am fond of|adore|collect] {x}[.| very much.| a lot.]
    My [favorite thing is|favorite things are|hobby is] {x}.
    {x} are [great|wonderful|my favorite things|what I like].
""")
ASK_LIKE = line_list("""
    [What do I like|What is it that I like|What was it that I like][?| again?]
    [Do you remember|Do you know|Do you still know] what I like?
    What did I say [that |]I like?
    @do [tell me|say|repeat] what I like.
""")
PETS = line_list("""
    I [have|own|keep] {an} [named|called] {n}.
    My {a} is [called|named] {n}.
    {n} is [the name of |]my {a}.
    The name of my {a} is {n}.
    I own {an}, {n}.
""")
ASK_PET = line_list("""
    [What is|What was|Do you know|Do you remember] the name of my {a}?
    [What|How] is my {a} called[?| again?]
    [Which|What] name does my {a} have?
    @do [tell me|say|repeat] the name of my {a}.
""")
FAVORITES = line_list("""
    [What is|Do you have] your favorite [color|animal|food|book|song]?
    Do you [like|love|enjoy|hate] {x}?
    Do you [dream|sleep|eat|have feelings|have friends|get tired]?
    [Can you see|Do you like|Do you love|Can you hear] me?
    What do you [like|love|hate][?| most?]
""")


def _memory(rng: random.Random, split: Split, chat: Conversation) -> None:
    """The user tells something and asks for it later."""
    choice = rng.choice(("name", "like", "pet"))
    if choice == "name":
        name = person(rng, split)[0]
        told, asked = wording(rng, split, NAMED).format(n=name), wording(rng, split, ASK_NAME)
        reply, answer, fact = f"Nice to meet you, {name}! How can I help you?", f"Your name is {name}.", name
    elif choice == "like":
        thing = plural(filler(rng, split, OBJECTS))
        thing = f"{filler(rng, split, ADJECTIVES)} {thing}" if rng.random() < 0.5 else thing
        told, asked = wording(rng, split, LIKES).format(x=thing), wording(rng, split, ASK_LIKE)
        reply, answer, fact = f"That is nice. What do you like about {thing}?", f"You like {thing}.", thing
    else:
        animal, name = pick(rng, split, ANIMALS), surname(rng, split)
        told = pick(rng, split, PETS).format(a=animal, an=article_for(animal), n=name)
        asked = wording(rng, split, ASK_PET).format(a=animal)
        reply, answer, fact = (
            f"{name} is a nice name for {article_for(animal)}!",
            f"Your {animal} is called {name}.",
            name,
        )
    chat.ask(told[:1].upper() + told[1:], reply, Check("facts", [fact]))
    if rng.random() < 0.3:
        chat.ask(wording(rng, split, HOW), rng.choice(FINE))
    if rng.random() < 0.7:
        chat.ask(asked, answer, Check("facts", [fact]))


def _refuse(rng: random.Random, split: Split, chat: Conversation) -> None:
    text = wording(rng, split, UNKNOWN).format(
        town=town(rng, split), date=date(rng), name=full_name(rng, split), country=pick(rng, split, COUNTRIES)
    )
    chat.ask(text, rng.choice(REFUSE), Check("facts", ["know"]))


def _mood(rng: random.Random, split: Split, chat: Conversation) -> None:
    words, replies = rng.choice(((GOOD_MOOD, GLAD), (BAD_MOOD, SORRY)))
    chat.ask(wording(rng, split, MOODS).format(mood=pick(rng, split, words)), rng.choice(replies))


def _self(rng: random.Random, split: Split, chat: Conversation) -> None:
    choice = rng.random()
    if choice < 0.5:
        chat.ask(wording(rng, split, WHO), rng.choice(ABOUT), Check("facts", ["streamserve"]))
    elif choice < 0.8:
        chat.ask(wording(rng, split, CAN), CAN_DO)
    else:
        text = wording(rng, split, FAVORITES).format(x=plural(filler(rng, split, OBJECTS)))
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
        conversation.ask(wording(rng, split, HOW), rng.choice(FINE))
    if rng.random() < 0.3:
        conversation.ask(wording(rng, split, THANKS), rng.choice(WELCOME))
    if rng.random() < 0.2:
        conversation.ask(wording(rng, split, BYE), rng.choice(BYE_BACK))
