// One answer: its request, its events, and what was measured of it.

import { ApiError, call, events, warningOf } from "./api.js";

const OPTIONS = { include_usage: true, continuous_usage_stats: true };

/** Return an assistant's message that is asked for now, with the latency targets that it has. */
export const newAnswer = (slo) => ({
  role: "assistant", content: "", reasoning: "", calls: [], state: "waiting", slo, timing: { sent: performance.now(), at: Date.now() },
});

/** Ask for a chat's next message, and fill `answer` as it comes; `changed` is called after each event. */
export function askChat(body, answer, signal, changed) {
  const request = { ...body, stream: true, stream_options: OPTIONS };
  return fill(call("POST", "v1/chat/completions", request, { signal }), answer, changed);
}

/** Finish a prompt stream, and fill `answer` with what it gives. */
export function finishStream(id, answer, signal, changed) {
  return fill(call("POST", `v1/streams/${id}/finish`, { stream: true, stream_options: OPTIONS }, { signal }), answer, changed);
}

async function fill(request, answer, changed) {
  try {
    const reply = await request;
    answer.warning = warningOf(reply);
    for await (const event of events(reply)) {
      take(answer, event);
      changed();
    }
    answer.state = "done";
  } catch (error) {
    if (error.name !== "AbortError" && !(error instanceof ApiError)) throw error;
    answer.state = error.name === "AbortError" ? "stopped" : "failed";
    answer.error = error.name === "AbortError" ? null : error.message;
    if (error.status === 404) answer.missing = true;
  }
  close(answer);
  changed();
}

/** Add one event to an answer. */
export function take(answer, event, now = performance.now()) {
  if (event.usage) measure(answer, event.usage, now);
  const [choice] = event.choices ?? [];
  if (!choice) return;
  answer.state = "writing";
  answer.model = event.model;
  answer.finish = choice.finish_reason ?? answer.finish;
  const { reasoning_content: reasoning, content, tool_calls: calls } = choice.delta ?? {};
  if (reasoning) think(answer, reasoning, now);
  if (content) {
    answer.content += content;
    answer.timing.spoke ??= now;
  }
  for (const call of calls ?? []) addCall(answer, call);
}

function think(answer, text, now) {
  answer.reasoning += text;
  answer.timing.thought ??= now;
}

function addCall(answer, { index, id, function: { name, arguments: text } }) {
  const known = (answer.calls[index] ??= { id: "", name: "", text: "" });
  known.id ||= id ?? "";
  known.name += name ?? "";
  known.text += text ?? "";
}

/** Note the time of new tokens. A last event without choices repeats the count, and has the details. */
function measure(answer, usage, now) {
  const before = answer.usage?.completion_tokens ?? 0;
  answer.usage = usage;
  if (usage.completion_tokens <= before) return;
  const { timing } = answer;
  timing.last = now;
  if (timing.first === undefined) Object.assign(timing, { first: now, early: usage.completion_tokens });
}

/** Make times relative to the request, so that they still mean something once the page was left. */
function close(answer) {
  const { sent, at, first, last, early, thought, spoke } = answer.timing;
  const since = (time) => (time === undefined ? undefined : time - sent);
  answer.timing = { at, sent: 0, first: since(first), last: since(last), early, thought: since(thought), spoke: since(spoke) };
}

/** Return the figures of an answer, null where they are not known (yet): times in milliseconds. */
export function figures(answer) {
  const { usage, timing, slo } = answer;
  if (!usage || timing.first === undefined) return null;
  const rest = usage.completion_tokens - timing.early;
  const perToken = rest > 0 ? (timing.last - timing.first) / rest : null;
  const drafts = usage.completion_tokens_details ?? {};
  const accepted = drafts.accepted_prediction_tokens ?? 0;
  return {
    tokens: usage.completion_tokens,
    promptTokens: usage.prompt_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    first: timing.first - timing.sent,
    perToken,
    rate: perToken ? 1000 / perToken : null,
    accepted,
    drafted: accepted + (drafts.rejected_prediction_tokens ?? 0),
    targets: slo ? targets(slo, usage, timing.first - timing.sent, perToken) : [],
  };
}

/** Return the latency targets, with the values that the server measured, or until it says so those seen here. */
function targets(slo, usage, first, perToken) {
  const known = usage.slo_met !== undefined;
  const entry = (name, limit, own, measured) => {
    const value = known ? (own ?? measured) : measured;
    return limit ? [{ name, limit, value, met: value === null ? true : value <= limit, final: known }] : [];
  };
  return [
    ...entry("first token", slo.ttft_ms, usage.ttft_ms, first),
    ...entry("per token", slo.tpot_ms, usage.tpot_ms, perToken),
  ];
}
