// The choice of the model: the served one, its other names, and its LoRA adapters.

import { call, keep, stored } from './api.js';
import { $, element } from './dom.js';

const STORE = 'quire-model';

export class Models {
  context = 0;

  constructor(onChange) {
    this.onChange = onChange;
    $('model').addEventListener('change', () => {
      keep('localStorage', STORE, this.id);
      onChange();
    });
  }

  get id() {
    return $('model').value;
  }

  // Reads the list again if the server has other adapters than before.
  follow({ max_model_len, adapters }) {
    const key = JSON.stringify(adapters.map(({ name }) => name));
    if (this.context !== max_model_len) {
      this.context = max_model_len;
      this.onChange();
    }
    if (key === this.key) return;
    this.key = key;
    this.read().catch(() => setTimeout(() => (this.key = null), 5000));
  }

  async read() {
    const { data } = await (await call('v1/models')).json();
    const option = ({ id }) => element('option', { value: id, textContent: id });
    const adapters = data.filter(({ parent }) => parent);
    const group = element('optgroup', { label: 'LoRA adapters' }, ...adapters.map(option));
    const chosen = this.id || stored('localStorage', STORE);
    $('model').replaceChildren(...data.filter(({ parent }) => !parent).map(option), ...(adapters.length ? [group] : []));
    if (data.some(({ id }) => id === chosen)) $('model').value = chosen;
    $('model').disabled = false;
    this.onChange();
  }
}
