// The tokens of an answer, each underlined by its probability; the pointer or the arrow keys show the alternatives.

import { element } from './dom.js';

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)}%`;
const printed = (token) => JSON.stringify(token).slice(1, -1).replaceAll(' ', '␣') || '(empty)';
// Bytes that are not text alone.
const shown = (token) => (token.startsWith('bytes:') ? '�' : token);

// A class by probability: from p4, nearly certain, to p0.
const rank = (logprob) => `p${[0.2, 0.5, 0.8, 0.95].filter((bound) => Math.exp(logprob) >= bound).length}`;

export class Tokens {
  constructor() {
    this.entries = [];
    this.at = -1;
    this.list = element('div', { className: 'tokens', tabIndex: 0, ariaLabel: 'Tokens. The arrow keys show the probability of each.' });
    this.list.setAttribute('role', 'group');
    this.detail = element('div', { className: 'alternatives', hidden: true });
    this.detail.setAttribute('role', 'status');
    this.node = element('div', { className: 'token-view', hidden: true }, this.list, this.detail);
    this.list.addEventListener('pointerover', ({ target }) => target !== this.list && this.choose([...this.list.children].indexOf(target)));
    this.list.addEventListener('pointerleave', () => this.choose(-1));
    this.list.addEventListener('focus', () => this.choose(Math.max(this.at, 0)));
    this.list.addEventListener('blur', () => this.choose(-1));
    this.list.addEventListener('keydown', (event) => this.press(event));
  }

  add(entries) {
    this.entries.push(...entries);
    this.list.append(...entries.map(({ token, logprob }) => element('span', { className: rank(logprob), textContent: shown(token) })));
  }

  press(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -this.entries.length, End: this.entries.length }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(this.at + step, 0), this.entries.length - 1));
  }

  choose(at) {
    this.list.children[this.at]?.classList.remove('at');
    this.at = at;
    const [span, entry] = [this.list.children[at], this.entries[at]];
    this.detail.hidden = !entry;
    if (!entry) return;
    span.classList.add('at');
    const line = ({ token, logprob }) => element('li', {}, element('code', { textContent: printed(token) }), ` ${percent(logprob)}`);
    const chosen = element('p', {}, element('code', { textContent: printed(entry.token) }), ` ${percent(entry.logprob)} (log ${entry.logprob.toFixed(3)})`);
    this.detail.replaceChildren(chosen, element('ol', {}, ...(entry.top_logprobs ?? []).map(line)));
    const left = Math.max(0, Math.min(span.offsetLeft, this.node.clientWidth - this.detail.offsetWidth));
    this.detail.style.left = `${left}px`;
    this.detail.style.top = `${span.offsetTop + span.offsetHeight + 4}px`;
  }
}
