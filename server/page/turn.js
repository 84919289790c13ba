// One turn of the conversation on the page.

import { summary, tokensOf } from './answer.js';
import { $, button, element, follow, setText } from './dom.js';
import { copyFrom } from './file.js';
import { Markdown } from './markdown.js';
import { Tokens } from './tokens.js';

const div = (className) => element('div', { className });

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export class Turn {
  // `chat` acts on the buttons.
  constructor(chat, index) {
    this.chat = chat;
    this.index = index;
    this.data = chat.tree.turns[index];
    const { role, model, call, content } = this.data;
    this.node = element('article', { className: `turn ${role}` });
    this.who = div('who');
    this.who.textContent = { user: 'You', tool: 'Result' }[role] ?? model ?? 'Assistant';
    if (call) this.who.textContent = `Result of ${chat.tree.nameOfCall(index)}`;
    this.text = div('text');
    this.calls = div('calls');
    this.foot = div('foot');
    this.actions = div('actions');
    this.node.append(this.who, this.text, this.actions);
    if (role === 'assistant') this.begin();
    else this.text.textContent = content;
  }

  begin() {
    const { content, thoughts = '', calls } = this.data;
    this.summary = element('summary', { textContent: 'Reasoning' });
    this.thoughts = element('div', { className: 'thoughts' }, document.createTextNode(thoughts));
    this.reasoning = element('details', { hidden: !thoughts }, this.summary, this.thoughts);
    this.tokens = new Tokens();
    this.markdown = new Markdown(this.text);
    this.text.before(this.reasoning);
    this.text.after(this.tokens.node, this.calls, this.foot);
    this.markdown.push(content);
    this.markdown.finish(content);
    this.tokens.add(tokensOf(this.data));
    calls?.forEach(({ name, text }, index) => this.addCall({ index, name, text }));
    this.closeCalls();
    setText(this.foot, summary(this.data));
  }

  // The answer begins, or goes on.
  open() {
    this.node.classList.add('writing');
    this.markdown.begin();
    this.markdown.push(this.data.content);
    setText(this.foot, '');
    this.actions.replaceChildren();
  }

  // Adds what is new, and draws it in the next frame.
  take({ content, thoughts, tokens, calls }) {
    if (content) this.markdown.push(content);
    if (tokens.length) this.tokens.add(tokens);
    if (thoughts) {
      this.reasoning.hidden = false;
      this.thoughts.firstChild.appendData(thoughts);
    }
    if (this.reasoning.hidden === false) setText(this.summary, this.data.content ? 'Reasoning' : 'Thinking…');
    calls.forEach((part) => this.addCall(part));
    if (tokens.length && this.tokens.entries.length === tokens.length) this.showTokens(true);
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    follow($('log'), () => this.markdown.draw());
  }

  close() {
    cancelAnimationFrame(this.frame);
    this.draw();
    this.markdown.finish(this.data.content);
    this.closeCalls();
    setText(this.summary, 'Reasoning');
    this.node.classList.remove('writing');
    setText(this.foot, summary(this.data));
  }

  addCall({ index, name, text }) {
    if (!this.calls.children[index]) {
      const body = element('pre', { tabIndex: 0 }, element('code', {}, document.createTextNode('')));
      this.calls.append(element('details', { open: true }, element('summary', { textContent: `Call of ${name}` }), body));
    }
    this.calls.children[index].querySelector('code').firstChild.appendData(text);
  }

  // Arguments that are complete are JSON, with a line for each field.
  closeCalls() {
    this.data.calls?.forEach(({ text }, index) => setText(this.calls.children[index].querySelector('code'), pretty(text)));
  }

  showTokens(on) {
    this.tokens.node.hidden = !on;
    this.text.hidden = on;
  }

  // The buttons, for this place in the path.
  show(isLast) {
    const { chat, index, data } = this;
    const siblings = chat.tree.siblings(index);
    const at = siblings.indexOf(index);
    const buttons = [];
    if (siblings.length > 1) {
      const go = (label, name, to) => button(label, () => chat.choose(to), { ariaLabel: name, disabled: to === undefined, className: 'quiet starts' });
      buttons.push(go('‹', 'Previous version', siblings[at - 1]));
      buttons.push(element('span', { className: 'versions', textContent: `${at + 1} / ${siblings.length}` }));
      buttons.push(go('›', 'Next version', siblings[at + 1]));
    }
    buttons.push(button('Copy', (event) => copyFrom(event.currentTarget, data.content)));
    const starts = (label, act) => buttons.push(button(label, act, { className: 'quiet starts' }));
    if (data.role === 'user') starts('Edit', () => this.edit());
    if (data.role === 'assistant') starts('Regenerate', () => chat.regenerate(index));
    else if (isLast && !chat.openCall) starts('Answer', () => chat.generate(index));
    // Without a reason, the page was closed while the answer came.
    const isCut = ['length', 'stopped', 'failed', '', undefined].includes(data.end);
    if (isLast && data.role === 'assistant' && data.content && isCut) starts('Continue', () => chat.proceed(index));
    if (this.tokens?.entries.length) {
      const toggle = button('Tokens', () => {
        this.showTokens(this.tokens.node.hidden);
        toggle.setAttribute('aria-pressed', String(!this.tokens.node.hidden));
      });
      toggle.setAttribute('aria-pressed', String(!this.tokens.node.hidden));
      buttons.push(toggle);
    }
    this.actions.replaceChildren(...buttons);
    this.node.classList.toggle('cut', data.cut === true);
  }

  // Turns the text into a box; its text becomes a new version of the question.
  edit() {
    const box = element('textarea', { value: this.data.content, rows: Math.min(12, this.data.content.split('\n').length + 1), ariaLabel: 'Edited message' });
    const end = () => {
      form.replaceWith(this.text);
      this.actions.hidden = false;
    };
    const send = () => {
      if (!box.value.trim() || this.chat.running) return;
      end();
      this.chat.edit(this.index, box.value.trim());
    };
    const cancel = () => {
      end();
      [...this.actions.children].find((node) => node.textContent === 'Edit')?.focus();
    };
    const buttons = element('div', { className: 'actions' }, button('Send', send, { className: 'primary' }), button('Cancel', cancel));
    const form = element('div', { className: 'edit' }, box, buttons);
    box.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        cancel();
      } else if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    this.text.replaceWith(form);
    this.actions.hidden = true;
    box.focus();
  }
}
