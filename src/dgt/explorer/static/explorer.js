// The page: what is chosen, what is asked of the server, what is drawn when the pointer moves.

import { askCurve, askImages, askModel, askView, imageUrl, nearK, stepK, takesImages, upload } from "./server.js";
import { Painter, colorTable, colors, keysOf, lightOf } from "./painter.js";
import { drawCurve, drawSizes } from "./charts.js";

const $ = (id) => document.getElementById(id);
const percent = (share) => (share >= 0.9995 || share < 0.1 ? `${(100 * share).toFixed(share >= 0.9995 ? 0 : 1)} %` : `${Math.round(100 * share)} %`);
const many = (count, word) => `${count} ${count === 1 ? word : word === "query" ? "queries" : `${word}s`}`;

// What is chosen; places are shares of the image's width and height, so that they hold in every block.
const state = { image: null, size: 0, block: 0, head: 0, k: null, map: false, shown: null, pins: [], theme: null };
// What is there: the model, the images, the current answer.
const now = { model: null, images: [], shot: null, view: null, curve: null, hover: null, keyboard: null, table: [], bars: [] };
const timings = { hover: [], view: [] };
const painter = new Painter($("view"));
let palette = colors();

// ---- places and tokens

const tokenAt = (place, view = now.view) => {
  const clamp = (share, count) => Math.max(0, Math.min(count - 1, Math.floor(share * count)));
  return clamp(place[1], view.rows) * view.columns + clamp(place[0], view.columns);
};
const placeOf = (token, view = now.view) =>
  [(token % view.columns + 0.5) / view.columns, (Math.floor(token / view.columns) + 0.5) / view.rows];

// The query in focus: under the pointer, else the last pin, else one of the second group worth showing: the first is
// the largest, mostly background.
function focus() {
  if (now.hover) return { token: tokenAt(now.hover), pin: null };
  if (state.pins.length) return { token: tokenAt(state.pins.at(-1)), pin: state.pins.length - 1 };
  if (state.map) return null;
  return { token: middleOf(now.view.order[1] ?? now.view.order[0]), pin: null };
}

function middleOf(group) {
  const { members, columns } = now.view;
  const tokens = members[group];
  if (!tokens.length) return 0;
  const x = tokens.reduce((sum, token) => sum + (token % columns), 0) / tokens.length;
  const y = tokens.reduce((sum, token) => sum + Math.floor(token / columns), 0) / tokens.length;
  const far = (token) => (token % columns - x) ** 2 + (Math.floor(token / columns) - y) ** 2;
  return tokens.reduce((best, token) => (far(token) < far(best) ? token : best));
}

const shownGroups = () => {
  const flags = new Array(now.view.groups).fill(false);
  now.view.order.slice(0, state.shown ?? now.view.order.length).forEach((group) => { flags[group] = true; });
  return flags;
};

// ---- drawing

function paint() {
  const { view } = now;
  if (!view || !painter.fit(now.shot, palette)) return;
  const at = focus();
  const group = at ? view.groupIds[at.token] : null;
  const light = group === null ? null : lightOf(view, view.members[group]);
  if (state.map) painter.map(view, now.table, shownGroups(), group);
  else painter.light(view, light);
  painter.grid(view, palette);
  state.pins.forEach((place, pin) => {
    const token = tokenAt(place);
    if (view.groupIds[token] !== group) painter.outline(view, lightOf(view, view.members[view.groupIds[token]]), palette.pins[pin], 1.7);
  });
  if (at) {
    const pinned = state.pins.findIndex((place) => view.groupIds[tokenAt(place)] === group);
    painter.outline(view, light, pinned >= 0 ? palette.pins[pinned] : palette.group, pinned >= 0 ? 1.7 : 1.2);
    painter.keys(view, at.token, palette.key, palette);
    painter.mark(view, at.token, palette.group, palette);
  }
}

let asked = false;
let since = 0;
function repaint(event) {
  since = since || event?.timeStamp || performance.now();
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    paint();
    tell();
    timings.hover.push(performance.now() - since);
    if (timings.hover.length > 500) timings.hover.shift();
    since = 0;
  });
}

