// Requests to the server of this page.

/** Return the parsed JSON of a GET. Throws the error message of the server. */
export async function get(path, key) {
  return (await checked(await fetch(path, { headers: headers(key) }))).json();
}

/** Stream the chunks of an answer. Aborting `signal` also aborts the answer on the server. */
export async function* complete(request, key, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_passes: true } });
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(key), body, signal });
  const reader = (await checked(response)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function checked(response) {
  if (response.ok) return response;
  const content = await response.json().catch(() => null);
  throw new Error(content?.error?.message ?? `HTTP status ${response.status}`);
}
