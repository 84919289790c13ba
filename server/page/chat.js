// The conversation that is shown, and the request that runs.

import { Answer } from './answer.js';
import { ApiError, call, events, keep } from './api.js';
import { $, follow } from './dom.js';
import { copyFrom } from './file.js';
import { clearNotice, notice } from './notice.js';
import { Tree } from './tree.js';
import { Turn } from './turn.js';

// The server's code of a request that does not fit into the context.
const FULL = 'context_length_exceeded';

// The conversation of this tab.
export const OPEN = 'quire-chat';

export class Chat {
  tree = new Tree();
  running = null;
  turns = [];

  constructor({ settings, models, storage, meter, onDenied }) {
    Object.assign(this, { settings, models, storage, meter, onDenied });
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
    document.addEventListener('keydown', (event) => event.key === 'Escape' && !document.querySelector('dialog[open]') && this.stop());
    $('stop').addEventListener('click', () => this.stop());
    $('fresh').addEventListener('click', () => this.fresh());
    $('log').addEventListener('click', ({ target }) => {
      if (target.matches?.('.code .copy')) copyFrom(target, target.closest('.code').querySelector('code').textContent);
    });
    // A page that is closed keeps what has been answered so far.
    document.addEventListener('visibilitychange', () => document.hidden && this.running && this.save(this.tree));
    for (const suggestion of $('suggestions').children) {
      suggestion.addEventListener('click', () => {
        $('message').value = suggestion.textContent;
        this.send();
      });
    }
  }

  fit() {
    const box = $('message');
    box.style.height = 'auto';
    box.style.height = `${box.scrollHeight}px`;
  }

  stop() {
    this.running?.abort();
  }

  // Shows another conversation.
  open(tree) {
    this.stop();
    this.running = null;
    this.busy(false);
    clearNotice();
    this.tree = tree;
    this.turns.forEach(({ node }) => node.remove());
    this.turns = [];
    this.show();
    $('log').scrollTop = $('log').scrollHeight;
  }

  fresh() {
    this.open(new Tree());
    keep('sessionStorage', OPEN, '');
    $('message').focus();
  }

  // Makes the turns on the page those of the path.
  show() {
    const path = this.tree.path();
    const keep = this.turns.findIndex(({ data, index }, i) => index !== path[i] || data !== this.tree.turns[index]);
    for (const { node } of keep < 0 ? [] : this.turns.splice(keep)) node.remove();
    for (const index of path.slice(this.turns.length)) {
      const turn = new Turn(this, index);
      this.turns.push(turn);
      $('notice').before(turn.node);
    }
    $('empty').hidden = path.length > 0;
    this.openCall = this.tree.openCall(path);
    const sent = this.tree.sent(path);
    this.turns.forEach((turn, i) => {
      turn.show(i === path.length - 1);
      turn.node.classList.toggle('dropped', !sent.includes(turn.index));
    });
    const name = this.openCall?.name;
    $('message').placeholder = name ? `Result of ${name}` : 'Message';
    this.measure();
  }

  // Tokens in the context of the last answer, if its turns are still those that would be sent.
  measure() {
    const path = this.tree.path();
    const last = this.tree.turns[path.findLast((index) => this.tree.turns[index].total)];
    const first = this.tree.sent(path)[0];
    this.meter.show(last && last.from === first ? last.total : null, path.length > 0);
  }

  async save(tree) {
    if (!tree.turns.length || tree.isDeleted) return;
    try {
      await this.storage.save(tree);
      if (this.tree === tree) keep('sessionStorage', OPEN, tree.id);
    } catch (error) {
      if (this.tree === tree) notice(error.message);
    }
  }

  send() {
    const text = $('message').value.trim();
    if (!text || this.running) return;
    const result = this.openCall;
    const turn = result ? { role: 'tool', call: result.id } : { role: 'user' };
    // Before anything changes.
    if (!this.settings.body()) return;
    $('message').value = '';
    this.fit();
    clearNotice();
    const index = this.tree.add(this.tree.path().at(-1) ?? -1, { ...turn, content: text });
    this.show();
    $('log').scrollTop = $('log').scrollHeight;
    // All calls need their results first.
    if (this.openCall) this.save(this.tree);
    else this.generate(index, text);
  }

  edit(index, content) {
    if (this.running || !this.settings.body()) return;
    const { parent } = this.tree.turns[index];
    const question = this.tree.add(parent, { role: 'user', content, cut: this.tree.turns[index].cut });
    this.show();
    this.generate(question);
  }

  regenerate(index) {
    if (!this.running) this.generate(this.tree.turns[index].parent);
  }