// The words beside the image.
function tell() {
  const { view } = now;
  if (!view) return;
  const at = focus();
  if (at) {
    const group = view.groupIds[at.token];
    const row = Math.floor(at.token / view.columns) + 1, column = at.token % view.columns + 1;
    $("readout").innerHTML =
      `Token ${row}, ${column}: <b>group ${group}</b> of ${many(view.members[group].length, "query")}, ` +
      `its ${many(view.k, "key")} cover${view.k === 1 ? "s" : ""} <b>${percent(view.mass[at.token])}</b> of this query’s global attention` +
      (view.residual ? `; <b>${percent(view.residual[at.token])}</b> of its attention goes to ${residualKeys()}` : "");
  } else {
    $("readout").innerHTML = `<b>${view.members.filter((tokens) => tokens.length).length} groups</b> of ${view.tokens} queries; point at one`;
  }
  chartSizes(at ? view.groupIds[at.token] : null);
}

function chartSizes(lone) {
  const shown = state.map ? shownGroups() : [];
  const color = (group) => (state.map && shown[group] ? `rgb(${now.table[group]})` : null);
  now.bars = drawSizes($("sizes"), now.view, lone, color, palette);
}

function chartCurve() {
  drawCurve($("curve"), now.curve, now.view.k, averageMass(), palette);
}

const average = (shares) => shares.reduce((sum, share) => sum + share, 0) / shares.length;
const averageMass = () => average(now.view.mass);
const residualKeys = () => many(now.model.blocks[state.block].residual_keys, "residual key");

function measures() {
  const { view } = now;
  const sizes = view.members.map((tokens) => tokens.length).filter(Boolean);
  $("held").textContent = percent(averageMass());
  $("held-note").textContent = `by ${view.k} of ${view.tokens} keys (${percent(view.k / view.tokens)})`;
  $("residual-note").textContent = view.residual ? `${percent(average(view.residual))} of the block’s attention goes to ${residualKeys()} a group` : "";
  sizes.sort((a, b) => a - b);
  $("sizes-note").textContent =
    `${sizes.length} of ${view.groups} in use; ${sizes[0]} to ${sizes.at(-1)} queries, median ${sizes[sizes.length >> 1]}`;
  const { ms, sides, classes } = view.forward;
  $("forward").textContent = ms < 10 ? `${ms.toFixed(1)} ms` : `${Math.round(ms)} ms`;
  $("forward-note").textContent = `${sides[1]} × ${sides[0]} px, CPU, ${many(now.model.threads, "thread")}`;
  $("classes").replaceChildren(...classes.map(([name, share]) => {
    const item = document.createElement("li");
    const label = document.createElement("span");
    label.textContent = name;
    item.append(label, percent(share));
    return item;
  }));
  $("classes-note").textContent = now.shotSize === now.model.size ? "" : `trained at ${now.model.size} px`;
  chartCurve();
}

function paintPins() {
  const { view } = now;
  $("pins").classList.toggle("none", !state.pins.length);
  document.querySelectorAll(".pin").forEach((card, pin) => {
    if (!state.pins[pin]) return card.replaceChildren();
    const token = tokenAt(state.pins[pin]), group = view.groupIds[token];
    if (!card.firstChild) {
      card.innerHTML = `<header><i></i><b></b><span></span><button title="Release" aria-label="Release">×</button></header>
        <div class="two"><figure><canvas></canvas><figcaption></figcaption></figure><figure><canvas></canvas><figcaption></figcaption></figure></div>`;
      card.querySelector("button").onclick = () => release(pin);
      card.painters = [...card.querySelectorAll("canvas")].map((canvas) => new Painter(canvas));
    }
    card.querySelector("b").textContent = `${"AB"[pin]} · group ${group}`;
    card.querySelector("span").textContent = `${percent(view.mass[token])} covered`;
    const [queries, keys] = card.querySelectorAll("figcaption");
    queries.textContent = many(view.members[group].length, "query");
    keys.textContent = many(view.k, "key");
    const [left, right] = card.painters;
    if (left.fit(now.shot, palette)) {
      const light = lightOf(view, view.members[group]);
      left.light(view, light);
      left.outline(view, light, palette.pins[pin], 1.4);
      left.mark(view, token, palette.group, palette);
    }
    if (right.fit(now.shot, palette)) {
      right.light(view, new Uint8Array(view.tokens));
      right.keys(view, token, palette.key, palette);
    }
  });
  const groups = state.pins.map((place) => view.groupIds[tokenAt(place)]);
  let words = "";
  if (groups.length === 2 && groups[0] === groups[1]) words = "<b>The same group</b>: both queries look at the same keys";
  else if (groups.length === 2) {
    const mine = new Set(keysOf(view, groups[0]));
    const both = keysOf(view, groups[1]).reduce((sum, key) => sum + mine.has(key), 0);
    words = `A and B have <b>${both} of ${view.k} keys</b> in common`;
  }
  $("common").innerHTML = words;
}

