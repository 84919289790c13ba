// How much of the context the conversation fills.

import { $, setText, whole } from './dom.js';

export class Meter {
  constructor(models) {
    this.models = models;
    this.tokens = 0;
  }

  // `tokens` of the last answer and all before it; null if it is not known what would be sent.
  show(tokens = this.tokens, isBegun = this.isBegun) {
    Object.assign(this, { tokens, isBegun });
    const { context } = this.models;
    const used = isBegun ? tokens : 0;
    $('context-box').hidden = !context;
    $('context').max = context || 1;
    $('context').high = 0.8 * context;
    $('context').value = used ?? 0;
    const count = used === null || used === undefined ? '–' : whole(used);
    setText($('context-text'), `${count} of ${whole(context)} tokens`);
    $('context').setAttribute('aria-valuetext', $('context-text').textContent);
  }
}
