// Defines window.scripted(parts): the next chat requests get these parts as their answers instead of the server's, one request after the
// other. A part is a list of chunks; 'hold' in it waits for window.release(), and 'end' ends it without a reason. Records the bodies of all
// requests in window.bodies.
window.bodies = [];
const real = window.fetch;
const queue = [];
window.scripted = (...parts) => queue.push(...parts);
window.fetch = async (url, options) => {
  if (options?.body) window.bodies.push(JSON.parse(options.body));
  if (!String(url).endsWith('chat/completions') || !queue.length) return real.call(window, url, options);
  const parts = queue.shift();
  if (parts.error) return new Response(JSON.stringify(parts), { status: 400 });
  const stream = new ReadableStream({
    async start(out) {
      options.signal.addEventListener('abort', () => out.error(new DOMException('stopped', 'AbortError')));
      for (const part of parts) {
        if (part === 'end') break;
        if (part === 'hold') await new Promise((done) => (window.release = done));
        else out.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(part)}\n\n`));
      }
      const reason = { choices: [{ index: 0, delta: {}, finish_reason: 'stop' }] };
      if (!parts.includes('end')) out.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(reason)}\n\n`));
      out.close();
    },
  });
  return new Response(stream, { status: 200 });
};
window.text = (content, more = {}) => ({ choices: [{ index: 0, delta: { content }, ...more }] });
// Presses a button of a turn, counted from the last if negative.
window.press = (label, at = -1) => {
  const turn = [...document.querySelectorAll('.turn')].at(at);
  const found = [...turn.querySelectorAll('button')].find((node) => node.textContent === label || node.ariaLabel === label);
  if (!found || found.disabled) throw new Error(`no button ${label} in turn ${at}: ${turn.textContent}`);
  found.focus();
  found.click();
};
window.say = (text) => {
  document.getElementById('message').value = text;
  document.getElementById('send').click();
};
window.set = (id, value) => {
  const field = document.getElementById(id);
  if (field.type === 'checkbox') field.checked = value;
  else field.value = value;
  field.dispatchEvent(new Event('change', { bubbles: true }));
};
window.turns = () => [...document.querySelectorAll('.turn .text')].map((node) => node.textContent).join(' | ');
window.sent = () => window.bodies.at(-1).messages.map(({ role, content }) => `${role}: ${content}`).join(' | ');
window.notice = () => document.getElementById('notice').textContent;
window.idle = () => !document.getElementById('send').hidden;
