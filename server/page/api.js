// Calls to the server: the key, errors as messages, server-sent events line by line.

const STORE = 'quire-key';

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Where a browser gives a page no storage, a value lasts as long as the page.
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
    // See above.
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

// `path` is relative to the page, which may stand behind a prefix.
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  if (body) headers['Content-Type'] = 'application/json';
  const options = { headers, signal, method: body ? 'POST' : 'GET', body: body && JSON.stringify(body), cache: 'no-store' };
  const response = await fetch(path, options);
  if (response.ok) return response;
  const text = await response.text();
  let message = text.slice(0, 300);
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // Not the server's own error object: a proxy's page, perhaps.
  }
  throw new ApiError(response.status, message || `the server answered ${response.status}`);
}

// The `data:` of each event, parsed; ends at `[DONE]` or with the stream.
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
