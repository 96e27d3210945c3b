// The chat: one conversation shown, asked and stored.

import { askChat, finishStream, newAnswer } from "./answer.js";
import { Composer } from "./composer.js";
import { add, asMarkdown, newConversation, path, sentMessages, turnTo } from "./conversation.js";
import { at, download, el, notify } from "./dom.js";
import { viewOf } from "./messages.js";
import { pageSettings, requestFields } from "./settings.js";
import * as store from "./store.js";

const SAVE_EVERY = 3000;      // milliseconds while an answer comes
const NEAR = 80;              // pixels from the end within which the log follows it
const IDEAS = ["What is 12 + 7?", "Who are you?", "Write a function that returns the larger of two numbers."];

/** The chat. `changed` is called when the history has changed. */
export class Chat {
  conversation = null;
  #changed; #composer; #pending = null; #views = new Map(); #frame = 0; #saved = 0;

  constructor(changed) {
    this.#changed = changed;
    this.#composer = new Composer({
      ahead: () => this.conversation.settings.ahead,
      streamBody: () => this.#streamBody(),
      send: (message, prepare) => this.#send(message, prepare),
      stop: () => this.stop(),
      editLast: () => this.#editLast(),
    });
    at("log").addEventListener("scroll", () => this.#showJump());
    at("jump").addEventListener("click", () => this.#follow());
    for (const event of ["beforeunload", "pagehide"]) window.addEventListener(event, () => this.#leave());
    this.#take(store.loadOpen() ?? undefined);
  }

  /** Show a conversation, by default a new one. */
  open(conversation) {
    this.stop();
    this.#take(conversation);
    this.#composer.refresh();
    this.#composer.focus();
  }

  /** Show a conversation; answers that were being generated when it was left end there. */
  #take(conversation = newConversation(pageSettings(store.loadSettings()))) {
    for (const node of Object.values(conversation.nodes)) if (node.state === "waiting" || node.state === "writing") node.state = "stopped";
    this.conversation = conversation;
    store.saveOpen(conversation);
    this.show();
    this.#follow();
  }

  /** Keep what has come of an answer. Stop it first: that the browser ends the connection now is no failure. */
  #leave() {
    if (!this.#pending) return;
    this.stop();
    store.save(this.conversation);
  }

  /** Change one setting here; the page's settings also for new conversations. */
  set(name, value) {
    const { settings } = this.conversation;
    if (value === undefined) delete settings[name];
    else settings[name] = value;
    store.saveSettings(settings);
    this.#settingsChanged();
  }

  /** Replace the conversation's settings by a preset. */
  choose(preset) {
    this.conversation.settings = { ...pageSettings(this.conversation.settings), ...preset };
    this.#settingsChanged();
  }

  #settingsChanged() {
    if (Object.keys(this.conversation.nodes).length) this.#save();
    this.#composer.refresh();
  }

  /** Stop the answer that is being generated. */
  stop() {
    this.#pending?.abort();
  }

  /** Offer the conversation as a file. */
  export(kind) {
    const name = this.conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";
    if (kind === "json") download(`${name}.json`, JSON.stringify(this.conversation, null, 2), "application/json");
    else download(`${name}.md`, asMarkdown(this.conversation), "text/markdown");
  }

  /** Show the conversation's current path. */
  show() {
    const nodes = path(this.conversation);
    this.#views = new Map(nodes.map((node) => [node.id, viewOf(node, this.conversation, this.#acts)]));
    at("messages").replaceChildren(...[...this.#views.values()].map((view) => view.element));
    at("welcome").hidden = nodes.length > 0;
    at("export").hidden = !nodes.length;
    this.#showJump();
  }

  /** Show questions to begin with. */
  offerIdeas() {
    at("ideas").replaceChildren(...IDEAS.map((text) => el("button", { type: "button", text, on: { click: () => this.#send({ content: text, files: [] }) } })));
  }

  #acts = {
    edit: (node, content) => this.#edit(node, content),
    regenerate: (node) => this.#ask(node.parent),
    turn: (node, by) => { turnTo(this.conversation, node, by); this.#save(); this.show(); },
    sendResult: (node, call, content) => this.#sendResult(node, call, content),
    isLast: (node) => node.id === this.conversation.head,
    show: () => this.show(),
  };

  #send(message, prepare) {
    if (this.#pending || !this.#isReady()) return false;
    add(this.conversation, { role: "user", ...message });
    this.#ask(this.conversation.head, prepare);
    return true;
  }

  #edit(node, content) {
    if (!content || this.#pending) return;
    add(this.conversation, { role: "user", content, files: node.files }, node.parent);
    this.#ask(this.conversation.head);
  }

  /** Send back a call's result; the model goes on once all calls of its message have one. */
  #sendResult(node, call, content) {
    node.results = { ...node.results, [call.id]: content };
    const calls = node.calls.filter(Boolean);
    if (calls.some(({ id }) => node.results[id] === undefined)) {
      notify("Send the results of the other calls, too.");
      return;
    }
    for (const { id, name } of calls) add(this.conversation, { role: "tool", call: id, name, content: node.results[id] });
    this.#ask(this.conversation.head);
  }

  #editLast() {
    const last = path(this.conversation).findLast((node) => node.role === "user");
    if (last && !this.#pending) this.#views.get(last.id).element.edit();
  }

  /** Return whether the settings make a request; say so if they do not. */
  #isReady() {
    try {
      requestFields(this.conversation.settings);
      return true;
    } catch (error) {
      notify(`More fields (JSON): ${error.message}`);
      return false;
    }
  }

  /** Return the request that opens a prompt stream for the next message; null if the settings make none. */
  #streamBody() {
    const { settings } = this.conversation;
    try {
      const messages = [...sentMessages(settings.system, path(this.conversation)), { role: "user", content: "{context}" }];
      return { ...requestFields(settings), messages };
    } catch {
      return null;
    }
  }

  /** Ask for an answer to the path that ends at `parent`: an alternative, if there is one. */
  async #ask(parent, prepare = () => null) {
    if (this.#pending || !this.#isReady()) return;
    const { conversation } = this;
    const pending = this.#pending = new AbortController();
    const body = { ...requestFields(conversation.settings), messages: sentMessages(conversation.settings.system, path(conversation, parent)) };
    const answer = add(conversation, newAnswer(body.slo), parent);
    this.#composer.busy = true;
    this.show();
    this.#follow();
    this.#save();
    try {
      await this.#answer(body, answer, prepare, pending.signal);
    } finally {
      this.#ended(conversation, pending);
    }
  }

  async #answer(body, answer, prepare, signal) {
    const changed = () => this.#painted(answer);
    const stream = await prepare();
    if (stream) {
      answer.ahead = { tokens: stream.tokens, computed: stream.computed };
      await finishStream(stream.id, answer, signal, changed);
      if (!answer.missing) return;
      Object.assign(answer, { ahead: null, missing: false, error: null, state: "waiting", timing: newAnswer().timing });
    }
    await askChat(body, answer, signal, changed);
  }

  #ended(conversation, pending) {
    if (this.#pending === pending) this.#pending = null;
    this.#composer.busy = false;
    if (!conversation.deleted && !store.save(conversation)) notify("The browser's storage is full: delete conversations to keep this one.");
    if (this.conversation === conversation) this.#draw();
    this.#changed();
  }

  /** Show what came, once a frame. */
  #painted() {
    this.#frame ||= requestAnimationFrame(() => this.#draw());
    if (performance.now() - this.#saved > SAVE_EVERY) this.#save();
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const follows = isAtEnd();
    this.#views.get(this.conversation.head)?.update();
    if (follows) this.#follow();
    this.#showJump();
  }

  #save() {
    this.#saved = performance.now();
    if (!this.conversation.deleted) store.save(this.conversation);
    this.#changed();
  }

  #follow() {
    at("log").scrollTop = at("log").scrollHeight;
  }

  #showJump() {
    at("jump").hidden = isAtEnd();
  }
}

const isAtEnd = () => {
  const { scrollHeight, scrollTop, clientHeight } = at("log");
  return scrollHeight - scrollTop - clientHeight < NEAR;
};
