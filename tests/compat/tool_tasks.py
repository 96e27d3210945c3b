"""Ten scripted tasks for tool loops: a question, the offered tools, and the fact that the last answer must
contain.

Also imported by programs that run in another client's venv, so it imports nothing but the standard library.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A task: `tools` are offered for the question; an answer based on the right tool's result contains
    `fact`."""

    question: str
    tools: tuple[str, ...]
    fact: str

    def is_answered(self, answer: str) -> bool:
        """Return whether the answer contains the fact and has no further call."""
        return self.fact in answer and "<tool_call>" not in answer


def get_weather(city: str) -> dict[str, Any]:
    """Get the current weather"""
    return {"temperature": {"Lisbon": 24, "Oslo": -3}[city], "sky": "cloudy"}


def get_time(city: str) -> dict[str, Any]:
    """Get the local time of a place"""
    return {"time": {"Tokyo": "21:40", "Lisbon": "13:40"}[city]}


def convert_currency(amount: int, source: str, target: str) -> dict[str, Any]:
    """Convert an amount of money"""
    return {"result": amount * {("euros", "dollars"): 2, ("pounds", "yen"): 190}[source, target]}


def get_capital(country: str) -> dict[str, Any]:
    """Get the capital of a country"""
    return {"capital": {"France": "Paris", "Italy": "Rome"}[country]}


def track_package(code: str) -> dict[str, Any]:
    """Where is a parcel"""
    return {"place": {"B4711": "Hamburg"}[code], "days_left": 3}


def get_stock(article: str) -> dict[str, Any]:
    """How many pieces of an article are in stock"""
    return {"pieces": {"K2050": 37}[article]}


def set_volume(percent: int) -> dict[str, Any]:
    """Set the volume of the speaker"""
    return {"status": "ok" if 0 <= percent <= 100 else "wrong"}


def switch_light(where: str, state: str) -> dict[str, Any]:
    """Switch a light on or off"""
    return {"status": {("kitchen", "off"): "ok", ("garage", "on"): "ok"}[where, state]}


def calculate_tip(bill: int, percent: int) -> dict[str, Any]:
    """Calculate a tip"""
    return {"tip": bill * percent // 100}


def search_flights(origin: str, destination: str) -> dict[str, Any]:
    """Find flights between two cities"""
    return {"flight": {("Madrid", "Vienna"): "KF402"}[origin, destination], "price": 129}


TOOLS: dict[str, Function] = {
    function.__name__: function
    for function in (
        get_weather, get_time, convert_currency, get_capital, track_package, get_stock, set_volume,
        switch_light, calculate_tip, search_flights,
    )
}  # fmt: skip

TURNS = 3
"""Maximum number of replies with tool calls before the model has to answer."""
ENOUGH = 8
"""Number of the ten tasks that the packaged model has to solve."""

NUMBER = {"type": "integer", "minimum": 0, "maximum": 10_000}
TEXT = {"type": "string", "maxLength": 20}

TASKS = (
    Task("What is the weather in Lisbon?", ("get_weather", "get_time"), "24"),
    Task("What time is it in Tokyo right now?", ("get_weather", "get_time", "set_volume"), "21:40"),
    Task("Please convert 150 euros to dollars.", ("convert_currency",), "300"),
    Task("What is the capital of France?", ("get_capital", "get_stock"), "Paris"),
    Task("Where is my package B4711?", ("track_package", "search_flights", "get_weather"), "Hamburg"),
    Task("How many of K2050 are in stock?", ("get_stock", "track_package"), "37"),
    Task("Set the volume to 35 percent.", ("set_volume", "switch_light", "get_time"), "35"),
    Task("Please turn off the light in the kitchen.", ("switch_light", "set_volume"), "kitchen"),
    Task("How much is a tip of 10 percent on 250?", ("calculate_tip", "convert_currency"), "25"),
    Task("I want to fly from Madrid to Vienna.", ("get_capital", "search_flights"), "KF402"),
)


def declaration(name: str) -> dict[str, Any]:
    """Return a tool as requests to OpenAI's API declare it."""
    function = TOOLS[name]
    parameters = {key: kind for key, kind in function.__annotations__.items() if key != "return"}
    properties = {key: NUMBER if kind is int else TEXT for key, kind in parameters.items()}
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(parameters),
        "additionalProperties": False,
    }
    described = {"name": name, "description": function.__doc__, "parameters": schema}
    return {"type": "function", "function": described}


def call(name: str, arguments: dict[str, Any]) -> str:
    """Call a tool; return its result, or an error message for the model."""
    try:
        return json.dumps(TOOLS[name](**arguments))
    except (KeyError, TypeError) as error:
        return json.dumps({"error": repr(error)})