  choose(index) {
    if (this.running) return;
    this.tree.choose(index);
    this.show();
    this.turns.find((turn) => turn.index === index)?.actions.querySelector('button:enabled')?.focus();
    this.save(this.tree);
  }

  // Goes on with an answer that was cut.
  proceed(index) {
    if (this.running) return;
    const body = this.settings.body();
    if (!body) return;
    // The rest of an answer does not meet the schema of all of it.
    delete body.response_format;
    clearNotice();
    this.run(index, { ...body, continue_final_message: true, add_generation_prompt: false, messages: this.tree.messages(index) }, { again: () => this.proceed(index) });
  }

  // Answers a question. `draft` is its text if it came from the message box.
  generate(question, draft = '') {
    if (this.running) return;
    const body = this.settings.body();
    if (!body) return;
    clearNotice();
    const messages = this.tree.messages(question);
    const index = this.tree.add(question, { role: 'assistant', model: this.models.id });
    this.show();
    this.run(index, { ...body, messages }, { draft, again: () => this.generate(question) });
  }

  // `again` sends the same once more, when older turns have been dropped.
  async run(index, fields, { draft = '', again }) {
    // The user may open another conversation before the answer ends.
    const { tree } = this;
    const turn = this.turns.find((turn) => turn.index === index);
    const controller = new AbortController();
    const answer = new Answer(turn.data);
    const system = this.settings.system;
    const messages = [...(system ? [{ role: 'system', content: system }] : []), ...fields.messages];
    const stream_options = { include_usage: true, continuous_usage_stats: true };
    const body = { ...(this.models.id ? { model: this.models.id } : {}), ...fields, messages, stream: true, stream_options };
    turn.data.from = tree.sent(tree.path())[0];
    this.running = controller;
    this.busy(true);
    turn.open();
    // The button that was pressed is gone.
    if (document.activeElement === document.body) $('log').focus();
    let problem = null;
    try {
      const response = await call('v1/chat/completions', { body, signal: controller.signal });
      for await (const chunk of events(response)) {
        const fresh = answer.take(chunk);
        if (fresh) turn.take(fresh);
        if (this.tree === tree) this.meter.show(turn.data.total, true);
      }
      if (!turn.data.end) throw new ApiError(0, 'The connection to the server ended.');
    } catch (error) {
      if (!controller.signal.aborted) problem = error;
      turn.data.end = problem ? 'failed' : 'stopped';
    }
    answer.finish();
    const nothing = answer.isEmpty && (problem || controller.signal.aborted);
    turn.close();
    if (nothing) {
      // A question that came to nothing returns to the message box, unless turns before it can be dropped.
      tree.pop();
      const returns = draft && problem?.code !== FULL;
      if (returns) tree.pop();
      if (returns && this.tree === tree) $('message').value ||= draft;
    }
    this.save(tree);
    if (this.running !== controller) return;
    this.running = null;
    follow($('log'), () => this.show());
    this.busy(false);
    this.fit();
    $('status').textContent = problem ? '' : `Answer complete. ${turn.foot.textContent}`;
    if (problem) this.fail(problem, nothing, again);
    else if (nothing) notice('Stopped before the first token.');
    else if (turn.data.end === 'length' && turn.data.total >= this.models.context) this.full('', () => this.proceed(index));
  }

  fail(error, nothing, again) {
    if (error.status === 401) {
      notice('The server requires an API key. Enter it above and send the message again.');
      this.onDenied();
    } else if (error.code === FULL) {
      this.full(error.message, again);
    } else {
      const found = error instanceof ApiError ? error.message : 'Cannot reach the server. Check that it is running and try again.';
      notice(nothing ? found : `${found} The answer is not complete.`);
    }
  }

  // The context is full: the user drops the oldest turns, or begins again.
  full(why, goOn) {
    const drop = () => {
      this.tree.drop(this.tree.path(), this.models.context);
      clearNotice();
      this.show();
      this.save(this.tree);
      goOn();
    };
    const canDrop = this.tree.starts(this.tree.path()).length > 0;
    const actions = [...(canDrop ? [['Drop the oldest turns and go on', drop]] : []), ['New chat', () => this.fresh()]];
    const advice = canDrop ? 'Turns that are dropped stay here, but the model no longer reads them.' : 'One turn alone fills it.';
    notice(`The context is full. ${advice} ${why}`.trim(), actions);
  }

  busy(on) {
    $('send').hidden = on;
    $('stop').hidden = !on;
    $('log').setAttribute('aria-busy', String(on));
    if (on) $('status').textContent = '';
  }
}
