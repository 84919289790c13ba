// A conversation: a tree of turns, because a question that is edited and an answer that is made again are siblings of the old ones. One path
// from the root to a leaf is shown. Turns are never removed, except the last one, so that the index of a turn stays and is above its parent's.

const ROLES = ['user', 'assistant', 'tool'];
const MAX_TURNS = 20_000;
const TITLE = 60;
// Numbers of an answer: tokens of it and of all its context, milliseconds to the first token and to the end, and where its context began.
const NUMBERS = ['tokens', 'total', 'wait', 'took', 'from'];
const WORDS = ['model', 'end', 'call', 'thoughts'];

export const newId = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, '0')).join('');

export class Tree {
  constructor(id = newId()) {
    this.id = id;
    this.updated = 0;
    this.turns = [];
    // Children of each turn, and the one that is shown; those of the root are at -1.
    this.children = new Map([[-1, []]]);
    this.shown = new Map();
  }

  get title() {
    const first = this.turns[0]?.content.trim().split('\n')[0] ?? '';
    return first.length > TITLE ? `${first.slice(0, TITLE)}…` : first || 'New chat';
  }

  add(parent, turn) {
    const index = this.turns.push({ parent, content: '', ...turn }) - 1;
    this.children.set(index, []);
    this.children.get(parent).push(index);
    this.shown.set(parent, index);
    return index;
  }

  // Removes the newest turn.
  pop() {
    const { parent } = this.turns.pop();
    this.children.delete(this.turns.length);
    const siblings = this.children.get(parent);
    siblings.pop();
    if (siblings.length) this.shown.set(parent, siblings.at(-1));
    else this.shown.delete(parent);
  }

  siblings(index) {
    return this.children.get(this.turns[index].parent);
  }

  // Shows the branch of a turn.
  choose(index) {
    this.shown.set(this.turns[index].parent, index);
  }

  // Indices of the turns that are shown.
  path() {
    const path = [];
    for (let at = this.shown.get(-1); at !== undefined; at = this.shown.get(at)) path.push(at);
    return path;
  }

  // Indices of the turns of a path that are sent: older ones may have been dropped.
  sent(path) {
    const first = path.findLastIndex((index) => this.turns[index].cut);
    return path.slice(Math.max(first, 0));
  }

  // The path up to a turn as the messages of a request.
  messages(last) {
    const path = [];
    for (let at = last; at >= 0; at = this.turns[at].parent) path.unshift(at);
    return this.sent(path).map((index) => {
      const { role, content, calls, call } = this.turns[index];
      if (role === 'tool') return { role, tool_call_id: call, content };
      if (!calls?.length) return { role, content };
      const tool_calls = calls.map(({ id, name, text }) => ({ id, type: 'function', function: { name, arguments: text } }));
      return { role, content: content || null, tool_calls };
    });
  }

  // The name of the function whose result a turn is.
  nameOfCall(index) {
    const { call } = this.turns[index];
    for (let at = index; at >= 0; at = this.turns[at].parent) {
      const found = this.turns[at].calls?.find(({ id }) => id === call);
      if (found) return found.name;
    }
    return call;
  }

  // The first call of the last answer that has no result.
  openCall(path) {
    const at = path.findLastIndex((index) => this.turns[index].role === 'assistant');
    const done = path.slice(at + 1).map((index) => this.turns[index].call);
    if (path.slice(at + 1).some((index) => this.turns[index].role === 'user')) return null;
    return this.turns[path[at]]?.calls?.find(({ id }) => !done.includes(id)) ?? null;
  }

  // Questions that could be the first one to be sent, if older turns are dropped.
  starts(path) {
    return this.sent(path).slice(1).filter((index) => this.turns[index].role === 'user');
  }

  // Drops the oldest turns of the path from what is sent: as few as leave half of the context free, but never the last question.
  drop(path, context) {
    const sent = this.sent(path);
    const answers = sent.filter((index) => this.turns[index].total);
    const used = this.turns[answers.at(-1)]?.total ?? 0;
    const before = (at) => this.turns[answers.findLast((index) => index < at)]?.total ?? 0;
    const starts = this.starts(path);
    const first = starts.find((at) => used - before(at) <= context / 2) ?? starts.at(-1);
    if (first !== undefined) this.turns[first].cut = true;
  }

  toJSON() {
    return { id: this.id, updated: this.updated, turns: this.turns, shown: [...this.shown] };
  }

  // Reads a tree that another page, or a file, may have written; null if it is not one.
  static from(value) {
    if (typeof value?.id !== 'string' || !/^[\w-]{1,64}$/.test(value.id) || !Array.isArray(value.turns)) return null;
    if (!value.turns.length || value.turns.length > MAX_TURNS) return null;
    const tree = new Tree(value.id);
    tree.updated = Number.isFinite(value.updated) ? value.updated : 0;
    for (const [index, turn] of value.turns.entries()) {
      const { parent, role, content, calls } = turn ?? {};
      const isTurn = Number.isInteger(parent) && parent >= -1 && parent < index && ROLES.includes(role) && typeof content === 'string';
      if (!isTurn) return null;
      const read = { role, content };
      for (const name of NUMBERS) if (Number.isFinite(turn[name])) read[name] = turn[name];
      for (const name of WORDS) if (typeof turn[name] === 'string') read[name] = turn[name];
      if (turn.cut === true) read.cut = true;
      if (Array.isArray(calls)) read.calls = calls.slice(0, 1000).map((call) => ({ id: String(call?.id), name: String(call?.name), text: String(call?.text) }));
      tree.add(parent, read);
    }
    for (const pair of Array.isArray(value.shown) ? value.shown : []) {
      if (Array.isArray(pair) && tree.children.get(pair[0])?.includes(pair[1])) tree.shown.set(pair[0], pair[1]);
    }
    return tree;
  }
}
