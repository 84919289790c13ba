// Conversations in the browser's own database, with a bound. Each path prefix of a server has a database of its own.

import { Tree, newId } from './tree.js';

const MAX_CHATS = 500;
// Characters of all conversations together.
const MAX_SIZE = 32 * 1024 * 1024;

const result = (request) =>
  new Promise((done, failed) => {
    request.onsuccess = () => done(request.result);
    request.onerror = () => failed(request.error);
  });

function open() {
  const request = indexedDB.open(`quire ${new URL('.', document.baseURI).pathname}`, 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore('list', { keyPath: 'id' });
    request.result.createObjectStore('chats', { keyPath: 'id' });
  };
  return result(request);
}

export class Storage {
  constructor(limits = {}) {
    this.limits = { chats: MAX_CHATS, size: MAX_SIZE, ...limits };
    this.queue = Promise.resolve();
  }

  // Without a database, for example in a private window, nothing is kept.
  async database() {
    this.opened ??= open();
    try {
      return await this.opened;
    } catch {
      throw new Error('This browser keeps no data for this page: conversations last until the page is closed. Export them to keep them.');
    }
  }

  async transaction(mode, work) {
    const transaction = (await this.database()).transaction(['list', 'chats'], mode);
    const ended = new Promise((done, failed) => {
      transaction.oncomplete = done;
      transaction.onabort = () => failed(transaction.error);
    });
    // An abort that follows an error of `work` is no error of its own.
    ended.catch(() => {});
    const value = await work(transaction.objectStore('list'), transaction.objectStore('chats'));
    await ended;
    return value;
  }

  // Id, title, time of the last change and size of each conversation, newest first.
  async list() {
    const entries = await this.transaction('readonly', (list) => result(list.getAll()));
    return entries.sort((a, b) => b.updated - a.updated);
  }

  async load(id) {
    const chat = await this.transaction('readonly', (_, chats) => result(chats.get(id)));
    const tree = chat ? Tree.from(JSON.parse(chat.text)) : null;
    if (tree) tree.stored = tree.updated;
    return tree;
  }

  // Saves one after the other.
  save(tree) {
    const saved = this.queue.then(() => this.put(tree));
    this.queue = saved.catch(() => {});
    return saved;
  }

  // Adds a conversation of a file, with the time that the file has.
  import(tree) {
    return this.put(tree, tree.updated || Date.now());
  }

  async put(tree, updated = Math.max(Date.now(), tree.updated + 1)) {
    const last = tree.updated;
    tree.updated = updated;
    let text = JSON.stringify(tree);
    try {
      await this.transaction('readwrite', async (list, chats) => {
        const entries = await result(list.getAll());
        // Another tab has changed the conversation: both are kept.
        if (entries.some(({ id, updated }) => id === tree.id && updated !== tree.stored)) {
          tree.id = newId();
          text = JSON.stringify(tree);
        }
        const others = entries.filter(({ id }) => id !== tree.id);
        const size = others.reduce((sum, other) => sum + other.size, text.length);
        if (others.length >= this.limits.chats || size > this.limits.size) {
          const limits = `${this.limits.chats} conversations and ${Math.round(this.limits.size / 1024 / 1024)} million characters`;
          throw new Error(`This conversation is not kept: the limit of ${limits} has been reached. Export conversations, then delete some.`);
        }
        list.put({ id: tree.id, title: tree.title, updated: tree.updated, size: text.length });
        chats.put({ id: tree.id, text });
      });
    } catch (error) {
      tree.updated = last;
      const isFull = error?.name === 'QuotaExceededError';
      throw isFull ? new Error('This conversation is not kept: the browser has no space left for this page. Export conversations, then delete some.') : error;
    }
    tree.stored = tree.updated;
  }

  async remove(id) {
    await this.transaction('readwrite', async (list, chats) => {
      list.delete(id);
      chats.delete(id);
    });
  }
}
