// Questions to the server, and its packed answers as typed arrays.

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer: is `dgt explore` still running?");
  }
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error || `The server refused (${response.status}).`);
  return answer;
}

function bytes(text) {
  const raw = atob(text);
  const array = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) array[i] = raw.charCodeAt(i);
  return array;
}

export const askModel = () => ask("api/model");
export const askImages = () => ask("api/images");
export const imageUrl = (id, size, side) => `api/images/${encodeURIComponent(id)}?size=${size}&side=${side}`;

// The type goes with the file, so that the server can say at once that a text is no image.
export const upload = (file) =>
  ask("api/images", { method: "POST", body: file, headers: { "Content-Type": file.type || "application/octet-stream" } });

export const askCurve = ({ image, size, block, head }) =>
  ask(`api/curve?${new URLSearchParams({ image, size, block, head })}`);

// A view: rows, columns, k, groups; groupIds (L), keyIds (groups * k), weights (L * k, bytes relative to the query's
// largest), peaks and mass (L), members (tokens of every group), order (groups worth showing first).
export async function askView({ image, size, block, head, k }) {
  const answer = await ask(`api/view?${new URLSearchParams({ image, size, block, head, k })}`);
  const [rows, columns] = answer.grid;
  const view = {
    rows, columns, tokens: rows * columns, k: answer.k, maxK: answer.max_k, groups: answer.groups,
    order: answer.order, forward: answer.forward,
    groupIds: new Uint16Array(bytes(answer.group_ids).buffer),
    keyIds: new Uint16Array(bytes(answer.key_ids).buffer),
    weights: bytes(answer.weights),
    peaks: new Float32Array(bytes(answer.peaks).buffer),
    mass: new Float32Array(bytes(answer.mass).buffer),
    members: Array.from({ length: answer.groups }, () => []),
  };
  view.groupIds.forEach((group, token) => view.members[group].push(token));
  return view;
}
