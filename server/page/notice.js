// One message to the user at the end of the conversation, with what can be done about it.

import { $, button, element } from './dom.js';

export function clearNotice() {
  $('notice').replaceChildren();
}

// `actions` are pairs of a label and a function.
export function notice(text, actions = []) {
  const buttons = actions.map(([label, act]) => button(label, act, { className: '' }));
  const close = button('Dismiss', clearNotice);
  $('notice').replaceChildren(element('p', { textContent: text }), element('div', { className: 'actions' }, ...buttons, close));
  $('notice').scrollIntoView({ block: 'nearest' });
}