function paintAll() {
  paint();
  tell();
  measures();
  paintPins();
}

// ---- asking

let running = null, again = false;
async function refresh() {
  if (running) { again = true; return running; }
  running = (async () => {
    $("frame").classList.add("busy");
    try {
      const start = performance.now();
      const wanted = { ...state, k: kOf() };
      const key = `${wanted.image} ${wanted.size}`;
      const curveKey = `${key} ${wanted.block} ${wanted.head}`;
      const [view, shot] = await Promise.all([askView(wanted), now.shotKey === key ? now.shot : load(wanted)]);
      Object.assign(now, { view, shot, shotKey: key, shotSize: wanted.size });
      if (now.curveKey !== curveKey) now.curve = null;
      $("frame").style.setProperty("--ratio", `${shot.naturalWidth} / ${shot.naturalHeight}`);
      $("pins").style.setProperty("--ratio", `${shot.naturalWidth} / ${shot.naturalHeight}`);
      layout();
      controls();
      paintAll();
      remember();
      timings.view.push(performance.now() - start);
      notice("");
      if (now.curveKey !== curveKey) {
        now.curve = await askCurve(wanted);
        now.curveKey = curveKey;
        chartCurve();
      }
    } catch (error) {
      notice(error.message);
    }
    $("frame").classList.remove("busy");
  })();
  await running;
  running = null;
  if (again) { again = false; await refresh(); }
}

function load({ image, size }) {
  return new Promise((resolve, reject) => {
    const shot = new Image();
    shot.onload = () => resolve(shot);
    shot.onerror = () => reject(new Error("That image is no longer available: drop it again, or choose another."));
    shot.src = imageUrl(image, size, 1024);
  });
}

async function take(file) {
  if (!file) return;
  if (!takesImages) return toast("`dgt explore` shows images of your own");
  $("frame").classList.add("busy");
  try {
    const { id, title } = await upload(file);
    if (!now.images.some((image) => image.id === id)) now.images.push({ id, title: file.name || title });
    listImages();
    choose({ image: id, pins: [] });
  } catch (error) {
    notice(error.message);
    $("frame").classList.remove("busy");
  }
}

function notice(text) {
  $("notice").hidden = !text;
  $("notice").textContent = text;
}

// ---- choosing

function choose(changes) {
  Object.assign(state, changes);
  const block = now.model.blocks[state.block];
  state.head = Math.min(state.head, block.heads - 1);
  now.hover = null;
  controls();
  return refresh();
}

const kOf = () => nearK(state.block, state.k ?? now.model.blocks[state.block].k);

function radios(id, options, chosen, pick) {
  const box = $(id);
  const text = JSON.stringify(options);
  if (box.dataset.options !== text) {
    box.dataset.options = text;
    box.replaceChildren(...options.map(([value, label]) => {
      const button = document.createElement("button");
      Object.assign(button, { type: "button", textContent: label, value });
      button.setAttribute("role", "radio");
      return button;
    }));
    box.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const all = [...box.children];
      const next = all[(all.indexOf(document.activeElement) + step + all.length) % all.length];
      next.focus();
      next.click();
    };
  }
  for (const button of box.children) {
    const on = button.value === String(chosen);
    button.setAttribute("aria-checked", on);
    button.tabIndex = on ? 0 : -1;
    button.onclick = () => pick(Number(button.value));
  }
}

