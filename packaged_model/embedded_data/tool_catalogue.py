"""The functions that tool chats may call: their signatures, requests for them, results and answers.

Functions are known to both splits, as the catalogue of Python functions is; wordings and fillers are split.
Names of functions and of parameters vary, so that a model must read them in the list of tools.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .base import Choices, Split, line_list, word_list
from .words import (
    CLOTHES,
    COLORS,
    COUNTRIES,
    FRUITS,
    JOBS,
    MONTHS,
    OBJECTS,
    PLACES,
    SPORTS,
    WEEKDAYS,
    filler,
    invent,
    person,
    surname,
    town,
)

Value = str | int | float | bool
Slot = Callable[[random.Random, Split], Value]

LANGUAGES = word_list("French Spanish German Italian Polish Dutch Greek Turkish Danish Swedish Czech Hindi")
CURRENCIES = word_list("euros dollars pounds yen francs rupees pesos kroner zloty rand")
ROOMS = word_list("kitchen bedroom bathroom office hall garage cellar attic garden study nursery")
DISHES = word_list("soup pizza curry salad stew pancakes lasagna noodles omelette risotto tacos sushi")
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")


def _time(rng: random.Random, split: Split) -> str:
    return f"{rng.randint(0, 23):02}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02}"


def _date(rng: random.Random, split: Split) -> str:
    return f"{rng.randint(2020, 2039)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _email(rng: random.Random, split: Split) -> str:
    return f"{person(rng, split)[0].lower()}@{invent(rng, split)}.{rng.choice(('com', 'org', 'net'))}"


def _title(rng: random.Random, split: Split) -> str:
    return " ".join(invent(rng, split).capitalize() for _ in range(rng.choice((1, 2, 2))))


def _code(rng: random.Random, split: Split) -> str:
    return f"{rng.choice('ABCDEFGHKLMNPRSTUVWX')}{rng.randint(100, 99999)}"


def _whole(low: int, high: int) -> Slot:
    return lambda rng, split: rng.randint(low, high)


def _one_of(items: Choices[str]) -> Slot:
    return lambda rng, split: filler(rng, split, items)


def _listed(items: Choices[str]) -> Slot:
    return lambda rng, split: items.draw(rng, split)


SLOTS: dict[str, Slot] = {
    "town": town,
    "other_town": town,
    "name": lambda rng, split: person(rng, split)[0],
    "full": lambda rng, split: f"{person(rng, split)[0]} {surname(rng, split)}",
    "email": _email,
    "time": _time,
    "date": _date,
    "day": lambda rng, split: rng.choice(WEEKDAYS),
    "month": lambda rng, split: rng.choice(MONTHS),
    "k": _whole(2, 20),
    "n": _whole(2, 99),
    "minutes": _whole(1, 120),
    "amount": _whole(5, 9999),
    "percent": _whole(1, 100),
    "degrees": _whole(12, 28),
    "thing": _one_of(OBJECTS),
    "clothing": _one_of(CLOTHES),
    "fruit": _one_of(FRUITS),
    "place": _one_of(PLACES),
    "job": _one_of(JOBS),
    "sport": _one_of(SPORTS),
    "title": _title,
    "artist": lambda rng, split: f"{person(rng, split)[0]} {surname(rng, split)}",
    "code": _code,
    "word": lambda rng, split: invent(rng, split),
    "dish": _one_of(DISHES),
    "room": _listed(ROOMS),
    "color": _listed(COLORS),
    "language": _listed(LANGUAGES),
    "country": _listed(COUNTRIES),
    "currency": _listed(CURRENCIES),
    "other_currency": _listed(CURRENCIES),
    "switch": lambda rng, split: rng.choice(("on", "off")),
    "unit": lambda rng, split: rng.choice(("celsius", "fahrenheit")),
    "size": lambda rng, split: rng.choice(("small", "medium", "large")),
    "priority": lambda rng, split: rng.choice(("low", "normal", "high")),
}
ENUMS = {
    "switch": ("on", "off"),
    "unit": ("celsius", "fahrenheit"),
    "size": ("small", "medium", "large"),
    "priority": ("low", "normal", "high"),
}
WHOLE = ("k", "n", "minutes", "amount", "percent", "degrees")
"""Slots whose values are integers."""


@dataclass(frozen=True)
class Parameter:
    """A parameter: `names` it may have, the slot of its value and, if it is optional, the words with which a
    request gives it."""

    names: str
    slot: str
    given: str = ""


@dataclass(frozen=True)
class Tool:
    """A function: names and descriptions it may have, parameters, requests (with slots of the parameters),
    what it returns for its arguments, and the answer from that."""

    names: str
    descriptions: str
    parameters: tuple[Parameter, ...]
    asks: Choices[str]
    result: Callable[[random.Random, Split], dict[str, Value]]
    answer: str


P = Parameter


def _done(*fields: str) -> Callable[[random.Random, Split], dict[str, Value]]:
    """A result that says that it is done, with a number for each of `fields`."""
    return lambda rng, split: {"status": "ok", **{field: rng.randint(100, 9999) for field in fields}}


def _number(field: str, low: int, high: int) -> Callable[[random.Random, Split], dict[str, Value]]:
    return lambda rng, split: {field: rng.randint(low, high)}


TOOLS = (
    Tool(
        "get_weather|current_weather|weather|fetch_weather|weather_now",
        "Get the current weather|Look up the weather of a place|Weather of a town|Current weather by place",
        (P("city|town|location|place", "town"), P("unit|units|scale", "unit", " in {v}")),
        line_list("""
            [What is|What's|How is|Tell me] the weather [in|at|for] {town}
            How [warm|cold|hot] is it in {town}[| now| today]
            @do [check|look up|get|tell me] the weather [in|for] {town}
            Is it [raining|sunny|cold|warm|snowing] in {town}[| now| today]
            [I am going|I will travel|We go] to {town}: [how is|what is] the weather
        """),
        lambda rng, split: {"temperature": rng.randint(-9, 39), "sky": rng.choice(SKIES)},
        "It is {sky} in {town}, at {temperature} degrees.",
    ),
    Tool(
        "get_time|current_time|local_time|time_in|clock",
        "Get the local time of a place|Current time in a city|Tell the time somewhere",
        (P("city|town|place|location", "town"),),
        line_list("""
            [What time is it|What is the time|How late is it] in {town}[| now| right now]
            @do [tell me|look up|check|get] the [time|local time] in {town}
            [Which time|What hour] do they have in {town}
        """),
        lambda rng, split: {"time": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"},
        "It is {time} in {town}.",
    ),
    Tool(
        "set_timer|start_timer|timer|create_timer",
        "Start a timer|Set a timer for some minutes|Count down a number of minutes",
        (P("minutes|duration|length", "minutes"), P("label|name|title", "dish", " for the {v}")),
        line_list("""
            @do [set|start|make|create] a timer [of|for|with] {minutes} minutes
            [Wake me|Remind me|Ring|Tell me] in {minutes} minutes
            [Timer|Countdown][:|,] {minutes} minutes
            I need a {minutes} minute timer
        """),
        _done("timer_id"),
        "The timer for {minutes} minutes is running.",
    ),
    Tool(
        "set_alarm|add_alarm|alarm|create_alarm",
        "Set an alarm clock|Ring at a time of day|Add an alarm at a time",
        (P("time|at|clock_time", "time"), P("day|weekday", "day", " on {v}")),
        line_list("""
            @do [set|make|add|create] an alarm [for|at] {time}
            Wake me [up|] at {time}
            [I have to get up|I must rise|Ring] at {time}
            [Alarm|An alarm][:| at|,] {time}
        """),
        _done("alarm_id"),
        "Your alarm is set for {time}.",
    ),
    Tool(
        "send_email|email|write_email|mail",
        "Send an email|Send an email to an address|Write an email with a subject",
        (P("to|address|recipient", "email"), P("subject|title|topic", "title")),
        line_list("""
            @do [send|write] an email to {email} [with the subject|about|titled] {title}
            @do email {email} [with the subject|about] {title}
            [Mail|Write to] {email}[, subject|, the subject is| about] {title}
        """),
        _done("message_id"),
        "I sent the email to {email}.",
    ),
    Tool(
        "send_message|text_message|message|send_text|sms",
        "Send a text message to a person|Text a person|Send a short message",
        (P("to|name|person|contact", "name"), P("text|message|body|content", "word")),
        line_list("""
            @do [send|text|write] {name} the message {word}
            @do [tell|message] {name} {word}
            @do send a [message|text] to {name} [saying|that says|with the text] {word}
            [Text|Message] {name}: {word}
        """),
        _done("message_id"),
        "{name} got your message.",
    ),
    Tool(
        "call_contact|phone|make_call|dial|call",
        "Call a person by phone|Start a phone call|Phone a contact",
        (P("name|person|contact|who", "full"),),
        line_list("""
            @do [call|phone|ring|dial] {full}[| now]
            [I want|I need|I would like] to [talk to|speak with|call] {full}
            [Get|Put] {full} on the phone
        """),
        _done("call_id"),
        "I am calling {full}.",
    ),
    Tool(
        "add_event|create_event|calendar_add|new_event|schedule",
        "Add an event to the calendar|Create a calendar entry|Schedule an event on a date",
        (
            P("title|name|event|what", "title"),
            P("date|on|day", "date"),
            P("time|at|start", "time", " at {v}"),
        ),
        line_list("""
            @do [add|put|enter|write] {title} [to|in|into] my calendar [on|for] {date}
            @do schedule {title} [on|for] {date}
            [New event|New entry|Calendar]: {title} on {date}
            [I have|There is] {title} on {date}, [add it|put it in my calendar|note it]
        """),
        _done("event_id"),
        "{title} is in your calendar on {date}.",
    ),
    Tool(
        "search_flights|find_flights|flights|flight_search",
        "Find flights between two cities|Search for flights|Flights from one town to another on a date",
        (
            P("from_city|origin|departure|start", "town"),
            P("to_city|destination|arrival|end", "other_town"),
            P("date|day|on", "date", " on {v}"),
        ),
        line_list("""
            @do [find|search|look for|show me] [flights|a flight] from {town} to {other_town}
            [I want|I need|I would like] to fly from {town} to {other_town}
            [Are there|Which are the] flights [from|between] {town} [to|and] {other_town}
            [How much is|What does it cost to take] a flight from {town} to {other_town}
        """),
        lambda rng, split: {
            "flight": f"{rng.choice('ABKLS')}{rng.choice('ABFQZ')}{rng.randint(10, 999)}",
            "price": rng.randint(40, 999),
        },
        "Flight {flight} goes from {town} to {other_town} for {price}.",
    ),
    Tool(
        "book_table|reserve_table|restaurant_booking|reserve",
        "Book a table at a restaurant|Reserve a table|Make a restaurant reservation",
        (P("restaurant|place|where", "title"), P("people|guests|seats|persons", "k"), P("time|at", "time")),
        line_list("""
            @do [book|reserve|get me] a table for {k} [people|] at {title} at {time}
            [We are|There are] {k} [of us|people]: @do [book|reserve] {title} at {time}
            [Table|A table] for {k} at {title}[,| at] {time}
        """),
        _done("booking"),
        "Your table for {k} at {title} is booked for {time}; the booking is {booking}.",
    ),
    Tool(
        "convert_currency|exchange|currency|convert_money",
        "Convert an amount of money|Exchange one currency for another|Convert between currencies",
        (
            P("amount|value|sum", "amount"),
            P("source|from_currency|base", "currency"),
            P("target|to_currency|into", "other_currency"),
        ),
        line_list("""
            [How much is|How much are|What is|What are] {amount} {currency} in {other_currency}
            @do [convert|change|exchange] {amount} {currency} [to|into] {other_currency}
            {amount} {currency} [in|to] {other_currency}
            [I have|I got] {amount} {currency}: [how many|how much] {other_currency} [is that|do I get]
        """),
        _number("result", 1, 99999),
        "{amount} {currency} are {result} {other_currency}.",
    ),
    Tool(
        "translate|translate_word|translation|translate_text",
        "Translate a text|Translate a word into a language|Say a word in another language",
        (P("text|word|phrase", "word"), P("language|target_language|into|to", "language")),
        line_list("""
            @do translate {word} [to|into] {language}
            [How do you say|What is|How do I say] {word} in {language}
            [Say|Write] {word} in {language}
            [Translate|Translation] [to|into] {language}: {word}
        """),
        lambda rng, split: {"translation": invent(rng, split)},
        "In {language}, {word} is {translation}.",
    ),
    Tool(
        "play_song|play_music|play|start_song",
        "Play a song|Play music by title|Start a song",
        (P("title|song|name|track", "title"), P("artist|singer|band|by", "artist", " by {v}")),
        line_list("""
            @do play [the song|] {title}
            [I want|I would like|I'd like] to [hear|listen to] {title}
            [Put on|Start] {title}
            [Can we hear|Let us hear|Let me hear] {title}
        """),
        _done(),
        "{title} is playing.",
    ),
    Tool(
        "set_volume|volume|change_volume|adjust_volume",
        "Set the volume of the speaker|Change how loud the music is|Adjust the volume in percent",
        (P("level|percent|value|volume", "percent"),),
        line_list("""
            @do [set|change|turn] the volume to {percent} percent
            [Volume|The volume][:| to|,] {percent}
            [Make it|I want it|Play it] at {percent} percent [volume|of the volume]
        """),
        _done(),
        "The volume is at {percent} percent.",
    ),
    Tool(
        "switch_light|light|set_light|lights|turn_light",
        "Switch a light on or off|Control the light of a room|Turn lights on or off",
        (P("room|where|place", "room"), P("state|power|to", "switch")),
        line_list("""
            @do [turn|switch] {switch} the [light|lights|lamp] in the {room}
            @do [turn|switch] the [light|lights|lamp] in the {room} {switch}
            [Light|Lights] {switch} in the {room}
            The [light|lamp] in the {room} should be {switch}
        """),
        _done(),
        "The light in the {room} is {switch}.",
    ),
    Tool(
        "set_temperature|heating|thermostat|set_heating",
        "Set the temperature of a room|Control the heating|Set the thermostat in degrees",
        (P("degrees|temperature|value", "degrees"), P("room|where", "room", " in the {v}")),
        line_list("""
            @do [set|turn] the [heating|temperature|thermostat] to {degrees} degrees
            [Make it|Heat to|I want] {degrees} degrees
            [Heating|Thermostat][:| to] {degrees}
        """),
        _done(),
        "The heating is set to {degrees} degrees.",
    ),
    Tool(
        "add_to_list|shopping_list|add_item|buy_later",
        "Add something to the shopping list|Put an item on the shopping list|Note an item to buy",
        (P("item|product|thing|what", "fruit"), P("quantity|count|number|amount", "k", ", {v} of it")),
        line_list("""
            @do [add|put|write] {fruit} [to|on] [my|the] shopping list
            [We need|I need|We are out of|I have to buy] {fruit}[| again]
            [Shopping list|Buy][:|,] {fruit}
        """),
        _done(),
        "{fruit} is on your shopping list.",
    ),
    Tool(
        "create_task|add_task|todo|new_task|add_todo",
        "Create a task|Add a task to the to-do list|Note something to do",
        (
            P("title|task|what|name", "title"),
            P("priority|importance|level", "priority", " with {v} priority"),
        ),
        line_list("""
            @do [create|add|make|note] [a|the|a new] task {title}
            [New task|To do|Task]: {title}
            [I have|I need|I must remember] to do {title}
        """),
        _done("task_id"),
        "The task {title} is noted.",
    ),
    Tool(
        "find_contact|get_phone_number|contact|look_up_person",
        "Find the phone number of a person|Look up a contact|Get a contact's number",
        (P("name|person|who|contact", "full"),),
        line_list("""
            [What is|What's|Do you know] the [phone number|number] of {full}
            @do [find|look up|give me|get] the [number|phone number|contact] of {full}
            [How can I reach|How do I reach|Under which number can I reach] {full}
        """),
        lambda rng, split: {"number": "".join(rng.choices("0123456789", k=rng.randint(5, 8)))},
        "The number of {full} is {number}.",
    ),
    Tool(
        "track_package|track_order|parcel_status|tracking",
        "Track a package|Where is a parcel|Get the status of a package by its number",
        (P("code|number|tracking_number|id", "code"),),
        line_list("""
            [Where is|What about|What happened to] my [package|parcel|order] {code}
            @do [track|find|check] [my|the] [package|parcel|order] {code}
            [When does|When will] [package|parcel|order] {code} [arrive|come]
        """),
        lambda rng, split: {"place": town(rng, split), "days_left": rng.randint(1, 9)},
        "Package {code} is in {place} and arrives in {days_left} days.",
    ),
    Tool(
        "get_price|product_price|price|look_up_price",
        "Get the price of a product|How much a product costs|Look up a price",
        (P("product|item|name|article", "thing"), P("size|format", "size", " in {v}")),
        line_list("""
            [What does|How much does] [a|the|one] {thing} cost
            [What is|What's|Tell me] the price of [a|the|one] {thing}
            @do [look up|check|find] the price of [a|the] {thing}
        """),
        _number("price", 1, 999),
        "The {thing} costs {price}.",
    ),
    Tool(
        "get_stock|stock|in_stock|check_stock|inventory",
        "How many pieces of an article are in stock|Check the stock of an article|Look up the inventory",
        (P("article|item|product|sku", "code"), P("store|shop|branch|city", "town", " in {v}")),
        line_list("""
            [How many|How much] of {code} [are|is] [left|in stock|there]
            @do check [the stock of|how many there are of|if we have] {code}
            [Is|Do we have] {code} in stock
        """),
        _number("pieces", 0, 500),
        "There are {pieces} pieces of {code} in stock.",
    ),
    Tool(
        "get_recipe|find_recipe|recipe|cook",
        "Find a recipe|Get a recipe for a dish|How to cook a dish",
        (P("dish|name|meal|food", "dish"), P("people|servings|portions", "k", " for {v} people")),
        line_list("""
            [How do I|How can I|How do you] [cook|make|prepare] {dish}
            @do [find|get|give me|show me] a recipe for {dish}
            [I want|I would like] to [cook|make] {dish}
        """),
        lambda rng, split: {
            "minutes": rng.randint(10, 90),
            "first": rng.choice(FRUITS),
        },
        "For {dish} you need {minutes} minutes. Begin with {first}.",
    ),
    Tool(
        "get_score|match_result|game_score|score",
        "Get the result of a match|Look up the score of a team|How a team has played",
        (P("team|club|name", "town"), P("sport|game|kind", "sport", " in {v}")),
        line_list("""
            [How did|What did] [the team of|] {town} play
            [What is|What's|Tell me] the [score|result] of {town}
            Did {town} win
            @do [check|look up|get] the [score|result] of {town}
        """),
        lambda rng, split: {"home": rng.randint(0, 9), "guests": rng.randint(0, 9)},
        "The result of {town} is {home} to {guests}.",
    ),
    Tool(
        "calculate_tip|tip|add_tip|tip_for",
        "Calculate a tip|How much to tip on a bill|Tip in percent of a bill",
        (P("bill|amount|total", "amount"), P("percent|rate|share", "percent")),
        line_list("""
            [How much is|What is] a tip of {percent} percent on {amount}
            @do [calculate|compute|work out] a {percent} percent tip [on|for] {amount}
            The bill is {amount}: [how much is|what is] a {percent} percent tip
        """),
        _number("tip", 1, 999),
        "The tip is {tip}.",
    ),
    Tool(
        "get_capital|capital|capital_city|country_capital",
        "Get the capital of a country|Name a country's capital|Look up a capital city",
        (P("country|nation|state|of", "country"),),
        line_list("""
            [What is|What's|Tell me|Which is] the capital of {country}
            @do [look up|find|name] the capital of {country}
            Which [city|town] is the capital of {country}
        """),
        lambda rng, split: {"capital": town(rng, split)},
        "The capital of {country} is {capital}.",
    ),
    Tool(
        "find_job|search_jobs|jobs|open_positions",
        "Search for open jobs|Find jobs in a city|List open positions",
        (P("title|job|position|role", "job"), P("city|place|town|where", "town")),
        line_list("""
            @do [find|search for|look for|show me] [jobs|work|a job] as [a |]{job} in {town}
            [Are there|Is there] [jobs|work] as [a |]{job} in {town}
            [I want|I would like] to work as [a |]{job} in {town}
        """),
        _number("jobs", 0, 60),
        "There are {jobs} jobs as {job} in {town}.",
    ),
    Tool(
        "order_taxi|taxi|call_taxi|book_ride|get_ride",
        "Order a taxi|Book a ride|Get a taxi to a place",
        (P("to|destination|where", "place"), P("time|at|pickup_time", "time", " at {v}")),
        line_list("""
            @do [order|call|book|get me] a [taxi|ride|cab] to the {place}
            [I need|I want|We need] a [taxi|ride|cab] to the {place}
            [Taxi|A taxi|A cab] to the {place}
        """),
        lambda rng, split: {"minutes": rng.randint(2, 30)},
        "Your taxi to the {place} comes in {minutes} minutes.",
    ),
    Tool(
        "paint_wall|set_color|color|change_color",
        "Change the color of a lamp|Set the color of a light|Make a room's light colored",
        (P("room|where|lamp", "room"), P("color|to|shade", "color")),
        line_list("""
            @do [make|color|turn] the {room} {color}
            @do [set|change] the color [in|of] the {room} to {color}
            [I want|I would like] {color} light in the {room}
        """),
        _done(),
        "The {room} is {color} now.",
    ),
    Tool(
        "book_room|reserve_hotel|hotel|book_hotel|find_hotel",
        "Book a hotel room|Reserve a hotel|Find a hotel in a city",
        (P("city|town|place|where", "town"), P("nights|days|duration", "k"), P("date|from|arrival", "date")),
        line_list("""
            @do [book|reserve|find] a hotel in {town} for {k} nights from {date}
            [I need|I want|We need] a room in {town} for {k} nights from {date}
            [Hotel|A hotel] in {town}, {k} nights, from {date}
        """),
        lambda rng, split: {"hotel": invent(rng, split).capitalize(), "price": rng.randint(30, 400)},
        "The hotel {hotel} in {town} has a room for {price} a night.",
    ),
)
