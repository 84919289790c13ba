// Conversations as a file: export, import, and texts for the clipboard.

import { element } from './dom.js';
import { Tree, newId } from './tree.js';

const FORMAT = 'quire-conversations';
const MAX_FILE = 64 * 1024 * 1024;

export function download(trees) {
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations: trees }, null, 1);
  const href = URL.createObjectURL(new Blob([text], { type: 'application/json' }));
  const date = new Date().toISOString().slice(0, 10);
  element('a', { href, download: `quire-conversations-${date}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

// The conversations of a file that are not in `entries`, each with an id that is not in use.
export async function read(file, entries) {
  if (file.size > MAX_FILE) throw new Error(`${file.name}: found ${file.size} bytes, expected at most ${MAX_FILE}.`);
  let found = null;
  try {
    found = JSON.parse(await file.text());
  } catch {
    // Not JSON.
  }
  if (found?.format !== FORMAT || found.version !== 1 || !Array.isArray(found.conversations)) {
    throw new Error(`${file.name}: expected conversations that this page has exported.`);
  }
  const trees = found.conversations.map(Tree.from);
  const bad = trees.indexOf(null);
  if (bad >= 0) throw new Error(`${file.name}: conversation ${bad + 1} is damaged. Nothing was imported.`);
  const used = new Map(entries.map(({ id, updated }) => [id, updated]));
  const fresh = trees.filter(({ id, updated }) => used.get(id) !== updated);
  for (const tree of fresh) if (used.has(tree.id)) tree.id = newId();
  return fresh;
}

// Browsers offer the clipboard only to pages of HTTPS or of this machine.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = element('textarea', { value: text, className: 'hidden' });
  document.body.append(box);
  box.select();
  const done = document.execCommand('copy');
  box.remove();
  if (!done) throw new Error('no clipboard');
}

// Copies, and says so on the button.
export async function copyFrom(button, text) {
  const label = button.textContent;
  if (label !== 'Copy') return;
  try {
    await copy(text);
    button.textContent = 'Copied';
  } catch {
    button.textContent = 'Not copied';
  }
  setTimeout(() => (button.textContent = label), 1500);
}
