"""What agents do in a trial: the task they are given, the replies of the model, and the expected result."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaigns.agents.installed import Agent, Call
from tests.scripted_checkpoint import Reply

LONG = 24_000
"""Characters of a long result: agents pass it to the model whole."""
LONG_RESULTS = 6
TURNS = 10
FIRST_STEP = 10
"""The first step of a conversation of ten turns: with two digits each, no cue is part of another."""
OVERFLOWS = ("context", "too long", "compact")
"""Words by which agents say that a conversation does not fit."""


@dataclass(frozen=True)
class Task:
    """One scenario for one agent.

    `prompts` are given one after another: the first begins a conversation, others resume it. `printed` must
    be in the output, and `written` has the files of its folder at the end. `tools` is the minimum number of
    tool results in the longest request. If `interrupted`, the agent is interrupted during the reply to the
    first prompt. If `refusable`, requests may be refused because the context overflows. If the agent prints
    one of the words in `says`, or has compacted its conversation, it may end without the result; but it must
    have printed what `before` has. `context` is the model's limit. `seen` must be in a request.
    """

    name: str
    prompts: Sequence[str]
    replies: Sequence[Reply]
    printed: str
    files: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    tools: int = 0
    interrupted: bool = False
    refusable: bool = False
    says: Sequence[str] = ()
    before: Sequence[str] = ()
    context: int | None = None
    seen: str = ""
    arguments: Sequence[str] = ()


def cue(name: str, step: int) -> str:
    """Return the word in a prompt that leads to the reply of a step."""
    return f"{name}-step-{step}"


def answer(name: str) -> str:
    """Return the word that the agent has to print."""
    return f"result-of-{name}"


def call(made: Call, spoiled: Callable[[str], str] = str) -> str:
    """Return a call as the model writes it, perhaps spoiled."""
    name, arguments = made
    body = json.dumps({"name": name, "arguments": arguments})
    return spoiled(f"<tool_call>\n{body}\n</tool_call>")


def read(agent: Agent, name: str, folder: Path) -> Task:
    """The agent reads a file, and answers with its content."""
    note = f"The word is amber. {cue(name, 2)}\n"
    last = Reply(cue(name, 2), f"The word is amber: {answer(name)}.")
    task = f"Read notes.txt and say the word in it. ({cue(name, 1)})"
    if agent.read is None:
        reply, seen = Reply(cue(name, 1), last.text, tooled=False), "The word is amber"
        files = {"notes.txt": note}
        return Task(name, [task], [reply], answer(name), files, seen=seen, arguments=["notes.txt"])
    first = Reply(cue(name, 1), "I read the file.\n" + call(agent.read(folder / "notes.txt")))
    return Task(name, [task], [first, last], answer(name), {"notes.txt": note}, tools=1)


def write(agent: Agent, name: str, folder: Path) -> Task:
    """The agent writes a file, runs it, edits it, and runs it again."""
    task = f"Write greet.sh, run it, and correct it. ({cue(name, 1)})"
    if agent.write is None or agent.run is None or agent.edit is None:
        block = f"greet.sh\n```\necho {name}\n```\n"
        reply = Reply(cue(name, 1), f"Here it is.\n\n{block}\nThat was it: {answer(name)}.", tooled=False)
        return Task(name, [task], [reply], answer(name), written={"greet.sh": f"echo {name}\n"})
    script, step = folder / "greet.sh", cue(name, 0)[:-1]
    replies = [
        Reply(
            cue(name, 1),
            f"First the file. {cue(name, 2)}\n" + call(agent.write(script, f"echo {step}$((1+2))\n")),
        ),
        Reply(cue(name, 2), "It is written, so I run it.\n" + call(agent.run(f"sh {script}"))),
        Reply(
            cue(name, 3),
            f"It is to print 5. {cue(name, 4)}\n" + call(agent.edit(script, "$((1+2))", "$((2+3))")),
        ),
        Reply(cue(name, 4), "Again.\n" + call(agent.run(f"sh {script} > {folder}/out; cat {folder}/out"))),
        Reply(cue(name, 5), f"It prints 5: {answer(name)}."),
    ]
    written = {"greet.sh": f"echo {step}$((2+3))\n", "out": f"{cue(name, 5)}\n"}
    return Task(name, [task], replies, answer(name), written=written, tools=4)


def nearly_right(agent: Agent, name: str, folder: Path) -> Task | None:
    """The model makes calls with a missing closing mark or bracket or both, and with a doubled one."""
    if agent.read is None or agent.write is None or agent.run is None:
        return None
    step = cue(name, 0)[:-1]
    replies = [
        Reply(
            cue(name, 1),
            "I read.\n" + call(agent.read(folder / "notes.txt"), lambda t: t.removesuffix("\n</tool_call>")),
        ),
        Reply(
            cue(name, 2),
            "I run.\n"
            + call(agent.run(f"echo {step}$((1+2))"), lambda t: t.replace("}\n</tool", "\n</tool")),
        ),
        Reply(
            cue(name, 3),
            f"I write. {cue(name, 4)}\n"
            + call(agent.write(folder / "one", "1\n"), lambda t: t.removesuffix("}\n</tool_call>")),
        ),
        Reply(
            cue(name, 4),
            "I run again.\n"
            + call(agent.run(f"echo {step}$((2+3)) | tee {folder}/two"), lambda t: t + "\n</tool_call>"),
        ),
        Reply(cue(name, 5), f"All of it is done: {answer(name)}."),
    ]
    task = f"Read notes.txt, and do what it says. ({cue(name, 1)})"
    files = {"notes.txt": f"Write the files one and two. {cue(name, 2)}\n"}
    written = {"one": "1\n", "two": f"{cue(name, 5)}\n"}
    return Task(name, [task], replies, answer(name), files, written, tools=4)


def cut(agent: Agent, name: str, folder: Path) -> Task:
    """A reply without an end is cut by the client's max_tokens or by the context; then the conversation is
    resumed."""
    prompts = [f"Count as far as you can. ({cue(name, 1)})", f"That is enough. ({cue(name, 2)})"]
    tooled = agent.read is not None
    replies = [
        Reply(cue(name, 1), f"{name} counts on and on, ", tooled=tooled, endless=True),
        Reply(cue(name, 2), f"I have counted: {answer(name)}.", tooled=tooled),
    ]
    if agent.limits_replies:
        return Task(name, prompts, replies, answer(name))
    context, result = agent.context, answer(name)
    return Task(name, prompts, replies, result, refusable=True, says=OVERFLOWS, context=context)


def overflow(agent: Agent, name: str, folder: Path) -> Task | None:
    """Long results fill the context: the agent compacts its conversation, or says why it ends."""
    if agent.run is None:
        return None
    replies = [
        Reply(
            cue(name, number),
            f"Part {number}.\n"
            + call(agent.run(f"echo {cue(name, 0)[:-1]}$(({number}+1)); cat {folder}/long")),
        )
        for number in range(1, LONG_RESULTS + 1)
    ]
    replies.append(Reply(cue(name, LONG_RESULTS + 1), f"I have seen all: {answer(name)}."))
    line = "All work and no play makes a long line of text.\n"
    files = {"long": line * (LONG // len(line))}
    task = f"Look at the file long, again and again. ({cue(name, 1)})"
    return Task(
        name,
        [task],
        replies,
        answer(name),
        files,
        tools=1,
        refusable=True,
        says=OVERFLOWS,
        context=agent.context,
    )


def interrupt(agent: Agent, name: str, folder: Path) -> Task:
    """The agent gets SIGINT within a reply; then the conversation is resumed."""
    prompts = [f"Talk until I stop you. ({cue(name, 1)})", f"Now answer. ({cue(name, 2)})"]
    tooled = agent.read is not None
    replies = [
        Reply(cue(name, 1), f"{name} talks and talks, ", tooled=tooled, endless=True),
        Reply(cue(name, 2), f"Here is the answer: {answer(name)}.", tooled=tooled),
    ]
    return Task(name, prompts, replies, answer(name), interrupted=True)


def ten_turns(agent: Agent, name: str, folder: Path) -> Task:
    """A conversation of ten prompts: seven that need several tools, a reply without an end that is cut, long
    results that fill the context, and a last answer. Once the context overflows, the agent may give up."""
    turns = _turns_with_tools(agent, folder) if agent.run else [[] for _ in range(TURNS - 3)]
    tooled = agent.run is not None
    replies: list[Reply] = []
    prompts: list[str] = []
    steps = iter(range(FIRST_STEP, 100))

    def turn(number: int, calls: Sequence[Call], said: str = "", endless: bool = False) -> None:
        here = next(steps)
        prompts.append(f"Do part {number} of {TURNS}. ({cue(name, here)})")
        for made in calls:
            after = next(steps)
            text = f"Part {number}, step {after}. {cue(name, after)}\n{call(made)}"
            replies.append(Reply(cue(name, here), text))
            here = after
        text = said or f"Part {number} is done: {_done(name, number)}."
        replies.append(Reply(cue(name, here), text, tooled=tooled, endless=endless))

    for number, calls in enumerate(turns, 1):
        block = "" if tooled else f"Here it is.\n\ngreet.sh\n```\necho {number} {name}\n```\n"
        turn(number, calls, block and f"{block}Part {number} is done: {_done(name, number)}.")
    turn(TURNS - 2, (), f"{name} counts up and up, ", endless=True)
    turn(TURNS - 1, [agent.run(f"cat {folder}/long")] * LONG_RESULTS if agent.run else ())
    turn(TURNS, ())
    line = "All work and no play makes a long line of text.\n"
    return Task(
        name,
        prompts,
        replies,
        _done(name, TURNS),
        files={"notes.txt": "The word is amber.\n", "long": line * (LONG // len(line))},
        written={"two": "green\n", "out": "5\n"} if tooled else {"greet.sh": f"echo {len(turns)} {name}\n"},
        tools=sum(map(len, turns)) if tooled else 0,
        refusable=True,
        says=OVERFLOWS,
        before=[_done(name, number) for number in range(1, len(turns) + 1)],
        context=agent.context,
        arguments=[] if tooled else ["greet.sh"],
    )


def _done(name: str, number: int) -> str:
    """Return the word that the agent has to print at the end of a turn."""
    return f"{answer(name)}-part-{number:02}"


def _turns_with_tools(agent: Agent, folder: Path) -> list[list[Call]]:
    """Return the calls of seven turns of an agent that has all tools."""
    assert agent.read is not None
    assert agent.write is not None
    assert agent.edit is not None
    assert agent.run is not None
    script, two = folder / "greet.sh", folder / "two"
    return [
        [agent.read(folder / "notes.txt")],
        [agent.write(script, "echo $((1+2))\n"), agent.run(f"sh {script}")],
        [
            agent.read(script),
            agent.edit(script, "$((1+2))", "$((2+3))"),
            agent.run(f"sh {script} > {folder}/out"),
        ],
        [agent.read(folder / "out"), agent.run(f"ls {folder}")],
        [agent.write(two, "blue\n"), agent.run(f"cat {two}")],
        [agent.read(two), agent.edit(two, "blue", "green"), agent.read(two)],
        [agent.run(f"wc -l {two}"), agent.read(script)],
    ]


SCENARIOS: dict[str, Callable[[Agent, str, Path], Task | None]] = {
    "read": read,
    "write": write,
    "nearly-right": nearly_right,
    "interrupt": interrupt,
    "cut": cut,
    "overflow": overflow,
    "ten-turns": ten_turns,
}
OTHERS = Reply("", "There is nothing else to do.", tooled=False)
"""The reply to requests of agents that are not part of a task, such as titles and summaries."""


def tasks(agents: Sequence[Agent], folder: Path) -> dict[tuple[str, str], Task]:
    """Return the tasks by agent and scenario. Their files are in folders of `folder`, which replies name."""
    made: dict[tuple[str, str], Task] = {}
    for scenario, make in SCENARIOS.items():
        for agent in agents:
            name = f"{agent.name}-{scenario}"
            task = make(agent, name, folder / name)
            if task is not None:
                made[agent.name, scenario] = task
    return made
