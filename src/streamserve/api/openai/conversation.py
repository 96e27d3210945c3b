"""Prepare a chat request: its prompt, its sampling parameters, and the parsers of its replies."""

from dataclasses import dataclass

import msgspec

from streamserve.api.generation import AppContext
from streamserve.api.generator import Generator
from streamserve.api.http.memory import Charge
from streamserve.api.openai.messages import checked_messages
from streamserve.api.openai.prompts import Encoder, Prompt, kept_tokens
from streamserve.api.openai.sampling import chat_sampling
from streamserve.api.openai.schemas import ChatRequest
from streamserve.api.openai.structured import Wanted, wanted_grammar, wants_form
from streamserve.api.openai.tools import Tools, wanted_tools
from streamserve.protocol.errors import RequestError
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.chat import require
from streamserve.text.message import MessageReader
from streamserve.text.reasoning import CLOSING, OPENING, Thinking, ThoughtReader, find_thinking
from streamserve.text.tokenizer import Tokenizer

LARGE_REQUEST = 256 << 10
"""Size in bytes of a parsed request above which templates, tools and formats are processed in the side
thread."""


@dataclass(frozen=True)
class Conversation:
    """A prepared chat request. `thinking` is the model's reasoning format, if it has one."""

    prompt: Prompt
    params: SamplingParams
    tools: Tools | None
    thinking: Thinking | None

    @property
    def plain(self) -> bool:
        """Whether the output is content only, without reasoning or tool calls."""
        return self.thinking is None and self.tools is None

    def reader(self) -> MessageReader:
        """Return a parser for one reply."""
        thoughts = ThoughtReader(self.thinking, self.prompt.text or "") if self.thinking else None
        return MessageReader(thoughts, self.tools.reader() if self.tools else None)


def chat_tools(door: AppContext, wanted: ChatRequest) -> Tools | None:
    """Return the tools that the model may call. Raises RequestError naming the field at fault."""
    settings, tokenizer = door.settings, door.llm.tokenizer
    thinks = find_thinking(settings.reasoning_parser, tokenizer.chat_template) is not None
    return wanted_tools(wanted, settings.tool_parser, tokenizer, thinks)


def chat_text(llm: Generator, wanted: ChatRequest, charge: Charge, tools: Tools | None = None) -> str:
    """Render the conversation with the chat template. Raises RequestError for what it cannot render."""
    context = llm.model.max_model_len
    if len(wanted.messages) > context:
        raise RequestError(
            f"messages holds {len(wanted.messages)} messages, more than a context of {context} tokens holds",
            field="messages",
        )
    return require(llm.chat_template).render(
        checked_messages(wanted.messages, charge),
        tools=tools.shown if tools else None,
        add_generation_prompt=wanted.add_generation_prompt,
        continue_final_message=wanted.continue_final_message,
        variables=wanted.chat_template_kwargs,
    )


async def chat_prompt(
    door: AppContext, wanted: ChatRequest, max_tokens: int | None, charge: Charge, tools: Tools | None = None
) -> Prompt:
    """Return the conversation's prompt. Raises RequestError for what the template cannot render."""
    llm = door.llm
    large = charge.held > LARGE_REQUEST
    text = await door.side.run_if(large, lambda: chat_text(llm, wanted, charge, tools))
    keep = kept_tokens(llm, wanted.truncate_prompt_tokens, max_tokens)
    encoder = Encoder(llm, door.side, charge)
    prompt = (await encoder.encode([text], wanted.add_special_tokens, "messages", keep))[0]
    return Prompt(prompt.ids, prompt.echo(llm.tokenizer, skip_special_tokens=False))  # also if truncated


async def prepared(
    door: AppContext, wanted: ChatRequest, charge: Charge, prompt: Prompt | None = None
) -> Conversation:
    """Validate `wanted` and prepare it, including its prompt unless that is given.

    Raises RequestError naming the field at fault.
    """
    tokenizer = door.llm.tokenizer
    params = chat_sampling(wanted, door.settings.default_sampling, door.llm.model.vocab_size)
    large = charge.held > LARGE_REQUEST
    tools = await door.forms.run_if(large, lambda: chat_tools(door, wanted))
    prompt = prompt or await chat_prompt(door, wanted, params.max_tokens, charge, tools)
    thinking = find_thinking(door.settings.reasoning_parser, tokenizer.chat_template)
    form = await door.forms.run_if(wants_form(wanted), lambda: _form(wanted, tools))
    if form is not None:
        form = _behind_thought(form, thinking, prompt.text or "", tokenizer)
        await door.llm.check_grammar(form.grammar, form.field)
        params = msgspec.structs.replace(params, grammar=form.grammar)
    marks = [OPENING, CLOSING] if thinking else []
    if tools:
        marks += [mark for mark in (tools.form.opening, tools.form.closing, tools.form.separator) if mark]
    if any(tokenizer.special_id(mark) is not None for mark in marks):
        params = msgspec.structs.replace(params, skip_special_tokens=False)  # the parsers need to see them
    return Conversation(prompt, params, tools, thinking)


def _form(wanted: ChatRequest, tools: Tools | None) -> Wanted | None:
    form = wanted_grammar(wanted)
    if form is None or tools is None:
        return Wanted(tools.grammar, "tools") if tools and tools.grammar else form
    raise RequestError(
        f"{form.field} cannot be combined with tools, unless tool_choice is none", field=form.field
    )


def _behind_thought(form: Wanted, thinking: Thinking | None, prompt: str, tokenizer: Tokenizer) -> Wanted:
    """Apply the grammar only after the reasoning, if the model reasons first."""
    thoughts = ThoughtReader(thinking, prompt) if thinking else None
    if thoughts is None or not (thoughts.open or thoughts.undecided):
        return form
    closing, opening = tokenizer.special_id(CLOSING), tokenizer.special_id(OPENING)
    grammar = msgspec.structs.replace(form.grammar, after=CLOSING if closing is None else closing)
    if thoughts.undecided:
        grammar = msgspec.structs.replace(grammar, opening=OPENING if opening is None else opening)
    return Wanted(grammar, form.field)
