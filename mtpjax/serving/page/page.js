// The page of an mtpjax server: its live state, read once a second, and a chat. The model's text is only ever set as
// text (textContent), never parsed as HTML.
"use strict";

const POLL_MS = 1000;
const HISTORY_MS = 5 * 60 * 1000;
const NUM_COLOURS = 5; // deeper levels share the last colour
const byId = (id) => document.getElementById(id);
const levelClass = (level) => `draft level-${Math.min(level, NUM_COLOURS)}`;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// ---------------------------------------------------------------------------------------------------- requests

class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Addresses are relative, so that the page also works behind a path prefix.
async function request(path, { body, signal } = {}) {
  const headers = {};
  // A header holds bytes, so send the key as the bytes of its UTF-8 form.
  const key = sessionStorage.getItem("key");
  if (key) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal };
  const response = await fetch(path, options);
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw new RequestError(response.status, answer?.error?.message ?? `the server answered ${response.status}`);
}

async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let buffer = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection broke before the end of the answer");
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

byId("key").value = sessionStorage.getItem("key") ?? "";
byId("key-field").hidden = !byId("key").value; // shown when the server asks for one
byId("key").addEventListener("input", () => sessionStorage.setItem("key", byId("key").value));

// ---------------------------------------------------------------------------------------------------- live state

const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
const decimals = (value, digits) => (value === null ? "–" : value.toFixed(digits));
const TILES = {
  "Running / slots": (status) => `${status.num_running} / ${status.num_slots}`,
  Waiting: (status) => status.num_waiting,
  "Pages used / total": (status) => `${status.num_used_pages} / ${status.num_pages}`,
  "Tokens per second": (status) => decimals(status.tokens_per_second, 1),
  "Accept length": (status) => decimals(status.accept_length, 2),
  "Prefix-cache hits": (status) => share(status.num_cached_tokens, status.num_prompt_tokens),
  "Requests ended": (status) => status.num_requests,
  Preemptions: (status) => status.num_preempted,
  "Aborted / failed": (status) => `${status.num_aborted} / ${status.num_failed}`,
};
const tileValues = Object.keys(TILES).map((name) => {
  const tile = element("div");
  tile.append(element("dt", "", name), element("dd", "", "–"));
  byId("tiles").append(tile);
  return tile.lastChild;
});

const total = (counts) => counts.reduce((sum, count) => sum + count, 0);
let history = []; // { time, length }; length is null where no pass ran
let lastStatus = null;
let timer;

async function poll() {
  let connection = "live";
  try {
    const response = await request("status.json", { signal: AbortSignal.timeout(5000) });
    showStatus(await response.json());
  } catch (error) {
    connection = error instanceof RequestError ? error.message : "the server does not answer";
    if (error.status === 401) byId("key-field").hidden = false;
  }
  // Set only when it changes: screen readers announce it.
  if (byId("connection").textContent !== connection) byId("connection").textContent = connection;
  byId("connection").classList.toggle("live", connection === "live");
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(poll, POLL_MS);
}

function showStatus(status) {
  byId("model").textContent = status.model;
  Object.values(TILES).forEach((read, index) => {
    tileValues[index].textContent = read(status);
  });

  // The accept length of the passes since the last answer. The counts begin again when the server restarts.
  const now = Date.now();
  const numSteps = lastStatus ? status.num_steps - lastStatus.num_steps : 0;
  const numAccepted = lastStatus ? total(status.accepted) - total(lastStatus.accepted) : 0;
  history.push({ time: now, length: numSteps > 0 ? 1 + numAccepted / numSteps : null });
  history = history.filter((point) => point.time >= now - HISTORY_MS);
  lastStatus = status;

  showLegend(status.proposed.length);
  showBars(status);
  showChart(now, status.proposed.length + 1);
}

function showLegend(numLevels) {
  if (byId("legend").childElementCount === numLevels + 1) return;
  const levels = Array.from({ length: numLevels }, (_, index) => index + 1);
  const drafts = levels.map((level) => element("li", levelClass(level), `accepted draft ${level}`));
  byId("legend").replaceChildren(element("li", "", "trunk’s own token"), ...drafts);
}

function showBars(status) {
  const bars = status.proposed.map((proposed, index) => {
    const item = element("li", "", `draft ${index + 1}`);
    const track = element("div", "track");
    const bar = element("div", levelClass(index + 1));
    bar.style.width = `${proposed ? (100 * status.accepted[index]) / proposed : 0}%`;
    track.append(bar);
    item.append(track, element("span", "share", share(status.accepted[index], proposed)));
    return item;
  });
  byId("bars").replaceChildren(...(bars.length ? bars : [element("li", "", "no drafts")]));
}