function controls() {
  const { blocks, sizes } = now.model;
  const { stage } = blocks[state.block];
  const stages = [...new Set(blocks.map((block) => block.stage))];
  radios("stage", stages.map((each) => [each, each]), stage, (value) => choose({ block: blocks.findIndex((block) => block.stage === value) }));
  const inside = blocks.map((block, index) => [index, block.place]).filter(([index]) => blocks[index].stage === stage);
  radios("block", inside, state.block, (value) => choose({ block: value }));
  radios("head", Array.from({ length: blocks[state.block].heads }, (_, head) => [head, head + 1]), state.head, (value) => choose({ head: value }));
  radios("size", sizes.map((size) => [size, size]), state.size, (value) => choose({ size: value }));
  const most = now.view ? now.view.maxK : kOf();
  const k = Math.min(kOf(), most);
  slider($("k"), Math.round((1000 * Math.log(k)) / Math.log(Math.max(2, most))));
  $("k-out").textContent = now.view ? `${k} of ${now.view.tokens}` : k;
  const total = now.view ? now.view.order.length : 1;
  $("map").checked = state.map;
  $("groups").max = total;
  $("groups").disabled = !state.map;
  slider($("groups"), Math.min(state.shown ?? total, total));
  $("groups-out").textContent = state.map ? `${$("groups").value} of ${total}` : "";
  document.querySelectorAll(".strip button").forEach((button) => button.setAttribute("aria-pressed", button.value === state.image));
}

function slider(input, value) {
  if (document.activeElement !== input || input.id !== "k") input.value = value;
  const share = (input.value - input.min) / Math.max(1, input.max - input.min);
  input.style.setProperty("--at", `${100 * share}%`);
}

function setK(k) {
  const most = now.view.maxK;
  k = nearK(state.block, Math.max(1, Math.min(most, Math.round(k))));
  state.k = k === now.model.blocks[state.block].k ? null : k;
  $("k-out").textContent = `${k} of ${now.view.tokens}`;
  refresh();
}

function listImages() {
  const strip = $("strip");
  for (const { id, title } of now.images) {
    if (strip.querySelector(`[value="${CSS.escape(id)}"]`)) continue;
    const button = document.createElement("button");
    Object.assign(button, { type: "button", value: id, title });
    const thumb = new Image();
    Object.assign(thumb, { alt: title, src: imageUrl(id, now.model.size, 128), draggable: false });
    button.append(thumb);
    button.onclick = () => choose({ image: id });
    strip.append(button);
  }
}

function pin(place) {
  const group = (each) => now.view.groupIds[tokenAt(each)];
  const same = state.pins.findIndex((each) => group(each) === group(place));
  if (same >= 0) state.pins.splice(same, 1);
  else state.pins = [...state.pins.slice(-1), place.map((share) => Math.round(share * 1e4) / 1e4)];
  pinned();
}

function release(index) {
  state.pins.splice(index, 1);
  pinned();
}

function pinned() {
  paintPins();
  layout();
  repaint();
  remember();
}

// ---- the address keeps the view

function remember() {
  const parts = { i: state.image, s: state.size, b: state.block, h: state.head };
  if (state.k !== null) parts.k = state.k;
  if (state.map) parts.m = 1;
  if (state.shown !== null) parts.g = state.shown;
  if (state.pins.length) parts.p = state.pins.map((place) => place.join(",")).join(";");
  history.replaceState(null, "", `#${new URLSearchParams(parts).toString().replaceAll("%2C", ",").replaceAll("%3B", ";")}`);
}

function restore() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const whole = (name, least, most, other) => {
    const value = Number.parseInt(parts.get(name) ?? "", 10);
    return value >= least && value <= most ? value : other;
  };
  const { blocks, sizes, size } = now.model;
  const wanted = parts.get("i");
  state.image = wanted ?? now.images[0].id;
  if (wanted && !now.images.some((image) => image.id === wanted)) {
    state.image = now.images[0].id;
    toast("The image of this link is no longer available");
  }
  state.size = sizes.includes(Number(parts.get("s"))) ? Number(parts.get("s")) : size;
  state.block = whole("b", 0, blocks.length - 1, 0);
  state.head = whole("h", 0, blocks[state.block].heads - 1, 0);
  state.k = whole("k", 1, 65535, null);
  state.map = parts.get("m") === "1";
  state.shown = whole("g", 1, 65535, null);
  state.pins = (parts.get("p") ?? "").split(";").map((pair) => pair.split(",").map(Number))
    .filter((pair) => pair.length === 2 && pair.every((share) => share >= 0 && share < 1)).slice(0, 2);
}

