// Calls of this server, relative to the page: it also works under a prefix of a proxy.

// The key is in this variable and its field alone: not in storage, cookies or the address.
let key = "";
const refused = new Set();

/** An error as the server described it. `status` is 0 if there was no reply. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Use this key from now on. */
export function useKey(value) {
  key = value.trim();
}

/** Return whether the page has a key. */
export const hasKey = () => key !== "";

/** Call a listener whenever a request was refused for want of a valid key. */
export function onKeyNeeded(listener) {
  refused.add(listener);
}

/** Send a request; return the reply. Throws ApiError unless its status is one of success. */
export async function call(method, path, body, options = {}) {
  try {
    return await callAs(key, method, path, body, options);
  } catch (error) {
    if (error.status === 401) refused.forEach((listener) => listener());
    throw error;
  }
}

/** Send a request to an admin route, with an admin key or else with the page's key; return the reply. */
export const callAsAdmin = (method, path, adminKey) => callAs(adminKey.trim() || key, method, path);

async function callAs(used, method, path, body, options = {}) {
  const headers = used ? { Authorization: `Bearer ${used}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const text = typeof body === "string" || body === undefined ? body : JSON.stringify(body);
  const reply = await sent(path, { method, headers, body: text, cache: "no-store", ...options });
  if (reply.ok) return reply;
  throw new ApiError(await reason(reply), reply.status);
}

/** Send a request; return the reply's JSON. */
export const json = async (method, path, body, options) => (await call(method, path, body, options)).json();

async function sent(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not respond.", 0);
  }
}

async function reason(reply) {
  const text = await reply.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server replied with status ${reply.status}.`;
  }
}

/** Yield the events of a reply, parsed. Throws ApiError for an error event, and if the reply breaks off. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await next(reader);
    if (done) break;
    const parts = (buffer + value).split(/\r?\n\r?\n/);
    buffer = parts.pop();
    for (const part of parts) {
      const data = dataOf(part);
      if (data === "[DONE]") return;
      if (data) yield checked(JSON.parse(data));
    }
  }
  throw new ApiError("The connection ended before the answer did.", 0);
}

async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost.", 0);
  }
}

function checked(event) {
  if (event.error) throw new ApiError(event.error.message, event.error.status ?? 500);
  return event;
}

const dataOf = (part) =>
  part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");

/** Return the fields that the server took without effect, as its Warning header names them; else null. */
export function warningOf(reply) {
  const match = /^299 \S+ "(.*)"$/.exec(reply.headers.get("Warning") ?? "");
  return match && match[1];
}