function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Draws the history between 1, which is decoding without drafts, and the longest possible accept length.
function showChart(now, maxLength) {
  const [left, right, top, bottom] = [22, 396, 8, 128];
  const highest = Math.max(maxLength, 2);
  const x = (time) => right - ((now - time) / HISTORY_MS) * (right - left);
  const y = (length) => bottom - ((length - 1) / (highest - 1)) * (bottom - top);

  const marks = [];
  const step = Math.ceil((highest - 1) / 4);
  for (let length = 1; length <= highest; length += step) {
    marks.push(svg("line", { class: "grid", x1: left, x2: right, y1: y(length), y2: y(length) }));
    marks.push(svg("text", { x: left - 6, y: y(length) + 4, "text-anchor": "end" }, length));
  }
  marks.push(svg("text", { x: left, y: 145 }, "5 min ago"), svg("text", { x: right, y: 145, "text-anchor": "end" }, "now"));

  // A line through the points; it has gaps where no pass ran, and a single point is drawn as a dot.
  let path = "";
  history.forEach(({ time, length }, index) => {
    if (length === null) return;
    const place = `${x(time).toFixed(1)} ${y(length).toFixed(1)}`;
    const follows = index > 0 && history[index - 1].length !== null;
    path += follows ? `L${place}` : `M${place}L${place}`;
  });
  byId("chart").replaceChildren(byId("chart-text"), ...marks, svg("path", { class: "line", d: path }));
  const last = history.findLast((point) => point.length !== null);
  byId("chart-text").textContent = last ? `last value ${last.length.toFixed(2)}` : "no passes yet";
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
poll();

// ---------------------------------------------------------------------------------------------------- chat

let messages = []; // of the conversation so far
let running = null; // { rid, controller } of the running answer

async function answer(text) {
  const rid = `page-${crypto.getRandomValues(new Uint32Array(4)).join("-")}`;
  const controller = new AbortController();
  addLine("user", text);
  const line = addLine("answer", "");
  setRunning({ rid, controller });
  try {
    const { shown, last } = await stream(text, rid, controller.signal, line);
    messages.push({ role: "user", content: text }, { role: "assistant", content: shown });
    addLine("counts", describe(last));
  } catch (error) {
    // The conversation goes on without the failed question, which can be sent again.
    byId("prompt").value ||= text;
    addLine("error", controller.signal.aborted ? "stopped" : error.message);
  }
  setRunning(null);
}

// Shows an answer while it arrives; returns its text and what the stream's last events reported.
async function stream(text, rid, signal, line) {
  const options = {
    rid,
    // An empty field is NaN, which JSON writes as null: the server then uses its default.
    temperature: byId("temperature").valueAsNumber,
    max_tokens: byId("max-tokens").valueAsNumber,
    speculative: byId("speculative").checked,
    stream: true,
    stream_options: { include_usage: true },
    return_draft_levels: true,
  };
  const last = {};
  let shown = "";
  for await (const event of readEvents(await open(text, options, signal))) {
    if (event.error) throw new Error(event.error.message);
    Object.assign(last, event.usage && { usage: event.usage, speculation: event.metrics?.speculative_decoding });
    for (const choice of event.choices) {
      last.reason = choice.finish_reason ?? last.reason;
      for (const span of choice.draft_levels ?? []) {
        shown += span.text;
        addSpan(line, span);
      }
    }
  }
  return { shown, last };
}

// Starts an answer: as a chat, or as a plain continuation of the text where the model has no chat template.
async function open(text, options, signal) {
  if (byId("template").checked) {
    try {
      const body = { ...options, messages: [...messages, { role: "user", content: text }] };
      return await request("v1/chat/completions", { body, signal });
    } catch (error) {
      if (!error.message.includes("no chat template")) throw error;
      byId("template").checked = false;
    }
  }
  return request("v1/completions", { body: { ...options, prompt: text }, signal });
}

function describe({ usage, speculation, reason }) {
  const endings = { length: "limit of tokens reached", abort: "stopped", timeout: "out of time" };
  const length = speculation.accept_length;
  const parts = [`${usage.completion_tokens} tokens in ${speculation.num_spec_steps} passes`];
  if (length !== null) parts.push(`accept length ${length.toFixed(2)}`);
  if (endings[reason]) parts.push(endings[reason]);
  return parts.join(", ");
}

function addLine(className, text) {
  const line = element("p", className, text);
  keepAtEnd(() => byId("log").append(line));
  return line;
}

function addSpan(line, { text, level }) {
  const span = element("span", level ? levelClass(level) : "", text);
  if (level) span.title = `draft ${level}`;
  keepAtEnd(() => line.append(span));
}

// Scrolls along with the answer, unless the reader has scrolled up.
function keepAtEnd(change) {
  const log = byId("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 20;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function setRunning(value) {
  running = value;
  const [send, stop] = [byId("send"), byId("stop")];
  // A disabled button loses the focus, so move the focus on.
  const focused = document.activeElement;
  send.disabled = byId("clear").disabled = Boolean(running);
  stop.disabled = !running;
  if (focused === send) stop.focus();
  if (focused === stop) byId("prompt").focus();
  // Screen readers read the whole answer at its end, not each token.
  byId("log").setAttribute("aria-busy", String(Boolean(running)));
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value;
  if (running || !text.trim()) return;
  byId("prompt").value = "";
  answer(text);
});

byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("form").requestSubmit();
});

byId("stop").addEventListener("click", async () => {
  const { rid, controller } = running;
  // The server then ends the answer in order, with its counts. Without its help, the connection is cut.
  const response = await request("abort_request", { body: { rid } }).catch(() => null);
  const numAborted = (await response?.json())?.num_aborted;
  if (!numAborted) controller.abort();
});

byId("clear").addEventListener("click", () => {
  messages = [];
  byId("log").replaceChildren();
});
