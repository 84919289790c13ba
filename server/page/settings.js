// The settings of a generation: kept in this browser, checked, and made the fields of a request.

import { keep, stored } from './api.js';
import { $, setText } from './dom.js';

const NUMBERS = [
  'temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty', 'presence_penalty', 'frequency_penalty', 'max_tokens', 'min_tokens', 'seed',
];
const TEXTS = ['system', 'stop_at', 'effort', 'schema', 'tools'];
const STORE = 'quire-settings';
const TOP = 5;

export class Settings {
  constructor() {
    this.restore();
    $('settings').addEventListener('change', () => this.keep());
    $('settings-toggle').addEventListener('click', () => this.open($('settings').hidden));
    $('theme').value = stored('localStorage', 'quire-theme') ?? 'system';
    if (!$('theme').value) $('theme').value = 'system';
    $('theme').addEventListener('change', () => {
      keep('localStorage', 'quire-theme', $('theme').value);
      window.dispatchEvent(new Event('theme-chosen'));
    });
  }

  open(on) {
    $('settings').hidden = !on;
    $('settings-toggle').setAttribute('aria-expanded', String(on));
  }

  keep() {
    const values = Object.fromEntries([...NUMBERS, ...TEXTS].map((name) => [name, $(name).value]));
    keep('localStorage', STORE, JSON.stringify({ ...values, logprobs: $('logprobs').checked }));
    this.json('schema', 'an object');
    this.json('tools', 'a list');
  }

  // Other pages of this origin may have changed the storage: only strings are restored.
  restore() {
    let values = null;
    try {
      values = JSON.parse(stored('localStorage', STORE));
    } catch {
      // No settings.
    }
    for (const name of [...NUMBERS, ...TEXTS]) {
      const value = values?.[name];
      $(name).value = typeof value === 'string' ? value : '';
    }
    // A choice that does not exist.
    $('effort').value ||= '';
    $('logprobs').checked = values?.logprobs === true;
    this.keep();
  }

  // The value of a field of JSON. Undefined if it is empty; null, with a message below the field, if it is wrong.
  json(name, expected) {
    const text = $(name).value.trim();
    let problem = '';
    let value;
    try {
      value = text ? JSON.parse(text) : undefined;
      const kind = Array.isArray(value) ? 'a list' : typeof value === 'object' && value ? 'an object' : typeof value;
      if (text && kind !== expected) problem = `Found ${kind}, expected ${expected}.`;
    } catch (error) {
      problem = `Not JSON: ${error.message}`;
    }
    $(name).setAttribute('aria-invalid', String(Boolean(problem)));
    setText($(`${name}-problem`), problem);
    return problem ? null : value;
  }

  get system() {
    return $('system').value.trim();
  }

  // Fields of a request; null after the first field that is wrong got the focus.
  body() {
    const [schema, tools] = [this.json('schema', 'an object'), this.json('tools', 'a list')];
    const wrong = ['schema', 'tools'].find((name) => $(name).getAttribute('aria-invalid') === 'true');
    if (wrong) {
      this.open(true);
      $(wrong).focus();
      return null;
    }
    const body = {};
    for (const name of NUMBERS) {
      if ($(name).value !== '' && $(name).validity.valid) body[name] = Number($(name).value);
    }
    if ($('stop_at').value) body.stop = [$('stop_at').value];
    if ($('effort').value) body.reasoning_effort = $('effort').value;
    if (schema) body.response_format = { type: 'json_schema', json_schema: { name: 'answer', schema } };
    if (tools?.length) body.tools = tools;
    if ($('logprobs').checked) Object.assign(body, { logprobs: true, top_logprobs: TOP });
    return body;
  }
}
