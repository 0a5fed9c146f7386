// Questions to the server, and its packed answers as typed arrays. A page that `dgt explore --export` wrote has no server:
// its answers are in scripts beside it, each loaded when it is first asked for.

const exported = globalThis.exported;

async function part(image, block) {
  const name = `${image}-${block}`;
  if (!exported.parts[name]) {
    await new Promise((resolve, reject) => {
      const script = Object.assign(document.createElement("script"), { src: `data/${name}.js`, onload: resolve });
      script.onerror = () => reject(new Error(`This page is incomplete: data/${name}.js is missing.`));
      document.head.append(script);
    });
  }
  return exported.parts[name];
}

// The number of keys to ask for, and the factor of the keys - and +: a page without a server has a few numbers alone.
export const nearK = (block, k) =>
  !exported ? k : exported.keys[block].reduce((best, each) => (Math.abs(Math.log(each / k)) < Math.abs(Math.log(best / k)) ? each : best));
export const stepK = exported ? 2 : 1.25;

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not respond: is `dgt explore` still running?");
  }
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error || `The server rejected the request (${response.status}).`);
  return answer;
}

function bytes(text) {
  const raw = atob(text);
  const array = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) array[i] = raw.charCodeAt(i);
  return array;
}

export const takesImages = !exported;
export const askModel = async () => (exported ? exported.model : ask("api/model"));
export const askImages = async () => (exported ? { images: exported.images } : ask("api/images"));
export const imageUrl = (id, size, side) => (exported ? exported.pictures[id] : `api/images/${encodeURIComponent(id)}?size=${size}&side=${side}`);

// The type goes with the file, so that the server can say at once that a text is no image.
export const upload = (file) =>
  ask("api/images", { method: "POST", body: file, headers: { "Content-Type": file.type || "application/octet-stream" } });

export const askCurve = async ({ image, size, block, head }) =>
  exported ? (await part(image, block)).curves[head] : ask(`api/curve?${new URLSearchParams({ image, size, block, head })}`);

// A view: rows, columns, k, groups; groupIds (L), keyIds (groups * k), weights (L * k, bytes relative to the query's
// largest), peaks and mass (L), residual (L, the share of attention that goes to residual keys, or null), members (tokens of every group), order (groups worth showing first).
export async function askView({ image, size, block, head, k }) {
  const answer = exported
    ? (await part(image, block)).views[`${head} ${k}`]
    : await ask(`api/view?${new URLSearchParams({ image, size, block, head, k })}`);
  const [rows, columns] = answer.grid;
  const view = {
    rows, columns, tokens: rows * columns, k: answer.k, maxK: answer.max_k, groups: answer.groups,
    order: answer.order, forward: answer.forward,
    groupIds: new Uint16Array(bytes(answer.group_ids).buffer),
    keyIds: new Uint16Array(bytes(answer.key_ids).buffer),
    weights: bytes(answer.weights),
    peaks: new Float32Array(bytes(answer.peaks).buffer),
    residual: answer.residual && new Float32Array(bytes(answer.residual).buffer),
    mass: new Float32Array(bytes(answer.mass).buffer),
    members: Array.from({ length: answer.groups }, () => []),
  };
  view.groupIds.forEach((group, token) => view.members[group].push(token));
  return view;
}
