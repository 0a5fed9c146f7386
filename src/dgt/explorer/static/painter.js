// Draws a view on canvases: the image, the light on a group, the glow of its keys.

const sheet = (width, height) => Object.assign(document.createElement("canvas"), { width, height });

export function colors() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    dark: document.documentElement.dataset.theme === "dark",
    page: read("--page"), card: read("--card"), ink: read("--ink"), soft: read("--soft"), faint: read("--faint"),
    line: read("--line"), key: read("--key"), group: read("--group"), pins: [read("--a"), read("--b")],
  };
}

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

// The image at a canvas's size, and the same faded: gray, near the page's color.
class Plates {
  constructor(image, width, height, palette) {
    this.bright = sheet(width, height);
    this.faded = sheet(width, height);
    const bright = this.bright.getContext("2d");
    bright.imageSmoothingQuality = "high";
    bright.drawImage(image, 0, 0, width, height);
    const faded = this.faded.getContext("2d");
    faded.fillStyle = palette.dark ? "#07090c" : "#ffffff";
    faded.fillRect(0, 0, width, height);
    faded.globalAlpha = palette.dark ? 0.4 : 0.36;
    faded.filter = "grayscale(0.85)";
    faded.drawImage(this.bright, 0, 0);
  }
}

export class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.work = sheet(1, 1);
    this.mask = sheet(1, 1);
    this.plates = null;
    this.held = {};
  }

  // Fit the canvas's pixels to its place on the page; returns whether anything can be drawn.
  fit(image, palette, scale = Math.min(window.devicePixelRatio || 1, 2)) {
    const width = Math.round(this.canvas.clientWidth * scale);
    const height = Math.round(this.canvas.clientHeight * scale);
    if (!image || width < 2 || height < 2) return false;
    const { held } = this;
    if (held.image !== image || held.width !== width || held.height !== height || held.dark !== palette.dark) {
      this.held = { image, width, height, dark: palette.dark };
      for (const each of [this.canvas, this.work]) Object.assign(each, { width, height });
      this.plates = new Plates(image, width, height, palette);
    }
    this.scale = scale;
    return true;
  }

  // Everything faded but the tokens where `light` (a byte for each token) is set.
  light(view, light) {
    const { context, work, plates } = this;
    const { width, height } = this.canvas;
    this.stamp(view, (data) => {
      for (let token = 0; token < light.length; token++) if (light[token]) data[4 * token + 3] = 255;
    });
    const layer = work.getContext("2d");
    layer.globalCompositeOperation = "copy";
    layer.drawImage(plates.bright, 0, 0);
    layer.globalCompositeOperation = "destination-in";
    layer.imageSmoothingEnabled = false;
    layer.drawImage(this.mask, 0, 0, width, height);
    context.globalCompositeOperation = "copy";
    context.drawImage(plates.faded, 0, 0);
    context.globalCompositeOperation = "source-over";
    context.drawImage(work, 0, 0);
  }

  // One pixel for each token, painted by `fill`.
  stamp(view, fill) {
    Object.assign(this.mask, { width: view.columns, height: view.rows });
    const pixels = new ImageData(view.columns, view.rows);
    fill(pixels.data);
    this.mask.getContext("2d").putImageData(pixels, 0, 0);
  }

  // All groups in their colors; those that are not `shown` stay faded, and all but `lone` (if any) step back.
  map(view, table, shown, lone) {
    const { context, plates } = this;
    const { width, height } = this.canvas;
    const strength = (group) => (!shown[group] ? 0 : lone === null || lone === group ? 184 : 70);
    this.stamp(view, (data) => {
      view.groupIds.forEach((group, token) => data.set([...table[group], strength(group)], 4 * token));
    });
    context.globalCompositeOperation = "copy";
    context.drawImage(plates.faded, 0, 0);
    context.globalCompositeOperation = "source-over";
    const layer = this.work.getContext("2d");
    layer.globalCompositeOperation = "copy";
    layer.drawImage(plates.bright, 0, 0);
    layer.globalCompositeOperation = "destination-in";
    layer.imageSmoothingEnabled = false;
    layer.drawImage(this.mask, 0, 0, width, height);
    context.drawImage(this.work, 0, 0);
    context.imageSmoothingEnabled = false;
    context.globalAlpha = 0.82;
    context.drawImage(this.mask, 0, 0, width, height);
    context.globalAlpha = 1;
  }

  grid(view, palette) {
    const { context } = this;
    const { width, height } = this.canvas;
    if (width / view.columns < 7 * this.scale) return;
    context.beginPath();
    for (let x = 1; x < view.columns; x++) {
      const at = Math.round((x * width) / view.columns) + 0.5;
      context.moveTo(at, 0);
      context.lineTo(at, height);
    }
    for (let y = 1; y < view.rows; y++) {
      const at = Math.round((y * height) / view.rows) + 0.5;
      context.moveTo(0, at);
      context.lineTo(width, at);
    }
    context.lineWidth = 1;
    context.strokeStyle = palette.dark ? "#ffffff14" : "#00000012";
    context.stroke();
  }

  // The border of the tokens where `light` is set.
  outline(view, light, color, thickness = 1.6) {
    const { context } = this;
    const { rows, columns } = view;
    const w = this.canvas.width / columns, h = this.canvas.height / rows;
    const lit = (y, x) => y >= 0 && x >= 0 && y < rows && x < columns && light[y * columns + x];
    context.beginPath();
    for (let y = 0; y < rows; y++) {
      for (let x = 0; x < columns; x++) {
        if (!light[y * columns + x]) continue;
        if (!lit(y - 1, x)) { context.moveTo(x * w, y * h); context.lineTo((x + 1) * w, y * h); }
        if (!lit(y + 1, x)) { context.moveTo(x * w, (y + 1) * h); context.lineTo((x + 1) * w, (y + 1) * h); }
        if (!lit(y, x - 1)) { context.moveTo(x * w, y * h); context.lineTo(x * w, (y + 1) * h); }
        if (!lit(y, x + 1)) { context.moveTo((x + 1) * w, y * h); context.lineTo((x + 1) * w, (y + 1) * h); }
      }
    }
    context.lineCap = "round";
    context.lineWidth = thickness * this.scale;
    context.strokeStyle = color;
    context.stroke();
  }

  // The keys of a token's group, as brightly as the token attends to them.
  keys(view, token, color, palette) {
    const { context } = this;
    const w = this.canvas.width / view.columns, h = this.canvas.height / view.rows;
    const side = Math.min(0.78 * w, w - 1, 30 * this.scale), corner = 0.28 * side;
    const group = view.groupIds[token];
    context.fillStyle = color;
    context.strokeStyle = palette.dark ? "#00000066" : "#ffffff99";
    context.lineWidth = Math.max(1, 0.05 * side);
    for (let slot = 0; slot < view.k; slot++) {
      const key = view.keyIds[group * view.k + slot];
      const weight = view.weights[token * view.k + slot] / 255;
      const x = (key % view.columns + 0.5) * w, y = (Math.floor(key / view.columns) + 0.5) * h;
      context.globalAlpha = 0.24 + 0.76 * weight ** 0.7;
      context.beginPath();
      context.roundRect(x - side / 2, y - side / 2, side, side, corner);
      context.fill();
      if (w > 9 * this.scale) context.stroke();
    }
    context.globalAlpha = 1;
  }

  // A ring around one token: where the query is.
  mark(view, token, color, palette) {
    const { context } = this;
    const w = this.canvas.width / view.columns, h = this.canvas.height / view.rows;
    const x = (token % view.columns + 0.5) * w, y = (Math.floor(token / view.columns) + 0.5) * h;
    const radius = Math.min(Math.max(0.62 * w, 5 * this.scale), 20 * this.scale);
    for (const [thickness, ink] of [[4.4, palette.dark ? "#000000a0" : "#ffffffc0"], [2.2, color]]) {
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.lineWidth = thickness * this.scale;
      context.strokeStyle = ink;
      context.stroke();
    }
  }
}

export const lightOf = (view, tokens) => {
  const light = new Uint8Array(view.tokens);
  for (const token of tokens) light[token] = 1;
  return light;
};

export const keysOf = (view, group) => view.keyIds.subarray(group * view.k, (group + 1) * view.k);

export const colorTable = (hexes) => hexes.map(channels);
