// Requests to the server this page came from.

/** Parsed JSON of a GET, or an Error with the server's sentence. */
export async function get(path, key) {
  return (await checked(await fetch(path, { headers: headers(key) }))).json();
}

/** Stream the answer to a conversation: gives each chunk as it comes. Aborting `signal` ends it on the server, too. */
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
  const found = await response.json().catch(() => null);
  throw new Error(found?.error?.message ?? `the server answers ${response.status}`);
}
