// A message that is sent while it is written: a prompt stream, whose chunks are the files and what was typed.
//
// `update` says what the message is now. Edits follow each other, one PATCH at a time; each brings the stream from the
// chunks that it has to those that it should have. `settled` waits until there is nothing more to send.

import { ApiError, json } from "./api.js";

const POLL = 400;            // milliseconds until the next question for how much is computed; doubled without progress
const MAX_POLL = 6400;
const TYPED = "typed";       // the key of the chunk that holds what was typed; it is the last one

/** Return a message's chunks: one for each file, and one for the text. */
export const chunksOf = (files, fileText, typed) => [
  ...files.map((file) => ({ key: file.key, text: fileText(file) })),
  ...(typed ? [{ key: TYPED, text: typed }] : []),
];

/** Return the operations that make `known` into `target`, and the chunks after them, which lack the ids of new ones. */
export function edits(known, target) {
  const operations = [];
  const wanted = new Map(target.map((chunk) => [chunk.key, chunk]));
  const chunks = known.filter((chunk) => {
    if (!wanted.has(chunk.key)) operations.push({ op: "remove", chunk: chunk.id });
    return wanted.has(chunk.key);
  });
  target.forEach(({ key, text }, index) => {
    const old = chunks.find((chunk) => chunk.key === key);
    if (!old) {
      operations.push({ op: "insert", index, text });
      chunks.splice(index, 0, { key, text, id: null });
    } else if (old.text !== text) {
      operations.push({ op: "replace", chunk: old.id, text });
      chunks[chunks.indexOf(old)] = { ...old, text };
    }
  });
  return { operations, chunks };
}

/** One prompt stream. `report` is called with its progress: {tokens, computed} or {error}. */
export class MessageStream {
  #body; #report;
  #id = null; #version = 0; #chunks = []; #target = [];
  #running = null; #timer = null; #closed = false; #error = null;

  constructor(body, report) {
    this.#body = body;
    this.#report = report;
  }

  /** Say what the message consists of now. */
  update(target) {
    this.#target = target;
    this.#error = null;
    this.#running ??= this.#sync().finally(() => { this.#running = null; });
    return this.#running;
  }

  /** Wait until the stream has all that it should; return {id, tokens, computed}, or null if it does not exist. */
  async settled(target) {
    await this.update(target);
    if (this.#error || this.#closed) return null;
    clearTimeout(this.#timer);
    this.#closed = true;
    const { tokens, computed } = await this.#state();
    return tokens === undefined ? null : { id: this.#id, tokens, computed };
  }

  /** Give the stream up. */
  close() {
    clearTimeout(this.#timer);
    if (this.#id && !this.#closed) json("DELETE", `v1/streams/${this.#id}`, undefined, { keepalive: true }).catch(() => {});
    this.#closed = true;
  }

  async #sync() {
    try {
      await this.#send().catch((error) => this.#sendAgain(error));
      if (!this.#closed) this.#poll(POLL);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#error = error;
      this.#report({ error: error.message });
    }
  }

  async #send() {
    this.#id ??= (await json("POST", "v1/streams", this.#body)).id;
    while (!this.#closed) {
      const more = edits(this.#chunks, this.#target);
      if (!more.operations.length) return;
      await this.#edit(more);
    }
  }

  /** Make a stream again that is gone, as after its time without a call. */
  #sendAgain(error) {
    if (error.status !== 404 || !this.#id) throw error;
    this.#id = null;
    this.#version = 0;
    this.#chunks = [];
    return this.#send();
  }

  async #edit({ operations, chunks }) {
    const body = { version: this.#version, operations };
    const reply = await json("PATCH", `v1/streams/${this.#id}`, body);
    const ids = reply.chunks.filter((id, i) => operations[i].op === "insert");
    for (const chunk of chunks) chunk.id ??= ids.shift();
    this.#chunks = chunks;
    this.#version = reply.version;
  }

  async #state() {
    try {
      return await json("GET", `v1/streams/${this.#id}`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      return {};
    }
  }

  /** Ask until all is computed but the last token, which the answer begins with. */
  async #poll(wait, before = -1) {
    clearTimeout(this.#timer);
    const { tokens, computed } = await this.#state();
    if (this.#closed || tokens === undefined) return;
    this.#report({ tokens, computed });
    if (computed >= tokens - 1 || document.hidden || wait > MAX_POLL) return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#poll(computed > before ? POLL : 2 * wait, computed), wait);
  }
}