// ---- tools

let fading = 0;
function toast(text) {
  $("toast").textContent = text;
  $("toast").classList.add("on");
  clearTimeout(fading);
  fading = setTimeout(() => $("toast").classList.remove("on"), 2200);
}

async function link() {
  remember();
  try {
    await navigator.clipboard.writeText(location.href);
    toast("Link copied");
  } catch {
    toast("The link is in the address bar");
  }
}

function caption() {
  const { view, model } = now;
  const block = model.blocks[state.block];
  const at = focus();
  const held = at ? `, group ${view.groupIds[at.token]} covers ${percent(view.mass[at.token])} of global attention` : "";
  return `${model.name}, stage ${block.stage}, block ${block.place}, head ${state.head + 1}, ${view.k} of ${view.tokens} keys${held}`;
}

function compose() {
  paint();
  const shot = $("view"), band = Math.round(46 * painter.scale);
  const sheet = Object.assign(document.createElement("canvas"), { width: shot.width, height: shot.height + band });
  const context = sheet.getContext("2d");
  context.fillStyle = palette.page;
  context.fillRect(0, 0, sheet.width, sheet.height);
  context.drawImage(shot, 0, 0);
  context.fillStyle = palette.soft;
  context.font = `${Math.round(13.5 * painter.scale)}px Inter, ui-sans-serif, system-ui, sans-serif`;
  context.textBaseline = "middle";
  context.fillText(caption(), 12 * painter.scale, shot.height + band / 2, sheet.width - 24 * painter.scale);
  return sheet;
}

function save() {
  compose().toBlob((blob) => {
    const anchor = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `groups-${state.image}-block${state.block}-head${state.head + 1}.png` });
    anchor.click();
    setTimeout(() => URL.revokeObjectURL(anchor.href), 1000);
    toast("Saved");
  }, "image/png");
}

function setTheme(theme, keep = true) {
  document.documentElement.dataset.theme = theme;
  state.theme = theme;
  palette = colors();
  try { if (keep) localStorage.setItem("theme", theme); } catch { /* a private window keeps nothing */ }
  if (now.view) paintAll();
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let kept = null;
  try { kept = localStorage.getItem("theme"); } catch { /* a private window has nothing */ }
  setTheme(kept === "light" || kept === "dark" ? kept : system.matches ? "dark" : "light", false);
  system.addEventListener("change", () => { if (!kept) setTheme(system.matches ? "dark" : "light", false); });
}

// The image as large as the window allows, with the strip below it in sight.
function layout() {
  const wide = innerWidth > 1080;
  const ratio = now.shot ? now.shot.naturalWidth / now.shot.naturalHeight : 1;
  const tall = wide ? innerHeight - 232 : 0.82 * innerHeight;
  document.documentElement.style.setProperty("--fit", `${Math.max(300, Math.round(Math.min(900, tall * ratio)))}px`);
}

// ---- events

function point(event) {
  const box = $("view").getBoundingClientRect();
  return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height].map((share) => Math.max(0, Math.min(0.9999, share)));
}

