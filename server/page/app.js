// Entry point: connects chat, engine view and API key form, and switches views on small screens.

import { key, setKey } from './api.js';
import { Chat } from './chat.js';
import { Engine } from './engine.js';

const $ = (id) => document.getElementById(id);

function denied() {
  $('key-hint').textContent = key() ? 'The server does not take this key.' : 'The key is stored only in this tab.';
  $('key-form').hidden = false;
  $('key').focus();
}

const chat = new Chat(denied);
const engine = new Engine(denied, (state) => {
  chat.model = state.model;
  const text = `${state.model} · context length ${state.max_model_len.toLocaleString('en')} tokens`;
  if ($('model').textContent !== text) $('model').textContent = text;
});

$('key-form').addEventListener('submit', (event) => {
  event.preventDefault();
  setKey($('key').value.trim());
  $('key-form').hidden = true;
  engine.follow();
  $('message').focus();
});

for (const view of ['chat', 'engine']) {
  $(`view-${view}`).addEventListener('click', () => {
    document.body.dataset.view = view;
    for (const other of ['chat', 'engine']) $(`view-${other}`).setAttribute('aria-pressed', String(other === view));
    engine.redraw();
  });
}

engine.follow();
$('message').focus();
