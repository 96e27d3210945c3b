// Where a message is written: the text, files, and the prompt stream that is sent meanwhile.

import { fileText } from "./conversation.js";
import { at, el, icon, number } from "./dom.js";
import { MessageStream, chunksOf } from "./prompt_stream.js";

const MAX_FILE_BYTES = 2_000_000;
const PAUSE = 250;      // milliseconds without a key before an edit is sent

/** The form. `host` has: ahead() (whether to compute a message before it is sent), streamBody(), send(message, prepare),
 *  stop(), editLast(). */
export class Composer {
  #host; #files = []; #stream = null; #streamBody = ""; #timer = null; #busy = false; #problem = "";

  constructor(host) {
    this.#host = host;
    const form = at("composer");
    form.addEventListener("submit", (event) => { event.preventDefault(); this.#submit(); });
    at("text").addEventListener("input", () => this.#changed(PAUSE));
    at("text").addEventListener("keydown", (event) => this.#key(event));
    at("text").addEventListener("paste", (event) => this.#paste(event));
    at("attach").addEventListener("click", () => at("file").click());
    at("file").addEventListener("change", () => { this.#add(at("file").files); });
    at("stop").addEventListener("click", () => host.stop());
    acceptDrops((files) => this.#add(files));
    window.addEventListener("pagehide", () => this.#reset());
  }

  focus() {
    at("text").focus();
  }

  /** Show the stop button instead of the other one. */
  set busy(busy) {
    this.#busy = busy;
    at("stop").hidden = !busy;
    at("send").hidden = busy;
  }

  /** Take another conversation or other settings into account. */
  refresh() {
    this.#changed(0);
  }

  /** Give the stream up. */
  #reset() {
    clearTimeout(this.#timer);
    this.#stream?.close();
    this.#stream = null;
    this.#progress(null);
  }

  #key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.#submit();
    } else if (event.key === "ArrowUp" && !at("text").value) {
      event.preventDefault();
      this.#host.editLast();
    }
  }

  #paste(event) {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    this.#add(event.clipboardData.files);
  }

  async #add(list) {
    const files = await Promise.all([...list].map(readText));
    at("file").value = "";
    this.#problem = files.filter((file) => file.problem).map((file) => file.problem).join(" ");
    this.#files.push(...files.filter((file) => !file.problem));
    this.#changed(0);
    this.focus();
  }

  #changed(pause) {
    resize(at("text"));
    this.#showFiles();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#sync(), pause);
  }

  #showFiles() {
    const chips = this.#files.map((file) => el("li", {}, icon("file"), el("span", { text: file.name }),
      el("button", { type: "button", "aria-label": `Remove ${file.name}`, on: { click: () => this.#removeFile(file) } }, icon("close"))));
    at("attached").replaceChildren(...chips);
    at("attached").hidden = !chips.length;
    at("problem").textContent = this.#problem;
    at("problem").hidden = !this.#problem;
  }

  #removeFile(file) {
    this.#files.splice(this.#files.indexOf(file), 1);
    this.#problem = "";
    this.#changed(0);
    this.focus();
  }

  #chunks() {
    return chunksOf(this.#files, fileText, at("text").value.trim());
  }

  /** Bring the prompt stream to what the message is now. */
  #sync() {
    const ahead = this.#host.ahead();
    const wanted = ahead === "always" ? at("text").value.trim() || this.#files.length : ahead !== "never" && this.#files.length;
    if (!wanted || this.#busy) {
      this.#reset();
      return;
    }
    const body = this.#host.streamBody();
    if (body === null) return;
    if (JSON.stringify(body) !== this.#streamBody) this.#reset();
    this.#streamBody = JSON.stringify(body);
    this.#stream ??= this.#opened(body);
    this.#stream.update(this.#chunks());
  }

  /** Return a new stream, whose progress is shown until it is sent or given up. */
  #opened(body) {
    const stream = new MessageStream(body, (progress) => { if (this.#stream === stream) this.#progress(progress); });
    return stream;
  }

  #progress(progress) {
    const { tokens, computed, error } = progress ?? {};
    at("ahead").hidden = !progress;
    at("ahead").classList.toggle("failed", Boolean(error));
    const share = tokens ? computed / tokens : 0;
    at("ahead-bar").value = share;
    at("ahead-bar").hidden = Boolean(error);
    at("ahead-text").textContent = !progress ? "" : error ? `Not computed ahead: ${error}` : `${number(computed)} of ${number(tokens)} tokens computed already`;
  }

  #submit() {
    const content = at("text").value.trim();
    if (this.#busy || !(content || this.#files.length)) return;
    clearTimeout(this.#timer);
    const stream = this.#stream;
    const chunks = this.#chunks();
    const fits = stream && JSON.stringify(this.#host.streamBody()) === this.#streamBody;
    if (stream && !fits) stream.close();
    const files = this.#files.map(({ name, text }) => ({ name, text }));
    const sent = this.#host.send({ content, files }, () => (fits ? stream.settled(chunks) : null));
    if (!sent) return;
    this.#stream = null;
    this.#files = [];
    this.#problem = "";
    at("text").value = "";
    this.#progress(null);
    resize(at("text"));
    this.#showFiles();
  }
}

function resize(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, 240)}px`;
}

let nextFile = 0;

/** Return a file's name, text and key; or the problem if it is no text. */
async function readText(file) {
  if (file.size > MAX_FILE_BYTES) return { problem: `${file.name} is larger than ${number(MAX_FILE_BYTES / 1e6)} MB.` };
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new TypeError("binary");
    return { name: file.name, text, key: `file-${(nextFile += 1)}` };
  } catch {
    return { problem: `${file.name} is not a text file.` };
  }
}

/** Take files that are dropped anywhere on the page, and show that they may be. */
function acceptDrops(take) {
  const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
  const show = (shown) => { at("drop").hidden = !shown; };
  window.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    show(true);
  });
  window.addEventListener("dragleave", (event) => { if (!event.relatedTarget) show(false); });
  window.addEventListener("drop", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    show(false);
    take(event.dataTransfer.files);
  });
}