function listen() {
  const canvas = $("view");
  canvas.addEventListener("pointermove", (event) => {
    if (!now.view) return;
    const place = point(event);
    const before = now.hover && tokenAt(now.hover);
    now.hover = place;
    if (before !== tokenAt(place)) repaint(event);
  });
  canvas.addEventListener("pointerleave", () => { now.hover = null; repaint(); });
  canvas.addEventListener("click", (event) => { if (now.view) pin(point(event)); });
  canvas.addEventListener("blur", () => { now.hover = null; repaint(); });
  $("sizes").addEventListener("pointermove", (event) => {
    const group = now.bars[Math.floor((event.offsetX / $("sizes").clientWidth) * now.bars.length)];
    if (group === undefined || !now.view.members[group].length) return;
    now.hover = placeOf(middleOf(group));
    repaint(event);
  });
  $("sizes").addEventListener("pointerleave", () => { now.hover = null; repaint(); });
  $("sizes").addEventListener("click", () => { if (now.hover) pin(now.hover); });
  $("k").addEventListener("input", () => { setK(now.view.maxK ** ($("k").value / 1000)); slider($("k"), 0); });
  $("map").addEventListener("change", () => { state.map = $("map").checked; controls(); repaint(); remember(); });
  $("groups").addEventListener("input", () => { state.shown = Number($("groups").value); controls(); repaint(); remember(); });
  $("file").addEventListener("change", () => { take($("file").files[0]); $("file").value = ""; });
  for (const [id, act] of [["link", link], ["save", save], ["theme", otherTheme], ["help", () => $("about").showModal()]]) $(id).onclick = act;
  addEventListener("dragover", (event) => { event.preventDefault(); $("veil").hidden = false; });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("veil").hidden = true; });
  addEventListener("drop", (event) => { event.preventDefault(); $("veil").hidden = true; take(event.dataTransfer.files[0]); });
  addEventListener("paste", (event) => take([...event.clipboardData.files].find((file) => file.type.startsWith("image/"))));
  addEventListener("keydown", press);
  addEventListener("hashchange", () => { restore(); refresh(); });
  new ResizeObserver(() => { if (now.view) { paint(); tell(); chartCurve(); paintPins(); } }).observe($("frame"));
  addEventListener("resize", layout);
}

const otherTheme = () => setTheme(state.theme === "dark" ? "light" : "dark");

function press(event) {
  if (!now.view || event.ctrlKey || event.metaKey || event.altKey || $("about").open) return;
  if (document.activeElement === $("view") && move(event)) return event.preventDefault();
  const block = (step) => choose({ block: (state.block + step + now.model.blocks.length) % now.model.blocks.length });
  const heads = now.model.blocks[state.block].heads;
  const head = (step) => choose({ head: (state.head + step + heads) % heads });
  const act = {
    "[": () => block(-1), "]": () => block(1), ",": () => head(-1), ".": () => head(1),
    "-": () => setKAndShow(now.view.k / stepK), "+": () => setKAndShow(now.view.k * stepK + 1), "=": () => setKAndShow(now.view.k * stepK + 1),
    m: () => $("map").click(), l: link, s: save, t: otherTheme, "?": () => $("about").showModal(),
    Escape: () => { state.pins = []; now.hover = null; pinned(); },
  }[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (act) { event.preventDefault(); act(); }
}

function setKAndShow(k) { setK(k); controls(); }

// The arrow keys move a cursor over the tokens; Enter pins.
function move(event) {
  const { view } = now;
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (step) {
    const token = focus()?.token ?? (view.rows >> 1) * view.columns + (view.columns >> 1);
    const x = Math.max(0, Math.min(view.columns - 1, token % view.columns + step[0]));
    const y = Math.max(0, Math.min(view.rows - 1, Math.floor(token / view.columns) + step[1]));
    now.hover = placeOf(y * view.columns + x);
    repaint(event);
    return true;
  }
  if (event.key !== "Enter" && event.key !== " ") return false;
  const at = focus();
  if (at) pin(placeOf(at.token));
  return true;
}

// ---- start

startTheme();
layout();
listen();
if (!takesImages) $("file").parentElement.style.display = "none";
// For whoever measures: what is drawn, and how long it took in milliseconds.
window.explorer = { state, now, timings, focus, compose };
try {
  [now.model, { images: now.images }] = await Promise.all([askModel(), askImages()]);
  now.table = colorTable(now.model.colors);
  const parameters = `${(now.model.parameters / 1e6).toFixed(1)} M parameters`;
  $("model").textContent = now.model.name;
  $("model").append(Object.assign(document.createElement("span"), { className: "more", textContent: `, ${parameters}, from ${now.model.source}` }));
  restore();
  controls();
  listImages();
  await refresh();
} catch (error) {
  notice(error.message);
}
