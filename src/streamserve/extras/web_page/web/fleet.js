// The fleet: workers, the latest routing decisions, and graphs of the last minutes.

import { call, json } from "./api.js";
import { chart } from "./chart.js";
import { at, el, number, svg } from "./dom.js";
import { History, WINDOW, gauge, mean, parse, rate, ratio } from "./metrics.js";

const SHOWN = 2_000, ASIDE = 10_000;      // milliseconds between samples while the view is shown, and otherwise
const DECISIONS = 8;

/** Charts. `needs`: a metric without which it is left out. */
const CHARTS = [
  { title: "Generated", unit: "tokens/s", lines: [{ of: rate("generation_tokens_total") }] },
  { title: "Prompts", unit: "tokens/s", lines: [{ of: rate("prompt_tokens_total") }] },
  { title: "Time to first token", unit: "ms", lines: [{ of: mean("time_to_first_token_seconds") }] },
  { title: "Time per token", unit: "ms", lines: [{ of: mean("inter_token_latency_seconds") }] },
  { title: "Requests", unit: "", lines: [{ name: "running", of: gauge("num_requests_running") }, { name: "waiting", of: gauge("num_requests_waiting") }] },
  { title: "KV cache in use", unit: "%", max: 100, needs: "kv_cache_usage_perc", lines: [{ of: gauge("kv_cache_usage_perc", 100) }] },
  { title: "Draft tokens accepted", unit: "%", max: 100, needs: "spec_decode_num_draft_tokens_total", lines: [{ of: ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total") }] },
  { title: "Latency targets met", unit: "%", max: 100, needs: "slo_requests_total", lines: [{ of: ratio("slo_requests_total met", "slo_requests_total") }] },
  { title: "KV moved between workers", unit: "MB/s", needs: "kv_transfers_total", lines: [{ of: rate("kv_transfer_bytes_total", 1e-6) }] },
  { title: "Step floor / step time", unit: "%", max: 100, needs: "step_floor_seconds_total", lines: [{ of: ratio("step_floor_seconds_total", "step_seconds_total") }] },
];

/** The view. It samples while the page is visible, more often while it is `shown` itself. */
export class Fleet {
  #history = new History(); #charts = CHARTS.map((spec) => ({ ...spec, ...chart(spec) }));
  #timer = null; #shown = false; #model = ""; #busy = false; #started = false;

  constructor() {
    at("charts").append(...this.#charts.map(({ element }) => element));
    document.addEventListener("visibilitychange", () => this.#schedule(0));
    new ResizeObserver(() => this.#draw()).observe(at("charts"));
    at("fleet-model").addEventListener("change", () => this.#choose(at("fleet-model").value));
  }

  /** Begin to sample, once the server answers. */
  start() {
    this.#started = true;
    this.#schedule(0);
  }

  /** Whether the view is on the screen. */
  set shown(shown) {
    this.#shown = shown;
    this.#schedule(0);
  }

  #choose(model) {
    this.#model = model;
    this.#history = new History();
    this.#schedule(0);
  }

  #schedule(wait) {
    clearTimeout(this.#timer);
    if (this.#started && !document.hidden) this.#timer = setTimeout(() => this.#sample(), wait);
  }

  async #sample() {
    if (this.#busy) return;
    this.#busy = true;
    try {
      await this.#read();
      at("fleet-problem").textContent = "";
    } catch (error) {
      at("fleet-problem").textContent = error.message;
    }
    this.#busy = false;
    this.#schedule(this.#shown ? SHOWN : ASIDE);
  }

  async #read() {
    const text = await (await call("GET", "metrics")).text();
    const { sums, models } = parse(text, this.#model);
    const router = this.#shown ? await this.#router() : null;
    this.#history.add({ at: Date.now(), sums, workers: router?.workers ?? [] });
    if (!this.#shown) return;
    this.#offerModels(models);
    this.#draw();
    if (router) showRouter(router, sums, this.#history);
  }

  /** Return the router's view; null while the chosen model is not loaded. */
  async #router() {
    const query = this.#model ? `?model=${encodeURIComponent(this.#model)}` : "";
    return json("GET", `v1/router${query}`).catch((error) => {
      if (error.status === 503 || error.status === 404) return null;
      throw error;
    });
  }

  #offerModels(models) {
    const select = at("fleet-model");
    select.hidden = models.size < 2;
    if (select.options.length === models.size + 1) return;
    select.replaceChildren(el("option", { value: "", text: "all models" }), ...[...models].map((name) => el("option", { value: name, text: name })));
    select.value = this.#model;
  }

  #draw() {
    const last = this.#history.samples.at(-1);
    if (!last || !this.#shown) return;
    for (const { element, draw, needs } of this.#charts) {
      element.hidden = Boolean(needs) && last.sums[needs] === undefined;
      if (!element.hidden) draw(this.#history, last.at);
    }
  }
}

function showRouter({ router, workers, machines = [], decisions, open_reservations: reservations }, sums, history) {
  const roles = Object.entries(Object.groupBy ? Object.groupBy(workers, roleOf) : groupedByRole(workers));
  at("workers").replaceChildren(...roles.map(([role, members]) => column(role, members, history)));
  at("workers").classList.toggle("pairs", roles.length > 1);
  at("machines").hidden = machines.length < 2 && machines.every(({ slots }) => slots === null);
  at("machine-rows").replaceChildren(...machines.map(machineRow));
  at("transfers").textContent = transferText(sums, reservations);
  at("transfers").hidden = sums.kv_transfers_total === undefined;
  at("router").textContent = router;
  at("decisions").replaceChildren(...decisions.slice(0, DECISIONS).map(decisionRow));
  at("routing").hidden = !decisions.length || workers.length < 2;
}

const roleOf = ({ name }) => name.replace(/-\d+$/, "");

function groupedByRole(workers) {
  const groups = {};
  for (const worker of workers) (groups[roleOf(worker)] ??= []).push(worker);
  return groups;
}

const ROLES = { unified: "Workers", prefill: "Prefill", decode: "Decode" };

const column = (role, members, history) =>
  el("section", { class: "role", "aria-label": ROLES[role] ?? role }, el("h3", { text: ROLES[role] ?? role }), ...members.map((worker) => card(worker, history)));

function card(worker, history) {
  const kv = worker.blocks_total ? worker.blocks_live / worker.blocks_total : 0;
  const state = !worker.ready ? "not ready" : worker.draining ? "draining" : "ready";
  return el("article", { class: "worker" },
    el("header", {}, el("b", { text: worker.name }), el("span", { class: `state ${state.replace(" ", "-")}`, text: state }),
      worker.host ? el("span", { class: "soft host", text: `on ${worker.host}` }) : null,
      worker.starts > 1 ? el("span", { class: "soft", text: `started ${worker.starts} ×` }) : null),
    el("dl", {}, fact("queue", `${number(worker.queued)}`, worker.queued_tokens ? `${number(worker.queued_tokens)} tokens` : ""),
      fact("decoding", number(worker.decoding)), fact("KV in use", `${number(100 * kv, 1)} %`, `${number(worker.blocks_live)} of ${number(worker.blocks_total)} blocks`)),
    el("meter", { min: 0, max: 1, value: kv, high: 0.9, optimum: 0, "aria-label": `KV cache in use by ${worker.name}` }),
    strip(worker.name, history));
}

const fact = (term, value, more) => el("div", {}, el("dt", { text: term }), el("dd", {}, value, more ? el("small", { text: ` ${more}` }) : null));

/** Return a timeline of the last minutes: the requests that a worker had, queued and decoding. */
function strip(name, history) {
  const now = history.samples.at(-1).at;
  const loads = history.samples.map(({ at: time, workers }) => ({ at: time, worker: workers.find((worker) => worker.name === name) })).filter(({ worker }) => worker);
  const most = Math.max(4, ...loads.map(({ worker }) => worker.queued + worker.decoding));
  const width = Math.max(0.4, (100 * SHOWN) / WINDOW);
  const bars = loads.filter(({ at: time }) => time > now - WINDOW).flatMap(({ at: time, worker }) => {
    const x = 100 - (100 * (now - time)) / WINDOW - width;
    const decoding = (20 * worker.decoding) / most, queued = (20 * worker.queued) / most;
    return [bar("decoding", x, width, 20 - decoding, decoding), bar("queued", x, width, 20 - decoding - queued, queued)];
  });
  const label = `Requests of ${name} in the last five minutes, at most ${most}`;
  return svg("svg", { class: "strip", viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": label }, ...bars.filter(Boolean));
}

const bar = (kind, x, width, y, height) => (height > 0 ? svg("rect", { class: kind, x: x.toFixed(2), width, y, height }) : null);

function transferText(sums, reservations) {
  const transfers = sums.kv_transfers_total ?? 0;
  const cached = (100 * (sums.kv_transfer_hit_tokens_total ?? 0)) / Math.max(1, sums.kv_transfer_tokens_total ?? 0);
  const exposed = (1000 * (sums.kv_transfer_exposed_seconds_total ?? 0)) / Math.max(1, transfers);
  const failed = sums.kv_transfer_failures_total ?? 0, copies = sums.kv_cache_copies_total ?? 0;
  return `${number(transfers)} KV transfers and ${number(copies)} copies of cached KV, ${number((sums.kv_transfer_bytes_total ?? 0) / 1e6, 1)} MB; ` +
    `${number(cached)} % of the transfers' tokens were cached at the receiver; decoding waited ` +
    `${number(exposed, 1)} ms per transfer; ${number(failed)} failed; ${number(reservations)} reservations open.`;
}

function machineRow({ name, slots, workers, joined_seconds: joined, silence }) {
  const used = slots === null ? number(workers.length) : `${number(workers.length)} of ${number(slots)}`;
  return el("tr", {}, el("td", { text: name }), el("td", { text: used }), el("td", { text: workers.join(", ") }),
    el("td", { text: `${number(joined)} s` }), el("td", { text: `${number(silence, 1)} s` }));
}

function decisionRow({ seconds_ago: ago, prompt_tokens: tokens, chosen, reason, candidates }) {
  const scores = candidates.map(({ workers, score }) => `${workers} ${score === null ? "skipped" : number(score, 2)}`).join(", ");
  return el("tr", {}, el("td", { text: `${number(ago)} s` }), el("td", { text: number(tokens) }), el("td", { text: chosen }),
    el("td", { text: reason }), el("td", { class: "scores", text: scores }));
}
