// Reads server-sent events of a response: unlike EventSource, with a header for the API key, and for POST.

const MAX_EVENT = 1 << 20; // characters

// Yields { kind, data } for each event; `data` is text.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      if (text.length > MAX_EVENT) throw new Error("an event of the server is too long");
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n"), of = (name) => lines.filter((line) => line.startsWith(name)).map((line) => line.slice(name.length));
        const data = of("data: ").join("\n");
        if (data) yield { kind: of("event: ")[0] || "message", data };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Sends a request of this page. Throws an Error with the server's sentence, and with the status.
export async function call(path, key, options = {}) {
  if (!/^[ -~]*$/.test(key)) throw Object.assign(new Error("the API key must be printable ASCII"), { status: 401 });
  const headers = { ...(key ? { authorization: `Bearer ${key}` } : {}), ...(options.body ? { "content-type": "application/json" } : {}) };
  const response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw Object.assign(new Error(body.error?.message || response.statusText || `status ${response.status}`), { status: response.status });
}
