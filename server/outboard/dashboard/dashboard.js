// The dashboard: one EventSource, whose "snapshot" events hold everything that is shown; see http/dashboard.py for their form.

const $ = (id) => document.getElementById(id);
const GOOD = ["serving", "standby"], BAD = ["lost", "quarantined"], AWAY = ["lost", "quarantined", "ejected", "off"];
/** Reasons for lower clocks by which a card protects itself; see devices/figures.py. */
const THROTTLED = { sw_thermal: "too hot", hw_thermal: "too hot", hw_slowdown: "slowed down by the hardware", hw_power_brake: "power brake" };
const PALETTE = ["--s1", "--s2", "--s3", "--s4", "--s5"];
const SVG = "http://www.w3.org/2000/svg";

/** An element with properties and children. Text is always set as text: nothing that a sender named becomes markup. */
function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key in node) node[key] = value; else node.setAttribute(key, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

function svg(tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
}

const number = (value, digits = 1) => (value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits }));
const gb = (bytes) => (bytes >= 1e8 || bytes === 0 ? `${number(bytes / 1e9, 2)}\u00a0GB` : `${number(bytes / 1e6, 2)}\u00a0MB`);
const ago = (iso) => {
  const seconds = Math.max(0, (Date.now() - Date.parse(iso)) / 1000);
  return seconds < 90 ? `${Math.round(seconds)} s ago` : seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${number(seconds / 3600)} h ago`;
};
const inTime = (iso) => `${Math.max(0, Math.round((Date.parse(iso) - Date.now()) / 1000))} s`;
const stateClass = (state) => (GOOD.includes(state) || state === "ready" ? "good" : BAD.includes(state) || state === "failed" ? "bad" : "warn");

/** Replace the children only where something changed: a button that has the focus must not vanish under the finger. */
const shown = new Map();
function render(container, key, value, build) {
  const text = JSON.stringify(value);
  if (shown.get(key) === text) return;
  shown.set(key, text);
  const focused = container.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  container.replaceChildren(...build());
  if (focused) container.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

// ---- devices

async function act(device, path, body) {
  $("device-message").textContent = "";
  const answer = await fetch(`/v1/devices/${encodeURIComponent(device)}/${path}`, {
    method: "POST", headers: body ? { "Content-Type": "application/json" } : {}, body: body ? JSON.stringify(body) : undefined,
  });
  const got = await answer.json().catch(() => ({}));
  if (!answer.ok) $("device-message").textContent = `${device}: ${got.detail ?? answer.statusText}`;
  else if (path === "eject") $("device-message").textContent = [got.say, ...got.commands].join(" ");
}

function deviceButtons(d) {
  const button = (label, path, body) => el("button", { type: "button", onclick: () => act(d.id, path, body), "data-key": `${d.id} ${label}` }, label);
  const buttons = [];
  if (d.simulated) buttons.push(d.state === "lost" ? button("Replug", "fault", { fault: "replug" }) : button("Unplug", "fault", { fault: "unplug" }));
  if (d.kind !== "cpu" && d.state !== "ejected") buttons.push(button("Eject", "eject"));
  if (["quarantined", "ejected"].includes(d.state)) buttons.push(button("Try again now", "reset"));
  return buttons;
}

function used(d, rate) {
  const rows = [];
  const row = (name, value) => rows.push(el("dt", {}, name), el("dd", {}, value));
  if (AWAY.includes(d.state)) {
    if (d.losses) row("Losses", d.last_loss ? `${d.losses}, the last ${ago(d.last_loss.at)}` : d.losses);
    return el("dl", {}, ...rows);
  }
  row("Frames a second", number(rate?.fps ?? 0));
  if (rate?.rows) row("Rows a batch", number(rate.rows));
  if (d.link.h2d_bytes_per_s) {
    const share = (rate?.h2d_bytes_per_s ?? 0) / d.link.h2d_bytes_per_s;
    row("Link to the device", `${gb(rate?.h2d_bytes_per_s ?? 0)}/s of ${gb(d.link.h2d_bytes_per_s)}/s`);
    rows.push(el("meter", { min: 0, max: 1, high: 0.9, value: share, "aria-label": `link use of ${d.id}` }));
  }
  if (d.memory.total_bytes) {
    const taken = d.memory.total_bytes - (d.memory.free_bytes ?? d.memory.total_bytes);
    const headroom = d.memory.headroom_bytes;
    row("Memory", `${gb(taken)} of ${gb(d.memory.total_bytes)}${headroom ? `, ${gb(headroom)} left to others` : ""}`);
    rows.push(el("meter", { min: 0, max: d.memory.total_bytes, high: d.memory.total_bytes - (headroom ?? 0), value: taken, "aria-label": `memory of ${d.id}` }));
  }
  if (d.gpu?.temperature_c !== null && d.gpu?.temperature_c !== undefined) row("Temperature", `${number(d.gpu.temperature_c, 0)}\u00a0°C`);
  if (d.gpu?.power_w) row("Power", `${number(d.gpu.power_w, 0)}${d.gpu.limit_w ? ` of ${number(d.gpu.limit_w, 0)}` : ""}\u00a0W`);
  const throttled = new Set((d.gpu?.reasons ?? []).map((reason) => THROTTLED[reason]).filter(Boolean));
  if (throttled.size) row("Throttled", [...throttled].join(", "));
  if (d.losses) row("Losses", d.last_loss ? `${d.losses}, the last ${ago(d.last_loss.at)}` : d.losses);
  return el("dl", {}, ...rows);
}

function showDevices(snapshot) {
  render($("devices"), "devices", [snapshot.devices, snapshot.rates.devices], () => snapshot.devices.map((d) => el("article", { className: "card", "aria-label": d.id },
    el("header", {}, el("h3", {}, d.id), el("span", { className: `state ${stateClass(d.state)}` }, d.state)),
    el("p", {}, `${d.name ?? d.kind}${d.external && !d.simulated ? " (external)" : ""}`),
    d.why ? el("p", { className: stateClass(d.state) }, d.why) : null,
    d.until ? el("p", {}, `tried again in ${inTime(d.until)}`) : null,
    d.last_loss && d.last_loss.why !== d.why ? el("p", {}, `last loss: ${d.last_loss.why}`) : null,
    used(d, snapshot.rates.devices[d.id]),
    ...deviceButtons(d))));
}

// ---- models

function showModels(snapshot) {
  render($("models"), "models", [snapshot.models, snapshot.rates.models], () => snapshot.models.map((m) => {
    const rate = snapshot.rates.models[m.name];
    const error = m.error ? el("div", { className: "bad" }, `${m.error.file ?? ""} ${m.error.key ?? ""}: ${m.error.expected ?? ""}`) : null;
    return el("tr", {}, el("th", { scope: "row" }, m.name, error), el("td", {}, el("span", { className: `state ${stateClass(m.state)}` }, m.state)),
      el("td", {}, m.devices.join(", ")), el("td", { className: "n" }, number(rate?.fps ?? 0)), el("td", { className: "n" }, number(rate?.rows)));
  }));
  const ready = snapshot.models.filter((m) => m.state === "ready" && m.task !== "tensor").map((m) => m.name);
  render($("try-model"), "try-model", ready, () => ready.map((name) => el("option", { value: name }, name)));
}

// ---- the chart: frames a second by device over the last minutes, stacked

function showChart(history, devices) {
  const width = Math.max(300, $("chart").clientWidth), height = 170, left = 38, bottom = 18, top = 8;
  const names = devices.map((d) => d.id).filter((id) => history.some((h) => h.fps[id] !== undefined));
  const total = history.map((h) => names.reduce((sum, n) => sum + (h.fps[n] ?? 0), 0));
  const most = Math.max(1, ...total) * 1.1;
  const x = (i) => left + ((width - left) * i) / Math.max(1, history.length - 1);
  const y = (value) => top + (height - top - bottom) * (1 - value / most);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `frames a second over ${history.length} seconds, now ${number(total.at(-1) ?? 0)}` });
  for (const share of [0, 0.5, 1]) {
    const value = (most / 1.1) * share;
    picture.append(svg("line", { x1: left, x2: width, y1: y(value), y2: y(value), stroke: "var(--line)" }),
      svg("text", { x: left - 5, y: y(value) + 4, "text-anchor": "end" }, number(value, most < 10 ? 1 : 0)));
  }
  let below = history.map(() => 0);
  names.forEach((name, k) => {
    const above = history.map((h, i) => below[i] + (h.fps[name] ?? 0));
    const forth = above.map((v, i) => `${x(i)},${y(v)}`), back = below.map((v, i) => `${x(i)},${y(v)}`).reverse();
    picture.append(svg("polygon", { points: [...forth, ...back].join(" "), fill: `var(${PALETTE[k % PALETTE.length]})`, "fill-opacity": 0.75 }));
    below = above;
  });
  picture.append(svg("text", { x: left, y: height - 4 }, `${history.length} s ago`), svg("text", { x: width, y: height - 4, "text-anchor": "end" }, "now"));
  $("chart").replaceChildren(picture);
  render($("legend"), "legend", names, () => names.map((name, k) => {
    const swatch = el("i", { "aria-hidden": "true" });
    swatch.style.background = `var(${PALETTE[k % PALETTE.length]})`;
    return el("li", {}, swatch, name);
  }));
}

// ---- streams

function showStreams(streams) {
  $("streams-section").hidden = streams.length === 0;
  const container = $("streams");
  const known = new Map([...container.children].map((c) => [c.dataset.id, c]));
  for (const s of streams) {
    let card = known.get(s.id);
    known.delete(s.id);
    if (!card) {
      card = el("article", { className: "card", "data-id": s.id, "aria-label": s.station || s.id },
        el("header", {}, el("h3", {}, s.station || s.id), el("span", {})), el("img", { className: "frame", alt: `newest frame of ${s.station || s.id}` }), el("dl", {}));
      card.dataset.id = s.id;
      container.append(card);
    }
    const [header, img, list] = card.children;
    const state = header.lastChild;
    state.className = `state ${s.status === "receiving" ? "good" : "warn"}`;
    state.textContent = s.status;
    const row = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
    const dropped = Object.entries(s.dropped ?? {}).map(([why, n]) => `${why} ${n}`).join(", ");
    list.replaceChildren(...row("Model", s.model), ...row("Received", number(s.received, 0)), ...row("Processed", number(s.processed, 0)),
      ...row("Dropped", dropped || "0"), ...row("Age", s.age_ms.last === null ? "–" : `${number(s.age_ms.last, 0)} ms`));
    if (s.processed && s.processed !== Number(img.dataset.frame)) { // before the first answer there is no frame to show
      img.dataset.frame = s.processed;
      img.src = `/v1/streams/${encodeURIComponent(s.id)}/latest.jpg?draw=1&n=${s.processed}`;
    }
  }
  for (const gone of known.values()) gone.remove();
}

// ---- a photograph to try

async function tryPhotograph(file) {
  const model = $("try-model").value;
  if (!file || !model) return;
  $("result").hidden = false;
  $("picture").src = URL.createObjectURL(file);
  $("marks").replaceChildren();
  $("answer").textContent = `${model} is looking at it…`;
  let answer, got;
  try {
    answer = await fetch(`/v1/models/${encodeURIComponent(model)}/predict`, { method: "POST", headers: { "Content-Type": file.type || "application/octet-stream" }, body: file });
    got = await answer.json();
  } catch (error) {
    $("answer").textContent = `The server did not answer: ${error.message}`;
    return;
  }
  if (!answer.ok) {
    $("answer").textContent = `${got.title}: ${got.detail}`;
    return;
  }
  const { width, height } = got.image;
  const found = got.detections ?? got.texts ?? got.classes ?? [];
  $("marks").setAttribute("viewBox", `0 0 ${width} ${height}`);
  const stroke = Math.max(2, width / 250);
  for (const f of found) {
    const points = f.polygon ?? (f.box && [[f.box[0], f.box[1]], [f.box[2], f.box[1]], [f.box[2], f.box[3]], [f.box[0], f.box[3]]]);
    if (!points) continue;
    $("marks").append(svg("polygon", { points: points.map((p) => p.join(",")).join(" "), fill: "none", stroke: "#ffb300", "stroke-width": stroke }),
      svg("text", { x: points[0][0], y: points[0][1] - stroke, fill: "#ffb300", "font-size": width / 40 }, f.label ?? f.text));
  }
  $("answer").replaceChildren(
    el("p", {}, `${got.device}${got.degraded ? " (degraded)" : ""}, ${number(got.timing_ms.total, 0)} ms${found.length ? "" : "; nothing found"}`),
    el("ol", {}, ...found.slice(0, 20).map((f) => el("li", {}, `${f.label ?? f.text} ${number(f.score, 2)}`))));
}

$("file").addEventListener("change", () => tryPhotograph($("file").files[0]));
$("try-model").addEventListener("change", () => tryPhotograph($("file").files[0]));
for (const name of ["dragover", "dragleave", "drop"]) {
  $("drop").addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", name === "dragover");
    if (name === "drop") tryPhotograph(event.dataTransfer.files[0]);
  });
}

// ---- live

let history = [];
function show(snapshot) {
  history = snapshot.history ?? [...history, snapshot.second].slice(-300);
  const serving = snapshot.devices.filter((d) => d.state === "serving").map((d) => d.id).join(", ") || "nothing";
  const missing = snapshot.models.filter((m) => m.state !== "ready").map((m) => m.name);
  $("summary").classList.toggle("warn", Boolean(snapshot.degraded));
  const fps = Object.values(snapshot.second.fps).reduce((a, b) => a + b, 0);
  $("summary").textContent = `${snapshot.degraded ? `Degraded: ${snapshot.degraded}. ` : ""}${serving} serves${missing.length ? `; not ready: ${missing.join(", ")}` : ""}; ${number(fps)} frames/s`;
  showDevices(snapshot);
  showModels(snapshot);
  showStreams(snapshot.streams);
  showChart(history, snapshot.devices);
}

const GONE = "The server does not answer. This page goes on by itself when it is back.";
const NO_KEY = "The key that this page was opened with is not valid any more. Reload the page and give another one as the password.";

/** A connection that breaks is brought back by the browser; one that was answered with something else (a proxy's error, no valid key) is not. */
function listen() {
  const events = new EventSource("/v1/events");
  events.addEventListener("snapshot", (event) => show(JSON.parse(event.data)));
  events.onerror = async () => {
    $("summary").textContent = GONE;
    if (events.readyState !== EventSource.CLOSED) return;
    const refused = await fetch("/v1/streams").then((answer) => answer.status === 401, () => false);
    if (refused) $("summary").textContent = NO_KEY;
    else setTimeout(listen, 3000);
  };
}

listen();
