// The server's interface: requests, and answers as they are written.

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

/** Sends a request; the answer must be a success. */
async function send(method, path, body, signal) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    throw new ApiError(answer.status, told.error);
  }
  return answer;
}

export const get = async (path) => (await send("GET", path)).json();
export const remove = async (path) => (await send("DELETE", path)).json();

/** The objects of a stream of server-sent events, up to [DONE]; an error among them is thrown. */
export async function* stream(path, body, signal) {
  const answer = await send("POST", path, { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, { message: "the connection ended before the answer did" });
    waiting += value;
    const events = waiting.split("\n\n");
    waiting = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const content = JSON.parse(data);
      if (content.error) throw new ApiError(0, content.error);
      yield content;
    }
  }
}
