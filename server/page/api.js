// Calls to the server: API key, errors, server-sent events.

const STORE = 'quire-key';

export class ApiError extends Error {
  constructor(status, message, code = '') {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// Without storage, values last as long as the page.
export function stored(store, name) {
  try {
    return window[store].getItem(name);
  } catch {
    return null;
  }
}

export function keep(store, name, value) {
  try {
    window[store].setItem(name, value);
  } catch {
    // No storage.
  }
}

let current = stored('sessionStorage', STORE) ?? '';

export function key() {
  return current;
}

export function setKey(value) {
  current = value;
  keep('sessionStorage', STORE, value);
}

// `path` is relative to the page, which may have a path prefix.
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  if (body) headers['Content-Type'] = 'application/json';
  const options = { headers, signal, method: body ? 'POST' : 'GET', body: body && JSON.stringify(body), cache: 'no-store' };
  const response = await fetch(path, options);
  if (response.ok) return response;
  const text = await response.text();
  let [message, code] = [text.slice(0, 300), ''];
  try {
    ({ message, code } = JSON.parse(text).error);
  } catch {
    // Not the server's error object, for example a proxy's page.
  }
  throw new ApiError(response.status, message || `The server responded with status ${response.status}.`, code);
}

// Yields the parsed `data:` of each event, up to `[DONE]` or the end of the stream.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith('data:')) continue;
        const data = line.slice(5).trim();
        if (data === '[DONE]') return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
