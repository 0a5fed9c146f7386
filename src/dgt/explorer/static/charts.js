// The two small charts: attention held by the number of keys, and sizes of groups.

function prepare(canvas) {
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  const width = canvas.clientWidth, height = canvas.clientHeight;
  Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px Inter, ui-sans-serif, system-ui, sans-serif";
  return { context, width, height };
}

// Share of global attention against k on a logarithmic axis; dashed: what k keys held if all were alike.
export function drawCurve(canvas, curve, k, share, palette) {
  const { context, width, height } = prepare(canvas);
  if (!curve || width < 20) return;
  const left = 1, right = width - 5, top = 8, bottom = height - 17;
  const tokens = curve.counts.at(-1);
  const x = (count) => left + ((right - left) * Math.log(count)) / Math.log(tokens);
  const y = (part) => bottom - (bottom - top) * part;
  context.lineWidth = 1;
  context.strokeStyle = palette.line;
  for (const part of [0, 0.5, 1]) {
    context.beginPath();
    context.moveTo(left, Math.round(y(part)) + 0.5);
    context.lineTo(right, Math.round(y(part)) + 0.5);
    context.stroke();
  }
  const trace = (values) => {
    context.beginPath();
    curve.counts.forEach((count, i) => context.lineTo(x(count), y(values[i])));
  };
  context.setLineDash([2, 3]);
  context.strokeStyle = palette.faint;
  trace(curve.counts.map((count) => count / tokens));
  context.stroke();
  context.setLineDash([]);
  trace(curve.mass);
  context.lineTo(right, bottom);
  context.lineTo(left, bottom);
  context.closePath();
  context.globalAlpha = 0.12;
  context.fillStyle = palette.key;
  context.fill();
  context.globalAlpha = 1;
  trace(curve.mass);
  Object.assign(context, { lineWidth: 2, lineJoin: "round", strokeStyle: palette.key });
  context.stroke();
  const at = x(Math.min(k, tokens));
  context.beginPath();
  context.moveTo(at, bottom);
  context.lineTo(at, y(share));
  Object.assign(context, { lineWidth: 1, strokeStyle: palette.ink });
  context.stroke();
  context.beginPath();
  context.arc(at, y(share), 4.5, 0, 2 * Math.PI);
  Object.assign(context, { fillStyle: palette.key, strokeStyle: palette.card, lineWidth: 2 });
  context.fill();
  context.stroke();
  context.fillStyle = palette.soft;
  const words = [[left, "1 key", "left"], [right, `all ${tokens}`, "right"]];
  if (at > 60 && at < width - 78) words.push([at, `k = ${k}`, "center"]);
  for (const [place, text, align] of words) {
    context.textAlign = align;
    context.fillText(text, place, height - 3);
  }
}

// A bar for every group, largest first; returns the groups in that order.
export function drawSizes(canvas, view, lone, color, palette) {
  const { context, width, height } = prepare(canvas);
  const order = view.members.map((_, group) => group);
  order.sort((a, b) => view.members[b].length - view.members[a].length || a - b);
  const largest = Math.max(1, view.members[order[0]].length);
  const step = width / order.length, gap = step > 5 ? 1.5 : 0.5;
  order.forEach((group, place) => {
    const tall = view.members[group].length ? Math.max(2, (height - 2) * view.members[group].length / largest) : 1;
    context.globalAlpha = lone === null || lone === group ? 1 : 0.35;
    context.fillStyle = view.members[group].length ? color(group) || palette.faint : palette.line;
    if (lone === group && !color(group)) context.fillStyle = palette.ink;
    context.beginPath();
    context.roundRect(place * step, height - tall, Math.max(1, step - gap), tall, Math.min(2, tall / 2));
    context.fill();
  });
  return order;
}
