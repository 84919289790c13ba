// Entry point: connects conversations, engine view and API key form, and switches views on small screens.

import { key, setKey } from './api.js';
import { Chat } from './chat.js';
import { Chats } from './chats.js';
import { $ } from './dom.js';
import { Engine } from './engine.js';
import { Meter } from './meter.js';
import { Models } from './models.js';
import { Settings } from './settings.js';
import { Storage } from './storage.js';

function denied() {
  $('key-hint').textContent = key() ? 'The server does not take this key.' : 'The key is stored only in this tab.';
  $('key-form').hidden = false;
  $('key').focus();
}

const models = new Models(() => meter.show());
const meter = new Meter(models);
const storage = new Storage();
const chat = new Chat({ settings: new Settings(), models, storage, meter, onDenied: denied });
const engine = new Engine(denied, (state) => models.follow(state));

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

new Chats(chat, storage).restore();
engine.follow();
$('message').focus();
