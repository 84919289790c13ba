// The list of conversations that are kept: open, delete, export, import.

import { keep, stored } from './api.js';
import { OPEN } from './chat.js';
import { $, button, element } from './dom.js';
import { download, read } from './file.js';
import { clearNotice } from './notice.js';

const when = (time) => new Date(time).toLocaleString([], { dateStyle: 'medium', timeStyle: 'short' });

export class Chats {
  constructor(chat, storage) {
    Object.assign(this, { chat, storage });
    $('chats-open').addEventListener('click', () => {
      this.show();
      $('chats').showModal();
    });
    $('chats-close').addEventListener('click', () => $('chats').close());
    $('export').addEventListener('click', () => this.attempt(async () => this.export(await storage.list())));
    $('import').addEventListener('click', () => $('import-file').click());
    $('import-file').addEventListener('change', ({ target }) => {
      const [file] = target.files;
      if (file) this.attempt(() => this.import(file)).then(() => (target.value = ''));
    });
  }

  // Restores the conversation of this tab.
  async restore() {
    const id = stored('sessionStorage', OPEN);
    const tree = id ? await this.storage.load(id).catch(() => null) : null;
    if (tree && !this.chat.tree.turns.length && !this.chat.running) this.chat.open(tree);
  }

  async attempt(work) {
    this.say('');
    try {
      await work();
    } catch (error) {
      this.say(error.message);
    }
  }

  say(text) {
    $('chats-problem').textContent = text;
  }

  show() {
    return this.attempt(async () => {
      const entries = await this.storage.list();
      $('chat-list').replaceChildren(...entries.map((entry) => this.row(entry)));
      $('no-chats').hidden = entries.length > 0;
      $('export').disabled = !entries.length;
    });
  }

  row(entry) {
    const { id, title, updated } = entry;
    const open = button('', () => this.open(id), { className: 'open' });
    open.append(element('span', { textContent: title }), element('small', { textContent: when(updated) }));
    if (id === this.chat.tree.id) open.setAttribute('aria-current', 'true');
    const save = button('Export', () => this.attempt(() => this.export([entry])), { ariaLabel: `Export ${title}` });
    const remove = button('Delete', () => this.remove(remove, id), { ariaLabel: `Delete ${title}` });
    return element('li', {}, open, save, remove);
  }

  open(id) {
    return this.attempt(async () => {
      const tree = id === this.chat.tree.id ? this.chat.tree : await this.storage.load(id);
      if (!tree) throw new Error('This conversation is damaged and cannot be shown.');
      if (tree !== this.chat.tree) this.chat.open(tree);
      keep('sessionStorage', OPEN, tree.id);
      $('chats').close();
      $('message').focus();
    });
  }

  // The second press deletes.
  remove(pressed, id) {
    if (pressed.textContent === 'Delete') {
      Object.assign(pressed, { textContent: 'Really delete?', ariaLabel: 'Really delete?' });
      pressed.addEventListener('blur', () => this.show(), { once: true });
      return null;
    }
    return this.attempt(async () => {
      await this.storage.remove(id);
      if (id === this.chat.tree.id) {
        this.chat.tree.isDeleted = true;
        this.chat.fresh();
      }
      clearNotice();
      await this.show();
      $('chats-close').focus();
    });
  }

  async export(entries) {
    const trees = [];
    for (const { id } of entries) trees.push(await this.storage.load(id));
    download(trees.filter(Boolean));
  }

  async import(file) {
    const trees = await read(file, await this.storage.list());
    for (const tree of trees) await this.storage.import(tree);
    await this.show();
    this.say(`${trees.length} ${trees.length === 1 ? 'conversation' : 'conversations'} imported.`);
  }
}
