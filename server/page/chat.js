// The conversation: messages, the running request, and their display.

import { ApiError, call, events, keep, stored } from './api.js';
import { render } from './markdown.js';

const FIELDS = ['temperature', 'top_p', 'top_k', 'repetition_penalty', 'max_tokens', 'min_tokens', 'seed'];
const TEXTS = ['system', 'stop_at'];
const SETTINGS = 'quire-settings';
const whole = (number) => Math.round(number).toLocaleString('en');
const $ = (id) => document.getElementById(id);

function div(name, text = '') {
  const node = document.createElement('div');
  node.className = name;
  node.textContent = text;
  return node;
}

export class Chat {
  messages = [];
  running = null;

  constructor(onDenied) {
    this.onDenied = onDenied;
    this.model = 'model';
    this.restore();
    $('composer').addEventListener('submit', (event) => {
      event.preventDefault();
      this.send();
    });
    $('message').addEventListener('keydown', (event) => {
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    $('message').addEventListener('input', () => this.fit());
    document.addEventListener('keydown', (event) => event.key === 'Escape' && this.stop());
    $('stop').addEventListener('click', () => this.stop());
    $('fresh').addEventListener('click', () => this.clear());
    $('settings').addEventListener('change', () => this.keep());
    $('settings-toggle').addEventListener('click', (event) => {
      $('settings').hidden = !$('settings').hidden;
      event.currentTarget.setAttribute('aria-expanded', String(!$('settings').hidden));
    });
    for (const button of $('suggestions').children) {
      button.addEventListener('click', () => {
        $('message').value = button.textContent;
        this.send();
      });
    }
  }

  keep() {
    const values = Object.fromEntries([...FIELDS, ...TEXTS].map((name) => [name, $(name).value]));
    keep('localStorage', SETTINGS, JSON.stringify(values));
  }

  // Other pages of this origin may have changed the storage: only strings are restored.
  restore() {
    let values = null;
    try {
      values = JSON.parse(stored('localStorage', SETTINGS));
    } catch {
      // No settings.
    }
    for (const name of [...FIELDS, ...TEXTS]) {
      const value = values?.[name];
      $(name).value = typeof value === 'string' ? value : '';
    }
  }

  fit() {
    const box = $('message');
    box.style.height = 'auto';
    box.style.height = `${box.scrollHeight}px`;
  }

  clear() {
    this.stop();
    this.running = null;
    this.busy(false);
    this.messages = [];
    $('log').replaceChildren($('empty'));
    $('empty').hidden = false;
    $('message').focus();
  }

  stop() {
    this.running?.abort();
  }

  body(question) {
    const system = $('system').value.trim();
    const messages = [...(system ? [{ role: 'system', content: system }] : []), ...this.messages, question];
    const body = { messages, stream: true, stream_options: { include_usage: true } };
    for (const name of FIELDS) {
      if ($(name).value !== '' && $(name).validity.valid) body[name] = Number($(name).value);
    }
    if ($('stop_at').value) body.stop = [$('stop_at').value];
    return body;
  }

  async send() {
    const text = $('message').value.trim();
    if (!text || this.running) return;
    $('message').value = '';
    this.fit();
    // The current conversation: "New chat" may start another one before the response ends.
    const messages = this.messages;
    const question = { role: 'user', content: text };
    $('empty').hidden = true;
    const asked = this.turn('user', 'You');
    asked.text.textContent = text;
    const turn = this.turn('assistant', this.model);
    const controller = new AbortController();
    this.running = controller;
    turn.node.classList.add('writing');
    this.busy(true);
    const answer = { content: '', thoughts: '', tokens: 0, start: performance.now(), first: 0, end: '' };
    let failed = false;
    try {
      const response = await call('v1/chat/completions', { body: this.body(question), signal: controller.signal });
      for await (const chunk of events(response)) this.take(chunk, answer, turn);
    } catch (error) {
      failed = !controller.signal.aborted;
      if (failed) this.fail(error, turn);
      else answer.end = 'stopped';
    }
    // A question without a response is not part of the conversation: it returns to the input box.
    const answered = !failed && (answer.content || answer.end !== 'stopped');
    if (answered) messages.push(question, { role: 'assistant', content: answer.content });
    else if (this.messages === messages) $('message').value ||= text;
    this.draw(answer, turn);
    this.finish(answer, turn);
    turn.node.classList.remove('writing');
    this.fit();
    if (this.running !== controller) return;
    this.running = null;
    this.busy(false);
  }

  take(chunk, answer, turn) {
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    if (chunk.usage) answer.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    answer.content += choice.delta?.content ?? '';
    answer.thoughts += choice.delta?.reasoning_content ?? '';
    answer.end = choice.finish_reason ?? answer.end;
    if (!answer.first && (answer.content || answer.thoughts)) answer.first = performance.now();
    if (!turn.frame) {
      turn.frame = requestAnimationFrame(() => {
        turn.frame = 0;
        this.draw(answer, turn);
      });
    }
  }

  draw(answer, turn) {
    const log = $('log');
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    if (answer.thoughts) {
      turn.thoughts.hidden = false;
      turn.thoughts.lastChild.textContent = answer.thoughts;
    }
    turn.text.replaceChildren(...render(answer.content));
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  finish(answer, turn) {
    if (!answer.first) {
      if (answer.end === 'stopped') turn.foot.textContent = 'stopped before the first token';
      return;
    }
    const [wait, took] = [answer.first - answer.start, performance.now() - answer.start];
    const parts = [`first token after ${wait.toFixed(0)} ms`];
    if (answer.tokens) parts.unshift(`${answer.tokens} tokens`, `${whole(answer.tokens / (took / 1000))} tok/s`);
    if (answer.end === 'length') parts.push('token limit reached');
    if (answer.end === 'stopped') parts.push('stopped');
    turn.foot.textContent = parts.join(' · ');
  }

  fail(error, turn) {
    const denied = error.status === 401;
    const message = error instanceof ApiError ? error.message : 'Cannot reach the server. Check that it is running and try again.';
    const problem = div('problem', denied ? 'The server requires an API key. Enter it above and send the message again.' : message);
    problem.setAttribute('role', 'alert');
    turn.text.after(problem);
    if (denied) this.onDenied();
  }

  busy(on) {
    $('send').hidden = on;
    $('stop').hidden = !on;
    $('log').setAttribute('aria-busy', String(on));
  }

  turn(role, who) {
    const node = document.createElement('article');
    node.className = `turn ${role}`;
    const thoughts = document.createElement('details');
    thoughts.hidden = true;
    const summary = document.createElement('summary');
    summary.textContent = 'Reasoning';
    thoughts.append(summary, div('thoughts'));
    const [text, foot] = [div('text'), div('foot')];
    node.append(div('who', who), thoughts, text, foot);
    $('log').append(node);
    $('log').scrollTop = $('log').scrollHeight;
    return { node, thoughts, text, foot, frame: 0 };
  }
}
